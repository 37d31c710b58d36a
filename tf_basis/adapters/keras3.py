"""The base of every optimizer here on Keras 3."""

from __future__ import annotations

import os
from typing import Any

_backend = os.environ.get("KERAS_BACKEND", "tensorflow")
if _backend != "tensorflow":
    raise ImportError(
        "tf_basis needs the TensorFlow backend of Keras: KERAS_BACKEND must be "
        f"'tensorflow', received {_backend!r}"
    )

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

if keras.backend.backend() != "tensorflow":  # set in keras.json
    raise ImportError(
        "tf_basis needs the TensorFlow backend of Keras: the backend in keras.json "
        f"must be 'tensorflow', received {keras.backend.backend()!r}"
    )

Optimizer = keras.optimizers.Optimizer
serialize = keras.optimizers.serialize
deserialize = keras.optimizers.deserialize
register = keras.saving.register_keras_serializable(package="tf_basis")


def tensorflow_variable(variable: Any) -> tf.Variable:
    """The tf.Variable inside a Keras variable; a tf.Variable as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def path_of(variable: Any) -> str:
    """The path that names a variable in arguments and messages."""
    path = getattr(variable, "path", None)
    return path or variable.name.split(":")[0]


class OptimizerAdapter(Optimizer):
    """Gives a subclass the same few hooks on each flavour of Keras.

    A subclass defines `_create_slots(variables)`, `_step_variable(gradient,
    variable, learning_rate)`, `_row_checks(gradients, variables)` and
    `_decayed_by_rule(variable)`; variables for which `_is_delegated` holds go to
    `dense_optimizer`.
    """

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.dense_optimizer = None

    def build(self, variables: list) -> None:
        if self.built:
            return
        super().build(variables)
        self._create_slots(list(variables))

    def _add_slot(self, reference, name, shape, dtype, value) -> tf.Variable:
        colocate = self._distribution_strategy.extended.colocate_vars_with
        with colocate(tensorflow_variable(reference)):
            slot = self.add_variable(
                shape=shape,
                dtype=dtype.name,
                initializer=keras.initializers.Constant(value) if value else "zeros",
                name=f"{path_of(reference).replace('/', '_')}_{name}",
            )
        return tensorflow_variable(slot)

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        variables = trainable_variables
        if variables is None:
            variables = self._trainable_variables
        # Around all of Keras's `apply`: a failed step is not counted either.
        with tf.control_dependencies(self._row_checks(grads, variables)):
            super().apply(grads, trainable_variables)

    def _apply_weight_decay(self, variables):
        super()._apply_weight_decay(
            [v for v in variables if not self._decayed_by_rule(v)]
        )

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        own, delegated = self._split(zip(grads, trainable_variables, strict=True))
        if own:
            super()._backend_update_step(*map(list, zip(*own)), learning_rate)
        if delegated:
            self.dense_optimizer.apply(*map(list, zip(*delegated)))

    def update_step(self, gradient, variable, learning_rate):
        self._step_variable(gradient, variable, learning_rate)

    @property
    def variables(self) -> list:
        inner = self.dense_optimizer.variables if self.dense_optimizer else []
        return self._variables[:] + list(inner)

    def _own_variables(self) -> list:
        return self._variables[:]

    def _is_built(self) -> bool:
        return self.built
