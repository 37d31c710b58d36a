"""Any Keras optimizer, stepping with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import flavor, tracking
from tf_basis.distributed import auto, control, watch
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.reducer import GradientReducer, Reduction, Spec
from tf_basis.distributed.world import World, unique_name

_RULES = {
    "timeout": watch.TIMEOUT_RULE,
    "average_aggregated_gradients": hyperparameters.flag,
}


class _Distribution:
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


class DistributedMixin:
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
        inner = _exchanging(self)
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
        inner = _exchanging(self)
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
        super(DistributedMixin, type(self)).learning_rate.fset(self, value)

    def _built_distribution(self) -> _Distribution:
        if self._distribution.reducer is None:
            raise ValueError(
                f"optimizer '{self.name}' must be built first: call "
                "build(trainable_variables)"
            )
        return self._distribution

    # ---- hooks of the adapter --------------------------------------------------

    def _build_collective(self, variables: list) -> None:
        state, adapter = self._distribution, flavor.load_adapter(self._flavor)
        inner = _exchanging(self)
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
        )
        with tf.init_scope():
            # Rank-local and not state: saved nowhere.
            state.weight = tf.Variable(1.0, trainable=False, name="step_weight")

    def _reduced(self, gradients: list, variables: list) -> tuple[list, list[bool]]:
        state, inner = self._built_distribution(), _exchanging(self)
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
        state, inner = self._distribution, _exchanging(self)
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
        return told._replace(rows=tf.gather(told.rows, columns, axis=1))

    # ---- config ------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """The inner optimizer and the arguments of the wrapping."""
        adapter = flavor.load_adapter(self._flavor)
        inner = self._inner_class.from_config(super().get_config())
        return {
            "optimizer": adapter.serialize(inner),
            "name": self.name,
            **self._distribution.arguments(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects=None) -> Any:
        """The reverse of `get_config`."""
        config = dict(config)
        config.pop("name", None)
        adapter = flavor.load_adapter(cls._flavor)
        inner = adapter.deserialize(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return DistributedOptimizer(inner, **config)

    @classmethod
    def _of(cls, config: dict[str, Any], settings: _Distribution) -> Any:
        """From the config of the inner optimizer."""
        # Not at import: it makes an optimizer, and with it TensorFlow's devices.
        adapter = flavor.load_collective(cls._flavor)
        getattr(adapter, "agree_in_loss_scaling", lambda: None)()
        optimizer = super().from_config(config)
        optimizer._distribution = settings
        return optimizer


def DistributedOptimizer(  # noqa: N802  a class to its users, as in Horovod
    optimizer: Any,
    compression: Any = None,
    *,
    average_aggregated_gradients: bool = True,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> Any:
    r"""Makes an optimizer step with the mean of the gradients of all ranks.

    Works on Keras 3 and tf_keras, with `fit` and with loops of your own. On every rank,
    once per update, after gradient accumulation and before clipping:

    1. a gather of a few numbers: is every gradient finite, what does each rank weigh;
    2. dense gradients in flat buffers, by the bits of their policy;
    3. IndexedSlices as rows: duplicates summed, gathered, summed again.

    The same bytes come out on every rank, so that ranks that start alike stay alike to
    the last bit. Where a gradient is not finite on some rank, all ranks skip the step
    and count it in `skipped_steps`. Give the ranks equal weights at the start with
    `BroadcastCallback`.

    Args:
      optimizer: an optimizer of Keras 3 or tf_keras. A `dense_optimizer` that exchanges
        for itself (`OneBitAdam`) keeps its variables to itself.
      compression: None or `"none"` (default): float32; `"fp16"`; `"onebit"`; a
        `OneBitCompression` with settings of your own; or `"auto"`: what of the first
        three is faster here by a margin, measured when it is built, the same on all
        ranks. See `compression_choice`; the config has what was decided.
      average_aggregated_gradients: whether an update uses the mean (default) or the sum
        of the gradients of its `gradient_accumulation_steps`.
      process_set: a Horovod process set with this rank. Default: all ranks. It is not
        part of the config.
      timeout: seconds that an exchange may wait for other ranks before the job is ended
        with a message that names them. Default 600; None: for ever.

    Returns:
      An optimizer of a class derived from that of `optimizer`, with its arguments, and
      the properties `step_weight`, `skipped_steps`, `compression_choice` and
      `residual_variables`.
      `optimizer`, and a `dense_optimizer` of it, are left as they are: it has copies.
      Saved models load it wherever
      `tf_basis.distributed` is imported.

    Raises:
      ValueError: an argument breaks its rule; when it is built, on every rank: the
        ranks' variables, shapes or policies differ.
      RuntimeError: Horovod has not been initialised in a launched process.

    Example:

    >>> import keras
    >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3), "onebit")
    >>> isinstance(optimizer, keras.optimizers.Adam)
    True

    Reference: Sergeev and Del Balso 2018, "Horovod".
    """
    name = _flavor_of(optimizer)
    for argument, value in [
        ("timeout", timeout),
        ("average_aggregated_gradients", average_aggregated_gradients),
    ]:
        hyperparameters.check(argument, value, _RULES[argument])
    settings = _Distribution(
        auto.named(compression), average_aggregated_gradients, process_set, timeout
    )
    if isinstance(optimizer, DistributedMixin):
        raise ValueError(
            "optimizer must not be distributed already, received "
            f"{type(optimizer).__name__}({type(optimizer)._inner_class.__name__})"
        )
    if getattr(optimizer, "exchanges_for_itself", False):
        optimizer.join(process_set)
        return optimizer
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise ValueError(
            "optimizer must be the innermost one: wrap what "
            f"{type(optimizer).__name__} contains instead, as in "
            "LossScaleOptimizer(DistributedOptimizer(Adam(...)))"
        )
    inner = getattr(optimizer, "dense_optimizer", None)
    if isinstance(inner, DistributedMixin):
        raise ValueError(
            "dense_optimizer must not be distributed: wrap the whole optimizer, "
            f"received {type(inner).__name__}({type(inner)._inner_class.__name__})"
        )
    rate = auto.adaptive_rate(settings.compression)
    if inner is not None and rate is not None:
        raise ValueError(
            "adaptive_rate must be None where a dense_optimizer has a rate of its own: "
            f"give it to OneBitAdam inside, received {rate}"
        )
    adapter = flavor.load_collective(name)
    cls = _define(type(optimizer), name)
    config = optimizer.get_config()
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate) and not hasattr(rate, "get_config"):
        config["learning_rate"] = rate  # a function: no config can hold it
    wrapped = cls._of(config, settings)
    _copy_exclusions(optimizer, wrapped)
    if inner is not None:
        _copy_exclusions(inner, wrapped.dense_optimizer)
    if _exchanging(optimizer) is not None:
        _exchanging(optimizer).check_process_set(process_set)
        wrapped.dense_optimizer.join(process_set)
    if adapter.built(optimizer):
        adapter.copy_state(optimizer, wrapped)
    return wrapped


def _copy_exclusions(source: Any, target: Any) -> None:
    """What `exclude_from_weight_decay` was told, which no config holds."""
    for name, value in vars(source).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(target, name, value)


def _flavor_of(optimizer: Any) -> str:
    for name in flavor.FLAVORS:
        try:
            if isinstance(optimizer, flavor.load_adapter(name).Optimizer):
                return name
        except ImportError:
            continue
    raise ValueError(
        f"optimizer must be an optimizer of Keras 3 or tf_keras, received {optimizer!r}"
    )


@functools.cache
def _define(inner_class: type, flavor_name: str) -> type:
    """The class of optimizers of `inner_class` that are distributed."""
    adapter = flavor.load_collective(flavor_name).CollectiveAdapter

    bases = (DistributedMixin, adapter, inner_class)
    members = {
        "__doc__": DistributedOptimizer.__doc__,
        "__module__": __name__,
        "_flavor": flavor_name,
        "_inner_class": inner_class,
    }
    cls = type("DistributedOptimizer", bases, members)
    return flavor.load_adapter(flavor_name).register(cls)


def _exchanging(optimizer: Any) -> Any | None:
    """The optimizer inside that exchanges for itself."""
    inner = getattr(optimizer, "dense_optimizer", None)
    return inner if getattr(inner, "exchanges_for_itself", False) else None


# So that saved optimizers are known before the first is made.
_define(flavor.load_adapter(flavor.active()).Optimizer, flavor.active())
