"""One step on a table whose rows share state in buckets, as a pure function.

`table_step` is the pure-TF twin of `tf_ops/cc/core/bucket_update.h`.  BasisAdam,
BasisSGD and BasisAdagrad are choices of the numbers in `BucketRule`.
"""

from __future__ import annotations

import tensorflow as tf

from tf_basis.rules.arithmetic import correction, power, saturated, saturating_add
from tf_basis.rules.bucket_rule import BucketRule, Store, TableState
from tf_basis.rules.grouping import RowGroups
from tf_basis.rules.leaders import leads_row, vote
from tf_basis.rules.learned_scalar import learn


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
        gradients = clip_rows(gradients, rule.row_clipnorm)
    g = tf.cast(gradients, tf.float64)
    if rule.invariant_scalar == "learned":
        state = learn(rule, state, g, groups.segments, follows, learning_rate)
    first_from = second_from = groups.is_member
    missed = _missed_steps(state, step)
    if state.leader is not None:
        state, leads, owned = vote(state, groups, missed)
        first_from = leads
        second_from &= leads | ~tf.gather(owned, groups.member_of)
        owner = follows = leads_row(state, groups) & tf.gather(
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


def clip_rows(gradients: tf.Tensor, clipnorm: float) -> tf.Tensor:
    """Rows whose L2 norm is above `clipnorm`, shortened to it."""
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
            first *= tf.cast(power(rule.first[0], missed), tf.float32)[:, None]
        if second is not None:
            second *= tf.cast(power(rule.second[0], missed), tf.float32)[:, None]
        steps = saturating_add(steps, missed)

    if rule.collision_reduce == "sequential":
        # Applying x <- keep * x + take * g once a row, in order, is one decay by
        # keep^count and a weighted sum.
        position = tf.range(tf.shape(member_of, tf.int64)[0])

        def moved(moment, keep, take, x, members, limit):
            last = tf.math.unsorted_segment_max(
                tf.where(members, position, -1), member_of, n_buckets
            )
            later = tf.maximum(tf.gather(last, member_of) - position, 0)[:, None]
            times = per_bucket(tf.cast(members, tf.int32))[:, None]
            kept = tf.cast(moment, tf.float64) * power(keep, times)
            weight = tf.where(members[:, None], take * power(keep, later), 0.0)
            return tf.cast(limit(kept + per_bucket(weight * x)), tf.float32)

        steps = saturating_add(steps, count)
    else:

        def moved(moment, keep, take, x, members, limit):
            times = per_bucket(tf.cast(members, tf.int32))[:, None]
            reduced = per_bucket(tf.where(members[:, None], x, 0.0))
            if rule.collision_reduce == "mean":
                reduced /= tf.cast(tf.maximum(times, 1), tf.float64)
            reduced = tf.cast(limit(reduced), tf.float32)
            new = limit(keep * moment + take * reduced)
            return tf.where(times > 0, new, moment)

        steps = saturating_add(steps, tf.minimum(count, 1))

    if first is not None:
        first = moved(first, *rule.first, g, first_from, limit=tf.identity)
        seen = steps if state.leader is None else state.leader_steps
        first = store("first_moment", first, groups.buckets, seen)
    if second is not None:
        squares = saturated(tf.square(g))
        second = moved(second, *rule.second, squares, second_from, limit=saturated)
        second = store("second_moment", second, groups.buckets, steps)
    return state._replace(
        first_moment=first,
        second_moment=second,
        bucket_steps=steps,
    )


def _first_moment(rule, state, segments):
    """[R, d] the moment a row follows, and [R] the factor that removes its bias."""
    steps = state.bucket_steps if state.leader is None else state.leader_steps
    corrections = correction(rule, rule.first[0], steps)
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
    corrections = correction(rule, rule.second[0], state.bucket_steps)
    hat = saturated(state.second_moment * tf.cast(corrections, tf.float32)[:, None])
    return tf.reduce_min(tf.gather(hat, segments), axis=1)


def _energy(rule, energies, g, v_hat_mean, owner, rows, steps, store):
    """Energies after the step, and s = sqrt(mean v_hat / energy), clipped."""
    energy = tf.reduce_mean(tf.square(g), axis=1)
    keep, take = rule.energy
    old = tf.cast(energies, tf.float64)
    new = tf.where(old == 0, energy, keep * old + take * energy)
    new = tf.cast(saturated(new), tf.float32)
    new = store("row_energy", new, rows, steps)
    plain = owner | (new == 0)
    safe = tf.cast(tf.where(plain, 1.0, new), tf.float64)
    scale = tf.clip_by_value(tf.sqrt(v_hat_mean / safe), *rule.scalar_range)
    return new, tf.where(plain, tf.ones_like(scale), scale)
