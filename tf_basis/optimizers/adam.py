"""BasisAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_basis.optimizers import setting_checks
from tf_basis.optimizers.base import BasisOptimizerMixin
from tf_basis.optimizers.migrating import MigrationMixin
from tf_basis.rules import adam
from tf_basis.rules.bucket_rule import BucketRule


class BasisAdamMixin(MigrationMixin, BasisOptimizerMixin):
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
      num_buckets: B of every table, instead of the ratio (giving both warns); at most
        N in effect, silently where other tables have more rows. Default None.
      state_budget: bytes for the state of all tables together, `"256MB"`, `"1.5GiB"` or
        an integer, instead of a ratio or count (both must keep their default then):
        what is left after row energies and exclusive rows is divided over the tables
        in proportion to their size, except those to which `table_settings` gives a
        ratio or count. See `tf_basis.plan`. Default None.
      exclusive_rows: K, the leading rows that own a bucket each, or a list of the
        rows that do, or `"auto"`: a row that comes in most of its bucket's steps
        owns it (its moments are its own then, and the other rows of the bucket
        scale its second moment by their energy), and loses it again when others
        come more often. A number of at least N means all rows. Default 0.
      row_frequencies: how often each row occurs; then the `exclusive_rows` most
        frequent rows own a bucket. One number for each row of every table that they
        are for. Default None. (The config keeps the list of owners.)
      tables: which variables are compressed: None (rank-2 variables called
        `embeddings` with at least `min_rows` rows; a warning names other variables
        that look like tables), a regular expression that is searched in the variable
        path, or a list of variables or paths.
      table_settings: other settings for some tables: a dict from a pattern, searched
        in the variable path, to a dict of `compression_ratio`, `num_buckets`,
        `exclusive_rows`, `row_frequencies`, `momentum`, `hashing`, `seed`,
        `moment_dtype`, `energy_dtype`, `invariant_scalar` and the arguments that
        start with `scalar_`. A pattern must match a table. Default None.
      min_rows: rows from which on `tables=None` compresses. Default 10,000.
      momentum: `"exclusive"` (default: rows that own their bucket have momentum,
        the others none), `"shared"` or `"none"`.
      invariant_scalar: `"energy"` (default), `"learned"` or None.
      scalar_decay: decay of the row energies, in [0, 1). Default 0.99.
      scalar_range: the scalar's limits (low, high). Default (0.1, 10).
      scalar_rule: of the learned scalar: `"gradient"` (default), `"sign"`, `"log"`.
      scalar_learning_rate: of the learned scalar. Default 1e-4.
      scalar_frequency_power: p; the learned scalar of a row that comes in a share f
        of its bucket's steps learns f^-p times as fast, so that rare rows keep up.
        Costs a counter a row. Default 0.
      collision_reduce: how rows of one bucket enter it in one step: `"mean"`
        (default), `"sum"` or `"sequential"`.
      bias_correction: divide moments by 1 - beta^steps. Default True.
      hashing: `"balanced"` (default), `"murmur3"`, `"double"` (a row has two buckets:
        the mean of their first moments, the smaller of their second, column by
        column) or `"consistent"`, see `tf_basis.hashing`.
      seed: of the hash and of stochastic rounding, in [0, 2**32). Default 0.
      moment_dtype: format of the moments of tables: `"float32"` (default),
        `"bfloat16"` or `"float16"`. Arithmetic is float32; storing rounds at random,
        keyed by seed, row and step, so that small changes are not lost and replicas
        agree. With float16 `epsilon` is at least 2^-12 for tables.
      energy_dtype: format of the row energies: `"float32"` (default), `"bfloat16"`,
        or `"log8"`, an 8-bit logarithm.
      stale_decay: let a bucket's moments decay in the steps that did not touch it,
        as those of Adam do, when it is touched again. Default False (it gained
        nothing in `benchmarks/stale_decay.py`).
      weight_decay: decoupled decay per step; of a table, of its touched rows only;
        not of variables of the `dense_optimizer`. Default None.
      row_clipnorm: largest L2 norm of a table row's summed gradient. Default None.
      dense_optimizer: an optimizer of the same Keras for all other variables, with
        a learning rate and schedule of its own. Default None: exact Adam.
      clipnorm, clipvalue, global_clipnorm: as in Keras, over all gradients.
      use_ema, ema_momentum, ema_overwrite_frequency: as in Keras, but compressed
        tables are left out, with a warning: an average is as large as the table.
      name: default `"basis_adam"`.
      **kwargs: further arguments of this Keras's optimizers; and on tf_keras too
        `gradient_accumulation_steps`.

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
        state_budget: int | str | None = None,
        exclusive_rows: Any = 0,
        row_frequencies: Any = None,
        tables: Any = None,
        table_settings: Mapping[str, Mapping[str, Any]] | None = None,
        min_rows: int = 10_000,
        momentum: str = "exclusive",
        invariant_scalar: str | None = "energy",
        scalar_decay: float = 0.99,
        scalar_range: tuple[float, float] = (0.1, 10.0),
        scalar_rule: str = "gradient",
        scalar_learning_rate: float = 1e-4,
        scalar_frequency_power: float = 0.0,
        collision_reduce: str = "mean",
        bias_correction: bool = True,
        hashing: str = "balanced",
        seed: int = 0,
        moment_dtype: str = "float32",
        energy_dtype: str = "float32",
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
        name: str = "basis_adam",
        **kwargs: Any,
    ) -> None:
        led = isinstance(exclusive_rows, str) and exclusive_rows == "auto"
        setting_checks.check_scalar(invariant_scalar, led, momentum)
        self._initialize(locals())

    def _bucket_rule(self, decay: bool) -> BucketRule:
        return adam.bucket_rule(
            self.beta_1,
            self.beta_2,
            self.scalar_decay,
            bias_correction=self.bias_correction,
            epsilon=self.epsilon,
            scalar_range=tuple(self.scalar_range),
            scalar_rule=self.scalar_rule,
            scalar_learning_rate=self.scalar_learning_rate,
            scalar_frequency_power=self.scalar_frequency_power,
            stale_decay=self.stale_decay,
            **self._common_modes(decay),
        )

    def _dense_slots(self) -> dict[str, float]:
        return {"momentum": 0.0, "velocity": 0.0}

    def _dense_rule(self, learning_rate):
        step = self.iterations + 1

        def rule(variable, gradient, momentum, velocity):
            return adam.dense_step(
                variable,
                gradient,
                momentum,
                velocity,
                step,
                learning_rate,
                self.beta_1,
                self.beta_2,
                self.epsilon,
            )

        return rule
