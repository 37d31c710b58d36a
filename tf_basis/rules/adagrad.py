"""Adagrad: its numbers for buckets, and Keras's step for dense variables."""

from __future__ import annotations

import tensorflow as tf

from tf_basis.rules.bucket_rule import BucketRule


def bucket_rule(**modes) -> BucketRule:
    """BasisAdagrad's numbers: V <- V + g^2; `modes`: fields of `BucketRule`."""
    return BucketRule(second=(1.0, 1.0), energy=(1.0, 1.0), **modes)


def dense_step(
    variable: tf.Tensor,
    gradient: tf.Tensor,
    accumulator: tf.Tensor,
    learning_rate: tf.Tensor,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keras's Adagrad, operation by operation.  Returns variable and accumulator."""
    dtype = variable.dtype
    rate, gradient = tf.cast(learning_rate, dtype), tf.cast(gradient, dtype)
    accumulator += tf.square(gradient)
    variable -= (rate * gradient) / tf.sqrt(accumulator + epsilon)
    return variable, accumulator
