"""Applies gradients to variables: the only code that knows dense from sparse.

A table takes the fused C++ op where it can run, else the pure-TF rule; either
way duplicate ids are summed exactly once, below this file's surface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import tensorflow as tf

from tf_basis.ops import dispatch, hash_ops
from tf_basis.ops.table_op import update_table
from tf_basis.rules import formats
from tf_basis.rules.bucket import table_step
from tf_basis.rules.bucket_rule import BucketRule, TableState
from tf_basis.rules.grouping import group_rows
from tf_basis.tables import TableLayout

Gradient = tf.Tensor | tf.IndexedSlices

# The root of the smallest positive float16: below it second moments vanish, and a
# smaller epsilon would let steps explode there.
LEAST_FLOAT16_EPSILON = 2.0**-12

STALE = (
    "table '{}' was resized or got rows after this function had been traced: trace it "
    "anew, with tf_basis.retrace(model) where the function is Keras's"
)

_SCALARS = ("row_energy", "scalar")
_ROUNDING = {
    "table": formats.TABLE,
    "first_moment": formats.FIRST_MOMENT,
    "second_moment": formats.SECOND_MOMENT,
    "row_energy": formats.ROW_SCALAR,
}


def slot_specs(
    layout: TableLayout, rule: BucketRule, accumulator: float = 0.0
) -> dict[str, tuple]:
    """Name -> (shape, dtype, initial value) of the state of one table.

    `accumulator` is where second moments and row energies start.
    """
    rule = rule_of(rule, layout)
    n_rows, buckets = layout.mapping.n_rows, layout.mapping.num_buckets
    moment_dtype = tf.as_dtype(layout.moment_dtype)
    slots = {"bucket_steps": ((buckets,), tf.int32, 0)}
    if rule.second is not None:
        slots["second_moment"] = ((buckets, layout.dim), moment_dtype, accumulator)
    if layout.first_moment_rows:
        shape = (layout.first_moment_rows, layout.dim)
        slots["first_moment"] = (shape, moment_dtype, 0.0)
    if rule.invariant_scalar == "energy":
        log8 = layout.energy_dtype == "log8"
        dtype = tf.uint8 if log8 else tf.as_dtype(layout.energy_dtype)
        start = formats.nearest_log8(accumulator) if log8 else accumulator
        slots["row_energy"] = ((n_rows,), dtype, start)
    elif rule.invariant_scalar == "learned":
        slots["scalar"] = ((n_rows,), tf.float32, 1.0)
        if rule.scalar_frequency_power:
            slots["row_steps"] = ((n_rows,), tf.int32, 0)
    if layout.led:
        slots["leader"] = ((buckets,), tf.int64, 0)
        slots["leader_votes"] = ((buckets,), tf.int32, 0)
        slots["leader_steps"] = ((buckets,), tf.int32, 0)
    if rule.stale_decay:
        slots["last_step"] = ((buckets,), tf.int32, 0)
    return slots


def rule_of(rule: BucketRule, layout: TableLayout) -> BucketRule:
    """The optimizer's rule as one table has it.

    With the scalar that the table sets for itself, and an epsilon that the format of
    its second moment can carry.
    """
    own = dict(layout.scalar)
    if "scalar_decay" in own:
        decay = own.pop("scalar_decay")
        own["energy"] = (decay, 1.0 - decay)
    if rule.second is not None and layout.moment_dtype == "float16":
        own["epsilon"] = max(rule.epsilon, LEAST_FLOAT16_EPSILON)
    return replace(rule, **own)


def with_row_ids(gradient: Gradient | None, path: str) -> Gradient | None:
    """IndexedSlices of any integer type as int32 or int64; others as they are.

    Raises:
      ValueError: the indices are no integers.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices = gradient.indices
    if indices.dtype in (tf.int32, tf.int64):
        return gradient
    if not indices.dtype.is_integer:
        raise ValueError(
            f"the gradient of '{path}' must have integer indices, received indices of "
            f"type {indices.dtype.name}"
        )
    return tf.IndexedSlices(
        gradient.values, tf.cast(indices, tf.int64), gradient.dense_shape
    )


def check_gradient(
    gradient: Gradient, shape: tuple[int, ...], path: str
) -> tf.Operation | None:
    """An op that fails where the gradient names a row that is not there.

    XLA has no assertions; there rows out of range change nothing instead.

    Raises:
      ValueError: the gradient's static shape does not fit the variable's.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return None
    values = gradient.values.shape
    if not values[1:].is_compatible_with(shape[1:]) or not values[
        :1
    ].is_compatible_with(gradient.indices.shape):
        raise ValueError(
            f"the gradient of '{path}' must have one row of shape {shape[1:]} for "
            f"each index, received values of shape {tuple(values)} and indices of "
            f"shape {tuple(gradient.indices.shape)}"
        )
    if dispatch.in_xla():
        return None
    return hash_ops.check_rows(gradient.indices, shape[0], path)


def step_table(
    rule: BucketRule,
    layout: TableLayout,
    table: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: Gradient,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> None:
    """One step on a compressed table.

    Args:
      rule: hyperparameters.
      layout: sizes, formats and hash of this table.
      table: [N, d] float32, bfloat16 or float16, updated in place.
      slots: variables as `slot_specs` lists them, updated in place.
      gradient: IndexedSlices, or a dense [N, d] tensor that touches every row.
      learning_rate: scalar.
      step: scalar, the optimizer's steps from 1.
    """
    learning_rate = tf.cast(learning_rate, tf.float64)
    step = tf.cast(step, tf.int64)
    if isinstance(gradient, tf.IndexedSlices):
        indices, values = gradient.indices, gradient.values
    else:
        indices = tf.range(layout.mapping.n_rows, dtype=tf.int64)
        values = gradient
    values = tf.cast(values, tf.float32)
    values = tf.reshape(values, [tf.shape(indices)[0], layout.dim])
    arguments = (rule, layout, table, slots, indices, values, learning_rate, step)
    library = dispatch.library_for_variable(table)
    if library is not None:
        update_table(library, *arguments)
    else:
        _update_table_twin(*arguments)


def _update_table_twin(
    rule, layout, table, slots, indices, values, learning_rate, step
) -> None:
    mapping = layout.mapping
    checks = []
    if not dispatch.in_xla():
        checks = [
            hash_ops.assert_rows(indices, mapping.n_rows, f"table '{layout.path}'"),
            *_assert_current(layout, slots),
        ]
    with tf.control_dependencies([c for c in checks if c is not None]):
        groups = group_rows(indices, values, mapping, padded=dispatch.in_xla())

    moment_rows = layout.first_moment_rows
    # Reads past the end happen for padding only, and what they give is dropped.
    rows = tf.minimum(groups.rows, mapping.n_rows - 1)
    buckets = tf.minimum(groups.buckets, mapping.num_buckets - 1)
    bucket_of_row = tf.gather(buckets, groups.segments[:, 0])
    scalar_name = next((name for name in _SCALARS if name in slots), None)

    def gathered(name: str, ids: tf.Tensor) -> tf.Tensor | None:
        return tf.gather(slots[name], ids) if name in slots else None

    state = TableState(
        rows=tf.cast(tf.gather(table, rows), tf.float32),
        row_scalar=None if scalar_name is None else gathered(scalar_name, rows),
        row_steps=gathered("row_steps", rows),
        first_moment=gathered("first_moment", tf.minimum(buckets, moment_rows - 1)),
        second_moment=gathered("second_moment", buckets),
        bucket_steps=gathered("bucket_steps", buckets),
        last_step=gathered("last_step", buckets),
        leader=gathered("leader", buckets),
        leader_votes=gathered("leader_votes", buckets),
        leader_steps=gathered("leader_steps", buckets),
    )
    state = state._replace(
        **{
            name: formats.read(getattr(state, name))
            for name in ("row_scalar", "first_moment", "second_moment")
            if getattr(state, name) is not None
        }
    )
    stored: dict[str, tf.Tensor] = {}
    new = table_step(
        rule,
        state,
        groups,
        owner=bucket_of_row < mapping.owners,
        follows=bucket_of_row < moment_rows,
        learning_rate=learning_rate,
        step=step,
        store=_storage({"table": table, **slots}, mapping.seed, stored),
    )
    is_bucket = groups.buckets < mapping.num_buckets
    has_moment = groups.buckets < moment_rows
    shares = bucket_of_row >= mapping.owners  # owners have no energy
    writes = {
        "second_moment": (groups.buckets, stored.get("second_moment"), is_bucket),
        "first_moment": (groups.buckets, stored.get("first_moment"), has_moment),
        "row_energy": (groups.rows, stored.get("row_energy"), groups.is_row & shares),
        "scalar": (groups.rows, new.row_scalar, groups.is_row),
        "row_steps": (groups.rows, new.row_steps, groups.is_row),
        "bucket_steps": (groups.buckets, new.bucket_steps, is_bucket),
        "last_step": (groups.buckets, new.last_step, is_bucket),
        "leader": (groups.buckets, new.leader, is_bucket),
        "leader_votes": (groups.buckets, new.leader_votes, is_bucket),
        "leader_steps": (groups.buckets, new.leader_steps, is_bucket),
    }
    _write(table, groups.rows, stored["table"], groups.is_row)
    for name, slot in slots.items():
        _write(slot, *writes[name])


def _assert_current(layout: TableLayout, slots: Mapping[str, tf.Variable]) -> list:
    """Ops that fail where a slot was replaced after a function was traced with it.

    `resize` and `grow_rows` leave such a slot without rows.
    """
    if tf.executing_eagerly():
        return []
    # Not tf.shape, which knows no better than the trace.
    sizes = [tf.raw_ops.VariableShape(input=slot.handle)[0] for slot in slots.values()]
    return [tf.debugging.Assert(tf.reduce_min(sizes) > 0, [STALE.format(layout.path)])]


def _storage(
    variables: Mapping[str, tf.Variable], seed: int, stored: dict[str, tf.Tensor]
) -> Callable:
    """A `Store` that keeps what is to be written, in the variables' formats."""

    def store(name, values, ids, steps):
        stored[name] = formats.encode(
            values, variables[name].dtype, seed, _ROUNDING[name], ids, steps
        )
        return formats.read(stored[name])

    return store


def _write(variable: tf.Variable, rows, values, keep) -> None:
    """Writes the rows that are kept; the others change nothing."""
    if dispatch.in_xla():  # which drops what lies past the end
        rows = tf.where(keep, rows, tf.constant(variable.shape[0], rows.dtype))
    else:
        rows, values = tf.boolean_mask(rows, keep), tf.boolean_mask(values, keep)
    variable.scatter_update(tf.IndexedSlices(values, rows))


def step_dense(
    rule: Callable,
    variable: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: Gradient,
) -> None:
    """One step of a dense rule; IndexedSlices become dense (and summed).

    `rule(variable, gradient, *slots)` gives the new variable and slots.
    """
    values = rule(
        tf.convert_to_tensor(variable),
        tf.convert_to_tensor(gradient),
        *map(tf.convert_to_tensor, slots.values()),
    )
    for target, value in zip([variable, *slots.values()], values, strict=True):
        target.assign(value)
