"""Row-to-bucket functions in plain Python integers: clear rather than fast."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MASK32 = 0xFFFFFFFF
FEISTEL_ROUNDS = 6


def rotl32(x: int, r: int) -> int:
    return ((x << r) | (x >> (32 - r))) & MASK32


def fmix32(h: int) -> int:
    """The finaliser of MurmurHash3_x86_32."""
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & MASK32
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def murmur3_x86_32(value: int, seed: int) -> int:
    """MurmurHash3_x86_32 of `value` as 8 little-endian bytes of int64."""
    data = int(value).to_bytes(8, "little", signed=True)
    h = seed & MASK32
    for start in (0, 4):
        k = int.from_bytes(data[start : start + 4], "little")
        k = (k * 0xCC9E2D51) & MASK32
        k = rotl32(k, 15)
        k = (k * 0x1B873593) & MASK32
        h ^= k
        h = rotl32(h, 13)
        h = (h * 5 + 0xE6546B64) & MASK32
    return fmix32(h ^ len(data))


def permute(x: int, size: int, seed: int) -> int:
    """Keyed bijection of [0, size): six Feistel rounds, then cycle walking."""
    if size == 1:
        return 0
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    keys = [murmur3_x86_32(i, seed) for i in range(FEISTEL_ROUNDS)]
    while True:
        lo, hi = x & low_mask, x >> low_bits
        for i, key in enumerate(keys):
            if i % 2 == 0:
                hi ^= fmix32(lo ^ key) & high_mask
            else:
                lo ^= fmix32(hi ^ key) & low_mask
        x = (hi << low_bits) | lo
        if x < size:
            return x


def bucket_of_row(
    row: int,
    n_rows: int,
    num_buckets: int,
    exclusive_rows: int = 0,
    hashing: str = "balanced",
    seed: int = 0,
) -> int:
    """Bucket of one row of a table of `n_rows` rows."""
    row = int(row)
    if num_buckets >= n_rows or row < exclusive_rows:
        return row
    shared = num_buckets - exclusive_rows
    if hashing == "murmur3":
        return exclusive_rows + murmur3_x86_32(row, seed) % shared
    if hashing == "balanced":
        y = permute(row - exclusive_rows, n_rows - exclusive_rows, seed)
        return exclusive_rows + y % shared
    raise ValueError(f"unknown hashing {hashing!r}")


def bucket_of_rows(rows: Iterable[int], *args, **kwargs) -> np.ndarray:
    """`bucket_of_row` for many rows, as an int64 array."""
    return np.array([bucket_of_row(r, *args, **kwargs) for r in rows], np.int64)
