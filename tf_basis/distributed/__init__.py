"""Training on several processes: quantised exchange of gradients over Horovod.

Importing it does not import Horovod; making a distributed object does.
"""

from __future__ import annotations

from types import SimpleNamespace

from tf_basis.adapters import flavor
from tf_basis.distributed import callbacks, onebit_adam
from tf_basis.distributed.batches import any_rank, even_batches
from tf_basis.distributed.broadcast import broadcast_variables
from tf_basis.distributed.callbacks import (
    BroadcastCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.exchange import OneBitExchange
from tf_basis.distributed.metrics import average_metrics
from tf_basis.distributed.optimizer import DistributedOptimizer
from tf_basis.distributed.policy import NORMALIZATION_EVERY_10, Policy, Rule
from tf_basis.distributed.tape import DistributedGradientTape


def for_flavor(name: str) -> SimpleNamespace:
    """The classes that differ between `"keras3"` and `"tf_keras"`."""
    own = vars(callbacks.for_flavor(name))
    return SimpleNamespace(OneBitAdam=onebit_adam.define(name), **own)


OneBitAdam = for_flavor(flavor.active()).OneBitAdam

__all__ = [
    "NORMALIZATION_EVERY_10",
    "BroadcastCallback",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "OneBitAdam",
    "OneBitCompression",
    "OneBitExchange",
    "Policy",
    "Rule",
    "any_rank",
    "average_metrics",
    "broadcast_variables",
    "even_batches",
    "for_flavor",
]
