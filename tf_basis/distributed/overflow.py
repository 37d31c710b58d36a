"""Whether residuals outgrow what they may hold."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.distributed.channel import Channel
from tf_basis.distributed.residuals import exchangers


class ResidualOverflowCheckMixin:
    """Warns when gradient and residual of an element reach `clip_value` in `fit`.

    u = g + e_w is clipped to ±clip_value before it is quantised, and what is beyond is
    lost: error feedback no longer repays it. Each rank looks at its own count of such
    elements (`clipped` of an exchange), and warns once for each channel (variables that
    travel alike), naming the variable with the largest residual. No rank waits for
    another.

    Args:
      every: after how many batches it looks again. Default 100.

    Attributes:
      clipped: elements clipped since `fit` began, by channel, as last looked at.

    Raises:
      ValueError: an argument breaks its rule; or in `fit`, no exchange of the model's
        optimizer has a `clip_value`, so that there is nothing to reach.

    Warns:
      UserWarning: once for each channel and `fit`.

    Example:

    >>> watch = ResidualOverflowCheck(every=10)
    >>> watch.clipped
    {}
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        hyperparameters.check("every", every, hyperparameters.count)
        self.every = every
        self.clipped: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self.clipped, self._batches = {}, 0
        self._before = {
            channel.name: _count(channel) for channel, _ in self._channels()
        }
        self._warned: set[str] = set()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        self._batches += 1
        if self._batches == 1 and not any(True for _ in self._channels()):
            raise ValueError(
                "ResidualOverflowCheck needs an optimizer that exchanges some variable "
                "in 1 or 2 bits, with clip_value given (a Policy leaves those of fewer "
                "than min_elements to 16 bits), received "
                f"'{getattr(self.model.optimizer, 'name', self.model.optimizer)}' "
                "without"
            )
        if self._batches % self.every == 0:
            self._look()

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._look()

    def _look(self) -> None:
        for channel, paths in self._channels():
            count = _count(channel) - self._before.get(channel.name, 0)
            self.clipped[channel.name] = count
            if count > 0 and channel.name not in self._warned:
                self._warned.add(channel.name)
                warnings.warn(_advice(channel, paths, count), stacklevel=2)

    def _channels(self) -> Iterator[tuple[Channel, list[str]]]:
        for _, part in exchangers(self.model.optimizer):
            paths = getattr(part, "paths", None)
            if paths is None:
                paths = [spec.path for spec in part.specs]
            for channel in part.channels:
                if (
                    channel.exchange is not None
                    and channel.exchange.clipped is not None
                ):
                    yield channel, [paths[m] for m in channel.members]


def _count(channel: Channel) -> int:
    return int(channel.exchange.clipped[0])


def _advice(channel: Channel, paths: list[str], count: int) -> str:
    limit = channel.exchange.clip_value
    errors = channel.split(tf.convert_to_tensor(channel.exchange.worker_error))
    largest = [
        float(tf.reduce_max(tf.abs(e))) if e.shape.num_elements() else 0.0
        for e in errors
    ]
    place = max(range(len(largest)), key=largest.__getitem__)
    return (
        f"{channel.name}: gradient and residual of {count} elements reached "
        f"clip_value={limit:g}, and what was beyond is lost; the largest residual now "
        f"is {largest[place]:.3g}, in '{paths[place]}'. If the loss jumps, lower the "
        "learning rate or reset_interval, or lengthen the warm-up; if it does not, "
        "raise clip_value, or let this variable travel in 16 bits by a rule of the "
        "policy"
    )


@functools.cache
def define(flavor_name: str) -> type:
    """`ResidualOverflowCheck` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": ResidualOverflowCheckMixin.__doc__, "__module__": __name__}
    name = "ResidualOverflowCheck"
    return type(name, (ResidualOverflowCheckMixin, base), members)
