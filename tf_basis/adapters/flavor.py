"""Which Keras is `tf.keras`, and the adapter that goes with it."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

FLAVORS = ("keras3", "tf_keras")


def active() -> str:
    """The flavour that `tf.keras` means in this process.

    TensorFlow decides it at import: `TF_USE_LEGACY_KERAS=1` gives tf_keras.
    """
    # The same test as TensorFlow's own, made without loading either Keras.
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    return "tf_keras" if legacy else "keras3"


def load_adapter(name: str) -> ModuleType:
    """`tf_basis.adapters.keras3` or `.tf_keras`.

    Raises:
      ValueError: `name` is no flavour.
      ImportError: that Keras is not installed, or runs on another backend.
    """
    if name not in FLAVORS:
        raise ValueError(f"flavor must be one of {FLAVORS}, received {name!r}")
    return importlib.import_module(f"tf_basis.adapters.{name}")


def load_collective(name: str) -> ModuleType:
    """`tf_basis.adapters.collective_keras3` or `.collective_tf_keras`."""
    load_adapter(name)  # which checks name and backend
    return importlib.import_module(f"tf_basis.adapters.collective_{name}")
