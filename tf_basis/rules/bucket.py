"""One step on a table whose rows share state in buckets, as a pure function.

`table_step` is the pure-TF twin of `tf_ops/cc/core/bucket_update.h`.  BasisAdam,
BasisSGD and BasisAdagrad are choices of the numbers in `BucketRule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from tf_basis.rules.grouping import RowGroups


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


# A bucket's leader is the row that came in most of the bucket's recent steps: it
# gains a vote in a step it is in and loses one in another; without votes the first
# row of the step takes over. With enough votes it owns the bucket.
VOTES_TO_OWN, MOST_VOTES = 8, 64


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


def table_step(
    rule: BucketRule,
    state: TableState,
    groups: RowGroups,
    owner: tf.Tensor,
    follows: tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
    store: Store,
) -> TableState:
    """One step.

    Args:
      rule: hyperparameters.
      state: values before the step.
      groups: the batch.
      owner: [R] whether the row shares its bucket with nobody.
      follows: [R] whether the row follows the first moment of its buckets.
      learning_rate: float64 scalar.
      step: int64 scalar, the optimizer's steps from 1.
      store: what a variable makes of the numbers written to it.

    Returns:
      The values after the step.
    """
    gradients = groups.gradients
    if rule.row_clipnorm is not None:
        gradients = _clip_rows(gradients, rule.row_clipnorm)
    g = tf.cast(gradients, tf.float64)
    if rule.invariant_scalar == "learned":
        state = _learn(rule, state, g, groups.segments, follows, learning_rate)
    first_from = second_from = groups.is_member
    missed = _missed_steps(state, step)
    if state.leader is not None:
        state, leads, owned = _vote(state, groups, missed)
        first_from = leads
        second_from &= leads | ~tf.gather(owned, groups.member_of)
        owner = follows = _leads_row(state, groups) & tf.gather(
            owned, groups.segments[:, 0]
        )
    state = _update_buckets(
        rule, state, g, groups, first_from, second_from, missed, store
    )
    if state.last_step is not None:
        now = tf.cast(tf.minimum(step, tf.int32.max), tf.int32)
        state = state._replace(last_step=tf.fill(tf.shape(state.last_step), now))

    segments = groups.segments
    steps = tf.reduce_max(tf.gather(state.bucket_steps, segments), axis=1)
    row_scalar, scale = state.row_scalar, tf.ones_like(g[:, 0])
    if rule.invariant_scalar == "learned":
        scale = tf.cast(row_scalar, tf.float64)
    if rule.second is not None:
        v_hat = _second_hat(rule, state, segments)
        if rule.invariant_scalar == "energy":
            v_hat_mean = tf.reduce_mean(tf.cast(v_hat, tf.float64), axis=1)
            row_scalar, scale = _energy(
                rule, row_scalar, g, v_hat_mean, owner, groups.rows, steps, store
            )

    direction, length = gradients, learning_rate * scale
    if state.first_moment is not None:
        moment, moment_scale = _first_moment(rule, state, segments)
        if rule.nesterov:
            moment = gradients + rule.first[0] * moment
            moment_scale = tf.ones_like(moment_scale)
        direction = tf.where(follows[:, None], moment, gradients)
        length *= tf.where(follows, moment_scale, 1.0)

    rows = state.rows
    if rule.weight_decay:
        rows -= tf.cast(learning_rate * rule.weight_decay, tf.float32) * rows
    move = tf.cast(length, tf.float32)[:, None] * direction
    if rule.second is not None:
        move /= tf.sqrt(v_hat) + rule.epsilon
    rows = store("table", rows - move, groups.rows, steps)
    return state._replace(rows=rows, row_scalar=row_scalar)


def _correction(rule, keep: float, steps: tf.Tensor) -> tf.Tensor:
    """1 / (1 - keep^steps) in float64, or 1."""
    count = tf.cast(steps, tf.float64)
    if not rule.bias_correction:
        return tf.ones_like(count)
    return 1.0 / (1.0 - _power(keep, tf.maximum(count, 1.0)))


def _power(base: float, exponent: tf.Tensor) -> tf.Tensor:
    return tf.pow(tf.constant(base, tf.float64), tf.cast(exponent, tf.float64))


def _clip_rows(gradients: tf.Tensor, clipnorm: float) -> tf.Tensor:
    g = tf.cast(gradients, tf.float64)
    norm = tf.norm(g, axis=1, keepdims=True)
    clipped = tf.cast(g * (clipnorm / tf.maximum(norm, clipnorm)), tf.float32)
    return tf.where(norm > clipnorm, clipped, gradients)


def _missed_steps(state: TableState, step: tf.Tensor) -> tf.Tensor | None:
    """[S] int32: steps that a bucket with stale decay was not touched in."""
    if state.last_step is None:
        return None
    now = tf.cast(tf.minimum(step, tf.int32.max), tf.int32)
    missed = tf.maximum(now - state.last_step - 1, 0)
    return tf.where(state.bucket_steps > 0, missed, 0)


def _vote(state: TableState, groups: RowGroups, missed: tf.Tensor | None):
    """The state after the votes; [E] whether a member leads its bucket; [S] owned."""
    n_buckets = tf.shape(state.bucket_steps, tf.int64)[0]
    member_of = groups.member_of
    member_rows = tf.gather(groups.rows, groups.members)

    def per_bucket(condition):
        counts = tf.math.unsorted_segment_sum(
            tf.cast(condition & groups.is_member, tf.int32), member_of, n_buckets
        )
        return counts > 0

    is_leader = member_rows == tf.gather(state.leader, member_of)
    present = per_bucket(is_leader) & (state.leader_votes > 0)
    votes = tf.where(
        present, tf.minimum(state.leader_votes + 1, MOST_VOTES), state.leader_votes - 1
    )
    replaced = votes < 0
    smallest = tf.math.unsorted_segment_min(member_rows, member_of, n_buckets)
    leader = tf.where(replaced, smallest, state.leader)
    votes = tf.where(replaced, 1, votes)
    leads = groups.is_member & (member_rows == tf.gather(leader, member_of))
    leads &= tf.gather(present | replaced, member_of)
    steps = state.leader_steps
    if missed is not None:
        steps = tf.where(steps > 0, _saturating_add(steps, missed), steps)
    steps = tf.where(replaced, 0, steps)
    steps = tf.where(
        per_bucket(leads), _saturating_add(steps, tf.ones_like(steps)), steps
    )
    first = state.first_moment
    if first is not None:
        first = tf.where(replaced[:, None], tf.zeros_like(first), first)
    state = state._replace(
        leader=leader, leader_votes=votes, leader_steps=steps, first_moment=first
    )
    return state, leads, votes >= VOTES_TO_OWN


def _leads_row(state: TableState, groups: RowGroups) -> tf.Tensor:
    """[R] whether a row leads its bucket."""
    return groups.rows == tf.gather(state.leader, groups.segments[:, 0])


def _update_buckets(
    rule, state, g, groups, first_from, second_from, missed, store
) -> TableState:
    """Counters and moments after the step.

    `first_from` and `second_from` are the members that enter M, and V and C.
    """
    n_buckets = tf.shape(state.bucket_steps, tf.int64)[0]
    member_of = groups.member_of

    def per_bucket(x):
        return tf.math.unsorted_segment_sum(x, member_of, n_buckets)

    g = tf.gather(g, groups.members)
    count = per_bucket(tf.cast(second_from, tf.int32))
    first, second = state.first_moment, state.second_moment
    steps = state.bucket_steps
    if missed is not None:
        if first is not None:
            first *= tf.cast(_power(rule.first[0], missed), tf.float32)[:, None]
        if second is not None:
            second *= tf.cast(_power(rule.second[0], missed), tf.float32)[:, None]
        steps = _saturating_add(steps, missed)

    if rule.collision_reduce == "sequential":
        # Applying x <- keep * x + take * g once a row, in order, is one decay by
        # keep^count and a weighted sum.
        position = tf.range(tf.shape(member_of, tf.int64)[0])

        def moved(moment, keep, take, x, members):
            last = tf.math.unsorted_segment_max(
                tf.where(members, position, -1), member_of, n_buckets
            )
            later = tf.maximum(tf.gather(last, member_of) - position, 0)[:, None]
            times = per_bucket(tf.cast(members, tf.int32))[:, None]
            kept = tf.cast(moment, tf.float64) * _power(keep, times)
            weight = tf.where(members[:, None], take * _power(keep, later), 0.0)
            return tf.cast(kept + per_bucket(weight * x), tf.float32)

        steps = _saturating_add(steps, count)
    else:

        def moved(moment, keep, take, x, members):
            times = per_bucket(tf.cast(members, tf.int32))[:, None]
            reduced = per_bucket(tf.where(members[:, None], x, 0.0))
            if rule.collision_reduce == "mean":
                reduced /= tf.cast(tf.maximum(times, 1), tf.float64)
            new = keep * moment + take * tf.cast(reduced, tf.float32)
            return tf.where(times > 0, new, moment)

        steps = _saturating_add(steps, tf.minimum(count, 1))

    if first is not None:
        first = moved(first, *rule.first, g, first_from)
        seen = steps if state.leader is None else state.leader_steps
        first = store("first_moment", first, groups.buckets, seen)
    if second is not None:
        second = moved(second, *rule.second, tf.square(g), second_from)
        second = store("second_moment", second, groups.buckets, steps)
    return state._replace(
        first_moment=first,
        second_moment=second,
        bucket_steps=steps,
    )


def _saturating_add(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return a + tf.minimum(tf.cast(b, tf.int32), tf.int32.max - a)


def _first_moment(rule, state, segments):
    """[R, d] the moment a row follows, and [R] the factor that removes its bias."""
    steps = state.bucket_steps if state.leader is None else state.leader_steps
    corrections = _correction(rule, rule.first[0], steps)
    at = segments[:, 0]
    moment, scale = tf.gather(state.first_moment, at), tf.gather(corrections, at)
    if segments.shape[1] == 1:
        return moment, scale
    other = segments[:, 1]
    mean = 0.5 * (
        moment * tf.cast(scale, tf.float32)[:, None]
        + tf.gather(state.first_moment, other)
        * tf.cast(tf.gather(corrections, other), tf.float32)[:, None]
    )
    two = at != other
    return tf.where(two[:, None], mean, moment), tf.where(
        two, tf.ones_like(scale), scale
    )


def _second_hat(rule, state, segments) -> tf.Tensor:
    """[R, d] V without its bias; of two buckets the smaller, column by column."""
    corrections = _correction(rule, rule.second[0], state.bucket_steps)
    hat = state.second_moment * tf.cast(corrections, tf.float32)[:, None]
    return tf.reduce_min(tf.gather(hat, segments), axis=1)


def _learn(rule, state, g, segments, follows, learning_rate) -> TableState:
    """Moves the learned scalars along <u, g>, with u as it was before this step."""
    row_steps = state.row_steps
    if row_steps is not None:
        row_steps = _saturating_add(row_steps, tf.ones_like(row_steps))
    state = state._replace(row_steps=row_steps)
    if state.first_moment is None:
        return state

    def hat(moment, keep):
        corrections = _correction(rule, keep, state.bucket_steps)[:, None]
        return tf.gather(tf.cast(moment, tf.float64) * corrections, segments)

    u = tf.reduce_mean(hat(state.first_moment, rule.first[0]), axis=1)
    if rule.second is not None:
        v_hat = tf.reduce_min(hat(state.second_moment, rule.second[0]), axis=1)
        u /= tf.sqrt(v_hat) + rule.epsilon
    agreement = tf.reduce_sum(u * g, axis=1)
    s = tf.cast(state.row_scalar, tf.float64)
    steps = tf.gather(state.bucket_steps, segments)
    rate = tf.constant(rule.scalar_learning_rate, tf.float64)
    if row_steps is not None:
        most = tf.cast(tf.reduce_max(steps, axis=1), tf.float64)
        share = tf.minimum(tf.cast(row_steps, tf.float64) / (most + 1.0), 1.0)
        rate *= tf.pow(share, -tf.constant(rule.scalar_frequency_power, tf.float64))
    if rule.scalar_rule == "gradient":
        s += rate * learning_rate * agreement
    elif rule.scalar_rule == "sign":
        s += rate * tf.sign(agreement)
    else:
        norms = tf.norm(u, axis=1) * tf.norm(g, axis=1)
        s *= tf.exp(rate * agreement / (norms + 1e-30))
    learned = tf.cast(tf.clip_by_value(s, *rule.scalar_range), tf.float32)
    learns = follows & tf.reduce_all(steps > 0, axis=1)
    return state._replace(row_scalar=tf.where(learns, learned, state.row_scalar))


def _energy(rule, energies, g, v_hat_mean, owner, rows, steps, store):
    """Energies after the step, and s = sqrt(mean v_hat / energy), clipped."""
    energy = tf.reduce_mean(tf.square(g), axis=1)
    keep, take = rule.energy
    old = tf.cast(energies, tf.float64)
    new = tf.cast(tf.where(old == 0, energy, keep * old + take * energy), tf.float32)
    new = store("row_energy", new, rows, steps)
    plain = owner | (new == 0)
    safe = tf.cast(tf.where(plain, 1.0, new), tf.float64)
    scale = tf.clip_by_value(tf.sqrt(v_hat_mean / safe), *rule.scalar_range)
    return new, tf.where(plain, tf.ones_like(scale), scale)
