"""Adam: its numbers for buckets, and Keras's exact step for dense variables."""

from __future__ import annotations

import tensorflow as tf

from tf_basis.rules.bucket_rule import BucketRule


def bucket_rule(
    beta_1: float, beta_2: float, scalar_decay: float, **modes
) -> BucketRule:
    """BasisAdam's numbers; `modes` are further fields of `BucketRule`."""
    return BucketRule(
        first=(beta_1, 1.0 - beta_1),
        second=(beta_2, 1.0 - beta_2),
        energy=(scalar_decay, 1.0 - scalar_decay),
        **modes,
    )


def dense_step(
    variable: tf.Tensor,
    gradient: tf.Tensor,
    momentum: tf.Tensor,
    velocity: tf.Tensor,
    step: tf.Tensor,
    learning_rate: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Keras's Adam, operation by operation, so that the bits agree with it.

    `step` counts from 1.  Returns the new variable, momentum and velocity.
    """
    dtype = variable.dtype
    step, rate = tf.cast(step, dtype), tf.cast(learning_rate, dtype)
    gradient = tf.cast(gradient, dtype)
    beta_1_power = tf.pow(tf.cast(beta_1, dtype), step)
    beta_2_power = tf.pow(tf.cast(beta_2, dtype), step)
    alpha = rate * tf.sqrt(1 - beta_2_power) / (1 - beta_1_power)
    momentum += (gradient - momentum) * (1 - beta_1)
    velocity += (tf.square(gradient) - velocity) * (1 - beta_2)
    variable -= (momentum * alpha) / (tf.sqrt(velocity) + epsilon)
    return variable, momentum, velocity
