"""Steps that a rank takes alone between exchanges: `OneBitAdam(local_steps=k)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_basis.distributed import control, quantize
from tf_basis.distributed.channel import Channel
from tf_basis.distributed.exchange import NewVariable
from tf_basis.distributed.policy import Way
from tf_basis.ops import onebit_ops
from tf_basis.ops.onebit_ops import Scales
from tf_basis.ops.quantize_ops import joined


def check_local_steps(
    local_steps: int, doubling: int | None, moments: str, delay: int
) -> None:
    """Raises ValueError where the settings do not go together."""
    if local_steps == 1:
        if doubling is not None:
            raise ValueError(
                "local_steps_doubling must be None where local_steps is 1, received "
                f"{doubling}"
            )
        return
    if moments != "frozen":
        raise ValueError(
            f"moments must be 'frozen' with local_steps={local_steps}, received "
            f"{moments!r}"
        )
    if delay:
        raise ValueError(
            f"delay must be 0 with local_steps={local_steps}, received {delay}"
        )


def check_intervals(local_steps: int, ways: Iterable[tuple[str, Way]]) -> None:
    """Raises ValueError where a variable's interval is not that of `local_steps`."""
    for path, way in ways:
        if local_steps > 1 and way.interval > 1:
            raise ValueError(
                f"interval must be 1 with local_steps={local_steps}, received "
                f"{way.interval} for {path}"
            )


class LocalState:
    """What steps that are taken alone leave behind.

    Attributes:
      anchors: of each channel: the variables after the last exchange.
      drifts: of each channel: u, how far this rank has gone since; its own.
      since: steps since the last exchange.
      scales: Σ c of these steps.
      kept: Π (1 − decay) of these steps.
      weight: Σ of this rank's weights in these steps; its own.
      left_out: steps that this rank left out, as a gradient was not finite; its own.
    """

    def __init__(
        self, channels: Sequence[Channel], name: str, variables: NewVariable
    ) -> None:
        def one(stem: str, dtype: tf.DType) -> tf.Variable:
            return variables(f"{name}_local_{stem}", 1, dtype)

        def flat(stem: str) -> list[tf.Variable]:
            return [
                variables(f"{c.name}_{stem}", c.elements, tf.float32) for c in channels
            ]

        self.anchors, self.drifts = flat("anchor"), flat("drift")
        self.since = one("since", tf.int64)
        self.scales = one("scales", tf.float32)
        self.kept = one("kept", tf.float32)
        self.weight = one("weight", tf.float64)
        self.left_out = one("left_out", tf.float64)

    @property
    def own(self) -> list[tf.Variable]:
        """What is this rank's alone, between exchanges."""
        return [*self.drifts, self.weight, self.left_out]


class OneBitLocalMixin:
    """Steps alone and the exchange after them; see `OneBitAdamMixin`."""

    def synchronize(self) -> None:
        """Brings the ranks together now; call it on all ranks, outside graphs.

        With `local_steps` the variables of the ranks differ between exchanges. Call it
        before they are saved, evaluated or compared; `SynchronizeCallback` does at the
        end of every epoch. Without `local_steps`, or right after an exchange, it does
        nothing.
        """
        local = self._built_exchange().local
        if local is None or int(local.since[0]) == 0:
            return
        state = self._exchange
        if state.synchronizing is None:
            state.synchronizing = tf.function(self._exchange_drifts, autograph=False)
        state.synchronizing()

    @property
    def apart(self) -> bool:
        """Whether the ranks' variables may differ now; the same on all ranks."""
        local = self._exchange.local
        return local is not None and int(local.since[0]) > 0

    # ---- the step --------------------------------------------------------------------

    def _warm(self) -> tf.Tensor:
        return self._is_warm(tf.reshape(self._exchange.steps, []), 1)

    def _interval(self) -> tf.Tensor:
        """Steps from one exchange to the next."""
        most = tf.constant(self.local_steps, tf.int64)
        if self.local_steps_doubling is None:
            return most
        done = tf.reshape(self._exchange.steps, []) - self._last_turn(1)
        doublings = tf.minimum(done // self.local_steps_doubling, 40)
        return tf.minimum(tf.bitwise.left_shift(tf.ones_like(most), doublings), most)

    def _step_alone(self, given: list) -> tf.Tensor:
        """A step of which other ranks are not told."""
        state = self._exchange
        unusable = [tf.zeros([], tf.int64)]
        for gradient in given:
            if gradient is not None:
                sliced = isinstance(gradient, tf.IndexedSlices)
                values = gradient.values if sliced else gradient
                unusable.append(quantize.count_unusable(tf.cast(values, tf.float32)))
        finite = tf.equal(tf.add_n(unusable), 0)
        state.local.left_out.assign_add(
            [tf.where(finite, tf.zeros([], tf.float64), tf.ones([], tf.float64))]
        )
        weight = tf.cast(state.weight, tf.float64)
        counts = tf.where(finite, weight, tf.zeros_like(weight))
        return self._step_apart(given, finite & (weight > 0), counts)

    def _step_apart(
        self, given: list, usable: tf.Tensor, weight: tf.Tensor
    ) -> tf.Tensor:
        """A step of this rank where its gradients are `usable`, then what is due.

        Args:
          given: its gradients.
          usable: whether it moves.
          weight: of them, float64; 1 where they are weighted already.
        """
        state, local = self._exchange, self._exchange.local
        dense = [_dense(g, s) for g, s in zip(given, state.shapes)]
        state.moving = [None if g is None else True for g in given]
        turn = tf.reshape(state.steps, [])
        scales = self._scales(turn, self._last_turn(1))
        begins = tf.equal(local.since[0], 0)
        tf.cond(begins, self._begin_interval, lambda: tf.constant(0))
        local.scales.assign_add([scales.first])
        local.kept.assign(local.kept * (1 - scales.decay))
        local.weight.assign_add([weight])

        def go() -> tf.Tensor:
            for channel, moments, drift in zip(
                state.channels, state.moments, local.drifts
            ):
                targets = self._targets(channel, dense)
                onebit_ops.step_local(
                    *moments,
                    drift,
                    channel.pieces(dense),
                    targets,
                    scales,
                    beta=self.beta_1,
                    block=self.compression.feedback.block,
                )
            return tf.constant(0)

        tf.cond(usable, go, lambda: tf.constant(0))
        state.steps.assign_add([1])
        # The same on all ranks: it depends on the number of steps alone.
        due = local.since.assign_add([1], read_value=True)[0] >= self._interval()

        return tf.cond(due, self._exchange_drifts, lambda: tf.constant(0))

    def _begin_interval(self) -> tf.Tensor:
        state, local = self._exchange, self._exchange.local
        for channel, anchor in zip(state.channels, local.anchors):
            anchor.assign(self._flat(channel))
        for drift in local.drifts:
            drift.assign(tf.zeros_like(drift))
        local.scales.assign([0.0])
        local.kept.assign([1.0])
        local.weight.assign(tf.zeros([1], tf.float64))
        return tf.constant(0)

    def _flat(self, channel: Channel) -> tf.Tensor:
        """The variables of a channel, one after the other."""
        return joined(
            [
                tf.cast(self._plain(self._exchange.variables[m]), tf.float32)
                for m in channel.members
            ]
            or [tf.zeros([0])]
        )

    def _plain(self, variable: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self._adapter.tensorflow_variable(variable))

    # ---- the exchange ----------------------------------------------------------------

    def _exchange_drifts(self) -> tf.Tensor:
        """All ranks go where their mean has gone."""
        state, local = self._exchange, self._exchange.local
        metadata = state.metadata
        numbers = [] if metadata is None else metadata.numbers()
        told = control.exchange(
            state.world,
            f"{state.name}/local",
            [],
            [],
            tf.zeros([], tf.int64),
            state.watch,
            local.weight[0],
            [local.left_out[0], *numbers],
        )
        if metadata is not None:
            metadata.update(told.extras[:, 1:])
        state.skipped.assign_add([tf.cast(tf.reduce_sum(told.extras[:, 0]), tf.int64)])
        local.left_out.assign(tf.zeros([1], tf.float64))

        def go() -> tf.Tensor:
            before = tf.constant(0)
            for number, channel in enumerate(state.channels):
                with tf.control_dependencies([before]):
                    before = self._exchange_drift(channel, number, told.factor)
            return before

        with tf.control_dependencies(state.watch.begin([told.go])):
            done = tf.cond(told.go, go, lambda: tf.constant(0))
        state.watch.end(done)
        local.since.assign(tf.zeros([1], tf.int64))
        return done

    def _exchange_drift(
        self, channel: Channel, number: int, factor: tf.Tensor
    ) -> tf.Tensor:
        state, local = self._exchange, self._exchange.local
        first, second = state.moments[number]
        turn = tf.reshape(state.steps, []) - 1
        # In units of momentum: what is owed since a long interval must not be taken
        # for the momentum of a short one, nor be too small for float16. Without a
        # rate there is no way to be told, but the momentum.
        scale = local.scales[0]
        drift = tf.cond(
            scale > 0, lambda: local.drifts[number] / scale, lambda: tf.identity(first)
        )
        drift = control.scaled(drift, factor)
        if channel.exchange is None:
            mean = channel.averaged([drift])
        else:
            mean = channel.quantised([drift], turn)
        first.assign(mean)
        mean = mean * scale
        scales = self._scales(turn, self._last_turn(1))
        one = Scales(tf.constant(1.0), scales.root, scales.decay, scales.epsilon)
        delta = onebit_ops.change(mean, second, one)
        # Variables that had no gradient have not moved, nor do they now.
        moved = self._targets(channel, state.moving or [True] * len(state.shapes))
        for variable, start, decays in moved:
            size = variable.shape.num_elements()
            anchor = tf.slice(local.anchors[number], [start], [size])
            anchor = anchor * local.kept[0] if decays else anchor
            value = anchor - tf.slice(delta, [start], [size])
            value = tf.reshape(value, variable.shape)
            variable.assign(tf.cast(value, variable.dtype))
        return tf.constant(0)


def _dense(gradient: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = tf.reshape(gradient.values, [-1, *shape[1:]])
    return tf.math.unsorted_segment_sum(values, gradient.indices, shape[0])
