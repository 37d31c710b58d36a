"""Adam that sends one bit per element: it exchanges momentum, not gradients."""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import flavor
from tf_basis.distributed import watch
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.onebit_build import OneBitBuildMixin, State
from tf_basis.distributed.onebit_local import (
    check_local_steps,
)
from tf_basis.distributed.onebit_rule import RULES, check_schedule
from tf_basis.distributed.onebit_steps import OneBitStepMixin
from tf_basis.distributed.world import World

_COMPRESSION = (
    "block",
    "clip_value",
    "reset_interval",
    "reset",
    "sparse_values",
    "amplitude_interval",
    "statistics",
    "adaptive_bits",
    "adaptive_rate",
    "delay",
    "staleness_decay",
)
_REFUSED = ("clipnorm", "clipvalue", "global_clipnorm")


class OneBitAdamMixin(OneBitBuildMixin, OneBitStepMixin):
    r"""Adam for several processes that sends one bit per element of a dense variable.

    It averages over the ranks itself, through `OneBitExchange`, and keeps all ranks
    equal to the last bit. For t ≤ T (warm-up) gradients are averaged in float32 and
    the step is Adam's. After it, rank i holds gradient g_i::

        frozen     m_i = β1·m + (1 − β1)·g_i;   m = exchange(m_i)
                   θ ← θ − η·(m/(1 − β1^t)) / (√(v_T/(1 − β2^T)) + ε),  where v_T > 0
        corrected  g = exchange(g_i);   m = γ·m + (1 − γ)·g;   v = γ·v + (1 − γ)·g²
                   θ ← θ − η·m/(√v + ε)
                   γ = 0.9 in the first 10 % of `total_steps`, 0.5 to 80 %, 0.1 after
                   (`gamma` and `boundaries`)

    The variance is frozen because error feedback on gradients that go through Adam's
    own can diverge. Elements that had no gradient in the warm-up have none: they rest
    from then on, so let the warm-up see all features. Variables whose policy gives
    them 16 or 32 bits take Adam's exact step with averaged gradients throughout.
    IndexedSlices travel as rows and are applied as dense gradients: leave large tables
    to `BasisAdam(dense_optimizer=OneBitAdam(...))`, inside `DistributedOptimizer`.

    With `local_steps` above 1 each rank steps alone between exchanges, with D the
    divisor above, c = η/(1 − β1^t) and C = Σc since the last exchange, and what is
    exchanged is the way it went, u_i:

        alone      m_i = β1·m_i + (1 − β1)·g_i;  u_i = u_i + c·m_i;  θ_i = θ_i − c·m_i/D
        exchange   m = exchange(u_i/C);  θ = θ of the last exchange − C·m/D

    A variable without a gradient in a step keeps its value; its moments change as if
    the gradient were 0, unlike those of Keras's Adam.

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
      gamma: of `"corrected"`: γ of each part of the training. Default (0.9, 0.5, 0.1).
      boundaries: where a part ends and the next begins, in shares of `total_steps`; one
        fewer than there are parts. Default (0.1, 0.8).
      policy: a `Policy`, or rules for one. Default: `Policy()`.
      block: elements that share a scale, a multiple of 8. Default 2048.
      clip_value: see `OneBitCompression`. Default None.
      reset_interval: see `OneBitCompression`. Default 2000.
      reset: see `OneBitCompression`. Default `"flush"`.
      sparse_values: see `OneBitCompression`. Default `"float32"`.
      amplitude_interval: see `OneBitCompression`. Default 1.
      statistics: see `OneBitCompression`. Default False.
      adaptive_bits: see `OneBitCompression`. Default None.
      adaptive_rate: see `OneBitCompression`. Default None.
      delay: see `OneBitCompression`. Default 0.
      staleness_decay: see `OneBitCompression`. Default 1.
      local_steps: after the warm-up the ranks exchange in every so many-th step only,
        and step alone between: see `synchronize`. Default 1: in every step.
      local_steps_doubling: the interval begins with 1 and doubles after every so many
        steps, up to `local_steps`. Default None: it is `local_steps` from the start.
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
    Training with Adam's Convergence Speed"; Lu et al. 2023, "Maximizing Communication
    Efficiency for Large-scale Training via 0/1 Adam" (local steps).
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
        gamma: Sequence[float] = (0.9, 0.5, 0.1),
        boundaries: Sequence[float] = (0.1, 0.8),
        policy: Any = None,
        block: int = 2048,
        clip_value: float | None = None,
        reset_interval: int | None = 2000,
        reset: str = "flush",
        sparse_values: str = "float32",
        amplitude_interval: int = 1,
        statistics: bool = False,
        adaptive_bits: Any = None,
        adaptive_rate: Any = None,
        delay: int = 0,
        staleness_decay: float = 1.0,
        local_steps: int = 1,
        local_steps_doubling: int | None = None,
        weight_decay: float | None = None,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
        name: str = "one_bit_adam",
        **kwargs: Any,
    ) -> None:
        arguments = dict(locals())
        hyperparameters.check_all(
            {k: v for k, v in arguments.items() if k not in _COMPRESSION}, RULES
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
        check_schedule(gamma, boundaries)
        check_local_steps(local_steps, local_steps_doubling, moments, delay)
        compression = OneBitCompression(
            policy, **{k: arguments[k] for k in _COMPRESSION}
        )
        learning_rate = hyperparameters.checked_learning_rate(learning_rate)
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        if isinstance(warmup_steps, numbers.Integral):
            warmup_steps = int(warmup_steps)
            if total_steps is not None and warmup_steps >= total_steps:
                warnings.warn(
                    "warmup_steps should be below total_steps: all steps travel in "
                    f"float32, received {warmup_steps} of {total_steps}",
                    stacklevel=2,
                )
        self.warmup_steps = warmup_steps
        self.total_steps = None if total_steps is None else int(total_steps)
        self.moments, self.timeout = moments, timeout
        self.gamma, self.boundaries = tuple(gamma), tuple(boundaries)
        self.local_steps = int(local_steps)
        self.local_steps_doubling = local_steps_doubling
        self._exchange = State()
        self._exchange.compression = compression
        self._exchange.process_set = process_set

    # ---- what users read ---------------------------------------------------------

    @property
    def compression(self) -> OneBitCompression:
        """The settings of the exchange."""
        return self._exchange.compression

    @property
    def ranks(self) -> int:
        """How many ranks it exchanges with."""
        return World(self._exchange.process_set).size

    @property
    def exchanged_variables(self) -> list:
        """The variables that it exchanges gradients of."""
        return list(self._exchange.variables)

    @property
    def residual_variables(self) -> list[tf.Variable]:
        """State of this rank alone, saved per rank and never broadcast."""
        local = self._exchange.local
        own = [v for c in self._exchange.channels for v in c.residuals]
        return own + ([] if local is None else local.own)

    @property
    def step_weight(self) -> tf.Variable:
        """The weight of this rank's gradients in the mean; 1 unless assigned.

        Not read inside a `DistributedOptimizer`, which has one for all variables.
        """
        return self._built_exchange().weight

    @property
    def skipped_steps(self) -> tf.Tensor:
        """Steps that all ranks skipped, as some rank's gradients were not finite.

        Counted by the `DistributedOptimizer` around it, where there is one.
        """
        return tf.reshape(self._built_exchange().skipped, [])

    @property
    def quantization_statistics(self) -> dict[str, dict[str, float]]:
        """See `DistributedOptimizer`; empty unless the compression measures."""
        metadata = self._built_exchange().metadata
        return {} if metadata is None else metadata.report()

    @property
    def frozen_at(self) -> tf.Tensor:
        """The last step of the warm-up, T; 0 while `"auto"` has not decided."""
        self._built_exchange()
        return self._frozen_at()

    def check_process_set(self, process_set: Any) -> None:
        """Raises ValueError unless it is the one given here, or none was given."""
        mine = self._exchange.process_set
        if mine is not None and mine is not process_set:
            raise ValueError(
                "process_set must be that of the OneBitAdam inside, received "
                f"{process_set!r} and there {mine!r}"
            )

    def join(self, process_set: Any) -> None:
        """Exchanges within this process set from now on; None: as it was."""
        if process_set is None:
            return
        self.check_process_set(process_set)
        if self._exchange.process_set is None and self._exchange.channels:
            raise ValueError(
                "process_set must be given before the optimizer is built, received "
                f"{process_set!r}"
            )
        self._exchange.process_set = process_set

    def _built_exchange(self) -> State:
        if not self._exchange.built:
            raise ValueError(
                f"optimizer '{self.name}' must be built first: call "
                "build(trainable_variables)"
            )
        return self._exchange

    # ---- config ----------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "moments": self.moments,
            "gamma": list(self.gamma),
            "boundaries": list(self.boundaries),
            "local_steps": self.local_steps,
            "local_steps_doubling": self.local_steps_doubling,
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
