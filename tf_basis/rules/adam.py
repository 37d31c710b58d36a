"""BasisAdam and exact Adam as pure functions of tensors.

`table_step` is the pure-TF twin of `tf_ops/cc/core/basis_adam.h`; both follow
docs/basis_adam.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf


@dataclass(frozen=True)
class AdamRule:
    """The hyperparameters of the rule that do not change during training."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    momentum: str = "exclusive"
    invariant_scalar: str | None = "energy"
    scalar_decay: float = 0.99
    scalar_range: tuple[float, float] = (0.1, 10.0)
    scalar_rule: str = "gradient"
    scalar_learning_rate: float = 1e-4
    collision_reduce: str = "mean"
    bias_correction: bool = True
    weight_decay: float | None = None
    row_clipnorm: float | None = None


class TableState(NamedTuple):
    """What a step reads and returns, gathered for R touched rows in S buckets."""

    rows: tf.Tensor  # [R, d] float32
    row_scalar: tf.Tensor | None  # [R] float32: energies or learned scalars
    first_moment: tf.Tensor | None  # [S, d] float32
    second_moment: tf.Tensor  # [S, d] float32
    bucket_steps: tf.Tensor  # [S] int32


def table_step(
    rule: AdamRule,
    state: TableState,
    gradients: tf.Tensor,
    segments: tf.Tensor,
    is_row: tf.Tensor,
    owner: tf.Tensor,
    follows: tf.Tensor,
    learning_rate: tf.Tensor,
) -> TableState:
    """One step.

    Args:
      rule: hyperparameters.
      state: values before the step.
      gradients: [R, d] float32, one a distinct row, by (bucket, row).
      segments: [R] position of each row's bucket among the S.
      is_row: [R] False for padding.
      owner: [R] whether the row shares its bucket with nobody.
      follows: [R] whether the row follows the first moment of its bucket.
      learning_rate: float64 scalar.

    Returns:
      The values after the step.
    """
    if rule.row_clipnorm is not None:
        gradients = _clip_rows(gradients, rule.row_clipnorm)
    g = tf.cast(gradients, tf.float64)
    row_scalar = state.row_scalar
    if rule.invariant_scalar == "learned" and state.first_moment is not None:
        learned = _learn(rule, state, g, segments, learning_rate)
        learns = follows & tf.gather(state.bucket_steps > 0, segments)
        row_scalar = tf.where(learns, learned, row_scalar)

    first_moment, second_moment, steps = _moments(rule, state, g, segments, is_row)

    v_hat = second_moment * _correction(rule, rule.beta_2, steps)
    v_hat_mean = tf.reduce_mean(tf.cast(v_hat, tf.float64), axis=1)
    denominator = tf.sqrt(v_hat) + rule.epsilon

    scale = tf.ones_like(g[:, 0])
    if rule.invariant_scalar == "learned":
        scale = tf.cast(row_scalar, tf.float64)
    elif rule.invariant_scalar == "energy":
        row_scalar, scale = _energy(
            rule, row_scalar, g, tf.gather(v_hat_mean, segments), owner
        )

    direction, step = gradients, learning_rate * scale
    if first_moment is not None:
        direction = tf.where(
            follows[:, None], tf.gather(first_moment, segments), gradients
        )
        corrections = _correction(rule, rule.beta_1, steps, tf.float64)[:, 0]
        step *= tf.where(follows, tf.gather(corrections, segments), 1.0)

    rows = state.rows
    if rule.weight_decay:
        rows -= tf.cast(learning_rate * rule.weight_decay, tf.float32) * rows
    step = tf.cast(step, tf.float32)[:, None]
    rows -= step * direction / tf.gather(denominator, segments)
    return TableState(rows, row_scalar, first_moment, second_moment, steps)


def dense_step(
    variable: tf.Tensor,
    gradient: tf.Tensor,
    momentum: tf.Tensor,
    velocity: tf.Tensor,
    step: tf.Tensor,
    learning_rate: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Keras's Adam, operation by operation, so that the bits agree with it.

    `step` counts from 1.  Returns the new variable, momentum and velocity.
    """
    dtype = variable.dtype
    step, rate = tf.cast(step, dtype), tf.cast(learning_rate, dtype)
    gradient = tf.cast(gradient, dtype)
    beta_1_power = tf.pow(tf.cast(beta_1, dtype), step)
    beta_2_power = tf.pow(tf.cast(beta_2, dtype), step)
    alpha = rate * tf.sqrt(1 - beta_2_power) / (1 - beta_1_power)
    momentum += (gradient - momentum) * (1 - beta_1)
    velocity += (tf.square(gradient) - velocity) * (1 - beta_2)
    variable -= (momentum * alpha) / (tf.sqrt(velocity) + epsilon)
    return variable, momentum, velocity


def _correction(
    rule: AdamRule, beta: float, steps: tf.Tensor, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """[S, 1]: 1 / (1 - beta^C), from float64."""
    count = tf.cast(steps, tf.float64)[:, None]
    if not rule.bias_correction:
        return tf.cast(tf.ones_like(count), dtype)
    power = tf.pow(tf.constant(beta, tf.float64), tf.maximum(count, 1.0))
    return tf.cast(1.0 / (1.0 - power), dtype)


def _clip_rows(gradients: tf.Tensor, clipnorm: float) -> tf.Tensor:
    g = tf.cast(gradients, tf.float64)
    norm = tf.norm(g, axis=1, keepdims=True)
    clipped = tf.cast(g * (clipnorm / tf.maximum(norm, clipnorm)), tf.float32)
    return tf.where(norm > clipnorm, clipped, gradients)


def _moments(rule, state, g, segments, is_row):
    """First moment (or None), second moment and counters after the step."""
    n_segments = tf.shape(state.second_moment, tf.int64)[0]

    def per_bucket(x):
        return tf.math.unsorted_segment_sum(x, segments, n_segments)

    count = per_bucket(tf.cast(is_row, tf.int64))
    if rule.collision_reduce == "sequential":
        # Applying moment <- beta * moment + (1 - beta) * x once a row, in order,
        # is one decay by beta^count and a weighted sum.
        position = tf.range(tf.shape(segments, tf.int64)[0])
        last = tf.math.unsorted_segment_max(
            tf.where(is_row, position, -1), segments, n_segments
        )
        later = tf.cast(tf.gather(last, segments) - position, tf.float64)[:, None]
        times = tf.cast(count, tf.float64)[:, None]

        def decay(moment, beta, x):
            weight = (1.0 - beta) * _power(beta, tf.maximum(later, 0.0))
            kept = tf.cast(moment, tf.float64) * _power(beta, times)
            return tf.cast(kept + per_bucket(weight * x), tf.float32)

        steps = state.bucket_steps + tf.cast(count, tf.int32)
    else:
        divisor = tf.cast(
            tf.maximum(count, 1) if rule.collision_reduce == "mean" else 1, tf.float64
        )

        def decay(moment, beta, x):
            sums = per_bucket(x)
            reduced = sums / tf.reshape(divisor, [-1, 1])
            return beta * moment + (1.0 - beta) * tf.cast(reduced, tf.float32)

        steps = state.bucket_steps + 1

    g = tf.where(is_row[:, None], g, 0.0)
    first = state.first_moment
    if first is not None:
        first = decay(first, rule.beta_1, g)
    return first, decay(state.second_moment, rule.beta_2, tf.square(g)), steps


def _power(beta: float, exponent: tf.Tensor) -> tf.Tensor:
    return tf.pow(tf.constant(beta, tf.float64), exponent)


def _learn(rule, state, g, segments, learning_rate):
    """The learned scalars after they moved along <u, g>, clipped."""
    steps = state.bucket_steps
    m = tf.cast(state.first_moment, tf.float64)
    v = tf.cast(state.second_moment, tf.float64)
    m_hat = m * _correction(rule, rule.beta_1, steps, tf.float64)
    v_hat = v * _correction(rule, rule.beta_2, steps, tf.float64)
    u = tf.gather(m_hat / (tf.sqrt(v_hat) + rule.epsilon), segments)
    agreement = tf.reduce_sum(u * g, axis=1)
    s = tf.cast(state.row_scalar, tf.float64)
    rate = rule.scalar_learning_rate
    if rule.scalar_rule == "gradient":
        s += rate * learning_rate * agreement
    elif rule.scalar_rule == "sign":
        s += rate * tf.sign(agreement)
    else:
        norms = tf.norm(u, axis=1) * tf.norm(g, axis=1)
        s *= tf.exp(rate * agreement / (norms + 1e-30))
    return tf.cast(tf.clip_by_value(s, *rule.scalar_range), tf.float32)


def _energy(rule, energies, g, v_hat_mean, owner):
    """Energies after the step, and s = sqrt(mean v_hat / energy), clipped."""
    energy = tf.reduce_mean(tf.square(g), axis=1)
    old = tf.cast(energies, tf.float64)
    decay = rule.scalar_decay
    new = tf.where(old == 0, energy, decay * old + (1.0 - decay) * energy)
    new = tf.where(owner, energies, tf.cast(new, tf.float32))
    plain = owner | (new == 0)
    safe = tf.cast(tf.where(plain, 1.0, new), tf.float64)
    scale = tf.clip_by_value(tf.sqrt(v_hat_mean / safe), *rule.scalar_range)
    return new, tf.where(plain, tf.ones_like(scale), scale)
