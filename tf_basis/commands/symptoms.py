"""Known failures of a training, their causes, and the check that tells them apart."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """One cause of a symptom.

    Attributes:
      cause: what is wrong.
      check: how to find out whether it is this one.
      remedy: what to do then.
    """

    cause: str
    check: str
    remedy: str


_DRIFT = (
    "distributed.ReplicaDriftCheck(every=100) in fit: an error names the first "
    "variable that differs and the ranks"
)

SYMPTOMS: dict[str, tuple[Cause, ...]] = {
    "loss-jumps": (
        Cause(
            "gradient and residual reach clip_value, and what is beyond is lost",
            "distributed.ResidualOverflowCheck(every=100) in fit: it warns, and names "
            "the variable with the largest residual",
            "lower the learning rate or reset_interval, or lengthen the warm-up; where "
            "the loss then jumps no more but learns slowly, raise clip_value",
        ),
        Cause(
            "ranks are out of step: other weights, or other numbers of steps",
            _DRIFT,
            "BroadcastCallback at the start, DistributedOptimizer for equal steps, "
            "even_batches for unequal data",
        ),
        Cause(
            "the variance of OneBitAdam was frozen before it had settled",
            "the loss jumps right after warmup_steps; with warmup_steps doubled, later "
            "or not at all",
            "a longer warm-up: 10 % of all steps",
        ),
        Cause(
            "steps are delayed, or ranks go alone for too many of them",
            "the training without delay, or with local_steps=1",
            "staleness_decay=0.5, a smaller local_steps, or a lower learning rate",
        ),
        Cause(
            "learned scalars of a table swing",
            "CollisionReport(every=100, unit='step') in fit: scalar_rate_high",
            "divide scalar_learning_rate by ten; scalar_range=(0.5, 2)",
        ),
    ),
    "no-speed-up": (
        Cause(
            "the link is not the bottleneck",
            "benchmarks/break_even.py: it prints from which link speed on, and for how "
            "many parameters and ranks, one bit pays",
            "train in full precision, or use more ranks",
        ),
        Cause(
            "the model has too few dense parameters for the exchange to count",
            "benchmarks/break_even.py, with the number of your parameters; a Policy "
            "leaves variables below min_elements to 16 bits",
            "full precision; tables are exchanged by rows and not by bits anyway",
        ),
        Cause(
            "one rank is slower than the others, which wait for it",
            "distributed.BalancedBatch: the speeds in its history differ",
            "BalancedBatch, which gives it smaller batches",
        ),
        Cause(
            "the exchange is as short as it can be, and the step waits for it still",
            "benchmarks/onebit_ablation.py: what delay=1 and local_steps gain",
            "delay=1, which exchanges during the next step; local_steps",
        ),
        Cause(
            "the link is shared with other traffic",
            "benchmarks/allreduce.py between these machines, now and when they are "
            "idle: times differ",
            "a link or a time of its own",
        ),
        Cause(
            "the collective library is old, was built for another TensorFlow, or lacks "
            "the faster of its back ends",
            "tf-basis doctor: the lines of Horovod and its build",
            "tf-basis install-horovod --force",
        ),
        Cause(
            "the C++ ops are not used, and quantising costs more than is saved",
            "tf-basis doctor: the line of the ops; TF_BASIS_OPS=require makes it an "
            "error",
            "install the package from its sources for this TensorFlow",
        ),
    ),
    "low-accuracy": (
        Cause(
            "rows share too few buckets, or share momentum",
            "CollisionReport in fit: collision_error, few_buckets, and the error of "
            "shadow rows; the training with compression_ratio=1",
            "more buckets, exclusive_rows for the frequent rows, momentum='exclusive'",
        ),
        Cause(
            "on several ranks: clip_value cuts much off, or residuals grow without one",
            "distributed.ResidualOverflowCheck: how many elements; without a "
            "clip_value, the training with 0.5, 1 and 2",
            "a smaller clip_value if residuals are large late in the training, a "
            "larger one if much is clipped early",
        ),
        Cause(
            "on several ranks: the warm-up of OneBitAdam is too short",
            "the same training with all steps in the warm-up: if that is well, it is "
            "the exchange and not the model",
            "warmup_steps of 10 % of all steps",
        ),
        Cause(
            "on several ranks: OneBitAdam with moments='corrected' begins with too "
            "small a gamma",
            "the same training with moments='frozen'",
            "a larger first gamma, or 'frozen', which is the default",
        ),
        Cause(
            "on several ranks: steps are skipped, as gradients are not finite on one",
            "skipped_steps of the optimizer: it grows; distributed.GradientStatistics: "
            "non_finite, by variable",
            "clip gradients (clipnorm; OneBitAdam has clip_value), or lower the "
            "learning rate",
        ),
        Cause(
            "on several ranks: adaptive_rate keeps the learning rate near its floor",
            "quantization_statistics of the optimizer: relative_error near 1",
            "no adaptive_rate, or a larger learning rate",
        ),
    ),
    "does-not-converge": (
        Cause(
            "too many rows share a bucket, or the hash is uneven",
            "diagnostics.report(optimizer): few_buckets, bad_balance",
            "more buckets; hashing='balanced'",
        ),
        Cause(
            "the rate of learned scalars is wrong",
            "diagnostics.report(optimizer): scalar_rate_high, scalar_rate_low",
            "change scalar_learning_rate by factors of ten",
        ),
        Cause(
            "second moments are 0 or huge",
            "diagnostics.report(optimizer): zeros_touched, vanished_touched and max of "
            "the second moment; epsilon_small",
            "a larger epsilon, bfloat16 in place of float16, row_clipnorm",
        ),
        Cause(
            "it is not the tables",
            "the same training with compression_ratio=1, which is exact lazy Adam",
            "look at learning rate and data",
        ),
    ),
    "nan": (
        Cause(
            "gradients are not finite",
            "distributed.GradientStatistics(every=1): non_finite, and the first "
            "variable that has them",
            "clipnorm (OneBitAdam has clip_value instead) or row_clipnorm, a lower "
            "learning rate, the loss itself",
        ),
        Cause(
            "a moment is not finite: it stays so for ever",
            "diagnostics.report(optimizer), or tf-basis report on the last checkpoint: "
            "non_finite",
            "go on from an earlier checkpoint, with gradients clipped",
        ),
        Cause(
            "epsilon is too small for moments in float16",
            "diagnostics.report(optimizer): epsilon_small",
            "a larger epsilon, bfloat16, or a loss scale",
        ),
        Cause(
            "scalars lengthen steps beyond reason",
            "diagnostics.report(optimizer): the maximum of scalars, at_high",
            "a narrower scalar_range, (0.5, 2)",
        ),
    ),
    "ranks-drift": (
        Cause(
            "ranks began with other weights",
            _DRIFT + ", at its first look",
            "BroadcastCallback; after a restore CheckpointCallback in its place",
        ),
        Cause(
            "gradients are not exchanged: an optimizer of Keras, or Horovod's own one "
            "on Keras 3, which never reduces",
            _DRIFT,
            "distributed.DistributedOptimizer around the optimizer",
        ),
        Cause(
            "weights are changed on one rank alone: callbacks, loaded files, code "
            "behind `if rank == 0`",
            _DRIFT + "; take callbacks out one by one",
            "do it on all ranks, or broadcast_variables after it",
        ),
        Cause(
            "averages of BatchNormalization or seeds of dropout, which each rank has "
            "for itself",
            "ReplicaDriftCheck(non_trainable=True) names them; without it they do not "
            "count",
            "nothing, or broadcast them at the end",
        ),
        Cause(
            "OneBitAdam has local_steps: between exchanges weights differ on purpose",
            _DRIFT + ": it waits for the next exchange, and finds nothing",
            "distributed.synchronize before they are saved or compared",
        ),
    ),
}
