"""A table and a dense variable under an optimizer that accumulates gradients."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers import (
    make_slices,
    make_variable,
    optimizer_arrays,
    random_batch,
    state_of,
    to_numpy,
    variables_of,
)
from sparse_helpers import dense_of, nothing_made_dense

ROWS, DIM, STEPS = 40, 3, 3


class Run:
    """A table and a dense variable under one optimizer."""

    def __init__(self, flavor, function=False, kind="BasisAdam", **kwargs):
        from tf_basis import optimizers

        rng = np.random.default_rng(5)
        self.flavor = flavor
        self.table = make_variable(rng.normal(size=(ROWS, DIM)), flavor, "table")
        self.dense = make_variable(rng.normal(size=(4,)), flavor, "dense")
        self.variables = [self.table, self.dense]
        kwargs = {"num_buckets": 6, "learning_rate": 0.1, **kwargs}
        make = getattr(optimizers.for_flavor(flavor), kind)
        self.optimizer = make(tables=[self.table], **kwargs)
        self.optimizer.build(self.variables)
        traced = tf.function(self._apply, reduce_retracing=True)
        self.apply = traced if function else self._apply

    def _apply(self, slices, dense):
        gradients = [slices, dense]
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def step(self, ids, values, dense):
        with nothing_made_dense():
            self.apply(make_slices(ids, values, (ROWS, DIM)), tf.constant(dense))

    def arrays(self):
        return optimizer_arrays(self.optimizer, self.variables)

    def state(self):
        return {**state_of(self.optimizer, self.table), "dense": to_numpy(self.dense)}

    def buffer(self):
        """Rows and values of the accumulated slices."""
        rows, values = (
            to_numpy(v)
            for v in variables_of(self.optimizer)
            if "accumulator" in v.name and "table" in v.name
        )
        return rows, values


def batches(rng, count):
    """Batches of different sizes with many duplicates; one is empty."""
    made = []
    for number in range(count):
        size = 0 if number == 4 else 10 + 7 * number
        ids, values = random_batch(rng, ROWS, DIM, size)
        made.append((ids, values, rng.normal(size=4).astype(np.float32)))
    return made


def mean_of(group):
    """The mean gradient of a few batches as rows, and of the dense variable."""
    ids = np.concatenate([ids for ids, _, _ in group])
    rows = np.unique(ids)
    total = sum(dense_of(i, v, (ROWS, DIM)) for i, v, _ in group)
    dense = np.sum([d for _, _, d in group], axis=0, dtype=np.float32)
    return rows, total[rows] / len(group), dense / np.float32(len(group))
