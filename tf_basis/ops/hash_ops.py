"""The hash functions as TensorFlow ops: the C++ op, or its pure-TF twin.

The twin computes in int64 with 32-bit masks, which CPU, GPU and XLA all have.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import tensorflow as tf

from tf_basis.ops import dispatch

_MASK = 0xFFFFFFFF
_ROUNDS = 6


@dataclass(frozen=True)
class RowMapping:
    """What decides the bucket of a row (see `tf_basis.hashing.bucket_of_rows`)."""

    n_rows: int
    num_buckets: int  # at most n_rows
    exclusive_rows: int = 0
    hashing: str = "balanced"
    seed: int = 0

    @property
    def owners(self) -> int:
        """Rows (and buckets) below this share with nobody."""
        return self.n_rows if self.num_buckets >= self.n_rows else self.exclusive_rows


def murmur3(ids: tf.Tensor, seed: int) -> tf.Tensor:
    """uint32 hashes of int32 or int64 ids."""
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_hash_murmur3(ids, seed=seed)
    return tf.cast(_murmur3(tf.cast(ids, tf.int64), seed), tf.uint32)


def map_rows(
    rows: tf.Tensor, mapping: RowMapping, *, checked: bool = False
) -> tf.Tensor:
    """int64 buckets of rows in [0, n_rows).

    `checked` makes rows out of range an error; without it the caller has
    checked, and only the twin may be used (inside a larger twin).
    """
    library = dispatch.library_for_tensors() if checked else None
    if library is not None:
        return library.tf_basis_map_rows(rows, **asdict(mapping))
    rows = tf.cast(rows, tf.int64)
    if checked:
        with tf.control_dependencies([assert_rows(rows, mapping.n_rows, "rows")]):
            rows = tf.identity(rows)
    return _map_rows(rows, mapping)


def check_rows(indices: tf.Tensor, n_rows: int, table_name: str) -> tf.Operation | None:
    """Fails, naming the table, where an index is outside [0, n_rows)."""
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_check_rows(
            indices, n_rows=n_rows, table_name=table_name
        )
    return assert_rows(indices, n_rows, f"table '{table_name}'")


def assert_rows(indices: tf.Tensor, n_rows: int, what: str) -> tf.Operation | None:
    """The twin of `check_rows`."""
    outside = (indices < 0) | (indices >= n_rows)
    return tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(outside)),
        [
            f"{what}: index",
            tf.boolean_mask(indices, outside),
            f"is outside [0, {n_rows}), the table has {n_rows} rows",
        ],
        summarize=1,
    )


def _map_rows(rows: tf.Tensor, mapping: RowMapping) -> tf.Tensor:
    owners = mapping.owners
    shared = mapping.num_buckets - owners
    if shared == 0:
        return rows
    if mapping.hashing == "balanced":
        # Rows below `owners` are replaced below; keep the walk inside its domain.
        h = _permute(
            tf.maximum(rows - owners, 0), mapping.n_rows - owners, mapping.seed
        )
    else:
        h = _murmur3(rows, mapping.seed)
    return tf.where(rows < owners, rows, owners + h % shared)


def _times(x: tf.Tensor, factor: int) -> tf.Tensor:
    # The product wraps at 64 bits; its low 32 bits are right all the same.
    return tf.bitwise.bitwise_and(x * factor, _MASK)


def _rotate_left(x: tf.Tensor, bits: int) -> tf.Tensor:
    high = tf.bitwise.bitwise_and(tf.bitwise.left_shift(x, bits), _MASK)
    return tf.bitwise.bitwise_or(high, tf.bitwise.right_shift(x, 32 - bits))


def _xor_shift(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, bits))


def _fmix32(h: tf.Tensor) -> tf.Tensor:
    h = _times(_xor_shift(h, 16), 0x85EBCA6B)
    h = _times(_xor_shift(h, 13), 0xC2B2AE35)
    return _xor_shift(h, 16)


def _murmur3(ids: tf.Tensor, seed: int) -> tf.Tensor:
    h = tf.fill(tf.shape(ids), tf.constant(seed, tf.int64))
    for word in (ids, tf.bitwise.right_shift(ids, 32)):
        k = tf.bitwise.bitwise_and(word, _MASK)
        k = _times(_rotate_left(_times(k, 0xCC9E2D51), 15), 0x1B873593)
        h = _rotate_left(tf.bitwise.bitwise_xor(h, k), 13)
        h = tf.bitwise.bitwise_and(h * 5 + 0xE6546B64, _MASK)
    return _fmix32(tf.bitwise.bitwise_xor(h, 8))


def _permute(x: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """A keyed bijection of [0, size): Feistel rounds, walked until inside."""
    if size <= 1:
        return tf.zeros_like(x)
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    keys = tf.unstack(_murmur3(tf.range(_ROUNDS, dtype=tf.int64), seed), _ROUNDS)

    def once(x):
        low = tf.bitwise.bitwise_and(x, low_mask)
        high = tf.bitwise.right_shift(x, low_bits)
        for i in range(0, _ROUNDS, 2):
            mixed = _fmix32(tf.bitwise.bitwise_xor(low, keys[i]))
            high ^= tf.bitwise.bitwise_and(mixed, high_mask)
            mixed = _fmix32(tf.bitwise.bitwise_xor(high, keys[i + 1]))
            low ^= tf.bitwise.bitwise_and(mixed, low_mask)
        return tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, low_bits), low)

    return tf.while_loop(
        lambda y: tf.reduce_any(y >= size),
        lambda y: (tf.where(y >= size, once(y), y),),
        (once(x),),
    )[0]
