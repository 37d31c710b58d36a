"""The fused C++ step of BasisAdam on one table, as a typed function."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import tensorflow as tf

from tf_basis.rules.adam import AdamRule
from tf_basis.tables import TableLayout


def apply_basis_adam(
    library: ModuleType,
    rule: AdamRule,
    layout: TableLayout,
    table: tf.Variable,
    slots: Mapping[str, tf.Variable],
    indices: tf.Tensor,
    values: tf.Tensor,
    learning_rate: tf.Tensor,
) -> tf.Operation:
    """Updates the table and its slots in place (see `TfBasis>ApplyBasisAdam`)."""

    def optional(name: str) -> list[tf.Tensor]:
        return [slots[name].handle] if name in slots else []

    low, high = rule.scalar_range
    return library.tf_basis_apply_basis_adam(
        table=table.handle,
        second_moment=slots["second_moment"].handle,
        bucket_steps=slots["bucket_steps"].handle,
        first_moment=optional("first_moment"),
        row_scalar=optional("row_energy") + optional("scalar"),
        indices=indices,
        values=values,
        learning_rate=learning_rate,
        hyperparameters=tf.constant(
            [
                rule.beta_1,
                rule.beta_2,
                rule.epsilon,
                rule.weight_decay or 0.0,
                rule.row_clipnorm or 0.0,
                rule.scalar_decay,
                low,
                high,
                rule.scalar_learning_rate,
            ],
            tf.float64,
        ),
        exclusive_rows=layout.mapping.exclusive_rows,
        hashing=layout.mapping.hashing,
        seed=layout.mapping.seed,
        momentum=rule.momentum,
        invariant_scalar=rule.invariant_scalar or "none",
        scalar_rule=rule.scalar_rule,
        collision_reduce=rule.collision_reduce,
        bias_correction=rule.bias_correction,
        table_name=layout.path,
    )
