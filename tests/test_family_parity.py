"""Three-way parity of the whole family: numpy reference, twin and op."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from family_helpers import (
    ADAM,
    CASES,
    REDUCES,
    RULES,
    FamilyRun,
    assert_matches,
    hot_batch,
    touching_every_mode,
)
from helpers import (
    BACKENDS,
    TOLERANCE,
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


def check(kind, arguments, rng, shape=(40, 5), steps=8, function=False):
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
        size = [60, 30, 1, 0, 12, 60, 3, 60][step % 8]
        indices, values = random_batch(rng, *shape, size)
        run.step(indices, values)
        reference.step(indices, values)
        assert_matches(run, reference)
    return run, reference


SAMPLE = touching_every_mode(CASES)
# The twin has the op's bits (below), so a sample of it will do in the quick run.
BACKEND_CASES = [
    pytest.param(
        backend,
        case,
        marks=[pytest.mark.long] if backend == "twin" and case not in SAMPLE else [],
    )
    for backend in BACKENDS
    for case in CASES
]


@pytest.mark.parametrize("backend, case", BACKEND_CASES, indirect=["backend"])
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
    owners = []
    for phase in range(3):
        hot = np.arange(phase * 9, phase * 9 + 4)
        for step in range(16):
            batch = hot_batch(rng, 40, 5, [40, 20, 12, 4][step % 4], hot)
            run.step(*batch)
            reference.step(*batch)
            assert_matches(run, reference)
        owners.append(set(reference.leader[reference.leader_votes >= 8]))
    assert owners[0] - owners[2] and owners[2] - owners[0]


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


@pytest.mark.parametrize("seed", range(12))
def test_random_options(backend, seed):
    kind, arguments, rng, shape = random_case(seed)
    check(kind, arguments, rng, shape, steps=7, function=seed % 8 == 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(12, 24), *range(1000, 1200)])
def test_random_options_long(backend, seed):
    kind, arguments, rng, shape = random_case(seed)
    check(kind, arguments, rng, shape, steps=16, function=seed % 8 == 3)


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
