"""BasisAdam."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tf_basis import engine
from tf_basis.optimizers.base import BasisOptimizerMixin
from tf_basis.rules.adam import AdamRule


class BasisAdamMixin(BasisOptimizerMixin):
    """Adam whose embedding tables share their state in B << N buckets."""

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        compression_ratio: float = 100.0,
        num_buckets: int | None = None,
        exclusive_rows: int = 0,
        tables: Any = None,
        min_rows: int = 10_000,
        momentum: str = "exclusive",
        invariant_scalar: str | None = "energy",
        scalar_decay: float = 0.99,
        scalar_range: tuple[float, float] = (0.1, 10.0),
        scalar_rule: str = "gradient",
        scalar_learning_rate: float = 1e-4,
        collision_reduce: str = "mean",
        bias_correction: bool = True,
        hashing: str = "balanced",
        seed: int = 0,
        weight_decay: float | None = None,
        row_clipnorm: float | None = None,
        dense_optimizer: Any = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        name: str = "basis_adam",
        **kwargs: Any,
    ) -> None:
        if invariant_scalar == "learned" and momentum != "shared":
            warnings.warn(
                "invariant_scalar='learned' moves the scalars of rows that follow a "
                f"first moment only; with momentum={momentum!r} the rows that share "
                "a bucket keep their scalar at 1 (use momentum='shared')",
                stacklevel=2,
            )
        self._initialize(locals())

    def _rule(self, decay: bool) -> AdamRule:
        return AdamRule(
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            momentum=self.momentum,
            invariant_scalar=self.invariant_scalar,
            scalar_decay=self.scalar_decay,
            scalar_range=tuple(self.scalar_range),
            scalar_rule=self.scalar_rule,
            scalar_learning_rate=self.scalar_learning_rate,
            collision_reduce=self.collision_reduce,
            bias_correction=self.bias_correction,
            weight_decay=self.weight_decay if decay else None,
            row_clipnorm=self.row_clipnorm,
        )

    def _table_slots(self, layout):
        return engine.slot_shapes(layout, self._rule(decay=False))

    def _dense_slots(self, variable):
        dtype = tf.as_dtype(variable.dtype)
        shape = tuple(variable.shape)
        return {"momentum": (shape, dtype, 0.0), "velocity": (shape, dtype, 0.0)}

    def _step_table(self, layout, variable, slots, gradient, learning_rate):
        rule = self._rule(decay=self._use_weight_decay(variable))
        engine.step_table(rule, layout, variable, slots, gradient, learning_rate)

    def _step_dense(self, variable, slots, gradient, learning_rate):
        engine.step_dense(
            self._rule(decay=False),
            variable,
            slots,
            gradient,
            self.iterations + 1,
            learning_rate,
        )
