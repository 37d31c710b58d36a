"""BasisAdagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tf_basis import engine, hyperparameters
from tf_basis.optimizers.base import BasisOptimizerMixin
from tf_basis.rules import adagrad
from tf_basis.rules.bucket_rule import BucketRule


class BasisAdagradMixin(BasisOptimizerMixin):
    """Adagrad whose embedding tables share their accumulators in B << N buckets.

    Row-wise Adagrad, times a profile over the d columns that the rows of a bucket
    share. For a touched row r with gradient g_r (duplicates summed) in bucket b::

        V_b <- V_b + red over the bucket's rows of g^2
        q_r <- q_r + mean_j g_rj^2
        row <- row - lr * sqrt(mean_j V_bj / q_r) * g_r / (sqrt(V_b) + epsilon)

    A row that owns its bucket has the factor 1. There is no first moment. Other
    variables follow Keras's Adagrad exactly, or `dense_optimizer`.

    Args:
      learning_rate: a float, a schedule or a callable. Default 1e-3.
      initial_accumulator_value: where V and q start, at least 0. Default 0.
      epsilon: of the division. Default 1e-7.
      compression_ratio, num_buckets, state_budget: as in `BasisAdam`.
      exclusive_rows, row_frequencies: as in `BasisAdam`.
      tables, table_settings, min_rows: as in `BasisAdam`.
      invariant_scalar: `"energy"` (default) or None.
      collision_reduce: `"mean"` (default), `"sum"` or `"sequential"`.
      hashing, seed, moment_dtype, energy_dtype: as in `BasisAdam`.
      weight_decay, row_clipnorm, dense_optimizer: as in `BasisAdam`.
      clipnorm, clipvalue, global_clipnorm: as in `BasisAdam`.
      use_ema, ema_momentum, ema_overwrite_frequency: as in `BasisAdam` (averages leave
        compressed tables out).
      name: default `"basis_adagrad"`.
      **kwargs: further arguments of this Keras's optimizers; and on tf_keras too
        `gradient_accumulation_steps`.

    Raises:
      ValueError: an argument breaks its rule; the message names argument, rule and
        value.

    Example:

    >>> BasisAdagrad(0.05, compression_ratio=1000).initial_accumulator_value
    0.0

    Reference: `docs/basis_adam.md`; J. Duchi et al., "Adaptive Subgradient Methods",
    JMLR 2011.
    """

    _rules: ClassVar = {"invariant_scalar": hyperparameters.choice("energy", None)}

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-7,
        *,
        compression_ratio: float = 100.0,
        num_buckets: int | None = None,
        state_budget: int | str | None = None,
        exclusive_rows: Any = 0,
        row_frequencies: Any = None,
        tables: Any = None,
        table_settings: Mapping[str, Mapping[str, Any]] | None = None,
        min_rows: int = 10_000,
        invariant_scalar: str | None = "energy",
        collision_reduce: str = "mean",
        hashing: str = "balanced",
        seed: int = 0,
        moment_dtype: str = "float32",
        energy_dtype: str = "float32",
        weight_decay: float | None = None,
        row_clipnorm: float | None = None,
        dense_optimizer: Any = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        name: str = "basis_adagrad",
        **kwargs: Any,
    ) -> None:
        self._initialize(locals())

    def _momentum_mode(self) -> str:
        return "none"

    def _bucket_rule(self, decay: bool) -> BucketRule:
        return adagrad.bucket_rule(epsilon=self.epsilon, **self._common_modes(decay))

    def _table_slots(self, layout):
        rule = self._bucket_rule(decay=False)
        return engine.slot_specs(layout, rule, self.initial_accumulator_value)

    def _dense_slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def _dense_rule(self, learning_rate):
        def rule(variable, gradient, accumulator):
            return adagrad.dense_step(
                variable, gradient, accumulator, learning_rate, self.epsilon
            )

        return rule
