"""Nothing of a table's size is made: graphs, and the memory of a large table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BACKENDS,
    FLAVORS,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    run_python,
)
from sparse_helpers import nodes_of, nothing_made_dense, ops_of_size, peak_memory

ROWS, DIM = 2_000_000, 16
LARGE = ("accumulation and clipping", "global_clipnorm")  # tried at full size
OPTIONS = {
    "plain": {},
    "clipnorm": {"clipnorm": 1.0},
    "clipvalue": {"clipvalue": 0.5},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "clipnorm": 1.0},
    "weight decay": {"weight_decay": 0.01},
}
KERAS3_OPTIONS = {"loss_scale_factor": {"loss_scale_factor": 8.0}}


def build(flavor, options, rows=ROWS):
    """One step on a table, as a function of ids and values."""
    table = make_variable(np.zeros((rows, DIM)), flavor)
    optimizer = make_optimizer(flavor, tables=[table], **options)
    optimizer.build([table])

    @tf.function
    def step(ids, values):
        gradient = tf.IndexedSlices(values, ids, (rows, DIM))
        optimizer.apply_gradients([(gradient, table)])

    return step


def batch(size=4096):
    rng = np.random.default_rng(0)
    ids = tf.constant(rng.integers(0, ROWS, size), tf.int64)
    return ids, tf.constant(rng.normal(size=(size, DIM)), tf.float32)


@pytest.mark.parametrize("name", [*OPTIONS, *KERAS3_OPTIONS])
def test_no_op_makes_a_tensor_with_all_rows(flavor, backend, name):
    if name in KERAS3_OPTIONS and flavor != "keras3":
        pytest.skip("tf_keras does not have this argument")
    rows = 50_000
    step = build(flavor, {**OPTIONS, **KERAS3_OPTIONS}[name], rows)
    ids, values = batch(32)
    with nothing_made_dense():
        traced = step.get_concrete_function(ids % rows, values)
    assert ops_of_size(traced, rows) == set()
    # The graph that was looked at is the one that does the work.
    work = "TfBasis>UpdateTable" if backend == "op" else "ResourceScatterUpdate"
    assert work in {node.op for node in nodes_of(traced)}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_checks_above_see_what_keras_does(flavor):
    """Keras's Adam decays the whole table, and makes the gradient dense to clip it."""
    rows = 50_000
    table = make_variable(np.zeros((rows, DIM)), flavor)
    adam = keras_of(flavor).optimizers.Adam(clipvalue=1.0)
    adam.build([table])
    gradient = make_slices([1, 2], np.ones((2, DIM)), (rows, DIM))

    @tf.function
    def step():
        adam.apply_gradients([(gradient, table)])

    assert ops_of_size(step.get_concrete_function(), rows) & {"Mul", "AddV2"}
    if flavor == "keras3":
        with nothing_made_dense(), pytest.raises(AssertionError, match="made dense"):
            adam.apply_gradients([(gradient, table)])


def print_peaks(flavor: str) -> None:
    """In a new process, whose memory nothing else has been through."""
    from tf_basis.ops import loader

    peaks = {}
    for mode in BACKENDS.values():
        for name in LARGE:
            with loader.use(mode):
                step = build(flavor, OPTIONS[name])
                ids, values = batch()
                peaks[f"{name}, {mode}"] = max(
                    peak_memory(lambda f=step, x=ids, y=values: f(x, y))
                    for _ in range(3)
                )
    table = make_variable(np.zeros((ROWS, DIM)), flavor)
    adam = keras_of(flavor).optimizers.Adam()
    adam.build([table])
    gradient = tf.IndexedSlices(batch()[1], batch()[0], (ROWS, DIM))
    peaks["keras"] = peak_memory(lambda: adam.apply_gradients([(gradient, table)]))
    print(json.dumps(peaks))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_peak_memory_of_a_step_on_a_large_table(flavor):
    """A table of 128 MB; a step may not need a quarter of it, the tracing included."""
    try:
        peak_memory(lambda: None)
    except OSError:
        pytest.skip("this system does not tell the peak memory of a process")
    source = f"import test_sparse_size as t; t.print_peaks({flavor!r})"
    peaks = json.loads(run_python(source).stdout.strip().splitlines()[-1])
    table = ROWS * DIM * 4
    assert peaks.pop("keras") > table
    assert len(peaks) == 2 * len(LARGE)
    for name, peak in peaks.items():
        assert peak < table / 4, f"{name}: {peak / 2**20:.0f} MB"
