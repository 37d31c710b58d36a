"""Arithmetic that the parts of a step share."""

from __future__ import annotations

import tensorflow as tf


def correction(rule, keep: float, steps: tf.Tensor) -> tf.Tensor:
    """1 / (1 - keep^steps) in float64, or 1."""
    count = tf.cast(steps, tf.float64)
    if not rule.bias_correction:
        return tf.ones_like(count)
    return 1.0 / (1.0 - power(keep, tf.maximum(count, 1.0)))


def power(base: float, exponent: tf.Tensor) -> tf.Tensor:
    """base ** exponent in float64."""
    return tf.pow(tf.constant(base, tf.float64), tf.cast(exponent, tf.float64))


def saturating_add(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """a + b in int32, at most its largest number."""
    return a + tf.minimum(tf.cast(b, tf.int32), tf.int32.max - a)


def saturated(x: tf.Tensor) -> tf.Tensor:
    """At most the largest float32, for squares; NaN stays NaN.

    Large gradients must not make second moments infinite, which no later step would
    undo.
    """
    largest = tf.constant(tf.float32.max, x.dtype)
    return tf.where(x > largest, largest, x)
