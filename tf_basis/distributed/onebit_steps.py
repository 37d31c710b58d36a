"""How a step of `OneBitAdam` goes: what ranks tell each other, and who waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tf_basis.adapters import tracking
from tf_basis.distributed import control
from tf_basis.distributed.onebit_delay import OneBitDelayMixin
from tf_basis.distributed.onebit_local import OneBitLocalMixin


class OneBitStepMixin(OneBitLocalMixin, OneBitDelayMixin):
    """Hooks of the adapter and of `DistributedOptimizer`; see `OneBitAdamMixin`."""

    @contextlib.contextmanager
    def told(self, told: control.Control) -> Iterator[None]:
        """The ranks have told each other: do not ask again in this step.

        Gradients are weighted already, and IndexedSlices summed.
        """
        self._exchange.control = told
        try:
            yield
        finally:
            self._exchange.control = None

    def begin_step(self) -> None:
        """Begins what need not wait for the gradients of this step (`delay`)."""
        state = self._exchange
        if not self.compression.feedback.delay:
            return
        state.early = []
        with tf.control_dependencies(state.watch.begin()):
            for channel, moments in zip(state.channels, state.moments):
                with tf.control_dependencies(state.early[-1:]):
                    state.early.append(self._delayed(channel, moments))
        state.watch.end(state.early)

    def _reduced(self, gradients: list, variables: list) -> tuple[list, list[bool]]:
        if self._exchange.control is None:
            self.begin_step()
        return gradients, [False] * len(gradients)

    def _all_ranks_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """For a LossScaleOptimizer around this one, which may leave a step out."""
        state = self._built_exchange()
        return control.all_ranks(state.world, f"{state.name}/loss_scale", finite)

    def _take_step(self, pairs: list, update: Callable[[list], None]) -> None:
        del update  # no step of a single variable: all are exchanged together
        state = self._exchange
        given: list = [None] * len(state.shapes)
        for gradient, variable in pairs:
            position = tracking.index_of(self, variable)
            given[position] = gradient
            state.variables[position] = variable  # `grow_rows` may have exchanged it
        if state.control is not None:
            self._step_as_told(given, state.control)
        elif state.local is None:
            self._step_together(given)
        else:
            tf.cond(
                self._warm(),
                lambda: self._step_together(given),
                lambda: self._step_alone(given),
            )

    def _step_as_told(self, given: list, told: control.Control) -> None:
        state = self._exchange
        self._heed(told)
        if state.local is None:
            self._step(given, told)
            return
        tf.cond(
            self._warm(),
            lambda: self._step_warm(given, told),
            lambda: self._step_apart(given, tf.constant(True), tf.ones([], tf.float64)),
        )

    def _step_warm(self, given: list, told: control.Control) -> tf.Tensor:
        self._step(given, told)
        return tf.constant(0)

    def _step_together(self, given: list) -> tf.Tensor:
        """Tells the other ranks, and steps with them unless it is to be skipped."""
        state = self._exchange
        given, told = control.before_step(
            state.world,
            state.name,
            state.paths,
            given,
            state.watch,
            state.weight,
            extras=self.control_numbers(),
        )
        self._heed(told)

        def go() -> tf.Tensor:
            self._step(given, told)
            return tf.constant(0)

        def skip() -> tf.Tensor:
            self.put_back()
            state.skipped.assign_add([1])
            return tf.constant(0)

        with tf.control_dependencies(state.watch.begin([told.go])):
            done = tf.cond(told.go, go, skip)
        state.watch.end(done)
        return done

    # ---- what ranks tell each other ------------------------------------------------

    def control_numbers(self) -> list[tf.Tensor]:
        """What `Control.extras` must hold: for the end of the warm-up, and metadata."""
        metadata = self._exchange.metadata
        return self._norms() + ([] if metadata is None else metadata.numbers())

    def _heed(self, told: control.Control) -> None:
        metadata = self._exchange.metadata
        if metadata is not None:
            count = 1 if self.warmup_steps == "auto" else 0
            metadata.update(told.extras[:, count:])
