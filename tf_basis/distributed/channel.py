"""A group of dense gradients that travel alike: one flat buffer, one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.distributed.exchange import NewVariable, OneBitExchange
from tf_basis.distributed.policy import Way
from tf_basis.distributed.world import World

_FLOAT16_MAX = 65504.0


class Feedback(NamedTuple):
    """How one- and two-bit channels quantise; see `OneBitCompression`."""

    block: int = 2048
    clip_value: float | None = None
    reset_interval: int | None = 2000
    reset: str = "flush"
    warmup_steps: int = 0


def name_of(stem: str, way: Way) -> str:
    """The name of an object's channel for this way."""
    every = f"_every{way.interval}" if way.interval > 1 else ""
    return f"{stem}_{way.bits}bit{every}"


class Channel:
    """Averages the gradients of some variables over the ranks.

    Args:
      members: positions of the variables in the list that `flatten` is given.
      shapes: of the members.
      way: bits and interval.
      feedback: how one and two bits quantise.
      world: the ranks.
      name: names the collectives.
      variables: makes residuals and accumulators, `variables(name, elements, dtype)`.
    """

    def __init__(
        self,
        members: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        way: Way,
        feedback: Feedback,
        world: World,
        name: str,
        variables: NewVariable,
    ) -> None:
        self.members, self.shapes, self.way = list(members), list(shapes), way
        self.elements = sum(map(math.prod, shapes))
        self.world, self.name, self.feedback = world, name, feedback
        self.exchange = self.accumulated = None
        if way.bits < 16:
            self.exchange = OneBitExchange(
                self.elements,
                feedback.block,
                bits=way.bits,
                clip_value=feedback.clip_value,
                name=name,
                variables=lambda part, *spec: variables(f"{name}_{part}", *spec),
                world=world,
            )
        if way.interval > 1:
            self.accumulated = variables(
                f"{name}_accumulated", self.elements, tf.float32
            )

    @property
    def residuals(self) -> list[tf.Variable]:
        """What belongs to this rank alone."""
        own = [] if self.accumulated is None else [self.accumulated]
        return own + (self.exchange.residuals if self.exchange else [])

    def flatten(self, gradients: Sequence[tf.Tensor | None]) -> tf.Tensor:
        """The members' gradients in one float32 buffer; zeros where one is missing."""
        parts = []
        for member, shape in zip(self.members, self.shapes):
            gradient = gradients[member]
            if isinstance(gradient, tf.Tensor):
                parts.append(tf.reshape(tf.cast(gradient, tf.float32), [-1]))
            else:  # none, or slices, which travel as rows
                parts.append(tf.zeros([math.prod(shape)]))
        return tf.concat(parts, axis=0) if parts else tf.zeros([0])

    def split(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """The reverse of `flatten`, as float32."""
        # Slices share the buffer where they are aligned; those of tf.split are copies.
        sizes = [math.prod(s) for s in self.shapes]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            tf.reshape(tf.slice(flat, [start], [size]), shape)
            for start, size, shape in zip(starts, sizes, self.shapes)
        ]

    def due(self, step: tf.Tensor) -> tf.Tensor | bool:
        """Whether the variables take a step at communicated step `step`, from 0."""
        if self.way.interval == 1:
            return True
        return tf.equal((step + 1) % self.way.interval, 0)

    def mean(self, flat: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The mean over ranks, and over the interval; zeros where not `due`."""
        return self.when_due(flat, step, self._mean, lambda: tf.zeros_like(flat))

    def when_due(
        self,
        flat: tf.Tensor,
        step: tf.Tensor,
        exchange: Callable[[tf.Tensor, tf.Tensor], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """`exchange(mean over the interval, turn)`; turns count from 0."""
        if self.accumulated is None:
            return exchange(flat, step)
        interval = self.way.interval
        total = self.accumulated.assign_add(flat, read_value=True)

        def go():
            mean = tf.identity(total) / interval
            self.accumulated.assign(tf.zeros_like(self.accumulated))
            return exchange(mean, step // interval)

        return tf.cond(self.due(step), go, otherwise)

    def full_precision(self, flat: tf.Tensor) -> tf.Tensor:
        """The mean over ranks in float32, whatever the bits."""
        return self.world.total(flat, f"{self.name}/float32") / self.world.size

    def _mean(self, flat: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
        if self.exchange is None:
            return self.averaged(flat)
        if not self.feedback.warmup_steps:
            return self.quantised(flat, turn)
        return tf.cond(
            turn < self.feedback.warmup_steps,
            lambda: self.full_precision(flat),
            lambda: self.quantised(flat, turn),
        )

    def averaged(self, flat: tf.Tensor) -> tf.Tensor:
        """The mean over ranks in 16 or 32 bits."""
        if self.way.bits == 32:
            return self.full_precision(flat)
        return self._half_precision(flat)

    def _half_precision(self, flat: tf.Tensor) -> tf.Tensor:
        if self.world.size == 1:
            return flat
        # Saturated: the sum over ranks must fit too.
        limit = _FLOAT16_MAX / self.world.size
        half = tf.cast(tf.clip_by_value(flat, -limit, limit), tf.float16)
        total = self.world.total(half, f"{self.name}/float16")
        return tf.cast(total, tf.float32) / self.world.size

    def quantised(self, flat: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
        """The exchange with error feedback, or its reset where that is due."""
        interval, reset = self.feedback.reset_interval, self.feedback.reset
        if interval is None:
            return self.exchange.average(flat, finite=True)
        due = tf.equal((turn + 1) % interval, 0)
        if reset == "flush":
            return tf.cond(
                due,
                lambda: self.exchange.flush(flat),
                lambda: self.exchange.average(flat, finite=True),
            )
        mean = self.exchange.average(flat, finite=True)
        with tf.control_dependencies([mean]):
            tf.cond(due, self.exchange.clear, lambda: None)
        return mean
