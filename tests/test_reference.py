"""The numpy reference agrees with the golden values, needing no implementation."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    TOLERANCE,
    energy_scalar,
    golden_cases,
    golden_hyper,
    load_golden,
    random_batch,
    to_numpy,
)
from reference.adam import KerasAdam, LazyAdam
from reference.basis_adam import BasisAdamTable, Hyper, sum_duplicates
from reference.hashing import bucket_of_rows, murmur3_x86_32

# Golden numbers, gradients included, keep nine significant digits; gradients reach
# 30, so where they cancel a float64 run differs by about 1e-8.
ROUNDING = {"rtol": 1e-7, "atol": 2e-8}
BETAS = {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-6}


def test_murmur3_golden():
    for case in load_golden("murmur3_x86_32"):
        assert murmur3_x86_32(int(case["id"]), case["seed"]) == case["hash"]


@pytest.mark.parametrize("case", golden_cases())
def test_basis_adam_golden(case):
    hyper = Hyper(**golden_hyper(case))
    table = BasisAdamTable(case["theta0"], hyper)
    np.testing.assert_array_equal(table.bucket, case["bucket_of_row"])
    for step in case["steps"]:
        table.step(step["indices"], step["values"])
        for field in ("theta", "second_moment", "row_energy"):
            np.testing.assert_allclose(
                getattr(table, field), step[field], err_msg=field, **ROUNDING
            )
        np.testing.assert_array_equal(table.bucket_steps, step["bucket_steps"])
        users = table.buckets_with_first_moment()
        np.testing.assert_allclose(
            table.first_moment[users],
            np.reshape(step["first_moment"], table.first_moment.shape)[users],
            **ROUNDING,
        )
        touched = np.unique(np.asarray(step["indices"], np.int64))
        if hyper.invariant_scalar != "energy":
            touched = np.arange(len(table.theta))
        np.testing.assert_allclose(
            table.scalar[touched], np.array(step["scalar"])[touched], **ROUNDING
        )


def test_energy_scalar_is_a_function_of_the_state(rng):
    hyper = Hyper(num_buckets=7, exclusive_rows=2, scalar_range=(0.5, 2.0))
    table = BasisAdamTable(rng.normal(size=(30, 3)), hyper)
    for _ in range(6):
        indices, values = random_batch(rng, 30, 3, 40)
        table.step(indices, values)
        touched = np.unique(indices)
        recomputed = energy_scalar(vars(table), table.bucket, table.owners, hyper)
        np.testing.assert_allclose(table.scalar[touched], recomputed[touched])


@pytest.mark.parametrize("scalar", [None, "energy"])
def test_one_bucket_per_row_is_lazy_adam(rng, scalar):
    theta = rng.normal(size=(20, 3))
    hyper = Hyper(20, learning_rate=0.1, invariant_scalar=scalar, **BETAS)
    table, lazy = BasisAdamTable(theta, hyper), LazyAdam(theta, 0.1, **BETAS)
    for size in (30, 1, 0, 50):
        indices, values = random_batch(rng, 20, 3, size)
        table.step(indices, values)
        lazy.step(indices, values)
    np.testing.assert_allclose(table.theta, lazy.theta, rtol=1e-12)


def test_keras_adam_equals_lazy_adam_when_epsilon_vanishes(rng):
    theta = rng.normal(size=(6, 4))
    betas = {**BETAS, "epsilon": 1e-30}
    dense, lazy = KerasAdam(theta, 0.1, **betas), LazyAdam(theta, 0.1, **betas)
    for _ in range(8):
        gradient = rng.normal(size=(6, 4))
        dense.step(gradient)
        lazy.step(np.arange(6), gradient)
    np.testing.assert_allclose(dense.theta, lazy.theta, rtol=1e-10)


def test_keras_adam_reference_follows_keras(rng, flavor):
    from helpers import keras_of, make_variable

    theta = rng.normal(size=(5, 3))
    variable = make_variable(theta, flavor)
    adam = keras_of(flavor).optimizers.Adam(0.1, **BETAS)
    adam.build([variable])
    reference = KerasAdam(theta, 0.1, **BETAS)
    for _ in range(6):
        gradient = rng.normal(size=(5, 3)).astype(np.float32)
        adam.apply_gradients([(_tensor(gradient), variable)])
        reference.step(gradient)
    np.testing.assert_allclose(to_numpy(variable), reference.theta, **TOLERANCE)


def test_sum_duplicates():
    rows, sums = sum_duplicates([3, 1, 3], [[1.0], [2.0], [4.0]])
    np.testing.assert_array_equal(rows, [1, 3])
    np.testing.assert_array_equal(sums, [[2.0], [5.0]])


@pytest.mark.parametrize("n_rows, buckets, exclusive", [(100, 7, 2), (64, 9, 0)])
def test_balanced_reference_is_balanced(n_rows, buckets, exclusive):
    hashed = bucket_of_rows(range(n_rows), n_rows, buckets, exclusive, "balanced", 5)
    counts = np.bincount(hashed, minlength=buckets)
    np.testing.assert_array_equal(counts[:exclusive], 1)
    assert counts[exclusive:].max() - counts[exclusive:].min() <= 1


def _tensor(array):
    import tensorflow as tf

    return tf.constant(array, tf.float32)
