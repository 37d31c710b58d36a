"""Brings the rows of a batch into the order in which the rules work.

This is the one place where duplicate ids are summed (in float64), and the
pure-TF twin of `tf_ops/cc/core/row_groups.h`.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tf_basis.ops import hash_ops


class RowGroups(NamedTuple):
    """The distinct rows of a batch, by (bucket, row).

    Outside XLA the leading dimensions R (rows) and S (buckets) are the true
    counts.  XLA wants static shapes: there R and S are the batch size, and the
    entries past the true counts carry row N and bucket B, which `write_rows`
    drops, as it drops a row that was out of range.
    """

    rows: tf.Tensor  # [R] int64
    gradients: tf.Tensor  # [R, d] float32, duplicates summed
    segments: tf.Tensor  # [R] int64: position of the row's bucket in `buckets`
    is_row: tf.Tensor  # [R] bool: False for padding
    buckets: tf.Tensor  # [S] int64, ascending


def group_rows(
    indices: tf.Tensor, values: tf.Tensor, mapping: hash_ops.RowMapping, padded: bool
) -> RowGroups:
    """Groups a batch; `padded` keeps the shapes static (for XLA)."""
    rows = tf.cast(indices, tf.int64)
    inside = (rows >= 0) & (rows < mapping.n_rows)
    buckets = hash_ops.map_rows(tf.where(inside, rows, 0), mapping)
    if padded:  # elsewhere a row out of range was an error before this
        rows = tf.where(inside, rows, mapping.n_rows)
        buckets = tf.where(inside, buckets, mapping.num_buckets)

    order = tf.argsort(rows, stable=True)
    order = tf.gather(order, tf.argsort(tf.gather(buckets, order), stable=True))
    rows, buckets = tf.gather(rows, order), tf.gather(buckets, order)
    row_of, n_rows = _number_runs(rows, padded)
    bucket_of, n_buckets = _number_runs(buckets, padded)

    sums = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(values, order), tf.float64), row_of, n_rows
    )

    distinct = _one_of(rows, row_of, n_rows, -1)
    distinct_buckets = _one_of(buckets, bucket_of, n_buckets, -1)
    is_row = (distinct >= 0) & (distinct < mapping.n_rows)
    return RowGroups(
        rows=tf.where(is_row, distinct, mapping.n_rows),
        gradients=tf.cast(sums, tf.float32),
        segments=_one_of(bucket_of, row_of, n_rows, 0),
        is_row=is_row,
        buckets=tf.where(
            distinct_buckets >= 0, distinct_buckets, mapping.num_buckets
        ),
    )


def sum_duplicates(slices: tf.IndexedSlices, padded: bool) -> tf.IndexedSlices:
    """The same gradient with every row once, ascending; sums are float64.

    `padded` keeps the shapes static (for XLA): rows -1 with zeros fill the end.
    """
    order = tf.argsort(slices.indices, stable=True)
    rows = tf.gather(slices.indices, order)
    run_of, count = _number_runs(rows, padded)
    values = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(slices.values, order), tf.float64), run_of, count
    )
    return tf.IndexedSlices(
        tf.cast(values, slices.values.dtype),
        _one_of(rows, run_of, count, -1),
        slices.dense_shape,
    )


def _one_of(x: tf.Tensor, segments: tf.Tensor, count: tf.Tensor, padding: int):
    """The value that all entries of a segment share; `padding` of an empty one."""
    return tf.maximum(tf.math.unsorted_segment_max(x, segments, count), padding)


def _number_runs(x: tf.Tensor, padded: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Numbers the runs of equal neighbours; also how many (padded: the length)."""
    starts = tf.concat([tf.ones_like(x[:1], tf.bool), x[1:] != x[:-1]], axis=0)
    ones = tf.cast(starts, tf.int64)
    count = tf.shape(x, tf.int64)[0] if padded else tf.reduce_sum(ones)
    return tf.cumsum(ones) - 1, count
