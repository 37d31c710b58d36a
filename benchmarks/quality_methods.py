"""The optimizers that `quality.py` compares, each made for a list of tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import rivals

import tf_basis

ORIGINAL = {
    "momentum": "shared",
    "invariant_scalar": "learned",
    "scalar_rule": "gradient",
    "collision_reduce": "sequential",
    "bias_correction": False,
}


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer of tables.

    Attributes:
      make: receives tables and rate.
      rate: where the search for the best rate begins.
      exact: keeps a state of its own for every element, as the base that BASIS is
        compared with does.
    """

    make: Callable[[list[Any], float], Any]
    rate: float
    exact: bool = False


def of_keras(name: str) -> Callable[[list[Any], float], Any]:
    """A Keras optimizer as it comes, but for Adagrad's sums, which begin with zero."""
    more = {"initial_accumulator_value": 0.0} if name == "Adagrad" else {}

    def make(tables: list[Any], rate: float) -> Any:
        optimizer = getattr(keras.optimizers, name)(rate, **more)
        optimizer.build(tables)
        return optimizer

    return make


def basis(cls: type, ratio: float, **more: Any) -> Callable[[list[Any], float], Any]:
    """An optimizer of this package."""

    def make(tables: list[Any], rate: float) -> Any:
        optimizer = cls(rate, compression_ratio=ratio, tables=tables, **more)
        optimizer.build(tables)
        return optimizer

    return make


def sketch(tables: list[Any], rate: float) -> Any:
    return rivals.CountSketchAdam(tables, rate, ratio=10)


def adam(ratio: float, **more: Any) -> Callable[[list[Any], float], Any]:
    return basis(tf_basis.BasisAdam, ratio, **more)


ADAGRAD = "BasisAdagrad 100:1, equal bytes"
ROW_WISE = "row-wise Adagrad"
BASE, WIDE = "BasisAdam 100:1", "BasisAdam 1000:1"
LOW = "BasisAdam 100:1, equal bytes"

METHODS = {
    "Keras Adam": Method(of_keras("Adam"), 1e-3, exact=True),
    "lazy Adam": Method(rivals.LazyAdam, 1e-3, exact=True),
    "RMSprop": Method(of_keras("RMSprop"), 1e-3, exact=True),
    "Adagrad": Method(of_keras("Adagrad"), 3e-2, exact=True),
    ROW_WISE: Method(rivals.RowWiseAdagrad, 3e-2),
    "Adafactor": Method(rivals.Adafactor, 1e-3),
    "SM3": Method(rivals.SM3, 3e-2),
    "count-sketch Adam 10:1": Method(sketch, 1e-3),
    "8-bit Adam": Method(rivals.EightBitAdam, 1e-3),
    "BasisAdam 10:1": Method(adam(10), 1e-3),
    BASE: Method(adam(100), 1e-3),
    WIDE: Method(adam(1000), 1e-3),
    LOW: Method(adam(100, moment_dtype="bfloat16", energy_dtype="bfloat16"), 1e-3),
    ADAGRAD: Method(basis(tf_basis.BasisAdagrad, 100, energy_dtype="log8"), 3e-2),
    "original rule 10:1": Method(adam(10, **ORIGINAL), 1e-3),
    "original rule 100:1": Method(adam(100, **ORIGINAL), 1e-3),
}


def state_bytes(optimizer: Any) -> int:
    """Bytes of what the optimizer keeps beside the tables, but for single numbers."""
    if isinstance(optimizer, rivals.RowOptimizer):
        return optimizer.state_bytes()
    if isinstance(optimizer, (tf_basis.BasisAdam, tf_basis.BasisAdagrad)):
        return optimizer.state_bytes()["total"]
    arrays = [np.asarray(v) for v in optimizer.variables if math.prod(v.shape) > 1]
    return sum(array.nbytes for array in arrays)
