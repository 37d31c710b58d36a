"""Two buckets, consistent hashing, listed owners: against plain Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from family_helpers import FamilyRun
from helpers import to_numpy, variables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.hashing_family import (
    SECOND_SEED,
    jump_hash,
    most_frequent_rows,
    pair_of_row,
    pairs_of_table,
)

from tf_basis import hashing

METHODS = ("balanced", "murmur3", "double", "consistent")
NEW = METHODS[2:]
SEEDS = st.integers(0, 2**32 - 1)


def pairs(rows, *args) -> np.ndarray:
    """Buckets of the package as [..., 2], whatever the hash."""
    buckets = hashing.bucket_of_rows(np.asarray(rows), *args)
    two = len(args) > 3 and args[3] == "double"
    return buckets if two else np.stack([buckets] * 2, axis=-1)


def wanted_pairs(rows, *args) -> np.ndarray:
    return np.array([pair_of_row(r, *args) for r in rows], np.int64).reshape(-1, 2)


@pytest.mark.parametrize(
    "key, buckets, wanted",
    [
        (1, 1, 0),
        (42, 57, 43),
        (0xDEAD10CC, 1, 0),
        (0xDEAD10CC, 666, 361),
        (256, 1024, 520),
    ],
)
def test_the_reference_is_the_published_jump_hash(key, buckets, wanted):
    assert jump_hash(key, buckets) == wanted


@st.composite
def tables(draw, max_rows=120):
    """(n_rows, num_buckets, owners as a number or a list, seed), B >= N included."""
    n_rows = draw(st.integers(1, max_rows))
    buckets = draw(st.integers(1, n_rows + 3))
    count = draw(st.integers(0, max(0, min(buckets, n_rows) - 1)))
    owners = count
    if draw(st.booleans()):
        rows = draw(st.permutations(range(n_rows)))
        owners = list(rows[:count])
    return n_rows, buckets, owners, draw(SEEDS)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40)
@given(table=tables())
def test_buckets_equal_reference(backend, method, table):
    n_rows, buckets, owners, seed = table
    rows = np.arange(n_rows)
    args = (n_rows, buckets, owners, method, seed)
    np.testing.assert_array_equal(pairs(rows, *args), wanted_pairs(rows, *args))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shared", [1, 2, 3, 64, 1000, 1024, 2**20, 2**20 + 1])
@pytest.mark.parametrize("owners", [0, 3, [999, 0, 2**21, 77]])
def test_powers_of_two_take_the_same_buckets(backend, method, shared, owners, rng):
    """Where B - K is a power of two a bit mask replaces the remainder."""
    n_rows = 2**22 + 5
    count = owners if isinstance(owners, int) else len(owners)
    rows = np.r_[0, 1, 77, 999, n_rows - 1, rng.integers(0, n_rows, 40)]
    args = (n_rows, shared + count, owners, method, 2**32 - 5)
    np.testing.assert_array_equal(pairs(rows, *args), wanted_pairs(rows, *args))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_rows", [2**31 + 11, 2**40, 2**62 + 3])
def test_tables_longer_than_int32(backend, method, n_rows, rng):
    rows = rng.integers(0, n_rows, 40)
    rows[:4] = [0, n_rows - 1, n_rows // 2, min(2**40 - 1, n_rows - 2)]
    listed = [n_rows - 1, 5, n_rows // 2]
    for buckets, owners in ((10**6 + 3, 100), (2**20, 0), (10**6, listed)):
        args = (n_rows, buckets, owners, method, 12345)
        np.testing.assert_array_equal(pairs(rows, *args), wanted_pairs(rows, *args))


@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize("kind", ["function", "xla", "int32"])
def test_tensors(method, kind):
    """In a graph, under XLA (twin) and from int32 ids: the same buckets."""
    args = (100, 9, [7, 3], method, 3)
    dtype = tf.int32 if kind == "int32" else tf.int64
    rows = tf.reshape(tf.range(100, dtype=dtype), [5, 20])

    @tf.function(jit_compile=kind == "xla")
    def traced(ids):
        return hashing.bucket_of_rows(ids, *args)

    wanted = wanted_pairs(range(100), *args)
    shape = (5, 20, 2) if method == "double" else (5, 20)
    buckets = (hashing.bucket_of_rows if kind == "int32" else traced)(
        rows, *(args if kind == "int32" else ())
    )
    assert tf.is_tensor(buckets) and tuple(buckets.shape) == shape
    if method != "double":
        buckets = tf.stack([buckets] * 2, axis=-1)
    np.testing.assert_array_equal(buckets.numpy().reshape(-1, 2), wanted)


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**32 - SECOND_SEED])
def test_the_second_seed_wraps(backend, seed):
    """The second bucket is the first one of seed + 0x9e3779b9 mod 2^32."""
    rows = np.arange(500)
    both = hashing.bucket_of_rows(rows, 500, 37, 4, "double", seed)
    other = (seed + SECOND_SEED) % 2**32
    for column, one_seed in ((0, seed), (1, other)):
        single = hashing.bucket_of_rows(rows, 500, 37, 4, "murmur3", one_seed)
        np.testing.assert_array_equal(both[:, column], single)


def test_both_buckets_are_independent(backend):
    """One bucket of a row says nothing about the other."""
    n_rows, buckets = 20_000, 100
    both = hashing.bucket_of_rows(np.arange(n_rows), n_rows, buckets, 0, "double", 1)
    joint = np.zeros((buckets, buckets))
    np.add.at(joint, (both[:, 0], both[:, 1]), 1)
    mean = n_rows / buckets**2
    # A Poisson table: the dispersion is 1, its deviation sqrt(2 / cells).
    assert abs(joint.var() / mean - 1) < 5 * np.sqrt(2) / buckets
    same = np.mean(both[:, 0] == both[:, 1])
    assert abs(same - 1 / buckets) < 5 * np.sqrt(1 / buckets / n_rows)


@pytest.mark.parametrize("owners", [0, 5, [70, 6, 1999]])
@pytest.mark.parametrize("grown", [51, 60, 100])
def test_consistent_growth_moves_the_fewest_rows(backend, owners, grown):
    """A row keeps its bucket or moves to a new one; a share of 1 - B/B' moves."""
    rows, count = 20_000, owners if isinstance(owners, int) else len(owners)
    small, large = 50 + count, grown + count
    before, after = (
        hashing.bucket_of_rows(np.arange(rows), rows, b, owners, "consistent", 9)
        for b in (small, large)
    )
    moved = before != after
    assert np.all(after[moved] >= small)
    expected = 1 - 50 / grown
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert abs(moved.mean() - expected) < 5 * deviation + count / rows


@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize("stride", [1, 3, 1024])
def test_loads_are_those_of_random_assignment(method, stride):
    rows, buckets = 40_000, 400
    ids = np.arange(rows) * stride
    hashed = hashing.bucket_of_rows(ids, rows * stride, buckets, 0, method, 2)
    loads = hashing.load_statistics(hashed, buckets)
    uses = 2 if method == "double" else 1
    assert loads["mean"] == pytest.approx(uses * rows / buckets)
    spread = loads["std"] ** 2 / loads["mean"]  # of Poisson loads: 1
    assert abs(spread - 1) < 5 * np.sqrt(2 / buckets)


@pytest.mark.parametrize("method", METHODS)
def test_listed_owners_share_with_nobody(backend, method, rng):
    owners = rng.permutation(300)[:20].tolist()
    table = pairs(np.arange(300), 300, 50, owners, method, 11)
    np.testing.assert_array_equal(table[owners], np.repeat(range(20), 2).reshape(-1, 2))
    assert np.delete(table, owners, axis=0).min() >= 20
    if method == "balanced":
        loads = np.bincount(np.delete(table[:, 0], owners) - 20, minlength=30)
        assert set(loads) <= {9, 10}


def test_a_list_of_the_first_rows_is_their_number(backend):
    for method in METHODS:
        rows = np.arange(200)
        listed = hashing.bucket_of_rows(rows, 200, 30, list(range(7)), method, 4)
        counted = hashing.bucket_of_rows(rows, 200, 30, 7, method, 4)
        np.testing.assert_array_equal(listed, counted)


def test_frequencies_choose_the_owners(flavor, rng):
    """The most frequent rows; of equally frequent ones the first."""
    frequencies = rng.integers(0, 6, 60).astype(float)
    for count in (0, 1, 13):
        run = FamilyRun(
            "BasisAdam",
            np.zeros((60, 2)),
            flavor,
            row_frequencies=frequencies,
            exclusive_rows=count,
            num_buckets=20,
        )
        owners = most_frequent_rows(frequencies.tolist(), count)
        wanted = pairs_of_table(60, 20, owners)[:, 0]
        np.testing.assert_array_equal(run.optimizer.buckets(run.variable), wanted)
        assert list(run.optimizer.get_config()["exclusive_rows"]) == owners


@pytest.mark.parametrize(
    "arguments",
    [
        {"hashing": "double", "momentum": "shared"},
        {"hashing": "consistent"},
        {"exclusive_rows": [5, 2, 9]},
        {"exclusive_rows": "auto", "stale_decay": True},
    ],
    ids=lambda a: "-".join(map(str, a)),
)
def test_state_bytes_count_everything(flavor, arguments):
    run = FamilyRun("BasisAdam", np.zeros((90, 4)), flavor, num_buckets=9, **arguments)
    held = sum(to_numpy(v).nbytes for v in variables_of(run.optimizer))
    counted = run.optimizer.state_bytes()
    others = held - counted["total"]
    layouts = 8 * 15  # what is compared when state is read
    assert others - layouts in (8, 12)  # the step count, and a learning rate
    state = run.optimizer.table_state(run.variable)
    assert counted["total"] == sum(value.nbytes for value in state.values())


@pytest.mark.parametrize(
    "owners, words",
    [
        ([3, 100], ("exclusive_rows", "100")),
        ([3, -1], ("exclusive_rows", "-1")),
        ([3, 3], ("exclusive_rows", "3")),
        (list(range(10)), ("exclusive_rows", "10")),
    ],
)
def test_bad_lists_of_owners(owners, words):
    with pytest.raises(ValueError) as error:
        hashing.bucket_of_rows(np.arange(5), 100, 10, owners)
    for word in words:
        assert word in str(error.value)
