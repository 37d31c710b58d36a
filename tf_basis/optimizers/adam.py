"""BasisAdam."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tf_basis import engine
from tf_basis.optimizers.base import BasisOptimizerMixin
from tf_basis.rules.adam import AdamRule


class BasisAdamMixin(BasisOptimizerMixin):
    """Adam whose embedding tables share their state in B << N buckets.

    A table of N rows keeps B second moments instead of N pairs of moments; a
    balanced hash assigns rows to buckets, and one scalar per row restores the size
    of the row's own step. For a touched row r with gradient g_r (duplicates summed)
    in bucket b, with the defaults::

        V_b <- beta_2 * V_b + (1 - beta_2) * mean over the bucket's rows of g^2
        q_r <- decay * q_r + (1 - decay) * mean_j g_rj^2
        row <- row - lr * sqrt(mean_j V^_bj / q_r) * g_r / (sqrt(V^_b) + epsilon)

    where ^ removes the bias of a moment. All modes: `docs/basis_adam.md`. Other
    variables follow Keras's Adam exactly, or `dense_optimizer`.

    Sparse gradients stay sparse: a step costs what the touched rows cost, whatever
    N is. A dense gradient of a table touches every row.

    Args:
      learning_rate: a float, a schedule or a callable. Default 1e-3.
      beta_1: decay of first moments, in [0, 1). Default 0.9.
      beta_2: decay of second moments, in [0, 1). Default 0.999.
      epsilon: added to the root of the second moment. Default 1e-8.
      compression_ratio: rows per bucket, at least 1. Default 100.
      num_buckets: B of every table, instead of the ratio. Default None.
      exclusive_rows: K, the leading rows that own a bucket each. Default 0.
      tables: which variables are compressed: None (rank-2 variables called
        `embeddings` with at least `min_rows` rows), a regular expression that is
        searched in the variable path, or a list of variables or paths.
      min_rows: rows from which on `tables=None` compresses. Default 10,000.
      momentum: `"exclusive"` (default: rows that own their bucket have momentum,
        the others none), `"shared"` or `"none"`.
      invariant_scalar: `"energy"` (default), `"learned"` or None.
      scalar_decay: decay of the row energies, in [0, 1). Default 0.99.
      scalar_range: the scalar's limits (low, high). Default (0.1, 10).
      scalar_rule: of the learned scalar: `"gradient"` (default), `"sign"`, `"log"`.
      scalar_learning_rate: of the learned scalar. Default 1e-4.
      collision_reduce: how rows of one bucket enter it in one step: `"mean"`
        (default), `"sum"` or `"sequential"`.
      bias_correction: divide moments by 1 - beta^steps. Default True.
      hashing: `"balanced"` (default) or `"murmur3"`, see `tf_basis.hashing`.
      seed: of the hash, in [0, 2**32). Default 0.
      weight_decay: decoupled decay per step; of a table, of its touched rows only;
        not of variables of the `dense_optimizer`. Default None.
      row_clipnorm: largest L2 norm of a table row's summed gradient. Default None.
      dense_optimizer: an optimizer of the same Keras for all other variables, with
        a learning rate and schedule of its own. Default None: exact Adam.
      clipnorm, clipvalue, global_clipnorm: as in Keras, over all gradients.
      use_ema, ema_momentum, ema_overwrite_frequency: as in Keras.
      name: default `"basis_adam"`.
      **kwargs: further arguments of this Keras's optimizers.

    Raises:
      ValueError: an argument breaks its rule; the message names argument, rule and
        value.
      tf.errors.InvalidArgumentError: (while training) an index is outside the table;
        nothing has been changed then.

    Example:

    >>> model = tf.keras.Sequential([
    ...     tf.keras.layers.Embedding(50_000, 16),
    ...     tf.keras.layers.Flatten(),
    ...     tf.keras.layers.Dense(1)])
    >>> model.compile(BasisAdam(1e-3, compression_ratio=100), "mse")
    >>> history = model.fit(tf.constant([[7], [9]]), tf.constant([0., 1.]), verbose=0)
    >>> model.optimizer.table_state(model.layers[0].embeddings)["second_moment"].shape
    (500, 16)

    Reference: `docs/basis_adam.md`; Kingma and Ba, "Adam: A Method for Stochastic
    Optimization", ICLR 2015.
    """

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
