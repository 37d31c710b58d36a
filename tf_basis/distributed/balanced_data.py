"""A dataset whose batches have the sizes that a plan says, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis.distributed.balanced_plan import Plan


def planned_batches(
    dataset: tf.data.Dataset,
    plan: Plan,
    rank: int,
    chunk: int,
    factor: float | None,
) -> tf.data.Dataset:
    """Examples in batches of `plan`'s sizes; see `BalancedBatch.batches`.

    Args:
      dataset: of single examples, without an end.
      plan: the sizes.
      rank: whose.
      chunk: examples that are read together: about one batch.
      factor: times the size of its batch it is the weight of an example, put in the
        third place; None: the structure stays as it is.
    """

    def take(iterator: np.ndarray, available: np.ndarray) -> tuple:
        iterator, sizes = plan.take(int(iterator), int(available), rank)
        return np.int64(iterator), np.array(sizes, np.int64)

    def collect(state: tuple, piece: Any) -> tuple:
        iterator, rest = state
        joined = tf.cond(
            tf.equal(iterator, 0),
            lambda: piece,
            lambda: tf.nest.map_structure(
                lambda a, b: tf.concat([a, b], axis=0), rest, piece
            ),
        )
        iterator, sizes = tf.numpy_function(
            take, [iterator, _length(joined)], [tf.int64, tf.int64]
        )
        iterator.set_shape([])
        sizes.set_shape([None])
        used = tf.reduce_sum(sizes)
        rest = tf.nest.map_structure(lambda t: t[used:], joined)
        return (iterator, rest), (sizes, joined)

    def cut(sizes: tf.Tensor, examples: Any) -> tf.data.Dataset:
        ends = tf.data.Dataset.from_tensor_slices((tf.cumsum(sizes), sizes))

        def batch(end: tf.Tensor, size: tf.Tensor) -> Any:
            found = tf.nest.map_structure(lambda t: t[end - size : end], examples)
            return found if factor is None else _weighted(found, size, factor)

        return ends.map(batch)

    chunks = dataset.batch(chunk)
    none = tf.nest.map_structure(_none, chunks.element_spec)
    start = (tf.zeros([], tf.int64), none)
    return chunks.scan(start, collect).flat_map(cut)


def _none(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(n or 0 for n in spec.shape[1:])], spec.dtype)


def _length(batch: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]


def _weighted(batch: tuple, size: tf.Tensor, factor: float) -> tuple:
    x, y = batch[:2]
    weight = tf.cast(tf.cast(size, tf.float64) * factor, tf.float32)
    if len(batch) == 3:
        return x, y, tf.cast(batch[2], tf.float32) * weight
    return x, y, tf.fill([size], weight)
