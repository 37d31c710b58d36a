"""The base of every optimizer here on tf_keras (Keras 2)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

Optimizer = tf_keras.optimizers.Optimizer
serialize = tf_keras.optimizers.serialize
deserialize = tf_keras.optimizers.deserialize
register = tf_keras.saving.register_keras_serializable(package="tf_basis")


def tensorflow_variable(variable: tf.Variable) -> tf.Variable:
    """Here every variable is a tf.Variable."""
    return variable


def path_of(variable: tf.Variable) -> str:
    """The path that names a variable in arguments and messages."""
    return variable.name.split(":")[0]


class OptimizerAdapter(Optimizer):
    """Gives a subclass the same few hooks on each flavour of Keras.

    See `tf_basis.adapters.keras3.OptimizerAdapter`.
    """

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.dense_optimizer = None

    def build(self, var_list: list) -> None:
        if self._is_built():
            return
        super().build(var_list)
        self._create_slots(list(var_list))
        self._built = True

    def _add_slot(self, reference, name, shape, dtype, value) -> tf.Variable:
        colocate = self._distribution_strategy.extended.colocate_vars_with
        with tf.init_scope(), colocate(reference):
            slot = tf.Variable(
                tf.fill(shape, tf.cast(value, dtype)),
                name=f"{name}/{path_of(reference)}",
                trainable=False,
            )
        self._variables.append(slot)
        return slot

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        grads_and_vars = list(grads_and_vars)
        checks = self._row_checks(*zip(*grads_and_vars)) if grads_and_vars else []
        with tf.control_dependencies(checks):
            return super().apply_gradients(grads_and_vars, *args, **kwargs)

    def _deduplicate_sparse_grad(self, grads):
        return grads  # duplicates are summed in one place, in the engine

    def _apply_weight_decay(self, variables):
        super()._apply_weight_decay(
            [v for v in variables if not self._decayed_by_rule(v)]
        )

    def _internal_apply_gradients(self, grads_and_vars):
        own, delegated = self._split(grads_and_vars)
        if delegated:
            self.dense_optimizer.apply_gradients(
                delegated, skip_gradients_aggregation=True
            )
        return super()._internal_apply_gradients(own)

    def update_step(self, gradient, variable):
        self._step_variable(gradient, variable, self.learning_rate)

    @property
    def variables(self) -> list:
        inner = self.dense_optimizer.variables if self.dense_optimizer else []
        own = super().variables
        return type(own)(list(own) + list(inner))

    def _own_variables(self) -> list:
        return list(self._variables)

    def _is_built(self) -> bool:
        return getattr(self, "_built", False)

    def get_config(self) -> dict:
        config = super().get_config()
        rate = self._serialize_hyperparameter(self._learning_rate)
        config["learning_rate"] = rate if isinstance(rate, dict) else float(rate)
        return config
