"""Number formats of state and stochastic rounding to them, in pure TensorFlow.

The twin of `tf_ops/cc/core/formats.h`, operation by operation.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_basis.ops import hash_ops

# Which variable of a table is rounded: part of the key, so that they differ.
TABLE, FIRST_MOMENT, SECOND_MOMENT, ROW_SCALAR = range(4)

_MASK = 0xFFFFFFFF
_QUARTERS = np.array([1.0, 1.18920712, 1.41421354, 1.68179283], np.float32)
# Code 0 is 0, code c is 2^((c - 1) / 4 - 50): an 8-bit logarithm.
_OCTAVES = np.exp2(np.arange(64, dtype=np.float32) - 50)
LOG8_LEVELS = np.float32([0.0, *(_OCTAVES[:, None] * _QUARTERS).ravel()[:255]])


def nearest_log8(value: float) -> int:
    """The code of the level nearest to a number of at least 0."""
    return int(np.argmin(np.abs(LOG8_LEVELS - np.float32(value))))


def read(stored: tf.Tensor) -> tf.Tensor:
    """Stored numbers as float32; uint8 is the 8-bit logarithm."""
    if stored.dtype == tf.uint8:
        return tf.gather(tf.constant(LOG8_LEVELS), tf.cast(stored, tf.int32))
    return tf.cast(stored, tf.float32)


def encode(
    values: tf.Tensor,
    dtype: tf.DType,
    seed: int,
    slot: int,
    rows: tf.Tensor,
    steps: tf.Tensor,
) -> tf.Tensor:
    """float32 values, [R, d] or [R], in the format of a variable.

    Rounding is up or down at random with the exact value as its mean; the random
    bits depend on seed, slot, row, step and column only.
    """
    if dtype == tf.float32:
        return values
    random = _random_bits(seed, slot, rows, steps, values.shape)
    if dtype == tf.uint8:
        return _encode_log8(values, random)
    if dtype == tf.bfloat16:
        rounded = _round(values, random, 7, -119, 3.3895314e38)
    else:
        rounded = _round(values, random, 10, -14, 65504.0)
    return tf.cast(rounded, dtype)


def _random_bits(seed, slot, rows, steps, shape) -> tf.Tensor:
    """uint32 values in int64, one a number."""
    key = (seed ^ (slot * 0x85EBCA77)) & _MASK
    base = hash_ops.murmur3_twin(tf.cast(rows, tf.int64), key)
    steps = tf.bitwise.bitwise_and(tf.cast(steps, tf.int64), _MASK)
    base = hash_ops.fmix32(tf.bitwise.bitwise_xor(base, _times(steps, 0x9E3779B1)))
    if len(shape) == 2:
        columns = tf.range(shape[1], dtype=tf.int64)
        base = base[:, None] + _times(columns, 0x9E3779B9)[None, :]
    return hash_ops.fmix32(tf.bitwise.bitwise_and(base, _MASK))


def _times(x: tf.Tensor, factor: int) -> tf.Tensor:
    return tf.bitwise.bitwise_and(x * factor, _MASK)


def _exponent(x: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(x, tf.int32)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 23), 0xFF) - 127


def _round(x, random, mantissa_bits, min_exponent, largest) -> tf.Tensor:
    exponent = tf.maximum(_exponent(x), min_exponent)
    spacing = tf.bitcast(
        tf.bitwise.left_shift(exponent - mantissa_bits + 127, 23), tf.float32
    )
    fraction_bits = 23 - mantissa_bits
    top = tf.bitwise.right_shift(random, 32 - fraction_bits)
    chance = tf.cast(top, tf.float32) / float(1 << fraction_bits)
    magnitude = tf.minimum(tf.floor(tf.abs(x) / spacing + chance) * spacing, largest)
    negative = tf.bitcast(x, tf.int32) < 0  # the sign bit: -0.0 stays -0.0
    rounded = tf.where(negative, -magnitude, magnitude)
    return tf.where(tf.math.is_finite(x), rounded, x)


def _encode_log8(x: tf.Tensor, random: tf.Tensor) -> tf.Tensor:
    levels = tf.constant(LOG8_LEVELS)
    # Clipped from below too: a positive number never becomes 0, "not seen yet".
    inside = tf.clip_by_value(x, LOG8_LEVELS[1], LOG8_LEVELS[254])
    code = tf.searchsorted(levels, inside, side="right") - 1
    low, high = tf.gather(levels, code), tf.gather(levels, tf.minimum(code + 1, 255))
    chance = tf.cast(tf.bitwise.right_shift(random, 8), tf.float32) * 2.0**-24
    up = chance < (tf.minimum(x, high) - low) / (high - low)
    code = tf.where(up, code + 1, code)
    code = tf.where(x >= LOG8_LEVELS[255], 255, code)
    return tf.cast(tf.where(x > 0, code, 0), tf.uint8)
