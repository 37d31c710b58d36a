"""Brings the rows of a batch into the order in which the rules work.

This is the one place where duplicate ids are summed (in float64), and the
pure-TF twin of `tf_ops/cc/core/row_groups.h`.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tf_basis.ops import hash_ops


class RowGroups(NamedTuple):
    """The distinct rows of a batch, the buckets they touch, and who is in which.

    Outside XLA the leading dimensions R (rows), S (buckets) and E (memberships) are
    the true counts.  XLA wants static shapes: there they are multiples of the batch
    size, and the entries past the true counts carry row N and bucket B, whose
    results are dropped, as those of a row that was out of range are.
    """

    rows: tf.Tensor  # [R] int64, ascending
    gradients: tf.Tensor  # [R, d] float32, duplicates summed
    is_row: tf.Tensor  # [R] bool: False for padding
    segments: tf.Tensor  # [R, H] int64: positions in `buckets` of the row's buckets
    buckets: tf.Tensor  # [S] int64, ascending
    members: tf.Tensor  # [E] int64: positions in `rows`, by (bucket, row)
    member_of: tf.Tensor  # [E] int64: position in `buckets`
    is_member: tf.Tensor  # [E] bool: False for padding


def group_rows(
    indices: tf.Tensor, values: tf.Tensor, mapping: hash_ops.RowMapping, padded: bool
) -> RowGroups:
    """Groups a batch; `padded` keeps the shapes static (for XLA)."""
    rows = tf.cast(indices, tf.int64)
    if padded:  # elsewhere a row out of range was an error before this
        inside = (rows >= 0) & (rows < mapping.n_rows)
        rows = tf.where(inside, rows, mapping.n_rows)
    order = tf.argsort(rows, stable=True)
    rows = tf.gather(rows, order)
    run_of, count = _number_runs(rows, padded)
    sums = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(values, order), tf.float64), run_of, count
    )
    rows = _one_of(rows, run_of, count, -1)
    is_row = (rows >= 0) & (rows < mapping.n_rows)
    rows = tf.where(is_row, rows, mapping.n_rows)

    # One membership for each different bucket of each row, row by row.
    buckets = hash_ops.map_rows_twin(tf.where(is_row, rows, 0), mapping)
    per_row = mapping.buckets_per_row
    row_numbers = tf.range(tf.shape(rows, tf.int64)[0])
    is_member = is_row[:, None] & tf.concat(
        [tf.ones_like(buckets[:, :1], tf.bool), buckets[:, 1:] != buckets[:, :-1]],
        axis=1,
    )
    flat = tf.reshape(tf.where(is_member, buckets, mapping.num_buckets), [-1])
    members = tf.repeat(row_numbers, per_row) if per_row > 1 else row_numbers
    is_member = tf.reshape(is_member, [-1])
    if not padded and per_row > 1:
        flat = tf.boolean_mask(flat, is_member)
        members = tf.boolean_mask(members, is_member)
        is_member = tf.boolean_mask(is_member, is_member)
    order = tf.argsort(flat, stable=True)
    flat, members = tf.gather(flat, order), tf.gather(members, order)
    is_member = tf.gather(is_member, order)
    member_of, count = _number_runs(flat, padded)
    touched = _one_of(flat, member_of, count, -1)
    touched = tf.where(touched >= 0, touched, mapping.num_buckets)
    # Padding may have a bucket that nobody touched; any position will do for it.
    segments = tf.minimum(
        tf.searchsorted(touched, tf.reshape(buckets, [-1]), out_type=tf.int64),
        tf.maximum(tf.shape(touched, tf.int64)[0] - 1, 0),
    )
    return RowGroups(
        rows=rows,
        gradients=tf.cast(sums, tf.float32),
        is_row=is_row,
        segments=tf.reshape(segments, [-1, per_row]),
        buckets=touched,
        members=members,
        member_of=member_of,
        is_member=is_member,
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
