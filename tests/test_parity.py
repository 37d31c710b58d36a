"""Three-way parity on random problems: numpy reference, twin and op."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import TableRun, active_flavor, assert_matches_reference, random_batch
from reference.basis_adam import BasisAdamTable, Hyper

pytestmark = pytest.mark.filterwarnings("ignore:.*scalar.*:UserWarning")

SCALARS = [
    {"invariant_scalar": None},
    {"invariant_scalar": "energy"},
    {"invariant_scalar": "learned", "scalar_rule": "gradient"},
    {"invariant_scalar": "learned", "scalar_rule": "sign"},
    {"invariant_scalar": "learned", "scalar_rule": "log"},
]
ALL_MODES = [
    {"momentum": momentum, "collision_reduce": reduce, **scalar}
    for momentum in ("exclusive", "shared", "none")
    for reduce in ("mean", "sum", "sequential")
    for scalar in SCALARS
]


def random_hyper(rng, n_rows: int) -> dict:
    """Non-default hyperparameters of a table of `n_rows` rows."""
    buckets = int(rng.integers(1, n_rows + 2))
    scalar = SCALARS[rng.integers(len(SCALARS))]
    rate = {"gradient": 0.5, "sign": 0.05, "log": 0.3}
    return {
        "num_buckets": buckets,
        "exclusive_rows": int(rng.integers(0, min(buckets, n_rows))),
        "learning_rate": float(rng.uniform(0.01, 0.1)),
        "beta_1": float(rng.choice([0.0, 0.6, 0.9])),
        "beta_2": float(rng.choice([0.9, 0.99, 0.999])),
        "epsilon": float(rng.choice([1e-8, 1e-5, 1e-2])),
        "momentum": str(rng.choice(["exclusive", "shared", "none"])),
        "collision_reduce": str(rng.choice(["mean", "sum", "sequential"])),
        "bias_correction": bool(rng.integers(2)),
        "hashing": str(rng.choice(["balanced", "murmur3"])),
        "seed": int(rng.integers(2**32)),
        "scalar_decay": float(rng.uniform(0.5, 0.99)),
        "scalar_range": [(0.1, 10.0), (0.5, 2.0)][rng.integers(2)],
        "scalar_learning_rate": rate.get(scalar.get("scalar_rule"), 1e-4),
        "weight_decay": [None, 0.1][rng.integers(2)],
        "row_clipnorm": [None, 0.7][rng.integers(2)],
        **scalar,
    }


def check(rng, shape, hyper, sizes, index_dtype="int64", function=False):
    """Step both backends' run and the reference; compare after every step."""
    theta = rng.normal(size=shape).astype(np.float32)
    reference = BasisAdamTable(theta, Hyper(**hyper))
    run = TableRun(theta, function=function, **hyper)
    np.testing.assert_array_equal(
        np.asarray(run.optimizer.buckets(run.variable)), reference.bucket
    )
    for size in sizes:
        if size == "all":
            indices, values = np.arange(shape[0]), rng.normal(size=shape)
        elif size == "dense":
            gradient = rng.normal(size=shape).astype(np.float32)
            run.step_dense(gradient)
            reference.step_dense(gradient)
            assert_matches_reference(run, reference)
            continue
        else:
            indices, values = random_batch(rng, *shape, size)
        values = np.asarray(values, np.float32)
        run.step(indices, values, index_dtype)
        reference.step(indices, values)
        assert_matches_reference(run, reference)


def random_case(seed: int):
    rng = np.random.default_rng(seed)
    n_rows = int(rng.integers(1, 80))
    dim = int(rng.choice([1, 2, 3, 7, 8, 16, 33]))
    sizes = [int(rng.integers(0, 100)) for _ in range(5)] + [0, 1, "all"]
    return rng, (n_rows, dim), random_hyper(rng, n_rows), sizes


@pytest.mark.parametrize("seed", range(30))
def test_random_problems(backend, seed):
    rng, shape, hyper, sizes = random_case(seed)
    index_dtype = ["int64", "int32"][seed % 2]
    check(rng, shape, hyper, sizes, index_dtype, function=seed % 10 == 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 500))
def test_random_problems_long(backend, seed):
    check(*random_case(seed))


@pytest.mark.parametrize(
    "modes", ALL_MODES, ids=lambda m: "-".join(str(v) for v in m.values())
)
def test_every_combination_of_modes(backend, modes, rng):
    hyper = {
        "num_buckets": 9,
        "exclusive_rows": 3,
        "learning_rate": 0.05,
        "beta_1": 0.8,
        "beta_2": 0.97,
        "scalar_learning_rate": 0.02,
        "seed": 77,
        **modes,
    }
    check(rng, (40, 5), hyper, [60, 30, 1, 60, 10, 60])


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    "shape, buckets, exclusive",
    [
        ((1, 3), 1, 0),
        ((1, 1), 5, 0),
        ((17, 1), 4, 1),
        ((17, 7), 1, 0),
        ((17, 7), 17, 0),
        ((17, 7), 17, 5),
        ((17, 7), 30, 2),
        ((17, 7), 16, 15),
        ((17, 65), 2, 1),
    ],
)
def test_edge_shapes(backend, shape, buckets, exclusive, index_dtype, rng):
    hyper = {
        "num_buckets": buckets,
        "exclusive_rows": exclusive,
        "learning_rate": 0.03,
        "beta_2": 0.98,
        "seed": 5,
    }
    check(rng, shape, hyper, [1, 40, "all", 0, 3, 40, "all"], index_dtype)


@pytest.mark.parametrize(
    "scalar", SCALARS, ids=lambda s: "-".join(map(str, s.values()))
)
def test_large_batches(backend, scalar, rng):
    """Enough ids for the parallel sort and for several shards."""
    hyper = {
        "num_buckets": 150,
        "exclusive_rows": 20,
        "learning_rate": 0.02,
        "momentum": "shared",
        "scalar_learning_rate": 0.01,
        "beta_2": 0.98,
        **scalar,
    }
    check(rng, (9000, 17), hyper, [5000, 8000])


@pytest.mark.parametrize("momentum", ["exclusive", "shared", "none"])
def test_dense_gradient_touches_every_row(backend, momentum, rng):
    hyper = {
        "num_buckets": 6,
        "exclusive_rows": 2,
        "learning_rate": 0.05,
        "momentum": momentum,
        "weight_decay": 0.01,
        "row_clipnorm": 1.5,
    }
    check(rng, (25, 4), hyper, ["dense", 30, "dense", "dense", 3, "dense"])


def test_zero_gradients(backend, rng):
    """q_r stays 0 and s_r is 1 until a row has had a gradient other than zero."""
    hyper = {"num_buckets": 4, "exclusive_rows": 1, "learning_rate": 0.1}
    theta = rng.normal(size=(12, 3)).astype(np.float32)
    reference = BasisAdamTable(theta, Hyper(**hyper))
    run = TableRun(theta, **hyper)
    for zero_rows in (12, 6, 3, 0, 12, 4):
        gradient = rng.normal(size=(12, 3)).astype(np.float32)
        gradient[:zero_rows] = 0
        run.step(np.arange(12), gradient)
        reference.step(np.arange(12), gradient)
        assert_matches_reference(run, reference)
        assert np.all(np.isfinite(run.theta))


@pytest.mark.skipif(active_flavor() != "keras3", reason="tf_keras has only these")
def test_plain_tf_variable_on_keras3(backend, rng):
    theta = rng.normal(size=(20, 3)).astype(np.float32)
    hyper = {"num_buckets": 5, "exclusive_rows": 1, "learning_rate": 0.05}
    runs = [TableRun(theta, plain=plain, **hyper) for plain in (False, True)]
    for size in (30, 5):
        indices, values = random_batch(rng, 20, 3, size)
        for run in runs:
            run.step(indices, values)
    np.testing.assert_array_equal(runs[0].theta, runs[1].theta)
