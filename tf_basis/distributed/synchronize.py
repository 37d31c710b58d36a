"""Brings ranks together that step alone between exchanges (`local_steps`)."""

from __future__ import annotations

import functools
from typing import Any

from tf_basis.adapters import keras_modules
from tf_basis.distributed.residuals import exchangers


def synchronize(optimizer: Any) -> None:
    """Exchanges now what ranks have done alone; call it on all ranks.

    For an `OneBitAdam` with `local_steps`, alone or inside another optimizer: between
    two exchanges the variables of the ranks differ. Call it before they are saved by
    one rank, evaluated or compared. Where ranks are together already, or no optimizer
    has `local_steps`, it does nothing.

    Args:
      optimizer: an optimizer of Keras 3 or tf_keras, or a compiled model.

    Raises:
      ValueError: it is neither.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    >>> optimizer = OneBitAdam(warmup_steps=1, local_steps=4)
    >>> optimizer.build(model.trainable_variables)
    >>> synchronize(optimizer)
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    keras_modules.flavor_of(optimizer)  # or an error
    for owner, _ in exchangers(optimizer):
        if hasattr(owner, "synchronize"):
            owner.synchronize()


def apart(optimizer: Any) -> bool:
    """Whether variables of the ranks may differ now; the same on all ranks."""
    return any(getattr(owner, "apart", False) for owner, _ in exchangers(optimizer))


class SynchronizeCallbackMixin:
    """Calls `synchronize` in `fit`: before a validation, and at the end of every epoch.

    Put it before the callbacks that save or compare.

    Example:

    >>> callbacks = [SynchronizeCallback()]
    """

    def on_test_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._together()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del epoch, logs
        self._together()

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._together()

    def _together(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            synchronize(optimizer)


@functools.cache
def define(flavor_name: str) -> type:
    """`SynchronizeCallback` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": SynchronizeCallbackMixin.__doc__, "__module__": __name__}
    return type("SynchronizeCallback", (SynchronizeCallbackMixin, base), members)
