"""The fused C++ step on one table, as a typed function."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import tensorflow as tf

from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.tables import TableLayout


def update_table(
    library: ModuleType,
    rule: BucketRule,
    layout: TableLayout,
    table: tf.Variable,
    slots: Mapping[str, tf.Variable],
    indices: tf.Tensor,
    values: tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> tf.Operation:
    """Updates the table and its slots in place (see `TfBasis>UpdateTable`)."""

    def optional(*names: str) -> list[tf.Tensor]:
        return [slots[name].handle for name in names if name in slots]

    mapping = layout.mapping
    owner_rows, owner_buckets = mapping.sorted_owners()
    return library.tf_basis_update_table(
        table=table.handle,
        bucket_steps=slots["bucket_steps"].handle,
        second_moment=optional("second_moment"),
        first_moment=optional("first_moment"),
        row_scalar=optional("row_energy", "scalar"),
        row_steps=optional("row_steps"),
        last_step=optional("last_step"),
        leader=optional("leader"),
        leader_votes=optional("leader_votes"),
        leader_steps=optional("leader_steps"),
        indices=indices,
        values=values,
        learning_rate=learning_rate,
        step=step,
        hyperparameters=tf.constant(
            [
                *rule.first,
                *(rule.second or (0.0, 0.0)),
                *rule.energy,
                rule.epsilon,
                rule.weight_decay or 0.0,
                rule.row_clipnorm or 0.0,
                *rule.scalar_range,
                rule.scalar_learning_rate,
                rule.scalar_frequency_power,
            ],
            tf.float64,
        ),
        owner_rows=owner_rows,
        owner_buckets=owner_buckets,
        exclusive_rows=mapping.exclusive_rows,
        hashing=mapping.hashing,
        seed=mapping.seed,
        domains=list(mapping.domains),
        momentum=layout.momentum,
        invariant_scalar=rule.invariant_scalar or "none",
        scalar_rule=rule.scalar_rule,
        collision_reduce=rule.collision_reduce,
        bias_correction=rule.bias_correction,
        nesterov=rule.nesterov,
        table_name=layout.path,
    )
