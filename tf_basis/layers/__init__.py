"""Embedding layers that tell the optimizer how to keep the state of their tables."""

from tf_basis.layers.collection import EmbeddingCollection, for_flavor
from tf_basis.layers.config import FeatureConfig, TableConfig

__all__ = ["EmbeddingCollection", "FeatureConfig", "TableConfig", "for_flavor"]
