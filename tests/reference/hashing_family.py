"""Hashes of the family with one or two buckets a row, in plain Python integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .hashing import murmur3_x86_32, permute

MASK64 = 2**64 - 1
SECOND_SEED = 0x9E3779B9
JUMP_FACTOR = 2862933555777941757


def jump_hash(key: int, buckets: int) -> int:
    """Jump consistent hash of a 64-bit key into [0, buckets)."""
    b, j = -1, 0
    while j < buckets:
        b = j
        key = (key * JUMP_FACTOR + 1) & MASK64
        j = int((b + 1) * (float(2**31) / float((key >> 33) + 1)))
    return b


def hashes(row: int, seed: int) -> tuple[int, int]:
    """The two independent 32-bit hashes of a row."""
    second = (seed + SECOND_SEED) % 2**32
    return murmur3_x86_32(row, seed), murmur3_x86_32(row, second)


def most_frequent_rows(frequencies: Sequence[float], count: int) -> list[int]:
    """The `count` most frequent rows; of equally frequent ones the first."""
    ranked = sorted(range(len(frequencies)), key=lambda r: (-frequencies[r], r))
    return ranked[:count]


def pair_of_row(
    row: int,
    n_rows: int,
    num_buckets: int,
    owners: int | Sequence[int] = 0,
    hashing: str = "balanced",
    seed: int = 0,
) -> tuple[int, int]:
    """Both buckets of a row; the same one twice where it has one.

    `owners` is K, or the list of the rows that own the first buckets.
    """
    row = int(row)
    if num_buckets >= n_rows:
        return row, row
    owners = range(owners) if isinstance(owners, int) else [int(r) for r in owners]
    if row in owners:
        return (owners.index(row),) * 2
    first, shared = len(owners), num_buckets - len(owners)
    if hashing == "balanced":
        rank = row - sum(r < row for r in owners)  # among the rows that share
        return (first + permute(rank, n_rows - first, seed) % shared,) * 2
    one, two = hashes(row, seed)
    if hashing == "murmur3":
        return (first + one % shared,) * 2
    if hashing == "double":
        return first + one % shared, first + two % shared
    if hashing == "consistent":
        return (first + jump_hash(one << 32 | two, shared),) * 2
    raise ValueError(f"unknown hashing {hashing!r}")


def pairs_of_table(n_rows: int, *args, **kwargs) -> np.ndarray:
    """`pair_of_row` of all rows: int64 [n_rows, 2]."""
    return np.array(
        [pair_of_row(r, n_rows, *args, **kwargs) for r in range(n_rows)], np.int64
    )
