"""Indices outside [0, N): an error before the first write, nothing under XLA."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BACKENDS,
    TOLERANCE,
    TableRun,
    assert_same_bits,
    make_optimizer,
    make_slices,
    make_variable,
    optimizer_arrays,
    state_of,
    to_numpy,
)

ROWS = 30


class Model:
    """Two tables and a dense variable under one optimizer."""

    def __init__(self, flavor=None, **kwargs):
        rng = np.random.default_rng(0)
        self.good = make_variable(rng.normal(size=(20, 3)), flavor, "good_table")
        self.table = make_variable(rng.normal(size=(ROWS, 3)), flavor, "checked_table")
        self.dense = make_variable(rng.normal(size=(4,)), flavor, "dense")
        self.variables = [self.good, self.dense, self.table]
        self.optimizer = make_optimizer(
            flavor, tables=[self.good, self.table], num_buckets=6, **kwargs
        )
        self.optimizer.build(self.variables)

    def apply(self, indices, values):
        """The table with the given rows comes last: the others must wait for it."""
        self.optimizer.apply_gradients(
            [
                (make_slices([1, 2], np.ones((2, 3)), (20, 3)), self.good),
                (tf.ones(4), self.dense),
                (tf.IndexedSlices(values, indices, (ROWS, 3)), self.table),
            ]
        )

    def arrays(self):
        return optimizer_arrays(self.optimizer, self.variables)


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("bad", [-1, ROWS, ROWS + 7, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_bad_index_is_an_error_and_writes_nothing(backend, bad, dtype, function):
    model = Model()
    apply = tf.function(model.apply) if function else model.apply
    good = tf.constant([3, 4, 29, 3], dtype), tf.ones((4, 3))
    apply(*good)
    before = model.arrays()
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as error:
        apply(tf.constant([3, 4, bad, 3], dtype), tf.ones((4, 3)))
    for part in ("checked_table", str(bad), str(ROWS)):
        assert part in str(error.value)
    assert_same_bits(before, model.arrays())
    apply(*good)
    assert np.any(to_numpy(model.table)[3] != before[list(before)[-1]][3])


@pytest.mark.parametrize("momentum", ["exclusive", "shared", "none"])
def test_bad_index_in_every_mode(flavor, backend, momentum):
    model = Model(flavor, momentum=momentum, invariant_scalar=None)
    before = model.arrays()
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        model.apply(tf.constant([ROWS]), tf.ones((1, 3)))
    assert_same_bits(before, model.arrays())


def test_large_int64_index_is_not_truncated(backend):
    """2**32 + 3 must not be taken for row 3."""
    model = Model()
    before = model.arrays()
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as error:
        model.apply(tf.constant([2**32 + 3], tf.int64), tf.ones((1, 3)))
    assert str(2**32 + 3) in str(error.value)
    assert_same_bits(before, model.arrays())


@pytest.mark.parametrize("scalar", [None, "energy"])
def test_bad_index_stops_the_iteration_counter_too(flavor, backend, scalar):
    """With tables alone nothing reads the counter; it must wait for the check."""
    table = make_variable(np.zeros((ROWS, 3)), flavor, "table")
    optimizer = make_optimizer(
        flavor, tables=[table], num_buckets=4, invariant_scalar=scalar
    )
    optimizer.build([table])

    @tf.function
    def apply(indices):
        values = tf.ones((tf.size(indices), 3))
        gradient = tf.IndexedSlices(values, indices, (ROWS, 3))
        optimizer.apply_gradients([(gradient, table)])

    indices = np.zeros(500_000, np.int64)
    indices[-1] = ROWS  # found last: a counter that does not wait is long done
    before = optimizer_arrays(optimizer, [table])
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            apply(tf.constant(indices))
        assert_same_bits(before, optimizer_arrays(optimizer, [table]))


def test_state_is_there_after_a_first_step_that_failed(flavor, backend):
    """Of a `tf.function` that builds the optimizer; it goes on as another would."""

    def arrays_after(batches):
        table = make_variable(np.ones((ROWS, 3)), flavor, "table")
        optimizer = make_optimizer(flavor, tables=[table], num_buckets=6)

        @tf.function
        def step(indices):
            gradient = tf.IndexedSlices(tf.ones([2, 3]), indices, [ROWS, 3])
            optimizer.apply_gradients([(gradient, table)])

        for batch in batches:
            if max(batch) < ROWS:
                step(tf.constant(batch))
                continue
            with pytest.raises(tf.errors.InvalidArgumentError, match="table"):
                step(tf.constant(batch))
        return optimizer_arrays(optimizer, [table])

    assert_same_bits(arrays_after([[0, 1]]), arrays_after([[0, ROWS], [0, 1]]))


def test_gradients_of_the_wrong_shape_are_an_error(backend):
    model = Model()
    before = model.arrays()
    for indices, values in (([1, 2], tf.ones((2, 4))), ([1, 2, 3], tf.ones((2, 3)))):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            model.apply(tf.constant(indices), values)
    assert_same_bits(before, model.arrays())


@pytest.mark.parametrize("mode", list(BACKENDS.values()))
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_under_xla_bad_rows_change_nothing(mode, dtype):
    """XLA drops assertions; the twin is taken there even when the op is loaded."""
    from tf_basis.ops import loader

    values = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    bad = np.array([1, 3])
    with loader.use(mode):
        mixed, clean = Model(), Model()
        compiled = tf.function(mixed.apply, jit_compile=True)
        indices = np.array([3, -1, 29, ROWS, 3])
        for _ in range(2):
            compiled(tf.constant(indices, dtype), tf.constant(values))
            clean.apply(
                tf.constant(np.delete(indices, bad), dtype),
                tf.constant(np.delete(values, bad, 0)),
            )
    for table in ("good", "table"):
        actual = state_of(mixed.optimizer, getattr(mixed, table))
        expected = state_of(clean.optimizer, getattr(clean, table))
        for field, array in expected.items():
            np.testing.assert_allclose(actual[field], array, **TOLERANCE)
    untouched = np.delete(np.arange(ROWS), [3, 29])
    start = to_numpy(Model().table)
    np.testing.assert_array_equal(to_numpy(mixed.table)[untouched], start[untouched])


def test_under_xla_only_bad_rows():
    model = Model()
    before = state_of(model.optimizer, model.table)
    compiled = tf.function(model.apply, jit_compile=True)
    compiled(tf.constant([-5, ROWS, 2**31 - 1]), tf.ones((3, 3)))
    assert_same_bits(before, state_of(model.optimizer, model.table))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int64"])
@pytest.mark.parametrize("more", [{}, {"clipnorm": 1.0}], ids=["plain", "clipped"])
def test_ids_of_any_integer_type(backend, flavor, dtype, more):
    states = []
    for kind in ("int32", dtype):
        run = TableRun(np.ones((9, 2)), flavor, num_buckets=3, **more)
        gradient = tf.IndexedSlices(
            tf.constant([[1.0, 2.0], [3.0, 4.0], [0.5, 0.5]]),
            tf.constant([4, 7, 4], kind),
            tf.constant([9, 2]),
        )
        run.optimizer.apply_gradients([(gradient, run.variable)])
        states.append(run.state())
    assert_same_bits(*states)
    assert states[0]["bucket_steps"].any()


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_ids_must_be_integers(backend, flavor, dtype):
    run = TableRun(np.ones((9, 2)), flavor, num_buckets=3)
    before = run.state()
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.ones([1], dtype), (9, 2))
    with pytest.raises(ValueError, match=f"'table' must have integer .*{dtype}"):
        run.optimizer.apply_gradients([(gradient, run.variable)])
    assert_same_bits(run.state(), before)
