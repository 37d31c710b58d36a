"""The base of every optimizer here on Keras 3."""

from __future__ import annotations

import inspect
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

from tf_basis.adapters import arguments  # noqa: E402
from tf_basis.adapters.keras3_checked import CheckedVariable  # noqa: E402
from tf_basis.adapters.keras3_sparse import (  # noqa: E402
    RowsVariable,
    check_rows_in_loss_scaling,
    divisible,
)

Optimizer = keras.optimizers.Optimizer
serialize = keras.optimizers.serialize
deserialize = keras.optimizers.deserialize
register = keras.saving.register_keras_serializable(package="tf_basis")

check_rows_in_loss_scaling()


def _base_arguments() -> frozenset[str]:
    """What the base takes; the topmost class hides it behind `*args, **kwargs`."""
    for base in Optimizer.mro():
        names = set(inspect.signature(base.__init__).parameters)
        if "weight_decay" in names:
            return frozenset(names - {"self", "learning_rate", "kwargs"})
    raise ImportError("tf_basis does not know the optimizers of this Keras version")


ARGUMENTS = _base_arguments()
ADVICE = {
    "jit_compile": "it belongs to model.compile there",
    "lr": "use learning_rate",
    "decay": "use weight_decay, or a schedule as learning_rate",
}


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
    variable, learning_rate)`, `_row_checks(gradients, variables)`,
    `_decayed_by_rule(variable)`, and `_split(pairs)`, which tells the variables of the
    `dense_optimizer` apart; `_create_accumulator`, `_accumulate` and
    `_create_averages` for what Keras would do with tensors of a table's size.
    """

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        arguments.check(self, "Keras 3", kwargs, ARGUMENTS, ADVICE)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.dense_optimizer = None

    def build(self, variables: list) -> None:
        """Creates all state for these variables, once."""
        if self.built:
            return
        arguments.check_inner(self, self.dense_optimizer)
        # Keras would give tables averages and accumulators of their own size.
        use_ema, steps = self.use_ema, self.gradient_accumulation_steps
        self.use_ema, self.gradient_accumulation_steps = False, None
        try:
            super().build(variables)
        finally:
            self.use_ema, self.gradient_accumulation_steps = use_ema, steps
            self.built = False
        self._create_slots(list(variables))
        if use_ema:
            self._create_averages(variables)
        if steps:
            self._create_accumulator(variables, lambda: self._iterations % steps)
        self.built = True

    def _add_slot(self, reference, name, shape, dtype, value) -> tf.Variable:
        initializer = keras.initializers.Constant(value) if value else "zeros"
        with self._placed_like(reference):
            slot = self.add_variable(
                shape=shape,
                dtype=dtype.name,
                initializer=initializer,
                name=_slot_name(reference, name),
            )
        return tensorflow_variable(slot)

    def _add_checked(self, name, values, check) -> tf.Variable:
        with keras.name_scope(self.name, caller=self):
            variable = CheckedVariable(
                values, dtype="int64", trainable=False, name=name
            )
        variable.check = check
        self._track_variable(variable)
        return tensorflow_variable(variable)

    def _add_rows(self, reference, name, row_shape, dtype) -> tf.Variable:
        with (
            self._placed_like(reference),
            keras.name_scope(self.name, caller=self),
        ):
            rows = RowsVariable(
                "zeros",
                shape=(0, *row_shape),
                dtype=dtype.name,
                trainable=False,
                name=_slot_name(reference, name),
            )
        self._track_variable(rows)
        return tensorflow_variable(rows)

    def _add_average(self, variable):
        if self._overwrite_variable_with_gradient(variable):
            return None
        return self.add_variable_from_reference(variable, "average")

    @property
    def _accumulated_gradients(self) -> list:
        """Where Keras looks for those of variables that gradients overwrite."""
        return self._accumulator.sums

    def _placed_like(self, reference):
        colocate = self._distribution_strategy.extended.colocate_vars_with
        return colocate(tensorflow_variable(reference))

    @tf.autograph.experimental.do_not_convert  # nothing below needs it
    def apply(self, grads, trainable_variables=None):
        """Keras's `apply`, once the rows of all slices are known to exist."""
        grads = list(grads)
        variables = trainable_variables
        if variables is None:
            variables = self._trainable_variables
        grads = self._row_ids(grads, variables)
        checks = self._row_checks(grads, variables)
        if trainable_variables is not None and not self.built:
            # Not behind the checks: a `tf.function` could not give the new variables
            # their values before its first step, and would never if that step failed.
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        # Around all of Keras's `apply`: a failed step is not counted either.
        with tf.control_dependencies(checks):
            if self.loss_scale_factor is not None:
                grads = [divisible(g) for g in grads]
            super().apply(grads, trainable_variables)

    def _backend_apply_gradients(self, grads, trainable_variables):
        # Keras's own steps, but: replicas sum their gradients before these are
        # clipped or accumulated; tables are accumulated as slices; no condition
        # contains a switch of the replica context.
        pairs = list(zip(grads, trainable_variables, strict=True))
        grads = [g for g, _ in super()._all_reduce_sum_gradients(pairs)]
        if self.gradient_accumulation_steps:
            self._accumulate(
                grads,
                trainable_variables,
                lambda means: self._update(means, trainable_variables),
            )
        else:
            self._update(grads, trainable_variables)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            if self.ema_overwrite_frequency:
                tf.__internal__.distribute.interim.maybe_merge_call(
                    self._overwrite_when_due, self._distribution_strategy
                )

    def _update(self, grads, trainable_variables) -> None:
        grads = self._clip_gradients(grads)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)

    def _overwrite_when_due(self, distribution) -> None:
        due = (self.iterations + 1) % self.ema_overwrite_frequency == 0
        overwrite = self._overwrite_model_variables_with_average_value
        tf.cond(due, lambda: overwrite(self._trainable_variables), lambda: None)

    def _overwrite_model_variables_with_average_value(self, trainable_variables):
        for variable, average in self._averaged(trainable_variables):
            self._distribution_strategy.extended.update(
                tensorflow_variable(variable),
                lambda variable, average: variable.assign(average),
                args=(tensorflow_variable(average),),
            )

    def finalize_variable_values(self, var_list):
        """Keras's, for variables of the `dense_optimizer` too."""
        super().finalize_variable_values(var_list)
        _, delegated = self._split((None, v) for v in var_list)
        if delegated:
            self.dense_optimizer.finalize_variable_values([v for _, v in delegated])

    def _apply_weight_decay(self, variables):
        super()._apply_weight_decay(
            [v for v in variables if not self._decayed_by_rule(v)]
        )

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return list(grads_and_vars)  # done by `_backend_apply_gradients`

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        own, delegated = self._split(zip(grads, trainable_variables, strict=True))
        if own:
            super()._backend_update_step(*map(list, zip(*own)), learning_rate)
        if delegated:
            grads, variables = map(list, zip(*delegated))
            replicas = self._distribution_strategy.num_replicas_in_sync
            if replicas > 1:  # the other optimizer will sum over the replicas again
                grads = [divisible(g) / replicas for g in grads]
            self.dense_optimizer.apply(grads, variables)

    def update_step(self, gradient, variable, learning_rate):
        """One step of one variable of our own."""
        self._step_variable(gradient, variable, learning_rate)

    @property
    def variables(self) -> list:
        """Those of the `dense_optimizer` come last."""
        inner = self.dense_optimizer.variables if self.dense_optimizer else []
        return self._variables[:] + list(inner)

    def _own_variables(self) -> list:
        return self._variables[:]

    def _is_built(self) -> bool:
        return self.built


def _slot_name(reference: Any, name: str) -> str:
    return f"{path_of(reference).replace('/', '_')}_{name}"
