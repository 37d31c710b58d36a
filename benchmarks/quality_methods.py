"""The optimizers that `quality.py` compares, each made for a list of tables."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import keras
import numpy as np
import rivals
from movielens_ctr import ORIGINAL

import tf_basis


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer of tables.

    Attributes:
      make: receives tables and rate.
      rates: where the search for the best rate begins, by task.
      exact: keeps a state of its own for every element, as the base that BASIS is
        compared with does.
    """

    make: Callable[[list[Any], float], Any]
    rates: dict[str, float]
    exact: bool = False


def of_keras(name: str, **more: Any) -> Callable[[list[Any], float], Any]:
    """A Keras optimizer."""

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

# Near where steps of their size are best: the search goes on from there.
STEPS = {"gowalla": 1.6e-2, "movielens": 1e-3, "zipf": 8e-3}
SUMS = {"gowalla": 6.4e-2, "movielens": 1.6e-2, "zipf": 6.4e-2}

# Keras adds it under the root there, so it is 1e-8 as with the others. The default
# would be above the squares of gradients of a mean over thousands of pairs.
UNDER_ROOT = {"epsilon": 1e-16}

METHODS = {
    "Keras Adam": Method(of_keras("Adam", epsilon=1e-8), STEPS, exact=True),
    "lazy Adam": Method(rivals.LazyAdam, STEPS, exact=True),
    "RMSprop": Method(of_keras("RMSprop", rho=0.999, **UNDER_ROOT), STEPS, exact=True),
    "Adagrad": Method(
        of_keras("Adagrad", initial_accumulator_value=0.0, **UNDER_ROOT),
        SUMS,
        exact=True,
    ),
    ROW_WISE: Method(rivals.RowWiseAdagrad, SUMS),
    "Adafactor": Method(rivals.Adafactor, STEPS),
    "SM3": Method(rivals.SM3, SUMS),
    "count-sketch Adam 10:1": Method(sketch, STEPS),
    "8-bit Adam": Method(rivals.EightBitAdam, STEPS),
    "BasisAdam 10:1": Method(adam(10), STEPS),
    BASE: Method(adam(100), STEPS),
    WIDE: Method(adam(1000), STEPS),
    LOW: Method(adam(100, moment_dtype="bfloat16", energy_dtype="bfloat16"), STEPS),
    ADAGRAD: Method(basis(tf_basis.BasisAdagrad, 100, energy_dtype="log8"), SUMS),
    "original rule 100:1": Method(adam(100, **ORIGINAL), STEPS),
}


def state_bytes(optimizer: Any) -> int:
    """Bytes of what the optimizer keeps beside the tables, but for single numbers."""
    if isinstance(optimizer, rivals.RowOptimizer):
        return optimizer.state_bytes()
    if isinstance(optimizer, (tf_basis.BasisAdam, tf_basis.BasisAdagrad)):
        return optimizer.state_bytes()["total"]
    arrays = [np.asarray(v) for v in optimizer.variables if math.prod(v.shape) > 1]
    return sum(array.nbytes for array in arrays)
