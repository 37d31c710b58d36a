"""Row -> bucket: which shared optimizer state a row of a table uses.

The functions here are a file format: a saved table depends on them.  They carry
`FORMAT_VERSION` and never change silently.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.ops import hash_ops

FORMAT_VERSION = 1
"""The version of these functions, which is saved with every table."""


def murmur3_x86_32(ids: Any, seed: int = 0) -> Any:
    """MurmurHash3_x86_32 of integer ids, each as 8 little-endian bytes of int64.

    Args:
      ids: int32 or int64 ids of any shape, negative ones included; a tensor, or
        anything numpy makes an integer array of.  int32 is sign-extended.
      seed: an integer in [0, 2**32).  Default 0.

    Returns:
      uint32 hashes of the shape of `ids`: a tensor for a tensor, else an array.

    Raises:
      ValueError: `seed` is out of range.
      TypeError: `ids` are not int32 or int64.

    Example:

    >>> murmur3_x86_32([0, 1])
    array([1669671676, 1392991556], dtype=uint32)

    Reference: Austin Appleby, SMHasher, MurmurHash3.cpp.
    """
    hyperparameters.check("seed", seed)
    return _like_input(ids, "ids", lambda t: hash_ops.murmur3(t, int(seed)))


def bucket_of_rows(
    rows: Any,
    n_rows: int,
    num_buckets: int,
    exclusive_rows: Any = 0,
    hashing: str = "balanced",
    seed: int = 0,
) -> Any:
    """The bucket of each row of a table.

    With K = `exclusive_rows` and B = `num_buckets`: row r < K owns bucket r;
    another row has the bucket K + h(r) mod (B - K).  With B >= `n_rows` every
    row r owns bucket r.

    `"balanced"`: h is a keyed bijection of the n_rows - K hashed rows (a Feistel
    network of 6 rounds with cycle walking, on r - K), so every shared bucket
    holds the floor or the ceiling of the mean number of rows.  `"murmur3"`: h is
    `murmur3_x86_32(r, seed)`; loads vary as for random assignment.  `"double"`: a
    row has the two buckets of two murmur3 seeds (`seed` and `seed` + 0x9e3779b9).
    `"consistent"`: jump consistent hash of both hashes; when B grows, the fewest
    rows move.

    Args:
      rows: int32 or int64 row ids in [0, n_rows), any shape; tensor or array.
      n_rows: rows of the table, at least 1.
      num_buckets: B, at least 1.
      exclusive_rows: K, or the list of the K rows that own a bucket (the i-th owns
        bucket i; the other rows are hashed by their rank among the non-owners, or
        as they are by the murmur3 hashes).  K < B unless B >= n_rows.  Default 0.
      hashing: `"balanced"` (default), `"murmur3"`, `"double"`, `"consistent"`.
      seed: an integer in [0, 2**32).  Default 0.

    Returns:
      int64 buckets of the shape of `rows` (double: with a last dimension of 2, the
      two equal where a row has one): a tensor for a tensor, else an array.

    Raises:
      ValueError: an argument or (array input) a row is out of range.
      tf.errors.InvalidArgumentError: (tensor input) a row is out of range.

    Example:

    >>> sorted(bucket_of_rows(range(6), 6, 3).tolist())
    [0, 0, 1, 1, 2, 2]

    Reference: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002 (cycle walking); J. Lamping, E. Veach, "A Fast, Minimal Memory,
    Consistent Hash Algorithm", 2014.
    """
    hyperparameters.check("n_rows", n_rows)
    hyperparameters.check("num_buckets", num_buckets, hyperparameters.count)
    hyperparameters.check("hashing", hashing)
    hyperparameters.check("seed", seed)
    mapping = row_mapping(n_rows, num_buckets, exclusive_rows, hashing, seed)
    if not tf.is_tensor(rows):
        rows = _as_integers(rows, "rows")
        outside = rows[(rows < 0) | (rows >= n_rows)]
        if outside.size:
            raise ValueError(f"rows must be in [0, {n_rows}), received {outside[0]}")
    return _like_input(rows, "rows", lambda t: hash_ops.map_rows(t, mapping))


def row_mapping(
    n_rows: int, num_buckets: int, exclusive_rows: Any, hashing: str, seed: int
) -> hash_ops.RowMapping:
    """The mapping of a table; checks what depends on the table's size.

    Raises:
      ValueError: the exclusive rows leave no bucket to the others, or a listed one
        is no row of the table or listed twice.
    """
    owner_rows: tuple[int, ...] = ()
    hyperparameters.check("exclusive_rows", exclusive_rows)
    if isinstance(exclusive_rows, str):
        raise ValueError(
            "exclusive_rows must be a number or a list of rows here, received "
            f"{exclusive_rows!r}"
        )
    if not isinstance(exclusive_rows, numbers.Integral):
        owner_rows = tuple(map(int, exclusive_rows))
        outside = [r for r in owner_rows if not 0 <= r < n_rows]
        if outside:
            raise ValueError(
                f"exclusive_rows must list rows in [0, {n_rows}), received {outside[0]}"
            )
        exclusive_rows = len(owner_rows)
    count = int(exclusive_rows)
    if num_buckets < n_rows and count >= num_buckets:
        raise ValueError(
            "exclusive_rows must be below num_buckets, since the other rows need a "
            f"bucket too, received exclusive_rows={count}, num_buckets={num_buckets} "
            f"for {n_rows} rows"
        )
    if num_buckets >= n_rows:  # every row r owns bucket r, whatever was listed
        return hash_ops.RowMapping(int(n_rows), int(n_rows), 0, hashing, int(seed))
    return hash_ops.RowMapping(
        int(n_rows), int(num_buckets), count, hashing, int(seed), owner_rows
    )


def all_buckets(mapping: hash_ops.RowMapping) -> np.ndarray:
    """The buckets of all rows of a table: [N], or (double) [N, 2]."""
    with tf.init_scope():
        return hash_ops.map_rows(
            tf.range(mapping.n_rows, dtype=tf.int64), mapping
        ).numpy()


def load_statistics(buckets: Any, num_buckets: int) -> dict[str, float]:
    """How evenly rows fall into buckets.

    Args:
      buckets: the bucket of each row, in [0, num_buckets).
      num_buckets: number of buckets, those without a row included.

    Returns:
      Rows per bucket as a dict: `min`, `mean`, `max`, `std` (of the population),
      and `empty`, the number of buckets without a row.

    Raises:
      ValueError: a bucket is out of range.

    Example:

    >>> load_statistics([0, 0, 1], 3)["max"]
    2
    """
    hyperparameters.check("num_buckets", num_buckets, hyperparameters.count)
    buckets = _as_integers(np.asarray(buckets), "buckets").ravel()
    outside = buckets[(buckets < 0) | (buckets >= num_buckets)]
    if outside.size:
        raise ValueError(
            f"buckets must be in [0, {num_buckets}), received {outside[0]}"
        )
    load = np.bincount(buckets, minlength=num_buckets)
    return {
        "min": int(load.min()),
        "mean": float(load.mean()),
        "max": int(load.max()),
        "std": float(load.std()),
        "empty": int((load == 0).sum()),
    }


def _as_integers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0 and not np.issubdtype(array.dtype, np.integer):
        array = array.astype(np.int64)  # numpy calls an empty list float64
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name} must be int32 or int64, received {array.dtype}")
    return array


def _like_input(values: Any, name: str, function: Any) -> Any:
    if tf.is_tensor(values):
        if values.dtype not in (tf.int32, tf.int64):
            raise TypeError(
                f"{name} must be int32 or int64, received {values.dtype.name}"
            )
        return function(values)
    with tf.init_scope():  # arrays give arrays, also while a graph is traced
        return function(tf.convert_to_tensor(_as_integers(values, name))).numpy()


__all__ = ["FORMAT_VERSION", "bucket_of_rows", "load_statistics", "murmur3_x86_32"]
