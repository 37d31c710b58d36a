"""The Keras of a flavour, for what is neither an optimizer base nor a layer."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from tf_basis.adapters import flavor


def keras_of(name: str) -> ModuleType:
    """`keras` or `tf_keras`.

    Raises:
      ValueError: `name` is no flavour.
      ImportError: that Keras is not installed, or runs on another backend.
    """
    flavor.load_adapter(name)  # which checks name and backend
    return importlib.import_module("keras" if name == "keras3" else "tf_keras")


def flavor_of(optimizer: Any) -> str:
    """`"keras3"` or `"tf_keras"`: the flavour of Keras whose optimizer this is.

    Raises:
      ValueError: of none.
    """
    # The active one first: the other may not be loaded, and need not be.
    for name in sorted(flavor.FLAVORS, key=lambda n: n != flavor.active()):
        try:
            if isinstance(optimizer, flavor.load_adapter(name).Optimizer):
                return name
        except ImportError:
            continue
    raise ValueError(
        f"optimizer must be an optimizer of Keras 3 or tf_keras, received {optimizer!r}"
    )
