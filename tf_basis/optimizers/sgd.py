"""BasisSGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tf_basis import hyperparameters
from tf_basis.optimizers.base import BasisOptimizerMixin
from tf_basis.rules import sgd
from tf_basis.rules.bucket_rule import BucketRule


class BasisSGDMixin(BasisOptimizerMixin):
    """SGD whose embedding tables share their momentum in B << N buckets.

    For a touched row r with gradient g_r (duplicates summed) in bucket b::

        M_b <- momentum * M_b + red over the bucket's rows of g
        row <- row - lr * s_r * direction

    The direction is M_b for rows that own their bucket and g_r for the others
    (`momentum_mode="exclusive"`), M_b for all (`"shared"`) or g_r for all
    (`"none"`); with `nesterov`, g_r + momentum * M_b in place of M_b. Other variables
    follow Keras's SGD exactly, or `dense_optimizer`. There is no second moment, so
    the scalar s_r is learned or 1.

    Args:
      learning_rate: a float, a schedule or a callable. Default 0.01.
      momentum: in [0, 1). 0 keeps no first moment at all. Default 0.
      nesterov: look ahead along the momentum. Default False.
      compression_ratio, num_buckets, state_budget: as in `BasisAdam`.
      exclusive_rows, row_frequencies: as in `BasisAdam`.
      tables, table_settings, min_rows: as in `BasisAdam`.
      momentum_mode: `"exclusive"` (default), `"shared"` or `"none"`.
      invariant_scalar: None (default) or `"learned"`.
      scalar_range, scalar_rule, scalar_learning_rate, scalar_frequency_power: of the
        learned scalar, as in `BasisAdam`.
      collision_reduce: `"mean"` (default), `"sum"` or `"sequential"`.
      hashing, seed, moment_dtype, stale_decay: as in `BasisAdam`.
      weight_decay, row_clipnorm, dense_optimizer: as in `BasisAdam`.
      clipnorm, clipvalue, global_clipnorm: as in `BasisAdam`.
      use_ema, ema_momentum, ema_overwrite_frequency: as in `BasisAdam` (averages leave
        compressed tables out).
      name: default `"basis_sgd"`.
      **kwargs: further arguments of this Keras's optimizers; and on tf_keras too
        `gradient_accumulation_steps`.

    Raises:
      ValueError: an argument breaks its rule; the message names argument, rule and
        value.

    Example:

    >>> optimizer = BasisSGD(0.1, momentum=0.9, exclusive_rows=1000)
    >>> optimizer.momentum_mode
    'exclusive'

    Reference: `docs/basis_adam.md`; I. Sutskever et al., "On the importance of
    initialization and momentum in deep learning", ICML 2013.
    """

    _rules: ClassVar = {
        "momentum": hyperparameters.real("in [0, 1)", lambda v: 0 <= v < 1),
        "momentum_mode": hyperparameters.RULES["momentum"],
        "invariant_scalar": hyperparameters.choice("learned", None),
    }

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        compression_ratio: float = 100.0,
        num_buckets: int | None = None,
        state_budget: int | str | None = None,
        exclusive_rows: Any = 0,
        row_frequencies: Any = None,
        tables: Any = None,
        table_settings: Mapping[str, Mapping[str, Any]] | None = None,
        min_rows: int = 10_000,
        momentum_mode: str = "exclusive",
        invariant_scalar: str | None = None,
        scalar_range: tuple[float, float] = (0.1, 10.0),
        scalar_rule: str = "gradient",
        scalar_learning_rate: float = 1e-4,
        scalar_frequency_power: float = 0.0,
        collision_reduce: str = "mean",
        hashing: str = "balanced",
        seed: int = 0,
        moment_dtype: str = "float32",
        stale_decay: bool = False,
        weight_decay: float | None = None,
        row_clipnorm: float | None = None,
        dense_optimizer: Any = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        name: str = "basis_sgd",
        **kwargs: Any,
    ) -> None:
        self._initialize(locals())

    @classmethod
    def _settings(cls) -> list[str]:
        # Here `momentum` is a number, one for all tables.
        return [name for name in super()._settings() if name != "momentum"]

    def _momentum_mode(self) -> str:
        return self.momentum_mode if self.momentum else "none"

    def _bucket_rule(self, decay: bool) -> BucketRule:
        return sgd.bucket_rule(
            self.momentum,
            nesterov=self.nesterov,
            scalar_range=tuple(self.scalar_range),
            scalar_rule=self.scalar_rule,
            scalar_learning_rate=self.scalar_learning_rate,
            scalar_frequency_power=self.scalar_frequency_power,
            stale_decay=self.stale_decay,
            **self._common_modes(decay),
        )

    def _dense_slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def _dense_rule(self, learning_rate):
        def rule(variable, gradient, momentum=None):
            new = sgd.dense_step(
                variable,
                gradient,
                momentum,
                learning_rate,
                self.momentum,
                self.nesterov,
            )
            return new if self.momentum else new[:1]

        return rule
