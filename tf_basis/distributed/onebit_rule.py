"""The steps of `OneBitAdam`: exact in the warm-up, compressed after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis.distributed import control, rows
from tf_basis.distributed.channel import Channel

_DEFAULT_WARMUP = 500
# Tang et al.: the variance has settled when its norm grows by less than this ratio
# in the 1/(1 − β2) steps that it remembers.
_SETTLED = 0.96
_GAMMAS = ((0.1, 0.9), (0.8, 0.5), (math.inf, 0.1))


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
        for channel, moments in zip(state.channels, state.moments):
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
            out[i] = _Averaged(tf.reshape(dense, shape))
        return out

    def _step_channel(self, channel, moments, gradients, before) -> None:
        adapter, state = self._adapter, self._exchange
        present = [m for m in channel.members if gradients[m] is not None]
        if not present:
            return
        flat, exact = self._flat(channel, gradients)
        learning_rate = tf.cast(self.learning_rate, tf.float32)

        def go(gradient: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
            if exact:
                delta = self._adam(moments, gradient, turn + 1)
            elif channel.exchange is None:
                delta = self._adam(moments, channel.averaged(gradient), turn + 1)
            else:
                delta = self._compressed(channel, moments, gradient, turn)
            parts = channel.split(delta * learning_rate)
            for member, part in zip(channel.members, parts):
                if member not in present:
                    continue
                variable = state.variables[member]
                target = adapter.tensorflow_variable(variable)
                if self.weight_decay is not None and self._use_weight_decay(variable):
                    decay = tf.cast(learning_rate * self.weight_decay, target.dtype)
                    target.assign_sub(target * decay)
                target.assign_sub(tf.cast(part, target.dtype))
            return tf.constant(0)

        channel.when_due(flat, before, go, lambda: tf.constant(0))

    def _flat(self, channel: Channel, gradients: list) -> tuple[tf.Tensor, bool]:
        """The channel's buffer, and whether it has been averaged already."""
        averaged = [m for m in channel.members if isinstance(gradients[m], _Averaged)]
        plain = [g.value if isinstance(g, _Averaged) else g for g in gradients]
        flat = channel.flatten(plain)
        if not averaged:
            return flat, False
        if channel.exchange is not None or channel.accumulated is not None:
            # Equal on all ranks: their mean is what each rank puts in.
            return flat, False
        rest = [
            m for m in channel.members if m not in averaged and gradients[m] is not None
        ]
        if rest:
            sent = self._channel(channel.way, rest)
            means = sent.split(sent.averaged(sent.flatten(plain)))
            plain = list(plain)
            for member, mean in zip(rest, means):
                plain[member] = mean
        return channel.flatten(plain), True

    def _adam(self, moments, gradient: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """θ's change per learning rate of an exact step; `step` counts from 1."""
        first, second = moments
        m = first.assign(
            self.beta_1 * first + (1 - self.beta_1) * gradient, read_value=True
        )
        v = second.assign(
            self.beta_2 * second + (1 - self.beta_2) * tf.square(gradient),
            read_value=True,
        )
        return (m / _correction(self.beta_1, step)) / (
            tf.sqrt(v / _correction(self.beta_2, step)) + self.epsilon
        )

    def _compressed(self, channel, moments, gradient, turn) -> tf.Tensor:
        first, second = moments
        step = turn + 1
        last = self._frozen_at()
        # Of this channel's own steps; at least one, for there must be a variance.
        last_turn = tf.where(
            last > 0, tf.maximum(last // channel.way.interval, 1), last
        )
        warm = tf.equal(last, 0) | (step <= last_turn)

        def warm_up() -> tf.Tensor:
            return self._adam(moments, channel.full_precision(gradient), step)

        def frozen() -> tf.Tensor:
            mine = self.beta_1 * first + (1 - self.beta_1) * gradient
            m = channel.quantised(mine, turn)
            first.assign(m)
            v = second / _correction(self.beta_2, last_turn)
            delta = (m / _correction(self.beta_1, step)) / (tf.sqrt(v) + self.epsilon)
            # Without a gradient in the warm-up there is no variance: what is
            # quantised, divided by ε alone, would be a step of thousands.
            return tf.where(second > 0, delta, 0.0)

        def corrected() -> tf.Tensor:
            mean = channel.quantised(gradient, turn)
            gamma = self._gamma(step * channel.way.interval)
            m = first.assign(gamma * first + (1 - gamma) * mean, read_value=True)
            v = second.assign(
                gamma * second + (1 - gamma) * tf.square(mean), read_value=True
            )
            return m / (tf.sqrt(v) + self.epsilon)

        return tf.cond(warm, warm_up, frozen if self.moments == "frozen" else corrected)

    def _gamma(self, step: tf.Tensor) -> tf.Tensor:
        gamma = tf.constant(_GAMMAS[-1][1])
        for end, value in reversed(_GAMMAS[:-1]):
            # In integers: 0.1 · total_steps is not exact.
            within = step * 10 <= round(end * 10) * self.total_steps
            gamma = tf.where(within, tf.constant(value), gamma)
        return gamma

    # ---- the end of the warm-up ----------------------------------------------------

    def control_numbers(self) -> list[tf.Tensor]:
        """What `Control.extras` must hold: rank 0's decides when warm-up ends."""
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


class _Averaged:
    """A gradient that all ranks have alike."""

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value


def _correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """1 − β^t, in float64 before it is rounded."""
    power = tf.pow(tf.constant(beta, tf.float64), tf.cast(step, tf.float64))
    return tf.cast(1 - power, tf.float32)
