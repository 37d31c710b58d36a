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


def scale_count(elements: int, bits: int, block: int) -> int:
    """How many scales the message of that many elements has."""
    return -(-elements // block) * bits


def code_bytes(elements: int, bits: int, block: int) -> int:
    """Bytes of the message without its scales."""
    scales = scale_count(elements, bits, block)
    return message_bytes(elements, bits, block) - SCALE_BYTES * scales


def encode(
    values: tf.Tensor,
    elements: int,
    bits: int,
    block: int,
    given: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The message of float32 [elements], and the values it stands for.

    With the scales of all blocks `given`, magnitudes take the nearer one.
    """
    blocks = -(-elements // block)
    padding = [[0, blocks * block - elements]]

    def cut(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.pad(x, padding), [blocks, block])

    magnitude = cut(tf.abs(values))
    positive = cut(values >= 0)  # False past the end: those bits are 0
    starts = tf.range(blocks, dtype=tf.int64) * block
    lengths = tf.cast(tf.minimum(elements - starts, block), tf.float64)[:, None]
    if given is None:
        scales = threshold = _float32(_sum(magnitude) / lengths)
    else:
        scales = tf.reshape(given, [blocks, bits])
    if bits == 1:
        codes, scale = positive, scales
    else:
        if given is not None:
            threshold = 0.5 * (scales[:, :1] + scales[:, 1:])
        large = (magnitude >= threshold) & cut(tf.ones([elements], tf.bool))
        if given is None:
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
    scales, packed = _rows(message, elements, bits, block)
    packed = tf.cast(packed, tf.int32)[:, :, None]
    codes = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(packed, tf.range(BITS_PER_BYTE)), 1
    )
    codes = tf.reshape(codes, [blocks, block, bits]) == 1
    if bits == 1:
        scale = scales
    else:
        scale = tf.where(codes[:, :, 1], scales[:, 1:], scales[:, :1])
    return tf.reshape(tf.where(codes[:, :, 0], scale, -scale), [-1])[:elements]


def split(
    message: tf.Tensor, elements: int, bits: int, block: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The scales of a message, float32 [scales], and its codes, uint8."""
    scales, packed = _rows(message, elements, bits, block)
    codes = tf.reshape(packed, [-1])[: code_bytes(elements, bits, block)]
    return tf.reshape(scales, [-1]), codes


def join(
    scales: tf.Tensor, codes: tf.Tensor, elements: int, bits: int, block: int
) -> tf.Tensor:
    """The reverse of `split`."""
    blocks, packed = -(-elements // block), block * bits // BITS_PER_BYTE
    missing = blocks * packed - code_bytes(elements, bits, block)
    header = tf.bitcast(tf.reshape(scales, [blocks, bits]), tf.uint8)
    rows = tf.concat(
        [
            tf.reshape(header, [blocks, SCALE_BYTES * bits]),
            tf.reshape(tf.pad(codes, [[0, missing]]), [blocks, packed]),
        ],
        axis=1,
    )
    return tf.reshape(rows, [-1])[: message_bytes(elements, bits, block)]


def _rows(
    message: tf.Tensor, elements: int, bits: int, block: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Block by block the scales, float32 [blocks, bits], and the bytes of codes."""
    blocks, stride = -(-elements // block), _stride(bits, block)
    missing = blocks * stride - message_bytes(elements, bits, block)
    rows = tf.reshape(tf.pad(message, [[0, missing]]), [blocks, stride])
    header = SCALE_BYTES * bits
    scales = tf.reshape(rows[:, :header], [blocks, bits, SCALE_BYTES])
    return tf.bitcast(scales, tf.float32), rows[:, header:]


def _sum(rows: tf.Tensor) -> tf.Tensor:
    """Sums of rows: float64 [blocks, 1]."""
    return tf.reduce_sum(tf.cast(rows, tf.float64), axis=1, keepdims=True)


def _float32(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)
