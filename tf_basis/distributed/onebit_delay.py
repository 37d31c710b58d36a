"""`OneBitAdam(delay=1)`: the exchange first, the step when the ranks agree on it."""

from __future__ import annotations

import tensorflow as tf

from tf_basis.distributed.channel import Channel
from tf_basis.distributed.onebit_rule import Averaged, OneBitRuleMixin, done
from tf_basis.ops import onebit_ops


class OneBitDelayMixin(OneBitRuleMixin):
    """Gradients of a step are exchanged during the next; see `OneBitAdamMixin`."""

    def _delayed(self, channel: Channel, moments: tuple) -> tf.Tensor:
        """What the exchange of the step before results in: a mean, or momentum."""
        turn = tf.reshape(self._exchange.steps, [])
        pieces = [tf.identity(channel.pending)]
        if channel.exchange is None:
            return channel.averaged(pieces)

        def exchanged() -> tf.Tensor:
            if self.moments == "corrected":
                return channel.quantised(pieces, turn)
            keep = self.beta_1
            mine = [keep * moments[0] - (keep - 1) * pieces[0]]
            return channel.quantised(mine, turn)

        warm = self._is_warm(turn, 1)
        return tf.cond(warm, lambda: channel.full_precision(pieces), exchanged)

    def _step_delayed(self, channel, moments, gradients, turn, early) -> None:
        plain = [g.value if isinstance(g, Averaged) else g for g in gradients]
        channel.delay(channel.pieces(plain))
        targets = self._targets(channel, gradients)
        if not targets:
            return
        first, second = moments

        def exactly() -> tf.Tensor:
            self._step_exactly(moments, targets, early, turn + 1)
            return done()

        def frozen() -> tf.Tensor:
            scales = self._scales(turn, self._last_turn(1))
            m = first.assign(early, read_value=True)
            delta = onebit_ops.change(m, second, scales)
            onebit_ops.move(targets, delta, scales.decay)
            return done()

        def corrected() -> tf.Tensor:
            self._move_corrected(moments, targets, early, turn + 1)
            return done()

        if channel.exchange is None:
            exactly()
            return
        after = frozen if self.moments == "frozen" else corrected
        tf.cond(self._is_warm(turn, 1), exactly, after)

    def put_back(self) -> None:
        """The step is skipped: what was exchanged is exchanged once more."""
        state = self._exchange
        turn = tf.reshape(state.steps, [])
        for channel, (first, _), early in zip(
            state.channels, state.moments, state.early
        ):
            if channel.exchange is None or self.moments == "corrected":
                channel.pending.assign(early)
                continue
            channel.pending.assign(
                tf.cond(
                    self._is_warm(turn, 1),
                    lambda early=early: early,
                    lambda early=early, first=first: (
                        (early - self.beta_1 * first) / (1 - self.beta_1)
                    ),
                )
            )
