"""SGD with momentum: its numbers for buckets, and Keras's step for dense variables."""

from __future__ import annotations

import tensorflow as tf

from tf_basis.rules.bucket_rule import BucketRule


def bucket_rule(factor: float, **modes) -> BucketRule:
    """BasisSGD's numbers: M <- factor * M + g; `modes`: fields of `BucketRule`."""
    return BucketRule(first=(factor, 1.0), second=None, **modes)


def dense_step(
    variable: tf.Tensor,
    gradient: tf.Tensor,
    momentum: tf.Tensor | None,
    learning_rate: tf.Tensor,
    factor: float,
    nesterov: bool,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Keras's SGD, operation by operation; without `momentum` plain descent."""
    dtype = variable.dtype
    rate, gradient = tf.cast(learning_rate, dtype), tf.cast(gradient, dtype)
    if momentum is None:
        return variable - gradient * rate, None
    momentum = momentum * factor - gradient * rate
    if nesterov:
        return variable + (momentum * factor - gradient * rate), momentum
    return variable + momentum, momentum
