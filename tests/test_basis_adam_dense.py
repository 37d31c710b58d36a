"""Dense variables, learning rates and `dense_optimizer`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    TableRun,
    is_compressed,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    random_batch,
    to_numpy,
)
from reference.basis_adam import BasisAdamTable, Hyper, sum_duplicates

BETAS = {"beta_1": 0.85, "beta_2": 0.97, "epsilon": 1e-7}


def run_dense(flavor, optimizer, start, gradients, function):
    """Values of dense variables after applying lists of gradients."""
    variables = [
        make_variable(value, flavor, name=f"v{i}") for i, value in enumerate(start)
    ]
    optimizer.build(variables)

    def apply(*gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    apply = tf.function(apply, reduce_retracing=True) if function else apply
    for step in gradients:
        apply(*step)
    return [to_numpy(v) for v in variables]


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"weight_decay": 0.25}, {"clipnorm": 0.5}, {"clipvalue": 0.3}],
    ids=lambda e: next(iter(e), "plain"),
)
def test_dense_variables_follow_keras_adam_to_the_bit(flavor, rng, function, extra):
    shapes = [(7, 5), (9,), (), (20, 3)]
    start = [rng.normal(size=shape) for shape in shapes]
    gradients = [
        [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]
        for _ in range(8)
    ]
    adam = keras_of(flavor).optimizers.Adam(0.01, **BETAS, **extra)
    ours = make_optimizer(flavor, learning_rate=0.01, **BETAS, **extra)
    expected = run_dense(flavor, adam, start, gradients, function)
    actual = run_dense(flavor, ours, start, gradients, function)
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_small_tables_sum_duplicates_and_follow_keras_adam(flavor, rng, function):
    """A sparse gradient of a small table equals Keras Adam's dense step, to the bit.

    Keras's own sparse step differs: Keras 3 squares before it sums duplicates, and
    tf_keras orders the float operations of a sparse step differently.
    """
    shape = (20, 3)
    start = [rng.normal(size=shape)]
    batches = [random_batch(rng, *shape, 30) for _ in range(8)]
    sparse, dense = [], []
    for indices, values in batches:
        rows, sums = sum_duplicates(indices, values)
        full = np.zeros(shape, np.float32)
        full[rows] = sums
        sparse.append([make_slices(indices, values, shape)])
        dense.append([tf.constant(full)])
    adam = keras_of(flavor).optimizers.Adam(0.01, **BETAS)
    ours = make_optimizer(flavor, learning_rate=0.01, **BETAS)
    (expected,) = run_dense(flavor, adam, start, dense, function)
    (actual,) = run_dense(flavor, ours, start, sparse, function)
    np.testing.assert_array_equal(actual, expected)


def test_learning_rate_schedule(flavor, backend, rng):
    keras = keras_of(flavor)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    theta = rng.normal(size=(30, 3)).astype(np.float32)
    run = TableRun(theta, flavor, num_buckets=5, learning_rate=schedule)
    reference = BasisAdamTable(theta, Hyper(5))
    for step in range(6):
        indices, values = random_batch(rng, 30, 3, 20)
        run.step(indices, values)
        reference.step(indices, values, learning_rate=0.1 * 0.5 ** (step / 2))
    np.testing.assert_allclose(run.theta, reference.theta, **TOLERANCE)


def test_learning_rate_can_be_set_between_steps(flavor, backend, rng):
    run = TableRun(rng.normal(size=(30, 3)), flavor, function=True, num_buckets=5)
    run.step([3], np.ones((1, 3)))
    run.optimizer.learning_rate = 0.0
    before = run.theta
    run.step([3], np.ones((1, 3)))
    np.testing.assert_array_equal(run.theta, before)
    run.optimizer.learning_rate = 0.5
    run.step([3], np.ones((1, 3)))
    assert np.all(run.theta[3] < before[3] - 0.1)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
def test_dense_optimizer_equals_itself_alone(flavor, backend, rng, kind):
    arguments = {"SGD": {"momentum": 0.9}, "AdamW": {"weight_decay": 0.1}}
    schedule = keras_of(flavor).optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)

    def make():
        factory = getattr(keras_of(flavor).optimizers, kind)
        return factory(schedule, **arguments.get(kind, {}))

    start = rng.normal(size=(4, 3))
    table = make_variable(rng.normal(size=(30, 3)), flavor, "table")
    dense, alone = (make_variable(start, flavor, n) for n in ("dense", "alone"))
    optimizer = make_optimizer(
        flavor, tables=[table], num_buckets=4, dense_optimizer=make()
    )
    single = make()
    optimizer.build([table, dense])
    single.build([alone])
    table_before = to_numpy(table)
    for _ in range(6):
        indices, values = random_batch(rng, 30, 3, 10)
        gradient = tf.constant(rng.normal(size=(4, 3)), tf.float32)
        slices = make_slices(indices, values, (30, 3))
        optimizer.apply_gradients([(slices, table), (gradient, dense)])
        single.apply_gradients([(gradient, alone)])
    np.testing.assert_array_equal(to_numpy(dense), to_numpy(alone))
    assert np.any(to_numpy(table) != table_before)
    assert is_compressed(optimizer, table) and not is_compressed(optimizer, dense)
