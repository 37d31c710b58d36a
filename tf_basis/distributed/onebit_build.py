"""What `OneBitAdam` makes when it is built: channels, moments, what options need."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_basis.distributed import control, watch
from tf_basis.distributed.channel import Channel, name_of
from tf_basis.distributed.metadata import Metadata
from tf_basis.distributed.onebit_local import LocalState, check_intervals
from tf_basis.distributed.policy import Way
from tf_basis.distributed.reducer import check_delay
from tf_basis.distributed.world import World, unique_name


class State:
    """What was built, hidden from Keras's attribute tracking."""

    def __init__(self) -> None:
        self.built = False
        self.variables: list = []
        self.shapes: list[tuple[int, ...]] = []
        self.channels: list[Channel] = []
        self.moments: list[tuple[tf.Variable, tf.Variable]] = []
        self.control: control.Control | None = None
        self.metadata: Metadata | None = None
        self.local: LocalState | None = None
        self.early: list[tf.Tensor] = []  # what a delayed exchange resulted in
        self.moving: list = []  # of each variable: None where it has no gradient
        self.synchronizing: Any = None


class OneBitBuildMixin:
    """Building; see `OneBitAdamMixin`."""

    def _build_collective(self, variables: list) -> None:
        state, adapter = self._exchange, self._adapter
        world = state.world = World(state.process_set)
        name = state.name = unique_name("onebit_adam")
        paths = [adapter.path_of(v) for v in variables]
        state.shapes = [tuple(v.shape) for v in variables]
        policy = self.compression.policy
        ways = [policy.way(p, s) for p, s in zip(paths, state.shapes)]
        feedback = self.compression.feedback
        check_delay(feedback, zip(paths, ways))
        check_intervals(self.local_steps, zip(paths, ways))
        with watch.watched(world, f"{name}_agreement", self.timeout):
            control.agree(
                world,
                name,
                [f"OneBitAdam {k}={v}" for k, v in self._compared().items()]
                + [
                    f"{p} {s} {v.dtype}, {w.bits} bits every {w.interval} {w.group}"
                    for p, s, v, w in zip(paths, state.shapes, variables, ways)
                ],
            )
        state.watch = watch.Watch(world, name, self.timeout)
        with tf.init_scope():
            # Rank-local and not state: saved nowhere.
            state.weight = tf.Variable(1.0, trainable=False, name="step_weight")
        state.paths, state.variables = paths, list(variables)
        state.steps = self._add_state(f"{name}_steps", 1, tf.int64)
        state.skipped = self._add_state(f"{name}_skipped_steps", 1, tf.int64)
        if self.warmup_steps == "auto":
            state.settled = self._add_state(f"{name}_frozen_at", 1, tf.int64)
            state.norm = self._add_state(f"{name}_norm", 1, tf.float64)
        for way in sorted(set(ways)):
            members = [i for i, w in enumerate(ways) if w == way]
            state.channels.append(self._channel(way, members))
            elements = state.channels[-1].elements
            label = state.channels[-1].name
            state.moments.append(
                (
                    self._add_state(f"{label}_first_moment", elements, tf.float32),
                    self._add_state(f"{label}_second_moment", elements, tf.float32),
                )
            )
        if feedback.measures:
            state.metadata = Metadata(
                state.channels,
                feedback.adaptive_rate,
                feedback.adaptive_bits,
                name,
                self._add_state,
            )
        if self.local_steps > 1:
            state.local = LocalState(state.channels, name, self._add_state)
        state.built = True

    def _compared(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        steps = getattr(self, "gradient_accumulation_steps", None)
        return {**self._settings(), "gradient_accumulation_steps": steps}

    def _channel(self, way: Way, members: list[int]) -> Channel:
        state = self._exchange
        return Channel(
            members,
            [state.shapes[m] for m in members],
            way,
            self.compression.feedback,
            state.world,
            name_of(state.name, way),
            self._add_state,
        )
