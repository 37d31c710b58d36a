"""A group of dense gradients that travel alike: one flat buffer, one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.distributed.exchange import NewVariable, OneBitExchange
from tf_basis.distributed.metadata import AdaptiveBits, AdaptiveRate
from tf_basis.distributed.policy import Way
from tf_basis.distributed.world import World
from tf_basis.ops.quantize_ops import joined

# A vector in pieces, or one that has not been cut.
Pieces = Sequence[tf.Tensor]
_FLOAT16_MAX = 65504.0


class Feedback(NamedTuple):
    """How one- and two-bit channels quantise; see `OneBitCompression`."""

    block: int = 2048
    clip_value: float | None = None
    reset_interval: int | None = 2000
    reset: str = "flush"
    warmup_steps: int = 0
    amplitude_interval: int = 1
    statistics: bool = False
    adaptive_bits: AdaptiveBits | None = None
    adaptive_rate: AdaptiveRate | None = None
    delay: int = 0
    staleness_decay: float = 1.0

    @property
    def measures(self) -> bool:
        """Whether exchanges keep statistics."""
        adapts = self.adaptive_bits is not None or self.adaptive_rate is not None
        return self.statistics or adapts

    def get_config(self) -> dict[str, Any]:
        """Ready for JSON."""
        values = self._asdict()
        for name in ("adaptive_bits", "adaptive_rate"):
            if values[name] is not None:
                values[name] = values[name]._asdict()
        return values


def name_of(stem: str, way: Way) -> str:
    """The name of an object's channel for this way."""
    return f"{stem}_{label_of(way)}"


def label_of(way: Way) -> str:
    """What a channel is called in reports."""
    every = f"_every{way.interval}" if way.interval > 1 else ""
    group = f"_{way.group}" if way.group else ""
    return f"{way.bits}bit{every}{group}"


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
        sizes = [math.prod(s) for s in shapes]
        self.elements = sum(sizes)
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.world, self.name, self.feedback = world, name, feedback
        self.label = label_of(way)
        self.exchange = self.accumulated = self.pending = None
        if way.bits < 16:
            self.exchange = OneBitExchange(
                self.elements,
                feedback.block,
                bits=way.bits,
                clip_value=feedback.clip_value,
                amplitude_interval=feedback.amplitude_interval,
                adaptive=feedback.adaptive_bits is not None and way.bits == 1,
                statistics=feedback.measures,
                name=name,
                variables=lambda part, *spec: variables(f"{name}_{part}", *spec),
                world=world,
            )
        if way.interval > 1:
            self.accumulated = variables(
                f"{name}_accumulated", self.elements, tf.float32
            )
        if feedback.delay:
            self.pending = variables(f"{name}_pending", self.elements, tf.float32)

    @property
    def residuals(self) -> list[tf.Variable]:
        """What belongs to this rank alone."""
        own = [v for v in (self.accumulated, self.pending) if v is not None]
        return own + (self.exchange.residuals if self.exchange else [])

    def pieces(self, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
        """The members' gradients as float32 vectors; zeros where one is missing."""
        parts = []
        for member, shape in zip(self.members, self.shapes):
            gradient = gradients[member]
            if isinstance(gradient, tf.Tensor):
                parts.append(tf.reshape(tf.cast(gradient, tf.float32), [-1]))
            else:  # none, or slices, which travel as rows
                parts.append(tf.zeros([math.prod(shape)]))
        return parts or [tf.zeros([0])]

    def split(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """The members' parts of a flat buffer, as float32."""
        # Slices share the buffer where they are aligned; those of tf.split are copies.
        return [
            tf.reshape(tf.slice(flat, [start], [math.prod(shape)]), shape)
            for start, shape in zip(self.starts, self.shapes)
        ]

    def due(self, step: tf.Tensor) -> tf.Tensor | bool:
        """Whether the variables take a step at communicated step `step`, from 0."""
        if self.way.interval == 1:
            return True
        return tf.equal((step + 1) % self.way.interval, 0)

    def mean(self, pieces: Pieces, step: tf.Tensor) -> tf.Tensor:
        """The mean over ranks, and over the interval; zeros where not `due`."""
        return self.when_due(
            pieces, step, self._mean, lambda: tf.zeros([self.elements])
        )

    def when_due(
        self,
        pieces: Pieces,
        step: tf.Tensor,
        exchange: Callable[[Pieces, tf.Tensor], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """`exchange(mean over the interval, turn)`; turns count from 0."""
        if self.accumulated is None:
            return exchange(pieces, step)
        interval = self.way.interval
        total = self.accumulated.assign_add(joined(pieces), read_value=True)

        def go():
            mean = tf.identity(total) / interval
            self.accumulated.assign(tf.zeros_like(self.accumulated))
            return exchange([mean], step // interval)

        return tf.cond(self.due(step), go, otherwise)

    def delay(self, pieces: Pieces) -> None:
        """Keeps this step's gradient for the exchange of the next one."""
        flat = joined(pieces)
        if self.feedback.staleness_decay != 1:
            flat = flat * self.feedback.staleness_decay**self.feedback.delay
        self.pending.assign(flat)

    def full_precision(self, pieces: Pieces) -> tf.Tensor:
        """The mean over ranks in float32, whatever the bits."""
        total = self.world.total(joined(pieces), f"{self.name}/float32")
        return total / self.world.size

    def _mean(self, pieces: Pieces, turn: tf.Tensor) -> tf.Tensor:
        if self.exchange is None:
            return self.averaged(pieces)
        if not self.feedback.warmup_steps:
            return self.quantised(pieces, turn)
        return tf.cond(
            turn < self.feedback.warmup_steps,
            lambda: self.full_precision(pieces),
            lambda: self.quantised(pieces, turn),
        )

    def averaged(self, pieces: Pieces) -> tf.Tensor:
        """The mean over ranks in 16 or 32 bits."""
        if self.way.bits == 32:
            return self.full_precision(pieces)
        flat = joined(pieces)
        if self.world.size == 1:
            return flat
        # Saturated: the sum over ranks must fit too.
        limit = _FLOAT16_MAX / self.world.size
        half = tf.cast(tf.clip_by_value(flat, -limit, limit), tf.float16)
        total = self.world.total(half, f"{self.name}/float16")
        return tf.cast(total, tf.float32) / self.world.size

    def quantised(self, pieces: Pieces, turn: tf.Tensor) -> tf.Tensor:
        """The exchange with error feedback, or its reset where that is due."""
        return self.unless_reset(
            turn,
            lambda: self.exchange.average(pieces, finite=True),
            lambda: self.exchange.flush(pieces),
        )

    def unless_reset(
        self,
        turn: tf.Tensor,
        exchange: Callable[[], tf.Tensor],
        flush: Callable[[], tf.Tensor],
    ) -> tf.Tensor:
        """`exchange()`, which quantises; or, where residuals are due, `flush()`."""
        interval, reset = self.feedback.reset_interval, self.feedback.reset
        if interval is None:
            return exchange()
        due = tf.equal((turn + 1) % interval, 0)
        if reset == "flush":
            return tf.cond(due, flush, exchange)
        done = exchange()
        with tf.control_dependencies([done]):
            tf.cond(due, self.exchange.clear, lambda: None)
        return done
