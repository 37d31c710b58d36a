"""IndexedSlices over the ranks: summed here, gathered, summed again, the same bytes.

No step is dense: what travels is the distinct rows of each rank's batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_basis.distributed.world import World
from tf_basis.rules.grouping import sum_duplicates

VALUES = ("float32", "float16", "1bit")
_FLOAT16_MAX = 65504.0


def summed(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Distinct rows, ascending, with float32 values of shape [n, elements]."""
    width = math.prod(slices.values.shape[1:])
    return sum_duplicates(
        tf.IndexedSlices(
            tf.reshape(tf.cast(slices.values, tf.float32), [-1, width]),
            tf.reshape(tf.cast(slices.indices, tf.int64), [-1]),
            slices.dense_shape,
        ),
        padded=False,
    )


def mean(
    slices: Sequence[tf.IndexedSlices],
    counts: tf.Tensor,
    world: World,
    name: str,
    values: str,
) -> list[tf.IndexedSlices]:
    """The mean over ranks of slices of several variables, `summed` on each rank.

    One gather for the indices of all variables, and one for the values of all
    variables of one width.

    Args:
      slices: one of each variable.
      counts: int64, shape [ranks, variables]: the rows of each.
      world: the ranks.
      name: names the collectives.
      values: "float32"; "float16", saturated; or "1bit": signs and a scale per row.
    """
    if world.size == 1 or not slices:
        return list(slices)
    indices = _gathered(
        [s.indices for s in slices], range(len(slices)), counts, world, f"{name}/rows"
    )
    widths = [s.values.shape[1] for s in slices]
    gathered: dict[int, tf.Tensor] = {}
    for width in sorted(set(widths)):
        chosen = [i for i, w in enumerate(widths) if w == width]
        parts = _gathered(
            [encode(slices[i].values, values) for i in chosen],
            chosen,
            counts,
            world,
            f"{name}/values{width}",
        )
        gathered.update((i, decode(p, width, values)) for i, p in zip(chosen, parts))
    totals = [
        sum_duplicates(tf.IndexedSlices(gathered[i], rows), padded=False)
        for i, rows in enumerate(indices)
    ]
    return [tf.IndexedSlices(t.values / world.size, t.indices) for t in totals]


def _gathered(parts, columns, counts, world, name) -> list[tf.Tensor]:
    """What all ranks have of each part, in rank order."""
    # A rank sends its parts one after the other.
    counts = tf.gather(counts, list(columns), axis=1)
    starts = tf.reshape(
        tf.cumsum(tf.reshape(counts, [-1]), exclusive=True), tf.shape(counts)
    )
    everything = world.gather(tf.concat(parts, axis=0), name)
    return [
        tf.gather(
            everything,
            tf.ragged.range(starts[:, t], starts[:, t] + counts[:, t]).flat_values,
        )
        for t in range(len(parts))
    ]


def encode(values: tf.Tensor, form: str) -> tf.Tensor:
    """What travels for float32 values of shape [n, width]."""
    if form == "float32":
        return values
    if form == "float16":
        limit = _FLOAT16_MAX
        return tf.cast(tf.clip_by_value(values, -limit, limit), tf.float16)
    width = values.shape[1]
    scale = tf.reduce_mean(tf.abs(tf.cast(values, tf.float64)), axis=1, keepdims=True)
    signs = tf.cast(values >= 0, tf.int32)
    signs = tf.pad(signs, [[0, 0], [0, -width % 8]])
    places = tf.constant(2 ** np.arange(8), tf.int32)
    packed = tf.reduce_sum(tf.reshape(signs, [-1, -(-width // 8), 8]) * places, axis=2)
    scale = tf.bitcast(tf.cast(scale, tf.float32), tf.uint8)
    return tf.concat([tf.reshape(scale, [-1, 4]), tf.cast(packed, tf.uint8)], axis=1)


def decode(message: tf.Tensor, width: int, form: str) -> tf.Tensor:
    """The reverse of `encode`."""
    if form != "1bit":
        return tf.cast(message, tf.float32)
    scale = tf.bitcast(tf.reshape(message[:, :4], [-1, 1, 4]), tf.float32)
    places = tf.constant(2 ** np.arange(8), tf.int32)
    packed = tf.cast(message[:, 4:, tf.newaxis], tf.int32)
    bits = tf.reshape(packed // places % 2, [-1, 8 * (-(-width // 8))])[:, :width]
    return scale * tf.cast(2 * bits - 1, tf.float32)
