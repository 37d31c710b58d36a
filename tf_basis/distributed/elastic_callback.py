"""Keras callback that commits an `ElasticState` in the course of `fit`."""

from __future__ import annotations

import functools
from typing import Any

from tf_basis import hyperparameters
from tf_basis.adapters import keras_modules

_EVERY = hyperparameters.integer("of at least 1", lambda v: v >= 1)


class ElasticCallbackMixin:
    """Commits the state, and tells it how far training has come.

    `state.epoch` is the epoch to go on with and `state.batch` how many of its batches
    are done, where the state has these values: start it with
    `ElasticState(model, epoch=0, batch=0)`. All ranks must have the callback in the
    same place of the list, the last one: what comes before it has then seen the batch.

    Args:
      state: an `ElasticState`.
      every: commits every so many batches, and at the ends of epochs. A commit copies
        the whole state, and lets ranks join and leave. Default 100.

    Raises:
      ValueError: an argument breaks its rule.
    """

    def __init__(self, state: Any, every: int = 100) -> None:
        super().__init__()
        hyperparameters.check("every", every, _EVERY)
        if not hasattr(state, "commit"):
            raise ValueError(f"state must be an ElasticState, received {state!r}")
        self.state, self.every = state, every
        self._done = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._done = getattr(self.state, "batch", 0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        done = self._done + batch + 1
        if hasattr(self.state, "batch"):
            self.state.batch = done
        if done % self.every == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._done = 0
        for name, value in (("epoch", epoch + 1), ("batch", 0)):
            if hasattr(self.state, name):
                setattr(self.state, name, value)
        self.state.commit()


@functools.cache
def define(flavor_name: str) -> type:
    """`ElasticCallback` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": ElasticCallbackMixin.__doc__, "__module__": __name__}
    return type("ElasticCallback", (ElasticCallbackMixin, base), members)
