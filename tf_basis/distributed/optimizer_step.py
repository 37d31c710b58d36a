"""The step of an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_basis.adapters import flavor, tracking
from tf_basis.distributed import auto, control
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.reducer import GradientReducer, Reduction, Spec
from tf_basis.distributed.world import World, unique_name


class Distribution:
    """Settings and state of the exchange, hidden from Keras's attribute tracking."""

    def __init__(
        self,
        compression: OneBitCompression | str,
        average_aggregated_gradients: bool,
        process_set: Any,
        timeout: float | None,
    ) -> None:
        self.compression = compression  # "auto" until it is built
        self.choice: auto.Choice | None = None
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set, self.timeout = process_set, timeout
        self.reducer: GradientReducer | None = None
        self.left: list[int] = []  # places of what the inner optimizer exchanges
        self.weight: tf.Variable | None = None
        self.reduction: Reduction | None = None
        self.stepping = False

    def arguments(self) -> dict[str, Any]:
        """What was given to `DistributedOptimizer`, ready for JSON."""
        sent = self.compression
        return {
            "compression": sent if isinstance(sent, str) else sent.get_config(),
            "average_aggregated_gradients": self.average_aggregated_gradients,
            "timeout": self.timeout,
        }


class DistributedStepMixin:
    """What `DistributedOptimizer` adds to the class of the optimizer it is given."""

    distributes = True
    _flavor: str
    _inner_class: type

    # ---- what users read and set ---------------------------------------------

    @property
    def step_weight(self) -> tf.Variable:
        """The weight of this rank's gradients in the mean; 1 unless assigned.

        Assign the number of examples before each step where batches differ in size;
        0 where this rank has no data left and steps along with any gradients.
        """
        return self._built_distribution().weight

    @property
    def skipped_steps(self) -> tf.Tensor:
        """Steps that all ranks skipped.

        Some rank's gradients were not finite, or all weights were 0.
        """
        return self._built_distribution().reducer.skipped_steps

    @property
    def compression_choice(self) -> auto.Choice | None:
        """What `compression="auto"` has decided, and from which times.

        None where the compression was given.
        """
        return self._built_distribution().choice

    @property
    def residual_variables(self) -> list[tf.Variable]:
        """State of this rank alone: saved per rank, never broadcast."""
        own = self._distribution.reducer.residuals if self._distribution.reducer else []
        inner = inside(self)
        return own + (inner.residual_variables if inner is not None else [])

    @property
    def quantization_statistics(self) -> dict[str, dict[str, float]]:
        """How well the bits said the gradients of the last step but one.

        For each group (variables that travel alike) `mean`, `variance` of what was
        quantised (gradient, or momentum, and residual), `relative_error`
        ‖u − q‖²/‖u‖², `residual_norm` ‖u − q‖ (root mean square over ranks),
        `clipped_share`, all of all ranks, and the `bits` that travel. Empty unless
        `compression` measures: `statistics`, `adaptive_bits`, `adaptive_rate`.
        """
        metadata = self._built_distribution().reducer.metadata
        inner = inside(self)
        found = {} if metadata is None else metadata.report()
        if inner is not None:
            for label, statistics in inner.quantization_statistics.items():
                found[f"dense_optimizer/{label}"] = statistics
        return found

    @property
    def learning_rate(self) -> Any:
        """Keras's; while a step is taken, times what `adaptive_rate` says."""
        rate = super().learning_rate
        if not self._distribution.stepping:
            return rate
        factor = self._distribution.reducer.metadata.factor()
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(factor, rate.dtype)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        super(DistributedStepMixin, type(self)).learning_rate.fset(self, value)

    def _built_distribution(self) -> Distribution:
        if self._distribution.reducer is None:
            raise ValueError(
                f"optimizer '{self.name}' must be built first: call "
                "build(trainable_variables)"
            )
        return self._distribution

    # ---- hooks of the adapter --------------------------------------------------

    def _build_collective(self, variables: list) -> None:
        state, adapter = self._distribution, flavor.load_adapter(self._flavor)
        inner = inside(self)
        leave = set()
        if inner is not None:
            leave = {self._var_key(v) for v in inner.exchanged_variables}
            state.left = [tracking.index_of(self, v) for v in inner.exchanged_variables]
        specs = [
            Spec(
                path=adapter.path_of(v),
                shape=tuple(v.shape),
                dtype=tf.as_dtype(v.dtype).name,
                leave=self._var_key(v) in leave,
            )
            for v in variables
        ]
        world, name = World(state.process_set), unique_name("optimizer")
        state.compression, state.choice = auto.settle(
            state.compression, specs, world, name, state.timeout
        )
        state.reducer = GradientReducer(
            specs,
            state.compression,
            world,
            name,
            self._add_state,
            state.timeout,
            {
                "gradient_accumulation_steps": getattr(
                    self, "gradient_accumulation_steps", None
                ),
                "average_aggregated_gradients": state.average_aggregated_gradients,
            },
        )
        with tf.init_scope():
            # Rank-local and not state: saved nowhere.
            state.weight = tf.Variable(1.0, trainable=False, name="step_weight")

    def _reduced(self, gradients: list, variables: list) -> tuple[list, list[bool]]:
        state, inner = self._built_distribution(), inside(self)
        positions = [tracking.index_of(self, v) for v in variables]
        given: list = [None] * len(state.reducer.specs)
        for position, gradient in zip(positions, gradients):
            given[position] = gradient
        if inner is not None:
            inner.begin_step()
        steps = getattr(self, "gradient_accumulation_steps", None) or 1
        state.reduction = state.reducer.reduce(
            given,
            weight=state.weight,
            factor=1.0 if state.average_aggregated_gradients else float(steps),
            extras=inner.control_numbers() if inner is not None else (),
        )
        reduced = [state.reduction.gradients[p] for p in positions]
        return reduced, [not state.reducer.specs[p].leave for p in positions]

    def _all_ranks_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """For a LossScaleOptimizer around this one, which may leave a step out."""
        reducer = self._built_distribution().reducer
        return control.all_ranks(reducer.world, f"{reducer.name}/loss_scale", finite)

    def _take_step(self, pairs: list, update: Callable[[list], None]) -> None:
        state, inner = self._distribution, inside(self)
        due = state.reduction.due
        groups: dict[Any, list] = {}
        for gradient, variable in pairs:
            when = due[tracking.index_of(self, variable)]
            key = when if when is True else when.ref()
            groups.setdefault(key, []).append((gradient, variable))
        always = groups.pop(True, [])

        def step(pairs: list, rest: list) -> None:
            if not rest:
                with self._adapted_rate():
                    update(pairs)
                return
            (when, more), *rest = rest
            tf.cond(
                when.deref(),
                lambda: step(pairs + more, rest),
                lambda: step(pairs, rest),
            )

        def go() -> tf.Tensor:
            told = contextlib.nullcontext()
            if inner is not None:
                told = inner.told(self._told_to(state.reduction.control))
            with told:
                step(always, list(groups.items()))
            return tf.constant(0)

        go_on = state.reduction.control.go
        begun = [] if inner is None else state.reducer.watch.begin([go_on])

        def skip() -> tf.Tensor:
            if inner is not None:
                inner.put_back()
            return tf.constant(0)

        with tf.control_dependencies(begun):
            done = tf.cond(go_on, go, skip)
        if inner is not None:
            state.reducer.watch.end(done)

    @contextlib.contextmanager
    def _adapted_rate(self) -> Iterator[None]:
        state = self._distribution
        state.stepping = state.compression.feedback.adaptive_rate is not None
        try:
            yield
        finally:
            state.stepping = False

    def _told_to(self, told: control.Control) -> control.Control:
        columns = self._distribution.left
        return told._replace(
            rows=tf.gather(told.rows, tf.constant(columns, tf.int32), axis=1)
        )


def exchanging(optimizer: Any) -> Any | None:
    """The optimizer inside that exchanges for itself."""
    inner = getattr(optimizer, "dense_optimizer", None)
    return inner if getattr(inner, "exchanges_for_itself", False) else None


def inside(optimizer: Any) -> Any | None:
    """That optimizer, where it has variables: with tables alone it is never built."""
    inner = exchanging(optimizer)
    return inner if inner is not None and inner.exchanged_variables else None
