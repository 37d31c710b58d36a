"""What ranks tell each other of how well bits say their gradients, and what follows.

A group is what travels alike: one channel. In every step each rank has four numbers of
each group, Σu, Σu², Σ(u − q)² and the number of clipped elements. They travel in the
gather of the next step: no collective of their own, and the same sums on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed.exchange import NewVariable

NAMES = ("mean", "variance", "relative_error", "residual_norm", "clipped_share")
_PER_GROUP = 4
_SHARE = hyperparameters.real("between 0 and 1", lambda v: 0 < v < 1)
_ABOVE_0 = hyperparameters.real("above 0", lambda v: v > 0)
_RULES = {
    "floor": _SHARE,
    "smoothing": _SHARE,
    "raise_above": _ABOVE_0,
    "lower_below": _ABOVE_0,
    "patience": hyperparameters.integer("of at least 1", lambda v: v >= 1),
}


def _check(settings: dict[str, Any], path: str = "") -> None:
    for name, value in settings.items():
        hyperparameters.check(path + name, value, _RULES[name])
    if "patience" in settings and settings["lower_below"] >= settings["raise_above"]:
        raise ValueError(
            f"{path}lower_below must be below raise_above, received "
            f"{settings['lower_below']} and {settings['raise_above']}"
        )


def _check_made(settings: AdaptiveRate | AdaptiveBits) -> None:
    _check(settings._asdict())


@hyperparameters.checked_when_made(_check_made)
class AdaptiveRate(NamedTuple):
    r"""Learns the less, the less bits say: rate · max(floor, 1 − error).

    error is the relative error ‖u − q‖²/‖u‖² of all groups together and over all ranks,
    as an exponential mean over steps: error ← smoothing·error + (1 − smoothing)·new.

    Args:
      floor: the least factor, between 0 and 1. Default 0.5.
      smoothing: between 0 and 1. Default 0.9.

    Raises:
      ValueError: an argument breaks its rule.
    """

    floor: float = 0.5
    smoothing: float = 0.9


@hyperparameters.checked_when_made(_check_made)
class AdaptiveBits(NamedTuple):
    """Lets a group of one bit travel in two while one bit says too little.

    Args:
      raise_above: where the relative error was above it in `patience` exchanges in a
        row, two bits travel. Default 0.95.
      lower_below: where the relative error in two bits was below it in `patience`
        exchanges in a row, one bit does. Default 0.75.
      patience: at least 1. Default 100.

    Raises:
      ValueError: an argument breaks its rule, or lower_below is not below raise_above.
    """

    raise_above: float = 0.95
    lower_below: float = 0.75
    patience: int = 100


def checked(argument: str, value: Any, cls: type) -> Any:
    """An `AdaptiveRate` or `AdaptiveBits`, or None.

    Raises:
      ValueError: `value` is not None, a boolean, the settings or a dict of them; or a
        setting breaks its rule.
    """
    if value is None or value is False:
        return None
    if value is True:
        return cls()
    if isinstance(value, dict) and set(value) <= set(cls._fields):
        value = {**cls._field_defaults, **value}
        _check(value, f"{argument}.")
        return cls(**value)
    if not isinstance(value, cls):
        raise ValueError(
            f"{argument} must be None, True, an {cls.__name__} or a dict of "
            f"{list(cls._fields)}, received {value!r}"
        )
    return value


class Metadata:
    """Statistics of the groups of an optimizer, and what adapts to them.

    Args:
      channels: those whose exchange keeps sums.
      ranks: how many there are; the world's, as it may change.
      rate: settings, or None.
      bits: settings, or None.
      name: of its variables.
      variables: makes them, `variables(name, elements, dtype)`; equal on all ranks.
    """

    def __init__(
        self,
        channels: Sequence[Any],
        rate: AdaptiveRate | None,
        bits: AdaptiveBits | None,
        name: str,
        variables: NewVariable,
    ) -> None:
        self.channels = [
            c
            for c in channels
            if c.exchange is not None and c.exchange.sums is not None
        ]
        self.rate, self.bits = rate, bits
        size = len(self.channels) * len(NAMES)
        self._last = variables(f"{name}_quantization", size, tf.float64)
        self._error = self._streaks = None
        if rate is not None:
            self._error = variables(f"{name}_quantization_error", 1, tf.float64)
        if bits is not None:
            groups = len(self.channels)
            self._streaks = variables(f"{name}_quantization_streaks", groups, tf.int64)

    def numbers(self) -> list[tf.Tensor]:
        """What this rank tells the others, float64 scalars."""
        return [
            number
            for channel in self.channels
            for number in tf.unstack(tf.identity(channel.exchange.sums), _PER_GROUP)
        ]

    def update(self, everyone: tf.Tensor) -> None:
        """Takes what all ranks told, [ranks, 4·groups]; call it on all ranks."""
        if not self.channels:
            return
        totals = tf.reshape(tf.reduce_sum(everyone, axis=0), [-1, _PER_GROUP])
        ranks = everyone.shape[0]
        rows, old = [], tf.reshape(self._last, [-1, len(NAMES)])
        for number, channel in enumerate(self.channels):
            new = _described(totals[number], channel.elements, ranks)
            # All zeros: it was no step of bits.
            rows.append(tf.where(totals[number, 1] > 0, new, old[number]))
            exchange = channel.exchange
            exchange.sums.assign(tf.zeros_like(exchange.sums))
        last = tf.stack(rows)
        self._last.assign(tf.reshape(last, [-1]))
        if self.rate is not None:
            self._smooth(totals)
        if self.bits is not None:
            self._adapt(totals, last)

    def _smooth(self, totals: tf.Tensor) -> None:
        squares, errors = tf.reduce_sum(totals[:, 1]), tf.reduce_sum(totals[:, 2])
        new = tf.math.divide_no_nan(errors, squares)
        old, keep = tf.reshape(self._error, []), self.rate.smoothing
        first = tf.equal(old, 0)
        mixed = tf.where(first, new, keep * old + (1 - keep) * new)
        self._error.assign(tf.reshape(tf.where(squares > 0, mixed, old), [1]))

    def _adapt(self, totals: tf.Tensor, last: tf.Tensor) -> None:
        streaks = []
        for number, channel in enumerate(self.channels):
            exchange, streak = channel.exchange, self._streaks[number]
            if exchange.wide is None:
                streaks.append(streak)
                continue
            error = last[number, NAMES.index("relative_error")]
            wide = tf.equal(exchange.wide[0], 1)
            beyond = tf.where(
                wide, error < self.bits.lower_below, error > self.bits.raise_above
            )
            now = tf.where(beyond, streak + 1, 0)
            now = tf.where(totals[number, 1] > 0, now, streak)
            switch = now >= self.bits.patience
            streaks.append(tf.where(switch, tf.zeros_like(now), now))
            turned = tf.where(switch, 1 - exchange.wide, exchange.wide)
            exchange.wide.assign(turned)
            if exchange.age is not None:  # scales of the other width are old
                exchange.age.assign(
                    tf.where(switch, tf.zeros_like(exchange.age), exchange.age)
                )
        self._streaks.assign(tf.stack(streaks))

    def factor(self) -> tf.Tensor:
        """By what the learning rate is multiplied, float32, equal on all ranks."""
        if self.rate is None:
            return tf.constant(1.0)
        error = tf.reshape(self._error, [])
        return tf.cast(tf.maximum(1 - error, self.rate.floor), tf.float32)

    def report(self) -> dict[str, dict[str, float]]:
        """The last statistics of each group, by its name; now, not in a graph."""
        rows = self._last.numpy().reshape([-1, len(NAMES)]).tolist()
        found = {}
        for channel, row in zip(self.channels, rows):
            if not any(row):
                continue  # nothing has been quantised yet
            bits = channel.way.bits
            if channel.exchange.wide is not None:
                bits = 1 + int(channel.exchange.wide[0])
            found[channel.label] = {**dict(zip(NAMES, row)), "bits": float(bits)}
        return found


def _described(totals: tf.Tensor, elements: int, ranks: int) -> tf.Tensor:
    """The numbers of `NAMES` from sums over all ranks."""
    count = float(max(1, elements * ranks))
    mean = totals[0] / count
    return tf.stack(
        [
            mean,
            tf.maximum(totals[1] / count - tf.square(mean), 0),
            tf.math.divide_no_nan(totals[2], totals[1]),
            tf.sqrt(totals[2] / ranks),
            totals[3] / count,
        ]
    )
