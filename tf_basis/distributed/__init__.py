"""Training on several processes: quantised exchange of gradients over Horovod.

Importing it does not import Horovod; making a distributed object does.
"""

from __future__ import annotations

from types import SimpleNamespace

from tf_basis.adapters import flavor
from tf_basis.distributed import (
    balanced,
    callbacks,
    checkpoint_callback,
    drift,
    elastic_callback,
    onebit_adam,
    overflow,
    quantization_callback,
    statistics,
)
from tf_basis.distributed import synchronize as _synchronize
from tf_basis.distributed.batches import any_rank, even_batches
from tf_basis.distributed.broadcast import broadcast_variables
from tf_basis.distributed.callbacks import (
    BroadcastCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from tf_basis.distributed.checkpoint import (
    CheckpointInfo,
    restore_checkpoint,
    save_checkpoint,
)
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.drift import ReplicaDriftError
from tf_basis.distributed.elastic import ElasticState, elastic_run
from tf_basis.distributed.exchange import OneBitExchange
from tf_basis.distributed.metadata import AdaptiveBits, AdaptiveRate
from tf_basis.distributed.metrics import average_metrics
from tf_basis.distributed.optimizer import DistributedOptimizer
from tf_basis.distributed.policy import NORMALIZATION_EVERY_10, Policy, Rule
from tf_basis.distributed.snapshot import DamagedCheckpointError
from tf_basis.distributed.synchronize import synchronize
from tf_basis.distributed.tape import DistributedGradientTape


def for_flavor(name: str) -> SimpleNamespace:
    """The classes that differ between `"keras3"` and `"tf_keras"`."""
    own = vars(callbacks.for_flavor(name))
    return SimpleNamespace(
        OneBitAdam=onebit_adam.define(name),
        BalancedBatch=balanced.define(name),
        CheckpointCallback=checkpoint_callback.define(name),
        ElasticCallback=elastic_callback.define(name),
        GradientStatistics=statistics.define(name),
        QuantizationStatistics=quantization_callback.define(name),
        ReplicaDriftCheck=drift.define(name),
        ResidualOverflowCheck=overflow.define(name),
        SynchronizeCallback=_synchronize.define(name),
        **own,
    )


_active = for_flavor(flavor.active())
BalancedBatch = _active.BalancedBatch
CheckpointCallback = _active.CheckpointCallback
ElasticCallback = _active.ElasticCallback
GradientStatistics = _active.GradientStatistics
OneBitAdam = _active.OneBitAdam
QuantizationStatistics = _active.QuantizationStatistics
ReplicaDriftCheck = _active.ReplicaDriftCheck
ResidualOverflowCheck = _active.ResidualOverflowCheck
SynchronizeCallback = _active.SynchronizeCallback

__all__ = [
    "NORMALIZATION_EVERY_10",
    "AdaptiveBits",
    "AdaptiveRate",
    "BalancedBatch",
    "BroadcastCallback",
    "CheckpointCallback",
    "CheckpointInfo",
    "DamagedCheckpointError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ElasticCallback",
    "ElasticState",
    "GradientStatistics",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "OneBitAdam",
    "OneBitCompression",
    "OneBitExchange",
    "Policy",
    "QuantizationStatistics",
    "ReplicaDriftCheck",
    "ReplicaDriftError",
    "ResidualOverflowCheck",
    "Rule",
    "SynchronizeCallback",
    "any_rank",
    "average_metrics",
    "broadcast_variables",
    "elastic_run",
    "even_batches",
    "for_flavor",
    "restore_checkpoint",
    "save_checkpoint",
    "synchronize",
]
