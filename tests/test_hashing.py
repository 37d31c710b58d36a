"""Row-to-bucket functions: the hash, balance, bijection, collisions, statistics."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import load_golden
from hypothesis import given
from hypothesis import strategies as st
from reference import hashing as reference

from tf_basis import hashing

SEEDS = st.integers(0, 2**32 - 1)
EXTREME_IDS = [0, 1, -1, 7, -12345, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63)]
HASHINGS = ("balanced", "murmur3")


@st.composite
def tables(draw, max_rows=3000):
    """(n_rows, num_buckets, exclusive_rows, seed), B >= N included."""
    n_rows = draw(st.integers(1, max_rows))
    buckets = draw(st.integers(1, n_rows + 3))
    exclusive = draw(st.integers(0, max(0, min(buckets, n_rows) - 1)))
    return n_rows, buckets, exclusive, draw(SEEDS)


def test_murmur3_golden(backend):
    cases = load_golden("murmur3_x86_32")
    for seed in {case["seed"] for case in cases}:
        ids = [int(c["id"]) for c in cases if c["seed"] == seed]
        wanted = [c["hash"] for c in cases if c["seed"] == seed]
        hashed = hashing.murmur3_x86_32(np.array(ids, np.int64), seed)
        np.testing.assert_array_equal(hashed, wanted)


@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), seed=SEEDS)
def test_murmur3_equals_reference(backend, ids, seed):
    ids = np.array(ids + EXTREME_IDS, np.int64)
    wanted = [reference.murmur3_x86_32(i, seed) for i in ids]
    np.testing.assert_array_equal(hashing.murmur3_x86_32(ids, seed), wanted)


def test_int32_ids_are_sign_extended(backend):
    ids = np.array([0, 5, -5, -(2**31), 2**31 - 1], np.int32)
    wanted = hashing.murmur3_x86_32(ids.astype(np.int64), 9)
    np.testing.assert_array_equal(hashing.murmur3_x86_32(ids, 9), wanted)
    tensor = hashing.murmur3_x86_32(tf.constant(ids), 9)
    np.testing.assert_array_equal(tensor.numpy(), wanted)


def test_numpy_in_numpy_out_and_tensor_in_tensor_out(backend):
    rows = np.arange(12).reshape(3, 4)
    for value in (rows, rows.astype(np.int32)):
        buckets = hashing.bucket_of_rows(value, 50, 7)
        assert isinstance(buckets, np.ndarray) and buckets.shape == (3, 4)
        assert isinstance(hashing.murmur3_x86_32(value, 1), np.ndarray)
        tensor = hashing.bucket_of_rows(tf.constant(value), 50, 7)
        assert tf.is_tensor(tensor)
        assert tf.is_tensor(hashing.murmur3_x86_32(tf.constant(value), 1))
        np.testing.assert_array_equal(tensor.numpy(), buckets)
    empty = hashing.bucket_of_rows(np.zeros(0, np.int64), 50, 7)
    assert isinstance(empty, np.ndarray) and empty.shape == (0,)


@pytest.mark.parametrize("method", HASHINGS)
@given(table=tables(max_rows=300))
def test_buckets_equal_reference(backend, method, table):
    n_rows, buckets, exclusive, seed = table
    rows = np.arange(n_rows)
    args = (n_rows, buckets, exclusive, method, seed)
    wanted = reference.bucket_of_rows(rows, *args)
    np.testing.assert_array_equal(hashing.bucket_of_rows(rows, *args), wanted)


@pytest.mark.parametrize("method", HASHINGS)
@pytest.mark.parametrize("n_rows", [2**31 + 11, 2**40, 2**62 + 3])
def test_tables_longer_than_int32(backend, method, n_rows, rng):
    rows = rng.integers(0, n_rows, 50)
    rows[:3] = [0, n_rows - 1, n_rows // 2]
    for buckets, exclusive in ((10**6 + 3, 100), (2**20, 0), (2**33, 5)):
        args = (n_rows, buckets, exclusive, method, 12345)
        if buckets > n_rows:
            continue
        wanted = reference.bucket_of_rows(rows, *args)
        np.testing.assert_array_equal(hashing.bucket_of_rows(rows, *args), wanted)


@given(table=tables())
def test_balanced_fills_every_bucket_evenly(backend, table):
    n_rows, buckets, exclusive, seed = table
    hashed = hashing.bucket_of_rows(
        np.arange(n_rows), n_rows, buckets, exclusive, "balanced", seed
    )
    assert hashed.min() >= 0 and hashed.max() < buckets
    if buckets >= n_rows:
        np.testing.assert_array_equal(hashed, np.arange(n_rows))
        return
    counts = np.bincount(hashed, minlength=buckets)
    np.testing.assert_array_equal(hashed[:exclusive], np.arange(exclusive))
    np.testing.assert_array_equal(counts[:exclusive], 1)
    floor, rest = divmod(n_rows - exclusive, buckets - exclusive)
    assert set(counts[exclusive:]) <= ({floor, floor + 1} if rest else {floor})


@given(rows=st.integers(3, 4000), exclusive=st.integers(0, 3), seed=SEEDS)
def test_balanced_permutation_is_a_bijection(backend, rows, exclusive, seed):
    """With one bucket fewer than rows only two rows can meet."""
    n_rows = rows + exclusive
    hashed = hashing.bucket_of_rows(
        np.arange(n_rows), n_rows, n_rows - 1, exclusive, "balanced", seed
    )
    assert len(np.unique(hashed)) == n_rows - 1


@pytest.mark.parametrize("method", HASHINGS)
def test_seed_changes_the_assignment(backend, method):
    rows = np.arange(1000)
    first, second = (
        hashing.bucket_of_rows(rows, 1000, 10, 0, method, seed) for seed in (0, 1)
    )
    # Independent assignments to 10 buckets agree on 100 of 1000, deviation 9.5.
    assert 50 < np.sum(first == second) < 150


@pytest.mark.parametrize("method", HASHINGS)
def test_inside_tf_function(backend, method):
    rows = tf.constant(np.arange(100), tf.int64)
    eager = hashing.bucket_of_rows(rows, 100, 9, 2, method, 3)

    @tf.function
    def traced(ids):
        return hashing.bucket_of_rows(ids, 100, 9, 2, method, 3)

    np.testing.assert_array_equal(traced(rows).numpy(), eager.numpy())


@pytest.mark.parametrize("method", HASHINGS)
def test_under_xla(method):
    """XLA has no kernel for the op: the twin is taken, with the same values."""
    rows = np.arange(100)

    @tf.function(jit_compile=True)
    def compiled(ids):
        return hashing.bucket_of_rows(ids, 100, 9, 2, method, 3)

    wanted = reference.bucket_of_rows(rows, 100, 9, 2, method, 3)
    np.testing.assert_array_equal(compiled(tf.constant(rows, tf.int64)), wanted)


def _id_sets(n_rows, count):
    """Regular id sets of `count` rows in a table of `n_rows` rows."""
    stride = n_rows // count
    yield np.arange(count)
    yield np.arange(count) + n_rows // 3
    yield np.arange(count) * 3
    yield np.arange(count) * stride
    yield np.arange(count) * 2 ** int(np.log2(stride))
    yield np.arange(count) * (stride - 1)


def _collision_z(hashed, n_rows, buckets):
    """Colliding pairs, in standard deviations from a random balanced assignment."""
    loads = np.bincount(hashed, minlength=buckets)
    pairs = len(hashed) * (len(hashed) - 1) / 2
    chance = (n_rows / buckets - 1) / (n_rows - 1)
    expected = pairs * chance
    return (np.sum(loads * (loads - 1) / 2) - expected) / np.sqrt(expected)


@pytest.mark.parametrize("method", HASHINGS)
@pytest.mark.parametrize("buckets", [1000, 1024])
def test_regular_ids_collide_like_random_ones(method, buckets):
    """|z| averaged over seeds: a random assignment gives mean 0 and variance 1.

    Limits: 4.5 deviations for the mean of 20 seeds, variance between 0.2 and 2.6
    (its own deviation is 0.32), no single value beyond 6.
    """
    n_rows, count = 2**17 + 9, 3000
    for ids in _id_sets(n_rows, count):
        values = np.array(
            [
                _collision_z(
                    hashing.bucket_of_rows(ids, n_rows, buckets, 0, method, seed),
                    n_rows,
                    buckets,
                )
                for seed in range(20)
            ]
        )
        assert abs(values.mean()) * np.sqrt(len(values)) < 4.5, (ids[:3], values)
        assert 0.2 < values.var() < 2.6, (ids[:3], values)
        assert np.abs(values).max() < 6, (ids[:3], values)


def test_collision_measure_rejects_the_remainder():
    """The measure above has power: `row mod B` fails it on the same ids."""
    n_rows, count, buckets = 2**17 + 9, 3000, 1024
    for ids in _id_sets(n_rows, count):
        assert abs(_collision_z(ids % buckets, n_rows, buckets)) > 6


@pytest.mark.parametrize("method", HASHINGS)
def test_no_distance_between_ids_collides_more_often(method):
    """P(bucket(r) = bucket(r + delta)) is 1/B for every delta, within 5.5 sigma."""
    n_rows, buckets = 2**16, 64
    hashed = hashing.bucket_of_rows(np.arange(n_rows), n_rows, buckets, 0, method, 7)
    deltas = [*range(1, 130), *(2**k for k in range(8, 16)), 1000, 4095, 4097]
    for delta in deltas:
        pairs = n_rows - delta
        same = np.sum(hashed[delta:] == hashed[:-delta])
        deviation = np.sqrt(pairs / buckets)
        assert abs(same - pairs / buckets) < 5.5 * deviation, delta


def test_load_statistics():
    statistics = hashing.load_statistics(np.array([0, 0, 0, 2, 4, 4]), 5)
    loads = np.array([3, 0, 1, 0, 2])
    assert statistics["min"] == 0 and statistics["max"] == 3
    assert statistics["empty"] == 2
    assert statistics["mean"] == pytest.approx(1.2)
    assert statistics["std"] == pytest.approx(loads.std())


def test_load_statistics_of_a_balanced_table():
    hashed = hashing.bucket_of_rows(np.arange(1000), 1000, 30)
    statistics = hashing.load_statistics(hashed, 30)
    assert (statistics["min"], statistics["max"]) == (33, 34)
    assert statistics["empty"] == 0
