"""The hash functions as TensorFlow ops: the C++ op, or its pure-TF twin.

The twin computes in int64 with 32-bit masks, which CPU, GPU and XLA all have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tf_basis.ops import dispatch

_MASK = 0xFFFFFFFF
_ROUNDS = 6
_SECOND_SEED = 0x9E3779B9  # of the double and the consistent hash


@dataclass(frozen=True)
class RowMapping:
    """What decides the bucket of a row (see `tf_basis.hashing.bucket_of_rows`).

    Attributes:
      n_rows: N.
      num_buckets: B, at most N.
      exclusive_rows: K, the number of rows that own a bucket each.
      hashing: `"balanced"`, `"murmur3"`, `"double"` or `"consistent"`.
      seed: of the hash.
      owner_rows: the K owners, owner i of bucket i; () for the rows below K.
      domains: ends of the ranges of hashed rows that were added together, the last
        N - K; () for one range. Rows added later are hashed among themselves, so
        that older rows keep their buckets.
    """

    n_rows: int
    num_buckets: int
    exclusive_rows: int = 0
    hashing: str = "balanced"
    seed: int = 0
    owner_rows: tuple[int, ...] = ()
    domains: tuple[int, ...] = ()

    @property
    def owners(self) -> int:
        """Buckets below this belong to one row each."""
        return self.n_rows if self.num_buckets >= self.n_rows else self.exclusive_rows

    @property
    def buckets_per_row(self) -> int:
        """How many buckets a row that owns none has."""
        return 2 if self.hashing == "double" else 1

    def sorted_owners(self) -> tuple[np.ndarray, np.ndarray]:
        """The listed owners, ascending, and the bucket of each; both may be empty."""
        owners = np.asarray(self.owner_rows, np.int64)
        buckets = np.argsort(owners, kind="stable")
        return owners[buckets], buckets.astype(np.int64)


def murmur3(ids: tf.Tensor, seed: int) -> tf.Tensor:
    """uint32 hashes of int32 or int64 ids."""
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_hash_murmur3(ids, seed=seed)
    return tf.cast(murmur3_twin(tf.cast(ids, tf.int64), seed), tf.uint32)


def map_rows(rows: tf.Tensor, mapping: RowMapping) -> tf.Tensor:
    """int64 buckets of rows; a row outside [0, n_rows) is an error.

    The shape is that of `rows`; in the double mode a last dimension of 2 holds both
    buckets (equal where a row has one).
    """
    library = dispatch.library_for_tensors()
    if library is None:
        with tf.control_dependencies([assert_rows(rows, mapping.n_rows, "rows")]):
            buckets = map_rows_twin(tf.identity(rows), mapping)
        return buckets if mapping.buckets_per_row == 2 else buckets[..., 0]
    owner_rows, owner_buckets = mapping.sorted_owners()
    return library.tf_basis_map_rows(
        rows,
        owner_rows,
        owner_buckets,
        n_rows=mapping.n_rows,
        num_buckets=mapping.num_buckets,
        exclusive_rows=mapping.exclusive_rows,
        hashing=mapping.hashing,
        seed=mapping.seed,
        domains=list(mapping.domains),
    )


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


def map_rows_twin(rows: tf.Tensor, mapping: RowMapping) -> tf.Tensor:
    """[..., 1] or (double) [..., 2] buckets of rows known to be in [0, n_rows)."""
    rows = tf.cast(rows, tf.int64)
    owners, shared = mapping.owners, mapping.num_buckets - mapping.owners
    if shared == 0:
        hashed = [rows] * mapping.buckets_per_row
        return tf.stack(hashed, axis=-1)
    if mapping.owner_rows:
        owner_rows, owner_buckets = map(tf.constant, mapping.sorted_owners())
        flat = tf.reshape(rows, [-1])
        below = tf.searchsorted(owner_rows, flat, out_type=tf.int64)
        below = tf.reshape(below, tf.shape(rows))
        at = tf.minimum(below, owners - 1)
        owned = tf.gather(owner_rows, at) == rows
        own_bucket, rank = tf.gather(owner_buckets, at), rows - below
    else:
        owned, own_bucket, rank = rows < owners, rows, rows - owners
    if mapping.hashing == "balanced":
        # Owners are replaced below; keep their walk inside its domain.
        hashes = [_permute_domains(tf.maximum(rank, 0), mapping)]
    elif mapping.hashing == "murmur3":
        hashes = [murmur3_twin(rows, mapping.seed)]
    else:
        second_seed = (mapping.seed + _SECOND_SEED) & _MASK
        hashes = [murmur3_twin(rows, mapping.seed), murmur3_twin(rows, second_seed)]
        if mapping.hashing == "consistent":
            hashes = [_jump(hashes[0], hashes[1], shared)]
    return tf.stack(
        [tf.where(owned, own_bucket, owners + h % shared) for h in hashes], axis=-1
    )


def _permute_domains(rank: tf.Tensor, mapping: RowMapping) -> tf.Tensor:
    ends = mapping.domains or (mapping.n_rows - mapping.owners,)
    hashes, begin = tf.zeros_like(rank), 0
    for end in ends:
        inside = (rank >= begin) & (rank < end)
        local = tf.where(inside, rank - begin, 0)
        permuted = _permute(local, end - begin, mapping.seed)
        hashes = tf.where(inside, permuted, hashes)
        begin = end
    return hashes


def _jump(high: tf.Tensor, low: tf.Tensor, buckets: int) -> tf.Tensor:
    """Jump consistent hash of the 64-bit key high * 2^32 + low."""
    key = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, 32), low)
    start = tf.zeros_like(key)

    def body(bucket, following, key):
        going = following < buckets
        bucket = tf.where(going, following, bucket)
        key = key * 2862933555777941757 + 1  # wraps at 64 bits
        top = tf.bitwise.bitwise_and(tf.bitwise.right_shift(key, 33), 0x7FFFFFFF)
        jump = tf.cast(bucket + 1, tf.float64) * (
            tf.constant(2.0**31, tf.float64) / tf.cast(top + 1, tf.float64)
        )
        # Past the last bucket any value will do; keep the cast inside int64.
        jump = tf.cast(tf.minimum(jump, 2.0**62), tf.int64)
        return bucket, tf.where(going, jump, following), key

    return tf.while_loop(
        lambda bucket, following, key: tf.reduce_any(following < buckets),
        body,
        (start - 1, start, key),
    )[0]


def _times(x: tf.Tensor, factor: int) -> tf.Tensor:
    # The product wraps at 64 bits; its low 32 bits are right all the same.
    return tf.bitwise.bitwise_and(x * factor, _MASK)


def _rotate_left(x: tf.Tensor, bits: int) -> tf.Tensor:
    high = tf.bitwise.bitwise_and(tf.bitwise.left_shift(x, bits), _MASK)
    return tf.bitwise.bitwise_or(high, tf.bitwise.right_shift(x, 32 - bits))


def _xor_shift(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, bits))


def fmix32(h: tf.Tensor) -> tf.Tensor:
    """The finaliser of murmur3: uint32 values in int64, to the same."""
    h = _times(_xor_shift(h, 16), 0x85EBCA6B)
    h = _times(_xor_shift(h, 13), 0xC2B2AE35)
    return _xor_shift(h, 16)


def murmur3_twin(ids: tf.Tensor, seed: int) -> tf.Tensor:
    """`murmur3` of int64 ids in pure TensorFlow, as uint32 values in int64."""
    h = tf.fill(tf.shape(ids), tf.constant(seed, tf.int64))
    for word in (ids, tf.bitwise.right_shift(ids, 32)):
        k = tf.bitwise.bitwise_and(word, _MASK)
        k = _times(_rotate_left(_times(k, 0xCC9E2D51), 15), 0x1B873593)
        h = _rotate_left(tf.bitwise.bitwise_xor(h, k), 13)
        h = tf.bitwise.bitwise_and(h * 5 + 0xE6546B64, _MASK)
    return fmix32(tf.bitwise.bitwise_xor(h, 8))


def _permute(x: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """A keyed bijection of [0, size): Feistel rounds, walked until inside."""
    if size <= 1:
        return tf.zeros_like(x)
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    keys = tf.unstack(murmur3_twin(tf.range(_ROUNDS, dtype=tf.int64), seed), _ROUNDS)

    def once(x):
        low = tf.bitwise.bitwise_and(x, low_mask)
        high = tf.bitwise.right_shift(x, low_bits)
        for i in range(0, _ROUNDS, 2):
            mixed = fmix32(tf.bitwise.bitwise_xor(low, keys[i]))
            high ^= tf.bitwise.bitwise_and(mixed, high_mask)
            mixed = fmix32(tf.bitwise.bitwise_xor(high, keys[i + 1]))
            low ^= tf.bitwise.bitwise_and(mixed, low_mask)
        return tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, low_bits), low)

    return tf.while_loop(
        lambda y: tf.reduce_any(y >= size),
        lambda y: (tf.where(y >= size, once(y), y),),
        (once(x),),
    )[0]
