"""The numbers and modes of a step, and the state it works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf


@dataclass(frozen=True)
class BucketRule:
    """The numbers and modes of a rule; `keep` and `take` are of `x <- keep*x + take*g`.

    A rule whose `second` is None has no second moment (and divides by nothing).
    """

    first: tuple[float, float] = (0.0, 1.0)  # M <- keep * M + take * g
    second: tuple[float, float] | None = None  # V <- keep * V + take * g^2
    energy: tuple[float, float] = (0.0, 1.0)  # q <- keep * q + take * mean g^2
    epsilon: float = 1e-8
    nesterov: bool = False
    bias_correction: bool = False
    invariant_scalar: str | None = None
    scalar_range: tuple[float, float] = (0.0, float("inf"))
    scalar_rule: str = "gradient"
    scalar_learning_rate: float = 1e-4
    scalar_frequency_power: float = 0.0
    collision_reduce: str = "mean"
    weight_decay: float | None = None
    row_clipnorm: float | None = None
    stale_decay: bool = False


class TableState(NamedTuple):
    """What a step reads and returns, gathered for R touched rows in S buckets.

    Numbers are float32 whatever their variables are; None: the rule has none.
    """

    rows: tf.Tensor  # [R, d]
    row_scalar: tf.Tensor | None  # [R]: energies or learned scalars
    row_steps: tf.Tensor | None  # [R] int32
    first_moment: tf.Tensor | None  # [S, d]
    second_moment: tf.Tensor | None  # [S, d]
    bucket_steps: tf.Tensor  # [S] int32
    last_step: tf.Tensor | None  # [S] int32
    leader: tf.Tensor | None  # [S] int64: where owners are found during training
    leader_votes: tf.Tensor | None  # [S] int32
    leader_steps: tf.Tensor | None  # [S] int32: of the leader's first moment


# Rounds numbers as their variable stores them: (slot, values, ids, steps) -> values.
Store = Callable[[str, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
