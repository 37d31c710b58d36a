"""Who takes part in step_time.py and step_scaling.py: optimizers of one table, and
what to see beside."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import measure
import numpy as np
import tensorflow as tf
from measure import Contender

from tf_basis import hashing
from tf_basis.ops import loader
from tf_basis.optimizers import for_flavor

OP, TWIN = "BasisAdam, C++ op", "BasisAdam, pure TF"
OP_ADAGRAD, FBGEMM = "BasisAdagrad, C++ op", "FBGEMM row-wise Adagrad"
ADAM, ADAGRAD, LAZY = "Keras Adam", "Keras Adagrad", "lazy Adam, plain TF"
EMPTY, COPY, GATHER = "empty call", "memory copy", "TF gather + scatter"
ORDER = (ADAM, ADAGRAD, LAZY, FBGEMM, OP_ADAGRAD, TWIN, OP, GATHER, COPY, EMPTY)

BATCHES = 128  # enough that the next visit finds little of a batch in a cache
GRADIENTS = 8


@dataclass
class Optimizer:
    """The step of an optimizer of one table, and the variables of its state."""

    step: Callable[[tf.Tensor, tf.Tensor], None]
    variables: list

    def state_bytes(self) -> int:
        sizes = (tf.as_dtype(v.dtype).size * math.prod(v.shape) for v in self.variables)
        return sum(sizes)


@dataclass
class Table:
    """One table, its batches, and everybody who is timed on it."""

    variable: keras.Variable
    batch: int
    zipf: measure.ZipfRows
    indices: list[tf.Tensor] = field(default_factory=list)
    touched: list[tuple[tf.Tensor, tf.Tensor]] = field(default_factory=list)
    contenders: dict[str, Contender] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.variable.shape[0]

    @property
    def dim(self) -> int:
        return self.variable.shape[1]

    @property
    def table_bytes(self) -> int:
        return 4 * self.rows * self.dim

    def mean_touched(self) -> tuple[float, float]:
        """Distinct rows and buckets of a batch."""
        counts = [(len(rows), len(buckets)) for rows, buckets in self.touched]
        return tuple(np.mean(counts, axis=0))

    def about_batches(self) -> dict[str, Any]:
        """What the batches are like, for a document."""
        rows, buckets = self.mean_touched()
        return {
            "rows": self.rows,
            "zipf_exponent": self.zipf.exponent,
            "distinct_rows": rows,
            "touched_buckets": buckets,
            "step_bytes": self.step_bytes(),
        }

    def step_bytes(self) -> dict[str, float]:
        """What a BasisAdam step must read and write, in the mean over the batches."""
        rows, buckets = self.mean_touched()
        return {
            "indices_read": 8 * self.batch,
            "gradients_read": 4 * self.batch * self.dim,
            "rows_read_and_written": 2 * 4 * rows * self.dim,
            "second_moments_read_and_written": 2 * 4 * buckets * self.dim,
            "energies_read_and_written": 2 * 4 * rows,
            "counters_read_and_written": 2 * 4 * buckets,
        }

    def add(self, name: str, call: Callable[[int], Any]) -> None:
        """Enters a contender; its first call here compiles what it needs."""
        self.contenders[name] = Contender(name, call)
        self.contenders[name].run()

    def add_optimizer(
        self, name: str, optimizer: Optimizer, gradients: list[tf.Tensor]
    ) -> None:
        def call(i: int) -> None:
            indices = self.indices[i % len(self.indices)]
            optimizer.step(indices, gradients[i % len(gradients)])

        self.add(name, call)
        self.state_bytes[name] = optimizer.state_bytes()


def make_variable(rows: int, dim: int) -> keras.Variable:
    return keras.Variable(tf.fill([rows, dim], 0.1), name=f"table_{rows}")


def make_table(variable: keras.Variable, batch: int, batches: int = BATCHES) -> Table:
    """A table with its batches and the rows and buckets that each of them touches."""
    rows = variable.shape[0]
    zipf = measure.ZipfRows(rows, batch, batch // 2, seed=rows)
    table = Table(variable, batch, zipf)
    for _ in range(batches):
        ids = zipf.draw()
        distinct = np.unique(ids)
        buckets = hashing.bucket_of_rows(distinct, rows, num_buckets(rows))
        table.indices.append(tf.constant(ids))
        table.touched.append((tf.constant(distinct), tf.constant(np.unique(buckets))))
    return table


def num_buckets(rows: int) -> int:
    """BasisAdam's own number, with the compression ratio that is its default."""
    return math.ceil(rows / 100)


def step_function(table: Table) -> Callable:
    """A `tf.function` decorator with the signature of a step on this table."""
    return tf.function(
        input_signature=[
            tf.TensorSpec([table.batch], tf.int64),
            tf.TensorSpec([table.batch, table.dim], tf.float32),
        ]
    )


def keras_optimizer(optimizer: Any, table: Table, ops: str = "require") -> Optimizer:
    """A Keras optimizer, traced with the C++ ops required or off."""
    optimizer.build([table.variable])
    shape = tf.constant([table.rows, table.dim], tf.int64)

    @step_function(table)
    def step(indices, values):
        gradient = tf.IndexedSlices(values, indices, shape)
        optimizer.apply_gradients([(gradient, table.variable)])

    with loader.use(ops):
        step.get_concrete_function()
    return Optimizer(step, optimizer.variables)


def lazy_adam(table: Table) -> Optimizer:
    """Adam on the touched rows only, as one writes it in plain TensorFlow."""
    beta_1, beta_2, epsilon, learning_rate = 0.9, 0.999, 1e-8, 1e-3
    first, second = (tf.Variable(tf.zeros([table.rows, table.dim])) for _ in range(2))
    count = tf.Variable(0, dtype=tf.int64)

    @step_function(table)
    def step(indices, values):
        rows, positions = tf.unique(indices)
        g = tf.math.unsorted_segment_sum(values, positions, tf.size(rows))
        t = tf.cast(count.assign_add(1), tf.float32)
        m = beta_1 * tf.gather(first, rows) + (1 - beta_1) * g
        v = beta_2 * tf.gather(second, rows) + (1 - beta_2) * tf.square(g)
        first.scatter_update(tf.IndexedSlices(m, rows))
        second.scatter_update(tf.IndexedSlices(v, rows))
        rate = learning_rate * tf.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        change = rate * m / (tf.sqrt(v) + epsilon)
        table.variable.value.scatter_sub(tf.IndexedSlices(change, rows))

    return Optimizer(step, [first, second, count])


LARGE_OPTIMIZERS = {
    LAZY: lazy_adam,
    ADAGRAD: lambda table: keras_optimizer(keras.optimizers.Adagrad(), table),
    ADAM: lambda table: keras_optimizer(keras.optimizers.Adam(), table),
}


# name: class, whether the C++ ops are used
BASIS = {
    OP: ("BasisAdam", "require"),
    TWIN: ("BasisAdam", "off"),
    OP_ADAGRAD: ("BasisAdagrad", "require"),
}


def add_basis(name: str, table: Table, gradients: list[tf.Tensor]) -> None:
    """Enters an optimizer of this package, with its defaults."""
    kind, ops = BASIS[name]
    optimizer = getattr(for_flavor("keras3"), kind)(tables=[table.variable])
    table.add_optimizer(name, keras_optimizer(optimizer, table, ops), gradients)


def add_empty(table: Table, gradients: list[tf.Tensor]) -> None:
    """Enters a `tf.function` of the same arguments that does nothing."""

    @step_function(table)
    def nothing(indices, values):
        del indices, values

    table.add_optimizer(EMPTY, Optimizer(nothing, []), gradients)


def add_copy(table: Table, buffers: tuple[np.ndarray, np.ndarray]) -> None:
    """Enters a copy of as many bytes as a BasisAdam step has to move."""
    # A copy of k bytes reads k and writes k.
    size = round(sum(table.step_bytes().values()) / 2)
    places = max(len(buffers[0]) // size, 1)

    def copy(i: int) -> None:
        place = slice(i % places * size, (i % places + 1) * size)
        np.copyto(buffers[1][place], buffers[0][place])

    table.add(COPY, copy)


def add_gather(table: Table) -> None:
    """Enters TensorFlow's gather and scatter of what a BasisAdam step touches."""
    second = tf.Variable(tf.zeros([num_buckets(table.rows), table.dim]))
    energy = tf.Variable(tf.zeros([table.rows]))

    @tf.function(input_signature=2 * [tf.TensorSpec([None], tf.int64)])
    def gather_and_scatter(rows, buckets):
        for variable, ids in (
            (table.variable.value, rows),
            (second, buckets),
            (energy, rows),
        ):
            values = tf.gather(variable, ids)
            variable.scatter_update(tf.IndexedSlices(values, ids))

    count = len(table.touched)
    table.add(GATHER, lambda i: gather_and_scatter(*table.touched[i % count]))


def add_small(
    table: Table, gradients: list[tf.Tensor], buffers: tuple[np.ndarray, np.ndarray]
) -> None:
    """Enters what needs little memory: it stays in all rounds."""
    for name in BASIS:
        add_basis(name, table, gradients)
    add_empty(table, gradients)
    add_gather(table)
    add_copy(table, buffers)
