"""The learned scalar: how long a row's steps are, learned from whether they agree."""

from __future__ import annotations

import tensorflow as tf

from tf_basis.rules.arithmetic import correction, saturated, saturating_add
from tf_basis.rules.bucket_rule import TableState


def learn(rule, state, g, segments, follows, learning_rate) -> TableState:
    """Moves the learned scalars along <u, g>, with u as it was before this step."""
    row_steps = state.row_steps
    if row_steps is not None:
        row_steps = saturating_add(row_steps, tf.ones_like(row_steps))
    state = state._replace(row_steps=row_steps)
    if state.first_moment is None:
        return state

    def hat(moment, keep):
        corrections = correction(rule, keep, state.bucket_steps)[:, None]
        return tf.gather(tf.cast(moment, tf.float64) * corrections, segments)

    u = tf.reduce_mean(hat(state.first_moment, rule.first[0]), axis=1)
    if rule.second is not None:
        v_hat = tf.reduce_min(hat(state.second_moment, rule.second[0]), axis=1)
        v_hat = saturated(v_hat)
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
