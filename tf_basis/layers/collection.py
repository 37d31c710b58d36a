"""The layer that looks all features up, one gather for each table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tf_basis.adapters import flavor, keras_modules, weights
from tf_basis.layers import lookup
from tf_basis.layers.blocks import by_blocks
from tf_basis.layers.config import FeatureConfig, TableConfig
from tf_basis.layers.growing import GrowingMixin
from tf_basis.optimizers.selection import OWN_SETTINGS


class EmbeddingCollectionMixin(GrowingMixin):
    """Embeds the features of a model, from tables that they may share.

    All ids that go to one table are put together before the lookup, so that a step has
    one gather and one gradient, `tf.IndexedSlices`, for each table, never a dense one.
    Optimizers of this package find the settings of each `TableConfig` by themselves.

    Inputs are a dict from the names of features to ids: dense, of the feature's
    `input_shape`; or, where they are combined, a `tf.RaggedTensor` or `tf.SparseTensor`
    of rank 2. Padded ids come with a `mask`, a dict of booleans, False where there is
    no id: nothing is looked up there, nor updated. `weights` is a dict of floats, in
    the form of the ids.

    Args:
      features: `FeatureConfig`s with different names; tables of one name are one.
      concatenate: whether to return one tensor, the features' vectors along the last
        axis in the order of `features`, instead of a dict. Default False.
      **kwargs: of the Keras layer.

    Raises:
      ValueError: an argument breaks its rule; in a call: a feature is missing or
        unknown, or its ids, weights or mask do not fit. The message names the feature.
      tf.errors.InvalidArgumentError: in a call: ids outside of the table, weights that
        are not finite. The message names the feature.

    Example:

    >>> item = TableConfig("item", vocabulary_size=5, embedding_dim=2, combiner="sum")
    >>> layer = EmbeddingCollection(
    ...     [FeatureConfig("last", item), FeatureConfig("history", item, (None, None))]
    ... )
    >>> history = tf.ragged.constant([[1, 2, 2], []])
    >>> ids = {"last": tf.constant([4, 0]), "history": history}
    >>> {name: tuple(x.shape) for name, x in layer(ids).items()}
    {'last': (2, 2), 'history': (2, 2)}

    Reference: `DistributedEmbedding` of keras-rs spells configs and features alike.
    """

    _keras: Any

    def __init__(
        self,
        features: Iterable[FeatureConfig],
        concatenate: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._feature_configs = tuple(features)
        for feature in self._feature_configs:
            if not isinstance(feature, FeatureConfig):
                raise ValueError(
                    f"features must be FeatureConfigs, received {feature!r}"
                )
        self.concatenate = concatenate
        names = [f.name for f in self._feature_configs]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                "features must be FeatureConfigs with different names, received "
                f"{names}"
            )
        tables: dict[str, TableConfig] = {}
        for feature in self._feature_configs:
            if tables.setdefault(feature.table.name, feature.table) != feature.table:
                raise ValueError(
                    f"tables of one name must be alike, received {feature.table} and "
                    f"{tables[feature.table.name]}"
                )
        if concatenate and not all(
            len(f.output_shape) == 2 for f in self._feature_configs
        ):
            raise ValueError(
                "concatenate must be False where a feature's output has more than two "
                "axes, received True"
            )
        self._tables = {n: self._table(t) for n, t in sorted(tables.items())}
        for name, table in self._tables.items() if self._flavor == "keras3" else ():
            # Keras 3 hides what is in a dict from `tf.train.Checkpoint`.
            self._track_trackable(table, f"_tables_{name}")

    @property
    def features(self) -> tuple[FeatureConfig, ...]:
        """As they were given."""
        return self._feature_configs

    def table(self, name: str) -> Any:
        """The variable of a table, shape [vocabulary_size, embedding_dim]."""
        return self._tables[name].embeddings

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables."""
        del input_shape
        for table in self._tables.values():
            if not table.built:
                # From the top, wherever this is built from.
                with tf.name_scope(f"{self.name}/"), tf.name_scope(table.name):
                    table.build(None)
        self.built = True

    def call(self, inputs: Any, weights: Any = None, mask: Any = None) -> Any:
        """The vectors of all features: a dict, or one tensor with `concatenate`."""
        given = self._by_feature("inputs", inputs, required=True)
        weights = self._by_feature("weights", weights)
        mask = self._by_feature("mask", mask)
        found = {
            f.name: lookup.ids_of(
                f, given[f.name], weights.get(f.name), mask.get(f.name)
            )
            for f in self._feature_configs
        }
        outputs = {}
        for name, table in self._tables.items():
            members = [f for f in self._feature_configs if f.table.name == name]
            parts = [tf.cast(found[f.name].values, tf.int64) for f in members]
            vectors = table.rows(tf.concat(parts, 0))
            sizes = [tf.shape(p)[0] for p in parts]
            for feature, part in zip(members, tf.split(vectors, sizes)):
                part = tf.ensure_shape(part, [None, feature.table.embedding_dim])
                out = lookup.combine(feature, found[feature.name], part)
                shape = tf.TensorShape(feature.output_shape)
                outputs[feature.name] = tf.ensure_shape(out, shape)
        ordered = {f.name: outputs[f.name] for f in self._feature_configs}
        if not self.concatenate:
            return ordered
        with tf.control_dependencies([lookup.same_examples(found)]):
            return tf.concat(list(ordered.values()), -1)

    def compute_mask(self, *args: Any, **kwargs: Any) -> None:
        """What was masked is not in the output."""

    def _by_feature(self, name: str, given: Any, required: bool = False) -> dict:
        if given is None and not required:
            return {}
        known = {f.name for f in self._feature_configs}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{name} must be a dict with the features {sorted(known)}, received "
                f"{given!r}"
            )
        unknown, missing = sorted(set(given) - known), sorted(known - set(given))
        if unknown or (required and missing):
            raise ValueError(
                f"{name} must have the features {sorted(known)}, received unknown "
                f"{unknown}, missing {missing if required else []}"
            )
        return dict(given)

    def get_config(self) -> dict[str, Any]:
        """The arguments, ready for JSON."""
        initializers = keras_modules.keras_of(self._flavor).initializers
        tables = {}
        for feature in self._feature_configs:
            config = dataclasses.asdict(feature.table)
            if feature.table.initializer is not None:
                start = initializers.get(feature.table.initializer)
                config["initializer"] = initializers.serialize(start)
            for key in ("exclusive_rows", "row_frequencies"):
                value = config[key]
                if value is not None and not isinstance(value, (int, str)):
                    config[key] = [x.item() if hasattr(x, "item") else x for x in value]
            tables[feature.table.name] = config
        features = [
            {
                "name": f.name,
                "table": f.table.name,
                "input_shape": list(f.input_shape),
                "output_shape": list(f.output_shape),
            }
            for f in self._feature_configs
        ]
        return {
            **super().get_config(),
            "tables": tables,
            "features": features,
            "concatenate": self.concatenate,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The reverse of `get_config`."""
        config = dict(config)
        initializers = keras_modules.keras_of(cls._flavor).initializers
        tables = {}
        for name, table in config.pop("tables").items():
            table = dict(table)
            if table["initializer"] is not None:
                table["initializer"] = initializers.get(table["initializer"])
            if table["scalar_range"] is not None:
                table["scalar_range"] = tuple(table["scalar_range"])
            tables[name] = TableConfig(**table)
        features = [
            FeatureConfig(**{**f, "table": tables[f["table"]]})
            for f in config.pop("features")
        ]
        return cls(features, **config)

    def _table(self, config: TableConfig) -> Any:
        return _classes(self._flavor).Table(config, dtype=self._table_dtype())


class TableMixin:
    """One table of a collection: a layer with one weight, `embeddings`."""

    def __init__(self, config: TableConfig, **kwargs: Any) -> None:
        super().__init__(name=config.name, **kwargs)
        self.config = config

    def build(self, input_shape: Any = None) -> None:
        """Makes the weight, and leaves the settings on it for the optimizer."""
        del input_shape
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.config.vocabulary_size, self.config.embedding_dim),
            initializer=self._initializer(),
            trainable=True,
            **_NO_AUTOCAST[self._flavor],
        )
        _leave_settings(self.embeddings, self.config)
        self.built = True

    def larger(self, config: TableConfig) -> Any:
        """A weight for a config with more rows, to take the place of this one."""
        shape = (config.vocabulary_size, config.embedding_dim)
        made = weights.like(self.embeddings, shape, self._initializer())
        _leave_settings(made, config)
        return made

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows with these ids, in the type that the layer computes in."""
        table = self._adapter.tensorflow_variable(self.embeddings)
        return tf.cast(tf.gather(table, ids), self.compute_dtype)

    def _initializer(self) -> Any:
        keras = keras_modules.keras_of(self._flavor)
        start = self.config.initializer
        if start is None:
            start = keras.initializers.VarianceScaling(mode="fan_out")
        return by_blocks(keras.initializers.get(start), keras)


def _leave_settings(variable: Any, config: TableConfig) -> None:
    if config.settings():
        setattr(variable, OWN_SETTINGS, config.settings())


# Cast as a whole, a table would have a dense gradient.
_NO_AUTOCAST = {
    "keras3": {"autocast": False},
    "tf_keras": {"experimental_autocast": False},
}


@functools.cache
def _classes(name: str) -> SimpleNamespace:
    base = keras_modules.keras_of(name).layers.Layer
    adapter = flavor.load_adapter(name)
    members = {"__module__": __name__, "_flavor": name, "_adapter": adapter}

    def table_dtype(self) -> Any:
        return self.dtype_policy if name == "keras3" else self._dtype_policy

    collection = {
        **members,
        "__doc__": EmbeddingCollectionMixin.__doc__,
        "_table_dtype": table_dtype,
    }
    made = type("EmbeddingCollection", (EmbeddingCollectionMixin, base), collection)
    return SimpleNamespace(
        EmbeddingCollection=adapter.register(made),
        Table=type("Table", (TableMixin, base), members),
    )


def for_flavor(name: str) -> SimpleNamespace:
    """The layers on one flavour of Keras: `"keras3"` or `"tf_keras"`."""
    return SimpleNamespace(EmbeddingCollection=_classes(name).EmbeddingCollection)


EmbeddingCollection = for_flavor(flavor.active()).EmbeddingCollection
