"""Block-wise quantisation to 1 or 2 bits an element in pure TensorFlow.

This is the twin of `tf_ops/cc/core/block_quantize.h`; what a message holds is
described in `tf_basis.distributed.quantize`.
"""

from __future__ import annotations

import tensorflow as tf

BITS_PER_BYTE = 8
SCALE_BYTES = 4  # one float32; a message has as many scales a block as bits an element


def message_bytes(elements: int, bits: int, block: int) -> int:
    """Bytes of the message of that many elements."""
    full, rest = divmod(elements, block)
    packed = -(-rest * bits // BITS_PER_BYTE)
    header = SCALE_BYTES * bits
    return full * _stride(bits, block) + (header + packed if rest else 0)


def _stride(bits: int, block: int) -> int:
    """Bytes of a whole block."""
    return SCALE_BYTES * bits + block * bits // BITS_PER_BYTE


def encode(
    values: tf.Tensor, elements: int, bits: int, block: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The message of float32 [elements], and the values it stands for."""
    blocks = -(-elements // block)
    padding = [[0, blocks * block - elements]]

    def cut(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.pad(x, padding), [blocks, block])

    magnitude = cut(tf.abs(values))
    positive = cut(values >= 0)  # False past the end: those bits are 0
    starts = tf.range(blocks, dtype=tf.int64) * block
    lengths = tf.cast(tf.minimum(elements - starts, block), tf.float64)[:, None]
    mean = _float32(_sum(magnitude) / lengths)
    if bits == 1:
        scales, codes, scale = mean, positive, mean
    else:
        large = (magnitude >= mean) & cut(tf.ones([elements], tf.bool))
        count = _sum(large)
        high = tf.math.divide_no_nan(_sum(tf.where(large, magnitude, 0.0)), count)
        low = tf.math.divide_no_nan(
            _sum(tf.where(large, 0.0, magnitude)), lengths - count
        )
        scales = _float32(tf.concat([low, high], axis=1))
        codes = tf.stack([positive, large], axis=-1)
        scale = tf.where(large, scales[:, 1:], scales[:, :1])
    quantized = tf.reshape(tf.where(positive, scale, -scale), [-1])[:elements]
    packed = block * bits // BITS_PER_BYTE
    codes = tf.reshape(codes, [blocks, packed, BITS_PER_BYTE])
    weights = tf.bitwise.left_shift(1, tf.range(BITS_PER_BYTE))
    message = tf.concat(
        [
            tf.reshape(tf.bitcast(scales, tf.uint8), [blocks, SCALE_BYTES * bits]),
            tf.cast(tf.reduce_sum(tf.cast(codes, tf.int32) * weights, -1), tf.uint8),
        ],
        axis=1,
    )
    message = tf.reshape(message, [-1])[: message_bytes(elements, bits, block)]
    return message, quantized


def decode(message: tf.Tensor, elements: int, bits: int, block: int) -> tf.Tensor:
    """The float32 [elements] that a message of the right length stands for."""
    blocks = -(-elements // block)
    stride = _stride(bits, block)
    missing = blocks * stride - message_bytes(elements, bits, block)
    rows = tf.reshape(tf.pad(message, [[0, missing]]), [blocks, stride])
    header = SCALE_BYTES * bits
    scales = tf.bitcast(
        tf.reshape(rows[:, :header], [blocks, bits, SCALE_BYTES]), tf.float32
    )
    packed = tf.cast(rows[:, header:], tf.int32)[:, :, None]
    codes = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(packed, tf.range(BITS_PER_BYTE)), 1
    )
    codes = tf.reshape(codes, [blocks, block, bits]) == 1
    if bits == 1:
        scale = scales
    else:
        scale = tf.where(codes[:, :, 1], scales[:, 1:], scales[:, :1])
    return tf.reshape(tf.where(codes[:, :, 0], scale, -scale), [-1])[:elements]


def _sum(rows: tf.Tensor) -> tf.Tensor:
    """Sums of rows: float64 [blocks, 1]."""
    return tf.reduce_sum(tf.cast(rows, tf.float64), axis=1, keepdims=True)


def _float32(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)
