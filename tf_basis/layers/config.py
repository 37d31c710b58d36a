"""What tables and features of an `EmbeddingCollection` are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_basis import hyperparameters

COMBINERS = ("mean", "sum", "sqrtn")

_RULES = {
    "name": hyperparameters.Rule(
        "a name without '/'", lambda v: isinstance(v, str) and v and "/" not in v
    ),
    "vocabulary_size": hyperparameters.count,
    "embedding_dim": hyperparameters.count,
    "combiner": hyperparameters.choice(*COMBINERS),
    "invariant_scalar": hyperparameters.choice("energy", "learned", "none", None),
}
_OF_THE_LAYER = ("name", "vocabulary_size", "embedding_dim", "initializer", "combiner")


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table, and how optimizers of this package keep its state.

    `BasisAdam` and its kin read what is not None here as they read `table_settings`;
    a pattern there that matches the table takes its place. Tables with a setting of
    their own are compressed whatever `min_rows` says.

    Args:
      name: of the table, unique in a collection.
      vocabulary_size: N, the number of rows.
      embedding_dim: d, the length of a row.
      initializer: a Keras initializer or its name. Default None:
        `VarianceScaling(mode="fan_out")`.
      combiner: how a feature with several ids per example becomes one vector: `"mean"`
        (default) Σwx/Σw, `"sum"` Σwx, `"sqrtn"` Σwx/√Σw²; 0 without ids.
      compression_ratio: N/B. Default None: the optimizer's.
      num_buckets: B. Default None: the optimizer's.
      exclusive_rows: see `BasisAdam`. Default None: the optimizer's.
      row_frequencies: see `BasisAdam`. Default None.
      momentum: see `BasisAdam`. Default None: the optimizer's.
      invariant_scalar: `"energy"`, `"learned"` or `"none"` for no scalar. Default
        None: the optimizer's.
      scalar_decay, scalar_range, scalar_rule: see `BasisAdam`. Default None: the
        optimizer's.
      scalar_learning_rate, scalar_frequency_power: see `BasisAdam`. Default None: the
        optimizer's.
      hashing: see `BasisAdam`. Default None: the optimizer's.
      seed: see `BasisAdam`. Default None: the optimizer's.
      moment_dtype: see `BasisAdam`. Default None: the optimizer's.
      energy_dtype: see `BasisAdam`. Default None: the optimizer's.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> TableConfig("user", 1_000_000, 64, compression_ratio=50.0).settings()
    {'compression_ratio': 50.0}
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = None
    combiner: str = "mean"
    compression_ratio: float | None = None
    num_buckets: int | None = None
    exclusive_rows: Any = None
    row_frequencies: Any = None
    momentum: str | None = None
    invariant_scalar: str | None = None
    scalar_decay: float | None = None
    scalar_range: tuple[float, float] | None = None
    scalar_rule: str | None = None
    scalar_learning_rate: float | None = None
    scalar_frequency_power: float | None = None
    hashing: str | None = None
    seed: int | None = None
    moment_dtype: str | None = None
    energy_dtype: str | None = None

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in _OF_THE_LAYER}
        own["invariant_scalar"] = self.invariant_scalar
        hyperparameters.check_all(own, _RULES)
        hyperparameters.check_all(self.settings())
        frequencies = self.row_frequencies
        if frequencies is not None and len(frequencies) != self.vocabulary_size:
            raise ValueError(
                "row_frequencies must have one number for each of the "
                f"{self.vocabulary_size} rows of '{self.name}', received "
                f"{len(frequencies)}"
            )

    def settings(self) -> dict[str, Any]:
        """What the optimizer reads: what is not None."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings = {
            name: value
            for name, value in values.items()
            if name not in _OF_THE_LAYER and value is not None
        }
        if self.invariant_scalar == "none":
            settings["invariant_scalar"] = None
        return settings


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One feature: the ids of an example, looked up in a table.

    Args:
      name: of the feature, its key in the inputs and outputs.
      table: its `TableConfig`; features may share one.
      input_shape: of a batch of ids, the batch first: `(None,)` one id each,
        `(None, k)` k ids, `(None, None)` any number, ragged, sparse or padded.
      output_shape: `input_shape` without its last axis, and the table's
        `embedding_dim`: ids are combined; or `input_shape` and `embedding_dim`: they
        are not, and must be dense. Default None: combined where there are two axes.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> table = TableConfig("item", 5_000, 16)
    >>> FeatureConfig("history", table, (None, None)).output_shape
    (None, 16)
    """

    name: str
    table: TableConfig
    input_shape: Sequence[int | None] = (None,)
    output_shape: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        hyperparameters.check("name", self.name, _RULES["name"])
        if not isinstance(self.table, TableConfig):
            raise ValueError(
                f"feature '{self.name}': table must be a TableConfig, received "
                f"{self.table!r}"
            )
        ids, dim = tuple(self.input_shape), self.table.embedding_dim
        if not len(ids) >= 1 or not all(n is None or n >= 1 for n in ids):
            raise ValueError(
                f"feature '{self.name}': input_shape must be the batch and the axes of "
                f"its ids, received {self.input_shape!r}"
            )
        combined, apart = (*ids[:-1], dim), (*ids, dim)
        out = self.output_shape
        if out is None:
            out = combined if len(ids) == 2 else apart
        allowed = [apart] if len(ids) == 1 else [combined, apart]
        if tuple(out) not in allowed:
            raise ValueError(
                f"feature '{self.name}': output_shape must be one of {allowed}, "
                f"received {self.output_shape!r}"
            )
        object.__setattr__(self, "input_shape", ids)
        object.__setattr__(self, "output_shape", tuple(out))

    @property
    def combined(self) -> bool:
        """Whether the ids of an example become one vector."""
        return len(self.output_shape) == len(self.input_shape)
