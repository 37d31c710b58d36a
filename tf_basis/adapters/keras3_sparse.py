"""What Keras 3 lacks for gradients that are IndexedSlices."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class RowsVariable(keras.Variable):
    """An optimizer variable whose number of rows changes; it starts with none."""

    def _validate_shape(self, shape: tuple) -> tuple:
        return (None, *shape[1:])

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._value = tf.Variable(
            lambda: tf.zeros([0, *self._shape[1:]], self._dtype),
            shape=self._shape,
            dtype=self._dtype,
            trainable=False,
            name=self.name,
        )

    @property
    def shape(self) -> tf.TensorShape:
        """With the rows of the moment, where there is one (Keras counts them)."""
        if tf.executing_eagerly():
            return tf.convert_to_tensor(self._value).shape
        return self._value.shape

    def assign(self, value: Any) -> tf.Tensor:
        """Takes any number of rows."""
        value = tf.cast(tf.convert_to_tensor(value), self._dtype)
        self._value.assign(value)
        return value


class DivisibleSlices(tf.IndexedSlices):
    """IndexedSlices that can be divided by a scalar, as Keras unscales gradients."""

    def __truediv__(self, scale: Any) -> tf.IndexedSlices:
        values = self.values / tf.cast(scale, self.values.dtype)
        return tf.IndexedSlices(values, self.indices, self.dense_shape)


def divisible(gradient: Any) -> Any:
    """The gradient, such that `gradient / scale` works."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return DivisibleSlices(gradient.values, gradient.indices, gradient.dense_shape)


def check_rows_in_loss_scaling() -> None:
    """Makes Keras's LossScaleOptimizer look at the values of IndexedSlices alone.

    Its own check makes them dense, and where an id occurs twice it sees the last of
    the values only: a NaN in another one gets through. And where the optimizer inside
    waits for other ranks, all ranks must decide alike whether to step.
    """
    optimizer = keras.optimizers.LossScaleOptimizer
    original = optimizer.check_finite
    if getattr(original, "_checks_rows", False):
        return

    def check_finite(self, grads):
        finite = original(
            self, [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        )
        agree = getattr(self.inner_optimizer, "_all_ranks_finite", None)
        return finite if agree is None else agree(finite)

    check_finite._checks_rows = True
    optimizer.check_finite = check_finite
