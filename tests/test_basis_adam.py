"""BasisAdam on compressed tables: lazy Adam, edges, several tables, tracing."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    TableRun,
    assert_same_bits,
    make_optimizer,
    make_slices,
    make_variable,
    random_batch,
    state_of,
    to_numpy,
)
from reference.adam import LazyAdam
from reference.basis_adam import BasisAdamTable, Hyper, sum_duplicates

BETAS = {"beta_1": 0.85, "beta_2": 0.97, "epsilon": 1e-7}


@pytest.mark.parametrize("num_buckets", [40, 1000])
@pytest.mark.parametrize("scalar", [None, "energy"])
def test_one_bucket_per_row_is_lazy_adam(backend, rng, num_buckets, scalar):
    theta = rng.normal(size=(40, 5)).astype(np.float32)
    run = TableRun(
        theta,
        learning_rate=0.05,
        num_buckets=num_buckets,
        invariant_scalar=scalar,
        **BETAS,
    )
    lazy = LazyAdam(theta, 0.05, **BETAS)
    for size in (60, 1, 0, 30, 100, 5, 60):
        indices, values = random_batch(rng, 40, 5, size)
        run.step(indices, values)
        lazy.step(indices, values)
        np.testing.assert_allclose(run.theta, lazy.theta, **TOLERANCE)
    state = run.state()
    np.testing.assert_allclose(state["first_moment"], lazy.m, **TOLERANCE)
    np.testing.assert_allclose(state["second_moment"], lazy.v, **TOLERANCE)
    np.testing.assert_array_equal(state["bucket_steps"], lazy.row_steps)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_none_gradients_are_skipped(flavor, backend, rng):
    table = make_variable(rng.normal(size=(30, 3)), flavor, "table")
    dense = make_variable(rng.normal(size=(4,)), flavor, "dense")
    optimizer = make_optimizer(flavor, tables=[table], num_buckets=4)
    optimizer.build([table, dense])
    before = state_of(optimizer, table)
    gradient = tf.ones(4)
    dense_before = to_numpy(dense)
    optimizer.apply_gradients([(None, table), (gradient, dense)])
    assert_same_bits(before, state_of(optimizer, table))
    assert np.all(to_numpy(dense) < dense_before)
    dense_before = to_numpy(dense)
    slices = make_slices([1], np.ones((1, 3)), (30, 3))
    optimizer.apply_gradients([(slices, table), (None, dense)])
    np.testing.assert_array_equal(to_numpy(dense), dense_before)
    assert state_of(optimizer, table)["bucket_steps"].sum() == 1


def test_empty_and_one_row_batches(backend, rng):
    theta = rng.normal(size=(30, 3)).astype(np.float32)
    hyper = {"num_buckets": 4, "learning_rate": 0.1}
    run = TableRun(theta, **hyper)
    before = run.state()
    run.step([], np.zeros((0, 3)))
    assert_same_bits(before, run.state())
    run.step([11], [[1.0, -2.0, 0.5]])
    np.testing.assert_array_equal(np.delete(run.theta, 11, 0), np.delete(theta, 11, 0))
    reference = BasisAdamTable(theta, Hyper(**hyper))
    reference.step([11], [[1.0, -2.0, 0.5]])
    np.testing.assert_allclose(run.theta, reference.theta, **TOLERANCE)


def test_function_does_not_retrace(backend, rng):
    table = make_variable(rng.normal(size=(30, 3)), name="table")
    dense = make_variable(rng.normal(size=(4,)), name="dense")
    optimizer = make_optimizer(tables=[table], num_buckets=4)
    optimizer.build([table, dense])
    traces = []

    @tf.function
    def step(slices, gradient):
        traces.append(1)
        optimizer.apply_gradients([(slices, table), (gradient, dense)])

    for _ in range(6):
        indices, values = random_batch(rng, 30, 3, 20)
        step(make_slices(indices, values, (30, 3)), tf.ones(4))
    assert len(traces) == 1
    assert int(to_numpy(optimizer.iterations)) == 6


def test_several_tables_of_one_optimizer_do_not_mix(backend, rng):
    thetas = {n: rng.normal(size=s) for n, s in (("a", (30, 3)), ("b", (50, 2)))}
    tables = {n: make_variable(t, name=n) for n, t in thetas.items()}
    hyper = {"num_buckets": 6, "exclusive_rows": 1, "learning_rate": 0.05}
    optimizer = make_optimizer(tables=list(tables.values()), **hyper)
    optimizer.build(list(tables.values()))
    references = {n: BasisAdamTable(t, Hyper(**hyper)) for n, t in thetas.items()}
    for _ in range(6):
        pairs = []
        for name, table in tables.items():
            shape = thetas[name].shape
            indices, values = random_batch(rng, *shape, 25)
            references[name].step(indices, values)
            pairs.append((make_slices(indices, values, shape), table))
        optimizer.apply_gradients(pairs)
    for name, table in tables.items():
        np.testing.assert_allclose(to_numpy(table), references[name].theta, **TOLERANCE)


def test_weight_decay_acts_on_touched_rows_only(backend):
    run = TableRun(np.ones((40, 2)), num_buckets=4, weight_decay=0.5)
    run.step([5], np.zeros((1, 2)))
    assert np.all(run.theta[5] < 1)
    np.testing.assert_array_equal(np.delete(run.theta, 5, 0), 1)


def test_float_state_stays_finite_with_extreme_gradients(backend):
    run = TableRun(np.zeros((40, 2)), num_buckets=4, learning_rate=0.1)
    for scale in (1e-18, 1e15, 1e-18, 1.0):
        run.step(np.arange(40), np.full((40, 2), scale))
    assert all(np.all(np.isfinite(a)) for a in run.state().values())


def test_the_backend_asked_for_is_the_one_that_runs(flavor, backend):
    """`require` must not end in the twin, nor `off` in the op, without notice."""
    run = TableRun(np.zeros((30, 3)), flavor, num_buckets=4)

    @tf.function
    def step(indices, values):
        gradient = tf.IndexedSlices(values, indices, (30, 3))
        run.optimizer.apply_gradients([(gradient, run.variable)])

    graph = step.get_concrete_function(tf.constant([1, 2]), tf.ones((2, 3))).graph
    fused = [
        op.type
        for op in graph.get_operations()
        if op.type.startswith("TfBasis>")
        and any(tensor.dtype == tf.resource for tensor in op.inputs)
    ]
    assert len(fused) == (1 if backend == "op" else 0)


def test_gradient_without_dense_shape(backend, rng):
    theta = rng.normal(size=(30, 3)).astype(np.float32)
    runs = [TableRun(theta, num_buckets=4, learning_rate=0.1) for _ in range(2)]
    indices, values = random_batch(rng, 30, 3, 20)
    runs[0].step(indices, values)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices))
    runs[1].optimizer.apply_gradients([(slices, runs[1].variable)])
    assert_same_bits(runs[0].state(), runs[1].state())


@pytest.mark.parametrize("kind", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_counts_duplicates_once(flavor, backend, rng, kind):
    """The norm is that of the dense gradient, duplicates summed."""
    theta, limit = rng.normal(size=(30, 3)).astype(np.float32), 0.7
    hyper = {"num_buckets": 5, "learning_rate": 0.05}
    run = TableRun(theta, flavor, **hyper, **{kind: limit})
    reference = BasisAdamTable(theta, Hyper(**hyper))
    for size in (30, 1, 0, 50):
        indices, values = random_batch(rng, 30, 3, size)
        run.step(indices, values)
        rows, sums = sum_duplicates(indices, values)
        norm = np.linalg.norm(sums)
        scaled = sums * (limit / norm if norm > limit else 1)
        clipped = np.clip(sums, -limit, limit) if kind == "clipvalue" else scaled
        reference.step(rows, clipped)
    np.testing.assert_allclose(run.theta, reference.theta, **TOLERANCE)


def test_nan_stays_in_its_bucket(backend, rng):
    run = TableRun(rng.normal(size=(60, 3)), num_buckets=6, learning_rate=0.1)
    gradient = np.ones((60, 3))
    gradient[17] = np.nan
    run.step(np.arange(60), gradient)
    buckets = np.asarray(run.optimizer.buckets(run.variable))
    others = buckets != buckets[17]
    assert np.all(np.isfinite(run.theta[others]))
    assert np.all(np.isnan(run.theta[17]))
