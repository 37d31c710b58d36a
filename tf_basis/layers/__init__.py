"""Embedding layers that tell the optimizer how to keep the state of their tables."""

from types import SimpleNamespace

from tf_basis.layers import collection, id_encoder
from tf_basis.layers.collection import EmbeddingCollection
from tf_basis.layers.config import FeatureConfig, TableConfig
from tf_basis.layers.id_encoder import IdEncoder

__all__ = [
    "EmbeddingCollection",
    "FeatureConfig",
    "IdEncoder",
    "TableConfig",
    "for_flavor",
]


def for_flavor(name: str) -> SimpleNamespace:
    """The layers on one flavour of Keras: `"keras3"` or `"tf_keras"`."""
    made = [module.for_flavor(name) for module in (collection, id_encoder)]
    return SimpleNamespace(**{k: v for each in made for k, v in vars(each).items()})
