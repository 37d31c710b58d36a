"""The steps of `OneBitAdam`: exact in the warm-up, compressed after it."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed import control, rows, watch
from tf_basis.distributed.channel import Channel, Pieces
from tf_basis.ops import onebit_ops
from tf_basis.ops.onebit_ops import Scales, Target
from tf_basis.ops.quantize_ops import joined

_DEFAULT_WARMUP = 500
# Tang et al.: the variance has settled when its norm grows by less than this ratio
# in the 1/(1 − β2) steps that it remembers.
_SETTLED = 0.96


def _is_ascending(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and all(_BETWEEN.accepts(v) for v in value)
        and list(value) == sorted(set(value))
    )


_BETWEEN = hyperparameters.real("between 0 and 1", lambda v: 0 < v < 1)
RULES = {
    "warmup_steps": hyperparameters.Rule(
        "None, 'auto' or an integer of at least 1",
        lambda v: (
            v is None
            or v == "auto"
            or (isinstance(v, numbers.Integral) and v is not True and v >= 1)
        ),
    ),
    "total_steps": hyperparameters.integer(
        "of at least 1", lambda v: v >= 1, optional=True
    ),
    "moments": hyperparameters.choice("frozen", "corrected"),
    "gamma": hyperparameters.Rule(
        "a list of at least one number in [0, 1)",
        lambda v: (
            isinstance(v, (list, tuple))
            and len(v) > 0
            and all(hyperparameters.RULES["beta_1"].accepts(g) for g in v)
        ),
    ),
    "boundaries": hyperparameters.Rule(
        "a list of numbers between 0 and 1, each above the one before", _is_ascending
    ),
    "local_steps": hyperparameters.integer("of at least 1", lambda v: v >= 1),
    "local_steps_doubling": hyperparameters.integer(
        "of at least 1", lambda v: v >= 1, optional=True
    ),
    "timeout": watch.TIMEOUT_RULE,
}


def check_schedule(gamma: Sequence[float], boundaries: Sequence[float]) -> None:
    """Raises ValueError unless there is one γ more than there are boundaries."""
    if len(gamma) != len(boundaries) + 1:
        raise ValueError(
            "gamma must have one number more than boundaries, received "
            f"gamma={list(gamma)} and boundaries={list(boundaries)}"
        )


class OneBitRuleMixin:
    """What is done with the gradients of a step; see `OneBitAdamMixin`.

    It works on the state that `_build_collective` left in `self._exchange`.
    """

    # ---- the rule ------------------------------------------------------------------

    def _step(self, gradients: Sequence[Any], told: control.Control) -> None:
        """One step of all variables, on all ranks."""
        state = self._exchange
        if self.warmup_steps == "auto":
            tf.cond(self._looks(), lambda: self._decide(told), lambda: None)
        before = tf.reshape(state.steps, [])
        gradients = self._without_rows(gradients, told)
        for number, channel in enumerate(state.channels):
            moments = state.moments[number]
            if state.early:
                early = state.early[number]
                self._step_delayed(channel, moments, gradients, before, early)
            else:
                self._step_channel(channel, moments, gradients, before)
        state.steps.assign_add([1])

    def _without_rows(self, gradients: Sequence[Any], told: control.Control) -> list:
        """Means of IndexedSlices as dense gradients, marked so that none is sent."""
        state = self._exchange
        sliced = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        means = rows.mean(
            [gradients[i] for i in sliced],
            tf.gather(told.rows, sliced, axis=1) if sliced else told.rows,
            state.world,
            state.name,
            self.compression.sparse_values,
        )
        out: list = list(gradients)
        for i, mean in zip(sliced, means):
            shape = state.shapes[i]
            dense = tf.math.unsorted_segment_sum(mean.values, mean.indices, shape[0])
            out[i] = Averaged(tf.reshape(dense, shape))
        return out

    def _step_channel(self, channel, moments, gradients, before) -> None:
        targets = self._targets(channel, gradients)
        if not targets:
            return
        pieces, exact = self._pieces(channel, gradients)

        def go(pieces: Pieces, turn: tf.Tensor) -> tf.Tensor:
            if exact:
                self._step_exactly(moments, targets, joined(pieces), turn + 1)
            elif channel.exchange is None:
                mean = channel.averaged(pieces)
                self._step_exactly(moments, targets, mean, turn + 1)
            else:
                self._step_compressed(channel, moments, targets, pieces, turn)
            return done()

        channel.when_due(pieces, before, go, done)

    def _targets(self, channel: Channel, gradients: list) -> list[Target]:
        """The channel's variables that have gradients."""
        state, targets = self._exchange, []
        for member, start in zip(channel.members, channel.starts):
            if gradients[member] is None:
                continue
            variable = state.variables[member]
            decays = self.weight_decay is not None and self._use_weight_decay(variable)
            target = self._adapter.tensorflow_variable(variable)
            targets.append(Target(target, start, bool(decays)))
        return targets

    def _pieces(self, channel: Channel, gradients: list) -> tuple[Pieces, bool]:
        """The channel's vector, and whether it has been averaged already."""
        averaged = [m for m in channel.members if isinstance(gradients[m], Averaged)]
        plain = [g.value if isinstance(g, Averaged) else g for g in gradients]
        sums = channel.accumulated is not None
        if not averaged or sums or channel.exchange is not None:
            # Equal on all ranks, it is what each rank puts in, and its own mean.
            return channel.pieces(plain), False
        rest = [
            m for m in channel.members if m not in averaged and gradients[m] is not None
        ]
        if rest:
            sent = self._channel(channel.way, rest)
            means = sent.split(sent.averaged(sent.pieces(plain)))
            for member, mean in zip(rest, means):
                plain[member] = mean
        return channel.pieces(plain), True

    def _rates(self) -> tuple[tf.Tensor, tf.Tensor]:
        """η, and what decays in a step."""
        rate = tf.cast(self.learning_rate, tf.float32)
        if self._exchange.metadata is not None:
            rate = rate * self._exchange.metadata.factor()
        return rate, rate * (self.weight_decay or 0.0)

    def _step_exactly(self, moments, targets, gradient, step: tf.Tensor) -> None:
        """Adam's own step; `step` counts from 1."""
        first, second = moments
        m = first.assign(
            self.beta_1 * first + (1 - self.beta_1) * gradient, read_value=True
        )
        v = second.assign(
            self.beta_2 * second + (1 - self.beta_2) * tf.square(gradient),
            read_value=True,
        )
        delta = (m / _correction(self.beta_1, step)) / (
            tf.sqrt(v / _correction(self.beta_2, step)) + self.epsilon
        )
        rate, decay = self._rates()
        onebit_ops.move(targets, delta * rate, decay)

    def _step_compressed(self, channel, moments, targets, pieces, turn) -> None:
        step = turn + 1
        last_turn = self._last_turn(channel.way.interval)
        warm = tf.equal(last_turn, 0) | (step <= last_turn)

        def warm_up() -> tf.Tensor:
            mean = channel.full_precision(pieces)
            self._step_exactly(moments, targets, mean, step)
            return done()

        def frozen() -> tf.Tensor:
            self._step_frozen(channel, moments, targets, pieces, turn, last_turn)
            return done()

        def corrected() -> tf.Tensor:
            self._step_corrected(channel, moments, targets, pieces, turn)
            return done()

        tf.cond(warm, warm_up, frozen if self.moments == "frozen" else corrected)

    def _last_turn(self, interval: int) -> tf.Tensor:
        """The end of the warm-up in a channel's own steps; 0: not decided."""
        last = self._frozen_at()
        # At least one, for there must be a variance.
        return tf.where(last > 0, tf.maximum(last // interval, 1), last)

    def _is_warm(self, turn: tf.Tensor, interval: int) -> tf.Tensor:
        last_turn = self._last_turn(interval)
        return tf.equal(last_turn, 0) | (turn < last_turn)

    def _scales(self, turn: tf.Tensor, last_turn: tf.Tensor) -> Scales:
        rate, decay = self._rates()
        return Scales(
            first=rate / _correction(self.beta_1, turn + 1),
            root=1.0 / tf.sqrt(_correction(self.beta_2, last_turn)),
            decay=decay,
            epsilon=self.epsilon,
        )

    def _step_frozen(self, channel, moments, targets, pieces, turn, last_turn) -> None:
        first, second = moments
        scales = self._scales(turn, last_turn)
        exchange = channel.exchange

        def step(bits: int) -> tf.Tensor:
            message = exchange.message(pieces, first, self.beta_1, bits)
            form = {"bits": bits, "block": exchange.block}
            onebit_ops.step_frozen(first, second, message, targets, scales, **form)
            return done()

        def sent() -> tf.Tensor:
            return exchange.with_bits(step)

        def flushed() -> tf.Tensor:
            mine = self.beta_1 * first + (1 - self.beta_1) * joined(pieces)
            m = first.assign(channel.exchange.flush(mine), read_value=True)
            delta = onebit_ops.change(m, second, scales)
            onebit_ops.move(targets, delta, scales.decay)
            return done()

        channel.unless_reset(turn, sent, flushed)

    # ---- corrected -----------------------------------------------------------------

    def _step_corrected(self, channel, moments, targets, pieces, turn) -> None:
        mean = channel.quantised(pieces, turn)
        step = (turn + 1) * channel.way.interval
        self._move_corrected(moments, targets, mean, step)

    def _move_corrected(self, moments, targets, mean, step: tf.Tensor) -> None:
        first, second = moments
        gamma = self._gamma(step)
        m = first.assign(gamma * first + (1 - gamma) * mean, read_value=True)
        v = second.assign(
            gamma * second + (1 - gamma) * tf.square(mean), read_value=True
        )
        rate, decay = self._rates()
        onebit_ops.move(targets, m / (tf.sqrt(v) + self.epsilon) * rate, decay)

    def _gamma(self, step: tf.Tensor) -> tf.Tensor:
        gamma = tf.constant(self.gamma[-1])
        for end, value in reversed(list(zip(self.boundaries, self.gamma))):
            # As the decimal it was written as: 0.1 · total_steps is not exact.
            last = int(Fraction(str(end)) * self.total_steps)
            gamma = tf.where(step <= last, tf.constant(value), gamma)
        return gamma

    # ---- the end of the warm-up ----------------------------------------------------

    def _norms(self) -> list[tf.Tensor]:
        """Of the second moments; rank 0's decides when the warm-up ends."""
        if self.warmup_steps != "auto":
            return []
        state = self._exchange

        def norm() -> tf.Tensor:
            seconds = [
                tf.reduce_sum(tf.cast(v, tf.float64))
                for c, (_, v) in zip(state.channels, state.moments)
                if c.exchange is not None
            ]
            return tf.add_n([tf.zeros([], tf.float64), *seconds])

        return [tf.cond(self._looks(), norm, lambda: tf.zeros([], tf.float64))]

    def _frozen_at(self) -> tf.Tensor:
        if self.warmup_steps == "auto":
            return tf.reshape(self._exchange.settled, [])
        if self.warmup_steps is not None:
            return tf.constant(self.warmup_steps, tf.int64)
        tenth = _DEFAULT_WARMUP
        if self.total_steps is not None:
            tenth = max(1, self.total_steps // 10)
        return tf.constant(tenth, tf.int64)

    def _memory(self) -> int:
        """The steps that the second moment remembers."""
        return max(1, round(1 / (1 - self.beta_2)))

    def _looks(self) -> tf.Tensor:
        """Whether this step compares the norms."""
        state = self._exchange
        done = tf.reshape(state.steps, [])
        return (
            tf.equal(tf.reshape(state.settled, []), 0)
            & (done > 0)
            & tf.equal(done % self._memory(), 0)
        )

    def _decide(self, told: control.Control) -> None:
        state = self._exchange
        norm = told.extras[0, 0]  # rank 0's, so that no rank decides otherwise
        before = tf.reshape(state.norm, [])
        settled = (before > 0) & (before >= _SETTLED * norm)
        state.settled.assign(tf.where(settled, state.steps, state.settled))
        state.norm.assign(tf.reshape(norm, [1]))


class Averaged:
    """A gradient that all ranks have alike."""

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value


def _correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """1 − β^t, in float64 before it is rounded."""
    power = tf.pow(tf.constant(beta, tf.float64), tf.cast(step, tf.float64))
    return tf.cast(1 - power, tf.float32)


def done() -> tf.Tensor:
    """What a branch of a condition returns that has done its work."""
    return tf.constant(0)
