"""State and tables of 16 and 8 bits: parity within a spacing, and no bias."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from family_helpers import ADAM, SGD, FamilyRun, assert_matches, hot_batch
from helpers import BACKENDS, TOLERANCE, assert_same_bits
from reference.basis_family import FamilyTable

from tf_basis.ops import loader

pytestmark = pytest.mark.filterwarnings("ignore:.*scalar.*:UserWarning")

LOG8 = np.r_[0.0, 2.0 ** ((np.arange(1, 256) - 1) / 4 - 50)]
BITS = {"bfloat16": (7, -126), "float16": (10, -14)}  # mantissa, least exponent
LOW = {"moment_dtype": "bfloat16", "energy_dtype": "log8"}
HALF = {"moment_dtype": "float16", "energy_dtype": "bfloat16"}
ADAGRAD = {"learning_rate": 0.05, "num_buckets": 9, "initial_accumulator_value": 0.25}

CASES = {
    "adam-low": ("BasisAdam", {**ADAM, **LOW, "momentum": "shared"}),
    "adam-half": ("BasisAdam", {**ADAM, **HALF, "momentum": "shared"}),
    "adam-owners": ("BasisAdam", {**ADAM, **LOW, "exclusive_rows": 5}),
    "adam-listed": ("BasisAdam", {**ADAM, **HALF, "exclusive_rows": [30, 2, 11]}),
    "adam-double": (
        "BasisAdam",
        {**ADAM, **LOW, "hashing": "double", "momentum": "shared"},
    ),
    "adam-auto": ("BasisAdam", {**ADAM, **LOW, "exclusive_rows": "auto"}),
    "adam-stale": (
        "BasisAdam",
        {**ADAM, **HALF, "stale_decay": True, "momentum": "shared"},
    ),
    "adam-sequential": ("BasisAdam", {**ADAM, **LOW, "collision_reduce": "sequential"}),
    "adam-learned": (
        "BasisAdam",
        {
            **ADAM,
            "moment_dtype": "bfloat16",
            "momentum": "shared",
            "invariant_scalar": "learned",
            "scalar_learning_rate": 0.02,
        },
    ),
    "adagrad-low": ("BasisAdagrad", {**ADAGRAD, **LOW}),
    "adagrad-half": ("BasisAdagrad", {**ADAGRAD, **HALF}),
    "sgd-low": (
        "BasisSGD",
        {**SGD, "moment_dtype": "bfloat16", "momentum_mode": "shared"},
    ),
    "sgd-half": (
        "BasisSGD",
        {**SGD, "moment_dtype": "float16", "momentum_mode": "shared", "nesterov": True},
    ),
}


def neighbours(x, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a format just below (or at) and above each x."""
    x = np.asarray(x, np.float64)
    if dtype == "log8":
        code = np.searchsorted(LOG8, x, side="right") - 1
        low, high = LOG8[code], LOG8[np.minimum(code + 1, 255)]
        # A positive number is never stored as 0, which means "none yet".
        return np.where((low == 0) & (x > 0), LOG8[1], low), high
    bits, least = BITS[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**least)))
    spacing = 2.0 ** (np.maximum(exponent, least) - bits)
    low = np.floor(x / spacing) * spacing
    return low, low + spacing


def assert_rounded(stored, exact, dtype: str, name: str) -> None:
    """Every stored number is a neighbour of the exact one, or that number."""
    if dtype == "float32":
        np.testing.assert_allclose(stored, exact, err_msg=name, **TOLERANCE)
        return
    stored = np.asarray(stored, np.float64)
    # float32 arithmetic may err by this much before it rounds.
    doubt = 1e-5 * np.abs(exact) + (1e-7 if dtype in BITS else 0.0)
    low, high = neighbours(exact - doubt, dtype)[0], neighbours(exact + doubt, dtype)[1]
    margin = 1e-6 * np.abs(exact)
    outside = (stored < low - margin) | (stored > high + margin)
    assert not outside.any(), (name, stored[outside], exact[outside])
    size = np.abs(stored)
    np.testing.assert_allclose(neighbours(size * (1 + 1e-7), dtype)[0], size, rtol=1e-6)


class LowRun(FamilyRun):
    """A run on a table of any dtype."""

    def __init__(self, kind, theta, dtype="float32", **arguments):
        super().__init__(kind, theta, **arguments)
        if dtype != "float32":
            self.variable = tf.Variable(tf.cast(theta, dtype), name="table")
            make = type(self.optimizer)
            self.optimizer = make(tables=[self.variable], **arguments)
            self.optimizer.build([self.variable])

    def step(self, indices, values):
        """One step; returns the gradient's values as the table's dtype has them."""
        values = tf.cast(tf.constant(values), self.variable.dtype)
        self._apply(tf.IndexedSlices(values, tf.constant(indices), self.shape))
        return tf.cast(values, tf.float64).numpy()

    def state(self):
        state = self.optimizer.table_state(self.variable)
        theta = tf.cast(tf.convert_to_tensor(self.variable), tf.float32)
        return {"theta": theta.numpy(), **state}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_every_stored_number_is_a_neighbour(backend, case, dtype, rng):
    """Each step starts the reference from what was stored, so nothing adds up."""
    kind, arguments = CASES[case]
    theta = rng.normal(size=(40, 4)).astype(np.float32)
    run = LowRun(kind, theta, dtype, **arguments)
    reference = FamilyTable(kind, theta, **arguments)
    formats = {
        "first_moment": arguments["moment_dtype"],
        "second_moment": arguments["moment_dtype"],
        "row_energy": arguments.get("energy_dtype", "float32"),
        "theta": dtype,
    }
    changed = 0
    for step in range(9):
        reference.load(run.state(), step)
        before = reference.theta.copy()
        indices, values = hot_batch(rng, 40, 4, [40, 12, 1][step % 3], [2, 30, 31])
        values = run.step(indices, values)
        state = run.state()
        stored = {k: v for k, v in state.items() if k in formats and k != "theta"}
        reference.step(indices, values, stored=stored)
        for field, value in stored.items():
            exact = reference.exact[field][: len(value)]
            assert_rounded(value, exact, formats[field], field)
        assert_rounded(state["theta"], reference.theta, dtype, "theta")
        changed += np.any(state["theta"] != before, axis=1).sum()
        for field, value in reference.state().items():
            if field not in formats:
                np.testing.assert_allclose(state[field], value, rtol=1e-5)
    assert changed > 40


SEEDS = 40
ROWS, DIM = 30, 4


def positions(stored, exact, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Which of both neighbours was stored, and with which chance it should be."""
    low, high = neighbours(exact, dtype)
    inside = (exact > low) & (exact < high)
    chance = np.where(inside, (exact - low) / np.where(inside, high - low, 1), 0.0)
    up = np.where(inside, np.isclose(stored, high, rtol=1e-6, atol=0), 0.0)
    return up, chance


@pytest.mark.parametrize("what", ["moments", "energy", "table"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "log8"])
def test_the_mean_over_seeds_is_exact(backend, what, dtype, rng):
    """Up or down, by chance alone: each number over 40 seeds, and all together.

    `z` sums (up - chance) in standard deviations; numbers of different seeds are
    independent, so the spread of z over numbers is 1.
    """
    if (dtype == "log8") != (what == "energy"):
        pytest.skip("log8 is the format of energies, the others of the rest")
    theta = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    values = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    arguments = {"learning_rate": 0.05, "num_buckets": ROWS, "momentum": "shared"}
    table_dtype = "float32"
    if what == "moments":
        arguments["moment_dtype"] = dtype
    elif what == "energy":
        arguments |= {"energy_dtype": dtype, "num_buckets": 5}
    else:
        table_dtype = dtype
        theta = tf.cast(tf.cast(theta, dtype), tf.float32).numpy()
        values = tf.cast(tf.cast(values, dtype), tf.float32).numpy()
    reference = FamilyTable("BasisAdam", theta, **arguments)
    reference.step(np.arange(ROWS), values)
    fields = {
        "moments": ["first_moment", "second_moment"],
        "energy": ["row_energy"],
        "table": ["theta"],
    }[what]
    up = {field: 0.0 for field in fields}
    for seed in range(SEEDS):
        run = LowRun("BasisAdam", theta, table_dtype, seed=seed, **arguments)
        run.step(np.arange(ROWS), values)
        state = run.state()
        for field in fields:
            up[field] += positions(state[field], getattr(reference, field), dtype)[0]
    for field in fields:
        exact = getattr(reference, field)
        chance = positions(exact, exact, dtype)[1]
        fair = (chance > 0.05) & (chance < 0.95)
        assert fair.sum() > 20
        variance = SEEDS * chance * (1 - chance)
        off = (up[field] - SEEDS * chance)[fair]
        total = off.sum() / np.sqrt(variance[fair].sum())
        assert abs(total) < 4.5, (field, total)
        spread = np.mean(off**2 / variance[fair])
        # A chi-square over n numbers: mean 1, deviation sqrt(2 / n).
        assert abs(spread - 1) < 5 * np.sqrt(2 / fair.sum()), (field, spread)


@pytest.mark.parametrize("moment_dtype", ["float16", "bfloat16"])
def test_epsilon_of_float16_moments(backend, moment_dtype, rng):
    """At least 2^-12 with float16 moments, as given with the others."""
    arguments = {
        "num_buckets": 30,
        "learning_rate": 0.5,
        "epsilon": 1e-6,
        "moment_dtype": moment_dtype,
    }
    theta = rng.normal(size=(30, 3)).astype(np.float32)
    values = (1e-3 * rng.normal(size=(30, 3))).astype(np.float32)
    run = LowRun("BasisAdam", theta, **arguments)
    reference = FamilyTable("BasisAdam", theta, **arguments)
    run.step(np.arange(30), values)
    state = run.state()
    reference.step(np.arange(30), values, stored=state | {"theta": reference.theta})
    np.testing.assert_allclose(state["theta"], reference.theta, rtol=1e-4, atol=1e-5)


HUGE = {
    "adam": ("BasisAdam", {"num_buckets": 2}),
    "adam-shared": ("BasisAdam", {"num_buckets": 2, "momentum": "shared"}),
    "adam-double": ("BasisAdam", {"num_buckets": 3, "hashing": "double"}),
    "adam-sequential": (
        "BasisAdam",
        {"num_buckets": 2, "collision_reduce": "sequential"},
    ),
    "adam-learned": (
        "BasisAdam",
        {"num_buckets": 2, "momentum": "shared", "invariant_scalar": "learned"},
    ),
    "adagrad": ("BasisAdagrad", {"num_buckets": 2}),
    "adam-low": ("BasisAdam", {"num_buckets": 2, **LOW}),
}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("case", HUGE)
def test_huge_gradients_stay_finite(case):
    """Squares beyond float32 stop at its largest number, alike in all three."""
    kind, arguments = HUGE[case]
    exact = "moment_dtype" not in arguments
    states = []
    for mode in BACKENDS.values():
        run = FamilyRun(kind, np.ones((6, 3)), learning_rate=0.1, **arguments)
        reference = FamilyTable(kind, np.ones((6, 3)), learning_rate=0.1, **arguments)
        with loader.use(mode):
            for scale in (1.0, 1e20, 3e38, 1.0, 1e19):
                values = scale * np.array([[1.0, -0.5, 0.25], [0.5, 1.0, 1.0]])
                run.step([1, 4], values)
                reference.step([1, 4], np.float32(values))
                if exact:
                    assert_matches(run, reference)
        states.append(run.state())
        for field, value in states[-1].items():
            assert np.all(np.isfinite(value.astype(np.float64))), field
        assert np.all(states[-1]["theta"][[1, 4]] != 1)
    assert_same_bits(*states)
