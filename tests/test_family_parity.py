"""Three-way parity of the whole family: numpy reference, twin and op."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BACKENDS,
    TOLERANCE,
    TableRun,
    active_flavor,
    assert_same_bits,
    make_variable,
    random_batch,
    state_of,
)
from reference.basis_adam import BasisAdamTable, Hyper
from reference.basis_family import DEFAULTS, FamilyTable

from tf_basis import optimizers
from tf_basis.ops import loader

pytestmark = pytest.mark.filterwarnings("ignore:.*scalar.*:UserWarning")

# At least one argument of each case is not its default; `_` marks what differs.
ADAM = {"learning_rate": 0.05, "beta_1": 0.8, "beta_2": 0.97, "num_buckets": 9}
SGD = {"learning_rate": 0.05, "momentum": 0.8, "num_buckets": 9}
ADAGRAD = {"learning_rate": 0.05, "num_buckets": 9}
SHARED_SGD = {**SGD, "momentum_mode": "shared"}
LEARNED = {"invariant_scalar": "learned", "scalar_learning_rate": 0.02}
LISTED = {"exclusive_rows": [17, 3, 25]}
FREQUENCIES = [float(r * 7 % 13) for r in range(40)]
RULES = ("gradient", "sign", "log")
REDUCES = ("mean", "sum", "sequential")

CASES = {
    # BasisSGD
    "sgd-plain": ("BasisSGD", {**SGD, "momentum": 0.0}),
    **{
        f"sgd-{mode}-{reduce}-{'nesterov' if nesterov else 'plain'}": (
            "BasisSGD",
            {
                **SGD,
                "exclusive_rows": 3,
                "momentum_mode": mode,
                "collision_reduce": reduce,
                "nesterov": nesterov,
            },
        )
        for mode in ("exclusive", "shared", "none")
        for reduce in REDUCES
        for nesterov in (False, True)
    },
    **{
        f"sgd-learned-{rule}": (
            "BasisSGD",
            {**SHARED_SGD, **LEARNED, "scalar_rule": rule},
        )
        for rule in RULES
    },
    "sgd-learned-nesterov": (
        "BasisSGD",
        {**SHARED_SGD, **LEARNED, "nesterov": True},
    ),
    "sgd-decayed": ("BasisSGD", {**SHARED_SGD, "weight_decay": 0.1}),
    "sgd-clipped": ("BasisSGD", {**SHARED_SGD, "row_clipnorm": 0.7}),
    "sgd-one-to-one": ("BasisSGD", {**SGD, "num_buckets": 40}),
    # BasisAdagrad
    **{
        f"adagrad-{scalar}-{reduce}-{start}": (
            "BasisAdagrad",
            {
                **ADAGRAD,
                "exclusive_rows": 2,
                "invariant_scalar": scalar,
                "collision_reduce": reduce,
                "initial_accumulator_value": start,
            },
        )
        for scalar in ("energy", None)
        for reduce in REDUCES
        for start in (0.0, 0.3)
    },
    "adagrad-decayed": (
        "BasisAdagrad",
        {**ADAGRAD, "weight_decay": 0.1, "row_clipnorm": 0.7, "epsilon": 1e-3},
    ),
    "adagrad-one-to-one": ("BasisAdagrad", {**ADAGRAD, "num_buckets": 41}),
    # Hashes
    **{
        f"adam-{hashing}-{momentum}-{reduce}": (
            "BasisAdam",
            {
                **ADAM,
                "hashing": hashing,
                "momentum": momentum,
                "collision_reduce": reduce,
                "exclusive_rows": 2,
                "seed": 6,
            },
        )
        for hashing in ("double", "consistent")
        for momentum in ("exclusive", "shared", "none")
        for reduce in REDUCES
    },
    **{
        f"adam-double-learned-{rule}": (
            "BasisAdam",
            {
                **ADAM,
                **LEARNED,
                "hashing": "double",
                "momentum": "shared",
                "scalar_rule": rule,
            },
        )
        for rule in RULES
    },
    "adam-double-raw": (
        "BasisAdam",
        {**ADAM, "hashing": "double", "momentum": "shared", "bias_correction": False},
    ),
    "adam-double-two-shared-buckets": (
        "BasisAdam",
        {**ADAM, "hashing": "double", "num_buckets": 4, "exclusive_rows": 2},
    ),
    "adam-double-one-shared-bucket": (
        "BasisAdam",
        {**ADAM, "hashing": "double", "num_buckets": 4, "exclusive_rows": 3},
    ),
    "adagrad-double": (
        "BasisAdagrad",
        {**ADAGRAD, "hashing": "double", "initial_accumulator_value": 0.1},
    ),
    "sgd-double": ("BasisSGD", {**SHARED_SGD, "hashing": "double", "nesterov": True}),
    "sgd-double-learned": ("BasisSGD", {**SHARED_SGD, **LEARNED, "hashing": "double"}),
    # Owners from a list, and from frequencies
    **{
        f"adam-listed-{hashing}": (
            "BasisAdam",
            {**ADAM, **LISTED, "hashing": hashing, "seed": 8},
        )
        for hashing in ("balanced", "murmur3", "double", "consistent")
    },
    "adagrad-listed": ("BasisAdagrad", {**ADAGRAD, **LISTED}),
    "sgd-listed": ("BasisSGD", {**SGD, **LISTED}),
    "adam-listed-one-to-one": ("BasisAdam", {**ADAM, **LISTED, "num_buckets": 40}),
    "adam-frequencies": (
        "BasisAdam",
        {**ADAM, "row_frequencies": FREQUENCIES, "exclusive_rows": 4},
    ),
    # Leaders
    **{
        f"adam-auto-{momentum}-{reduce}": (
            "BasisAdam",
            {
                **ADAM,
                "exclusive_rows": "auto",
                "momentum": momentum,
                "collision_reduce": reduce,
            },
        )
        for momentum in ("exclusive", "none")
        for reduce in REDUCES
    },
    "adam-auto-raw": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "bias_correction": False},
    ),
    "adam-auto-unscaled": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "invariant_scalar": None},
    ),
    "adam-auto-stale": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "stale_decay": True},
    ),
    "adam-auto-consistent": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "hashing": "consistent"},
    ),
    "adagrad-auto": (
        "BasisAdagrad",
        {**ADAGRAD, "exclusive_rows": "auto", "initial_accumulator_value": 0.1},
    ),
    "sgd-auto": ("BasisSGD", {**SGD, "exclusive_rows": "auto"}),
    "sgd-auto-nesterov": (
        "BasisSGD",
        {**SGD, "exclusive_rows": "auto", "nesterov": True, "stale_decay": True},
    ),
    # Stale decay
    **{
        f"adam-stale-{momentum}-{reduce}": (
            "BasisAdam",
            {
                **ADAM,
                "stale_decay": True,
                "momentum": momentum,
                "collision_reduce": reduce,
                "exclusive_rows": 2,
            },
        )
        for momentum in ("exclusive", "shared", "none")
        for reduce in REDUCES
    },
    "adam-stale-raw": (
        "BasisAdam",
        {**ADAM, "stale_decay": True, "momentum": "shared", "bias_correction": False},
    ),
    "adam-stale-double": (
        "BasisAdam",
        {**ADAM, "stale_decay": True, "momentum": "shared", "hashing": "double"},
    ),
    **{
        f"adam-stale-learned-{rule}": (
            "BasisAdam",
            {
                **ADAM,
                **LEARNED,
                "stale_decay": True,
                "momentum": "shared",
                "scalar_rule": rule,
            },
        )
        for rule in RULES
    },
    "sgd-stale": ("BasisSGD", {**SHARED_SGD, "stale_decay": True}),
    # The learned scalar by frequency
    **{
        f"adam-frequency-{rule}-{power}": (
            "BasisAdam",
            {
                **ADAM,
                **LEARNED,
                "momentum": "shared",
                "scalar_rule": rule,
                "scalar_frequency_power": power,
            },
        )
        for rule in RULES
        for power in (0.5, 1.0)
    },
    "adam-frequency-double": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "hashing": "double",
            "scalar_frequency_power": 0.7,
        },
    ),
    "adam-frequency-sequential": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "collision_reduce": "sequential",
            "scalar_frequency_power": 0.7,
        },
    ),
    "adam-frequency-stale": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "stale_decay": True,
            "scalar_frequency_power": 0.7,
        },
    ),
    "sgd-frequency": (
        "BasisSGD",
        {**SHARED_SGD, **LEARNED, "scalar_frequency_power": 1.0},
    ),
}


class FamilyRun(TableRun):
    """One optimizer of the family and one compressed table."""

    def __init__(self, kind, theta, flavor=None, function=False, **kwargs):
        flavor = flavor or active_flavor()
        self.variable = make_variable(theta, flavor)
        self.shape = tuple(self.variable.shape)
        make = getattr(optimizers.for_flavor(flavor), kind)
        self.optimizer = make(tables=[self.variable], **kwargs)
        self.optimizer.build([self.variable])
        traced = tf.function(self._apply_one, reduce_retracing=True)
        self._apply = traced if function else self._apply_one


def assert_matches(run: TableRun, reference: FamilyTable) -> None:
    actual, wanted = run.state(), reference.state()
    assert set(actual) == set(wanted)
    for field, value in wanted.items():
        assert actual[field].shape == value.shape, field
        if actual[field].dtype.kind == "i":
            np.testing.assert_array_equal(actual[field], value, err_msg=field)
        else:
            np.testing.assert_allclose(
                actual[field], value, err_msg=field, **TOLERANCE
            )


def hot_batch(rng, n_rows: int, dim: int, size: int, hot):
    """A batch in which some rows come nearly always: buckets find leaders."""
    indices, values = random_batch(rng, n_rows, dim, size)
    chosen = rng.random(size) < 0.6
    return np.where(chosen, rng.choice(hot, size), indices), values


def check(kind, arguments, rng, shape=(40, 5), steps=14, function=False):
    """Step a run and the reference; compare after every step."""
    theta = rng.normal(size=shape).astype(np.float32)
    run = FamilyRun(kind, theta, function=function, **arguments)
    reference = FamilyTable(kind, theta, **arguments)
    buckets = np.asarray(run.optimizer.buckets(run.variable))
    if buckets.ndim == 1:
        buckets = np.stack([buckets] * 2, axis=1)
    np.testing.assert_array_equal(
        np.sort(buckets, axis=1), np.sort(reference.pairs, axis=1)
    )
    assert_matches(run, reference)
    for step in range(steps):
        size = [60, 30, 1, 0, 12, 3, 60][step % 7]
        indices, values = random_batch(rng, *shape, size)
        run.step(indices, values)
        reference.step(indices, values)
        assert_matches(run, reference)
    return run, reference


@pytest.mark.parametrize("case", CASES)
def test_every_option(backend, case, rng):
    check(*CASES[case], rng)


LEADERS = [case for case in CASES if "auto" in case]


@pytest.mark.parametrize("case", LEADERS)
def test_leaders_come_and_go(backend, case, rng):
    """Traffic shifts twice: rows win their buckets and lose them again."""
    kind, arguments = CASES[case]
    theta = rng.normal(size=(40, 5)).astype(np.float32)
    run = FamilyRun(kind, theta, function=True, **arguments)
    reference = FamilyTable(kind, theta, **arguments)
    owners = set()
    for phase in range(3):
        hot = np.arange(phase * 9, phase * 9 + 4)
        for step in range(24):
            batch = hot_batch(rng, 40, 5, [40, 12, 4, 1][step % 4], hot)
            run.step(*batch)
            reference.step(*batch)
            assert_matches(run, reference)
        owning = reference.leader_votes >= 8
        owners.add(tuple(reference.leader[owning]))
    assert len(owners) == 3 and max(map(len, owners)) > 0


def test_votes_are_bounded_and_decide(backend):
    """64 votes at most, so 57 idle steps lose a bucket, however long it was owned."""
    arguments = {**ADAM, "exclusive_rows": "auto", "num_buckets": 1}
    theta = np.zeros((5, 2))
    run = FamilyRun("BasisAdam", theta, function=True, **arguments)
    reference = FamilyTable("BasisAdam", theta, **arguments)
    votes = []
    for row in [3] * 100 + [1, 2] * 40:
        run.step([row], [[1.0, -0.5]])
        reference.step([row], [[1.0, -0.5]])
        votes.append(int(run.state()["leader_votes"][0]))
    assert_matches(run, reference)
    assert votes[7] == 8 and max(votes) == votes[99] == 64
    assert votes[100:164] == list(range(63, -1, -1)) and votes[164] == 1
    # While row 3 owned the bucket (56 idle steps keep 8 votes) only it entered V.
    assert run.state()["bucket_steps"][0] == 180 - 56


@pytest.mark.parametrize("kind", DEFAULTS)
def test_two_settings_in_one_optimizer(backend, flavor, kind, rng):
    """`table_settings` gives a table what a run of its own would have."""
    mode = {} if kind != "BasisAdam" else {"momentum": "none"}
    settings = {"hashing": "double", "seed": 3, "num_buckets": 5, **mode}
    settings["exclusive_rows"] = [9, 4]
    common = {"learning_rate": 0.1, "num_buckets": 8, "exclusive_rows": 3}
    if kind == "BasisSGD":
        common["momentum"] = 0.8
    thetas = {
        name: rng.normal(size=(30, 4)).astype(np.float32)
        for name in ("first_table", "second_table")
    }
    variables = [make_variable(v, flavor, name) for name, v in thetas.items()]
    make = getattr(optimizers.for_flavor(flavor), kind)
    optimizer = make(tables="table", table_settings={"^second": settings}, **common)
    optimizer.build(variables)
    references = [
        FamilyTable(kind, thetas["first_table"], **common),
        FamilyTable(kind, thetas["second_table"], **{**common, **settings}),
    ]
    for _ in range(4):
        batches = [random_batch(rng, 30, 4, 25) for _ in variables]
        optimizer.apply_gradients(
            [
                (tf.IndexedSlices(tf.constant(v), tf.constant(i), (30, 4)), variable)
                for (i, v), variable in zip(batches, variables)
            ]
        )
        for batch, variable, reference in zip(batches, variables, references):
            reference.step(*batch)
            actual, wanted = state_of(optimizer, variable), reference.state()
            assert set(actual) == set(wanted)
            for field, value in wanted.items():
                np.testing.assert_allclose(
                    actual[field], value, err_msg=field, **TOLERANCE
                )


def random_case(seed: int):
    """A kind and arguments in which any options meet."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    kind = pick(*DEFAULTS)
    n_rows = int(rng.integers(2, 70))
    buckets = int(rng.integers(1, n_rows + 2))
    most = min(buckets, n_rows) - 1
    owners = int(rng.integers(0, most + 1)) if most > 0 else 0
    arguments = {
        "num_buckets": buckets,
        "learning_rate": float(rng.uniform(0.01, 0.1)),
        "exclusive_rows": pick(
            owners, [int(r) for r in rng.permutation(n_rows)[:owners]], "auto"
        ),
        "collision_reduce": pick(*REDUCES),
        "hashing": pick("balanced", "murmur3", "double", "consistent"),
        "seed": int(rng.integers(2**32)),
        "weight_decay": pick(None, 0.1),
        "row_clipnorm": pick(None, 0.7),
    }
    learned = {
        "invariant_scalar": "learned",
        "scalar_rule": pick(*RULES),
        "scalar_learning_rate": 0.05,
        "scalar_frequency_power": pick(0.0, 1.0),
    }
    if kind == "BasisAdam":
        arguments |= {
            "beta_1": pick(0.0, 0.6, 0.9),
            "beta_2": pick(0.9, 0.99),
            "epsilon": pick(1e-8, 1e-3),
            "momentum": pick("exclusive", "shared", "none"),
            "bias_correction": pick(True, False),
            "stale_decay": pick(True, False),
        }
        arguments |= pick(learned, {"invariant_scalar": None}, {"scalar_decay": 0.7})
    elif kind == "BasisSGD":
        arguments |= {
            "momentum": pick(0.0, 0.7),
            "momentum_mode": pick("exclusive", "shared", "none"),
            "nesterov": pick(True, False),
            "stale_decay": pick(True, False),
        }
        arguments |= pick(learned, {})
    else:
        arguments |= {
            "initial_accumulator_value": pick(0.0, 0.2),
            "invariant_scalar": pick("energy", None),
        }
    if arguments["exclusive_rows"] == "auto":  # what has no meaning with leaders
        shared = [arguments.get("momentum"), arguments.get("momentum_mode")]
        learns = arguments.get("invariant_scalar") == "learned"
        if "shared" in shared or learns or arguments["hashing"] == "double":
            arguments["exclusive_rows"] = owners
    shape = (n_rows, int(rng.choice([1, 2, 3, 7, 8, 16, 33])))
    return kind, arguments, rng, shape


@pytest.mark.parametrize("seed", range(24))
def test_random_options(backend, seed):
    kind, arguments, rng, shape = random_case(seed)
    check(kind, arguments, rng, shape, steps=7, function=seed % 8 == 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_random_options_long(backend, seed):
    kind, arguments, rng, shape = random_case(seed)
    check(kind, arguments, rng, shape, steps=14)


@pytest.mark.parametrize("case", CASES)
def test_op_and_twin_give_the_same_bits(case):
    states = []
    for mode in BACKENDS.values():
        rng = np.random.default_rng(7)
        kind, arguments = CASES[case]
        run = FamilyRun(kind, rng.normal(size=(40, 5)), **arguments)
        with loader.use(mode):
            for size in (60, 12, 0, 60, 30, 60, 60, 60, 60, 60):
                run.step(*hot_batch(rng, 40, 5, size, [2, 30, 31]))
        states.append(run.state())
    assert_same_bits(*states)


@pytest.mark.parametrize("hashing", ["balanced", "murmur3"])
@pytest.mark.parametrize("scalar", ["energy", "learned", None])
def test_the_two_references_agree(hashing, scalar, rng):
    """Where BasisAdam has no option, both numpy references say the same."""
    arguments = {
        **ADAM,
        "exclusive_rows": 2,
        "hashing": hashing,
        "invariant_scalar": scalar,
        "momentum": "shared",
        "scalar_learning_rate": 0.05,
    }
    theta = rng.normal(size=(40, 5))
    one = BasisAdamTable(theta, Hyper(**arguments))
    other = FamilyTable("BasisAdam", theta, **arguments)
    for size in (60, 30, 1, 60):
        indices, values = random_batch(rng, 40, 5, size)
        one.step(indices, values)
        other.step(indices, values)
    for field, value in other.state().items():
        if field == "scalar" and scalar == "energy":
            continue
        np.testing.assert_allclose(getattr(one, field), value, rtol=1e-12, atol=1e-15)
