"""Applies gradients to variables: the only code that knows dense from sparse.

A table takes the fused C++ op where it can run, else the pure-TF rule; either
way duplicate ids are summed exactly once, below this file's surface.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tf_basis.ops import dispatch, hash_ops
from tf_basis.ops.basis_adam_op import apply_basis_adam
from tf_basis.rules import adam
from tf_basis.rules.grouping import group_rows
from tf_basis.tables import TableLayout

Gradient = tf.Tensor | tf.IndexedSlices


def slot_shapes(layout: TableLayout, rule: adam.AdamRule) -> dict[str, tuple]:
    """Name -> (shape, dtype, initial value) of the state of one table."""
    n_rows, buckets = layout.mapping.n_rows, layout.mapping.num_buckets
    slots = {
        "second_moment": ((buckets, layout.dim), tf.float32, 0.0),
        "bucket_steps": ((buckets,), tf.int32, 0),
    }
    if layout.first_moment_rows:
        shape = (layout.first_moment_rows, layout.dim)
        slots["first_moment"] = (shape, tf.float32, 0.0)
    if rule.invariant_scalar == "energy":
        slots["row_energy"] = ((n_rows,), tf.float32, 0.0)
    elif rule.invariant_scalar == "learned":
        slots["scalar"] = ((n_rows,), tf.float32, 1.0)
    return slots


def check_indices(gradient: Gradient, n_rows: int, path: str) -> tf.Operation | None:
    """An op that fails where the gradient names a row that is not there.

    XLA has no assertions; there rows out of range change nothing instead.
    """
    if not isinstance(gradient, tf.IndexedSlices) or dispatch.in_xla():
        return None
    return hash_ops.check_rows(gradient.indices, n_rows, path)


def step_table(
    rule: adam.AdamRule,
    layout: TableLayout,
    table: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: Gradient,
    learning_rate: tf.Tensor,
) -> None:
    """One BasisAdam step on a compressed table.

    Args:
      rule: hyperparameters.
      layout: sizes and hash of this table.
      table: [N, d] float32, updated in place.
      slots: variables as `slot_shapes` lists them, updated in place.
      gradient: IndexedSlices, or a dense [N, d] tensor that touches every row.
      learning_rate: scalar.
    """
    learning_rate = tf.cast(learning_rate, tf.float64)
    if isinstance(gradient, tf.IndexedSlices):
        indices, values = gradient.indices, gradient.values
    else:
        indices = tf.range(layout.mapping.n_rows, dtype=tf.int64)
        values = gradient
    values = tf.cast(values, tf.float32)
    values = tf.reshape(values, [tf.shape(indices)[0], layout.dim])
    library = dispatch.library_for_variable(table)
    if library is not None:
        apply_basis_adam(
            library, rule, layout, table, slots, indices, values, learning_rate
        )
    else:
        _step_table_twin(rule, layout, table, slots, indices, values, learning_rate)


def _step_table_twin(rule, layout, table, slots, indices, values, learning_rate):
    mapping = layout.mapping
    checks = []
    if not dispatch.in_xla():
        checks = [
            hash_ops.assert_rows(indices, mapping.n_rows, f"table '{layout.path}'")
        ]
    with tf.control_dependencies([c for c in checks if c is not None]):
        groups = group_rows(indices, values, mapping, padded=dispatch.in_xla())

    scalar_name = next((n for n in ("row_energy", "scalar") if n in slots), None)
    moment_rows = layout.first_moment_rows
    # Reads past the end happen for padding only, and what they give is dropped.
    rows = tf.minimum(groups.rows, mapping.n_rows - 1)
    buckets = tf.minimum(groups.buckets, mapping.num_buckets - 1)
    bucket_of_row = tf.gather(buckets, groups.segments)
    state = adam.TableState(
        rows=tf.gather(table, rows),
        row_scalar=tf.gather(slots[scalar_name], rows) if scalar_name else None,
        first_moment=(
            tf.gather(slots["first_moment"], tf.minimum(buckets, moment_rows - 1))
            if moment_rows
            else None
        ),
        second_moment=tf.gather(slots["second_moment"], buckets),
        bucket_steps=tf.gather(slots["bucket_steps"], buckets),
    )
    new = adam.table_step(
        rule,
        state,
        groups.gradients,
        groups.segments,
        groups.is_row,
        owner=bucket_of_row < mapping.owners,
        follows=bucket_of_row < moment_rows,
        learning_rate=learning_rate,
    )
    is_bucket = groups.buckets < mapping.num_buckets
    _write(table, groups.rows, new.rows, groups.is_row)
    _write(slots["second_moment"], groups.buckets, new.second_moment, is_bucket)
    _write(slots["bucket_steps"], groups.buckets, new.bucket_steps, is_bucket)
    if moment_rows:
        has_moment = groups.buckets < moment_rows
        _write(slots["first_moment"], groups.buckets, new.first_moment, has_moment)
    if scalar_name:
        _write(slots[scalar_name], groups.rows, new.row_scalar, groups.is_row)


def _write(variable: tf.Variable, rows, values, keep) -> None:
    """Writes the rows that are kept; the others change nothing."""
    if dispatch.in_xla():  # which drops what lies past the end
        rows = tf.where(keep, rows, tf.constant(variable.shape[0], rows.dtype))
    else:
        rows, values = tf.boolean_mask(rows, keep), tf.boolean_mask(values, keep)
    variable.scatter_update(tf.IndexedSlices(values, rows))


def step_dense(
    rule: adam.AdamRule,
    variable: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: Gradient,
    step: tf.Tensor,
    learning_rate: tf.Tensor,
) -> None:
    """One step of Keras's exact Adam; IndexedSlices become dense (and summed)."""
    new_variable, momentum, velocity = adam.dense_step(
        tf.convert_to_tensor(variable),
        tf.convert_to_tensor(gradient),
        tf.convert_to_tensor(slots["momentum"]),
        tf.convert_to_tensor(slots["velocity"]),
        step,
        learning_rate,
        rule.beta_1,
        rule.beta_2,
        rule.epsilon,
    )
    slots["momentum"].assign(momentum)
    slots["velocity"].assign(velocity)
    variable.assign(new_variable)
