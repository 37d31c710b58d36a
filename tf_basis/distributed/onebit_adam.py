"""Adam that sends one bit per element: it exchanges momentum, not gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import flavor
from tf_basis.distributed import control, quantize, rows, watch
from tf_basis.distributed.channel import Channel
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.policy import Policy, Way
from tf_basis.distributed.world import World, unique_name

_RULES = {
    "warmup_steps": hyperparameters.Rule(
        "None, 'auto' or an integer of at least 1",
        lambda v: (
            v is None
            or v == "auto"
            or (isinstance(v, int) and not isinstance(v, bool) and v >= 1)
        ),
    ),
    "total_steps": hyperparameters.integer(
        "of at least 1", lambda v: v >= 1, optional=True
    ),
    "moments": hyperparameters.choice("frozen", "corrected"),
    "timeout": hyperparameters.real("above 0, in seconds", lambda v: v > 0, True),
}
_DEFAULT_WARMUP = 500
# Tang et al.: the variance has settled when its norm grows by less than this ratio
# in the 1/(1 − β2) steps that it remembers.
_SETTLED = 0.96
_GAMMAS = ((0.1, 0.9), (0.8, 0.5), (math.inf, 0.1))
_COMPRESSION = ("block", "clip_value", "reset_interval", "reset", "sparse_values")
_REFUSED = ("clipnorm", "clipvalue", "global_clipnorm")


class _State:
    """What was built, hidden from Keras's attribute tracking."""

    def __init__(self) -> None:
        self.variables: list = []
        self.positions: dict[Any, int] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.channels: list[Channel] = []
        self.moments: list[tuple[tf.Variable, tf.Variable]] = []
        self.control: control.Control | None = None


class OneBitAdamMixin:
    r"""Adam for several processes that sends one bit per element of a dense variable.

    It averages over the ranks itself, through `OneBitExchange`, and keeps all ranks
    equal to the last bit. For t ≤ T (warm-up) gradients are averaged in float32 and
    the step is Adam's. After it, rank i holds gradient g_i:

        frozen     m_i = β1·m + (1 − β1)·g_i;   m = exchange(m_i)
                   θ ← θ − η·(m/(1 − β1^t)) / (√(v_T/(1 − β2^T)) + ε)
        corrected  g = exchange(g_i);   m = γ·m + (1 − γ)·g;   v = γ·v + (1 − γ)·g²
                   θ ← θ − η·m/(√v + ε)
                   γ = 0.9 in the first 10 % of `total_steps`, 0.5 to 80 %, 0.1 after

    The variance is frozen because error feedback on gradients that go through Adam's
    own can diverge. Elements that had no gradient in the warm-up have none: they rest
    from then on, so let the warm-up see all features. Variables whose policy gives
    them 16 or 32 bits take Adam's exact step with averaged gradients throughout.
    IndexedSlices travel as rows and are applied as dense gradients: leave large tables
    to `BasisAdam(dense_optimizer=OneBitAdam(...))`, inside `DistributedOptimizer`.

    Where a gradient is not finite on some rank, all ranks skip the step and count it.
    On one process nothing is exchanged, but momentum is quantised all the same.

    Args:
      learning_rate: η: a number, schedule or callable. Default 0.001.
      beta_1: β1, in [0, 1). Default 0.9.
      beta_2: β2, in [0, 1). Default 0.999.
      epsilon: ε, above 0. Default 1e-8.
      warmup_steps: T. Default None: 10 % of `total_steps`, or 500 where that is not
        given. `"auto"`: until the second moment has settled, which all ranks decide
        alike: its 1-norm has grown by at most 4 % in 1/(1 − β2) steps.
      total_steps: steps of the whole training. Default None; `"corrected"` needs it.
      moments: `"frozen"` (default) or `"corrected"`.
      policy: a `Policy`, or rules for one. Default: `Policy()`.
      block: elements that share a scale, a multiple of 8. Default 2048.
      clip_value: see `OneBitCompression`. Default None.
      reset_interval: see `OneBitCompression`. Default 2000.
      reset: see `OneBitCompression`. Default `"flush"`.
      sparse_values: see `OneBitCompression`. Default `"float32"`.
      weight_decay: decoupled, per step. Default None.
      process_set: a Horovod process set with this rank. Default: all ranks. It is not
        part of the config.
      timeout: seconds that an exchange may wait for other ranks before the job is ended
        with a message that names them. Default 600; None: for ever.
      name: of the optimizer.
      **kwargs: further arguments of Keras's optimizers. Their clipping is refused: it
        would have to see the averaged gradients.

    Raises:
      ValueError: an argument breaks its rule; when it is built, on every rank: the
        ranks' variables, shapes or policies differ.

    Example:

    >>> optimizer = OneBitAdam(1e-3, warmup_steps=100)
    >>> optimizer.get_config()["moments"]
    'frozen'

    Reference: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale
    Training with Adam's Convergence Speed".
    """

    exchanges_for_itself = True
    _adapter: Any

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        warmup_steps: int | str | None = None,
        total_steps: int | None = None,
        moments: str = "frozen",
        policy: Any = None,
        block: int = 2048,
        clip_value: float | None = None,
        reset_interval: int | None = 2000,
        reset: str = "flush",
        sparse_values: str = "float32",
        weight_decay: float | None = None,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
        name: str = "one_bit_adam",
        **kwargs: Any,
    ) -> None:
        arguments = dict(locals())
        hyperparameters.check_all(
            {k: v for k, v in arguments.items() if k not in _COMPRESSION}, _RULES
        )
        for argument in _REFUSED:
            value = kwargs.pop(argument, None)
            if value is not None:
                raise ValueError(
                    f"{argument} must be None: each rank sees its own gradients only, "
                    f"and clip_value bounds what is quantised, received {value!r}"
                )
        if moments == "corrected" and total_steps is None:
            raise ValueError(
                "total_steps must be given where moments='corrected': γ depends on it, "
                "received None"
            )
        if isinstance(policy, dict):
            policy = Policy(**policy)
        compression = OneBitCompression(
            policy, **{k: arguments[k] for k in _COMPRESSION}
        )
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.moments, self.timeout = moments, timeout
        self._exchange = _State()
        self._exchange.compression = compression
        self._exchange.process_set = process_set

    # ---- what users read ---------------------------------------------------------

    @property
    def compression(self) -> OneBitCompression:
        """The settings of the exchange."""
        return self._exchange.compression

    @property
    def exchanged_variables(self) -> list:
        """The variables that it exchanges gradients of."""
        return list(self._exchange.variables)

    @property
    def residual_variables(self) -> list[tf.Variable]:
        """State of this rank alone: saved per rank, never broadcast."""
        return [v for c in self._exchange.channels for v in c.residuals]

    @property
    def skipped_steps(self) -> tf.Tensor:
        """Steps that all ranks skipped: some rank's gradients were not finite.

        Counted by the `DistributedOptimizer` around it, where there is one.
        """
        return tf.reshape(self._built_exchange().skipped, [])

    @property
    def frozen_at(self) -> tf.Tensor:
        """The last step of the warm-up, T; 0 while `"auto"` has not decided."""
        self._built_exchange()
        return self._frozen_at()

    def _built_exchange(self) -> _State:
        if not self._exchange.channels:
            raise ValueError(
                f"optimizer '{self.name}' must be built first: call "
                "build(trainable_variables)"
            )
        return self._exchange

    # ---- building ------------------------------------------------------------------

    def _build_collective(self, variables: list) -> None:
        state, adapter = self._exchange, self._adapter
        world = state.world = World(state.process_set)
        name = state.name = unique_name("onebit_adam")
        paths = [adapter.path_of(v) for v in variables]
        state.shapes = [tuple(v.shape) for v in variables]
        policy = self.compression.policy
        ways = [policy.way(p, s) for p, s in zip(paths, state.shapes)]
        control.agree(
            world,
            name,
            [f"OneBitAdam {self._settings()}"]
            + [
                f"{p} {s} {v.dtype}, {w.bits} bits every {w.interval}"
                for p, s, v, w in zip(paths, state.shapes, variables, ways)
            ],
        )
        state.watch = watch.Watch(world, name, self.timeout)
        state.positions = {self._var_key(v): i for i, v in enumerate(variables)}
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

    def _channel(self, way: Way, members: list[int]) -> Channel:
        state = self._exchange
        name = f"{state.name}_{way.bits}bit"
        if way.interval > 1:
            name += f"_every{way.interval}"
        return Channel(
            members,
            [state.shapes[m] for m in members],
            way,
            self.compression.feedback,
            state.world,
            name,
            self._add_state,
        )

    # ---- hooks of the adapter and of `DistributedOptimizer` -----------------------

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

    def _reduced(self, gradients: list, variables: list) -> tuple[list, list[bool]]:
        return gradients, [False] * len(gradients)

    def _take_step(self, pairs: list, update: Callable[[list], None]) -> None:
        del update  # no step of a single variable: all are exchanged together
        state = self._exchange
        given: list = [None] * len(state.shapes)
        for gradient, variable in pairs:
            given[state.positions[self._var_key(variable)]] = gradient
        if state.control is not None:
            self._step(given, state.control)
            return
        with state.watch.waiting(given) as start:
            given = [
                rows.summed(g) if isinstance(g, tf.IndexedSlices) else g for g in given
            ]
            values = [
                g.values if isinstance(g, tf.IndexedSlices) else g
                for g in given
                if g is not None
            ]
            with tf.control_dependencies(start):
                unusable = tf.add_n(
                    [quantize.count_unusable(tf.cast(v, tf.float32)) for v in values]
                )
            told = control.exchange(
                state.world,
                state.name,
                unusable,
                pattern=[
                    f"{p}: {'none' if g is None else type(g).__name__}"
                    for p, g in zip(state.paths, given)
                ],
                rows=[
                    tf.shape(g.values)[0] if isinstance(g, tf.IndexedSlices) else 0
                    for g in given
                ],
                extras=self.control_numbers(),
            )

            def go() -> tf.Tensor:
                self._step(given, told)
                return tf.constant(0)

            def skip() -> tf.Tensor:
                state.skipped.assign_add([1])
                return tf.constant(0)

            state.watch.finished(tf.cond(told.go, go, skip))

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

    # ---- config ----------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "moments": self.moments,
            "policy": self.compression.policy.get_config(),
            **{
                k: v
                for k, v in self.compression.get_config().items()
                if k in _COMPRESSION
            },
        }

    def get_config(self) -> dict[str, Any]:
        """The arguments, ready for JSON."""
        config = super().get_config()
        for argument in _REFUSED:
            config.pop(argument, None)
        return {**config, **self._settings(), "timeout": self.timeout}


class _Averaged:
    """A gradient that all ranks have alike."""

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value


def _correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """1 − β^t, in float64 before it is rounded."""
    power = tf.pow(tf.constant(beta, tf.float64), tf.cast(step, tf.float64))
    return tf.cast(1 - power, tf.float32)


@functools.cache
def define(flavor_name: str) -> type:
    """`OneBitAdam` for one flavour of Keras."""
    adapter = flavor.load_adapter(flavor_name)
    base = flavor.load_collective(flavor_name).CollectiveOptimizer
    members = {
        "__doc__": OneBitAdamMixin.__doc__,
        "__module__": __name__,
        "_adapter": adapter,
    }
    return adapter.register(type("OneBitAdam", (OneBitAdamMixin, base), members))
