"""Tables of a collection that get more rows, in the same model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import weights
from tf_basis.layers.config import TableConfig
from tf_basis.optimizers.slots import empty


class GrowingMixin:
    """`grow`."""

    def grow(
        self,
        table: str,
        vocabulary_size: int,
        optimizer: Any = None,
        *,
        num_buckets: int | None = None,
    ) -> None:
        """Gives a table more rows, behind the old ones, in the course of a training.

        The old rows keep their values, and through `optimizer.grow_rows` their buckets
        and all state; new rows start as the table's initializer says. The weight is
        another variable afterwards: call `tf_basis.retrace(model)` before the model is
        trained or used again. The old variable is emptied, so that a function that was
        traced with it fails. The new table is made beside the old one, and nothing else
        of that size is.

        Call it eagerly, between steps, on all ranks alike.

        Args:
          table: its name.
          vocabulary_size: the new number of rows, at least the old one.
          optimizer: of this package, which trains the table. Default None: there is
            none yet.
          num_buckets: B of the grown table, see `grow_rows`. Default None: as before.

        Raises:
          ValueError: an argument breaks its rule, or the optimizer cannot grow the
            table. Nothing has been changed then.
          RuntimeError: it is called inside a tf.function.

        Example:

        >>> layer = EmbeddingCollection([FeatureConfig("item", TableConfig("t", 5, 2))])
        >>> layer.build(None)
        >>> layer.grow("t", 8)
        >>> tuple(layer.table("t").shape), layer.features[0].table.vocabulary_size
        ((8, 2), 8)
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"grow of '{self.name}' must be called eagerly, between steps, not "
                "inside a tf.function or graph"
            )
        names = sorted(self._tables)
        hyperparameters.check("table", table, hyperparameters.choice(*names))
        config = next(f.table for f in self._feature_configs if f.table.name == table)
        before = config.vocabulary_size
        rule = hyperparameters.integer(
            f"of at least {before}, the rows of '{table}'", lambda v: v >= before
        )
        hyperparameters.check("vocabulary_size", vocabulary_size, rule)
        if optimizer is not None and not hasattr(optimizer, "grow_rows"):
            raise ValueError(
                "optimizer must be one of tf_basis, not wrapped in another, received "
                f"{optimizer!r}"
            )
        if vocabulary_size == before and num_buckets is None:
            return
        config, layer = _larger(config, int(vocabulary_size)), self._tables[table]
        if layer.built:
            old, new = layer.embeddings, layer.larger(config)
            native = self._adapter.tensorflow_variable
            native(new)[:before].assign(native(old))  # in place
            if optimizer is not None and optimizer._is_built():
                optimizer.grow_rows(old, new, num_buckets=num_buckets)
            weights.exchange(layer, "embeddings", new)
            empty(native(old))
        layer.config = config
        self._feature_configs = tuple(
            dataclasses.replace(f, table=config) if f.table.name == table else f
            for f in self._feature_configs
        )


def _larger(config: TableConfig, n_rows: int) -> TableConfig:
    """The same with more rows; those that own a bucket are the same ones."""
    frequencies = config.row_frequencies
    if frequencies is not None:
        new = n_rows - config.vocabulary_size
        frequencies = np.pad(np.asarray(frequencies), (0, new))
    return dataclasses.replace(
        config, vocabulary_size=n_rows, row_frequencies=frequencies
    )
