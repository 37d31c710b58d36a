"""Row -> bucket: which shared optimizer state a row of a table uses.

The functions here are a file format: a saved table depends on them.  They carry
`FORMAT_VERSION` and never change silently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.ops import hash_ops

FORMAT_VERSION = 1


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
    exclusive_rows: int = 0,
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
    `murmur3_x86_32(r, seed)`; loads vary as for random assignment.

    Args:
      rows: int32 or int64 row ids in [0, n_rows), any shape; tensor or array.
      n_rows: rows of the table, at least 1.
      num_buckets: B, at least 1.
      exclusive_rows: K, below B unless B >= n_rows.  Default 0.
      hashing: `"balanced"` (default) or `"murmur3"`.
      seed: an integer in [0, 2**32).  Default 0.

    Returns:
      int64 buckets of the shape of `rows`: a tensor for a tensor, else an array.

    Raises:
      ValueError: an argument or (array input) a row is out of range.
      tf.errors.InvalidArgumentError: (tensor input) a row is out of range.

    Example:

    >>> sorted(bucket_of_rows(range(6), 6, 3).tolist())
    [0, 0, 1, 1, 2, 2]

    Reference: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002 (cycle walking).
    """
    hyperparameters.check("n_rows", n_rows)
    hyperparameters.check("num_buckets", num_buckets)
    hyperparameters.check("exclusive_rows", exclusive_rows)
    hyperparameters.check("hashing", hashing)
    hyperparameters.check("seed", seed)
    check_exclusive_rows(n_rows, num_buckets, exclusive_rows)
    if not tf.is_tensor(rows):
        rows = _as_integers(rows, "rows")
        outside = rows[(rows < 0) | (rows >= n_rows)]
        if outside.size:
            raise ValueError(f"rows must be in [0, {n_rows}), received {outside[0]}")
    mapping = hash_ops.RowMapping(
        n_rows=int(n_rows),
        num_buckets=min(int(num_buckets), int(n_rows)),
        exclusive_rows=int(exclusive_rows),
        hashing=hashing,
        seed=int(seed),
    )
    return _like_input(
        rows, "rows", lambda t: hash_ops.map_rows(t, mapping, checked=True)
    )


def check_exclusive_rows(n_rows: int, num_buckets: int, exclusive_rows: int) -> None:
    """Raises ValueError where the exclusive rows leave no bucket to the others."""
    if num_buckets < n_rows and exclusive_rows >= num_buckets:
        raise ValueError(
            "exclusive_rows must be below num_buckets, since the other rows need "
            f"a bucket too, received exclusive_rows={exclusive_rows}, "
            f"num_buckets={num_buckets} for {n_rows} rows"
        )


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
    hyperparameters.check("num_buckets", num_buckets)
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
