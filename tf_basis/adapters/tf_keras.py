"""The base of every optimizer here on tf_keras (Keras 2)."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf
import tf_keras

from tf_basis.adapters import arguments

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


# What the base takes beside the learning rate, and what is added to it here.
ARGUMENTS = frozenset(
    set(inspect.signature(Optimizer.__init__).parameters) - {"self", "kwargs"}
    | {"is_legacy_optimizer", "gradient_accumulation_steps"}
)
ADVICE = {
    "loss_scale_factor": "wrap the optimizer in "
    "tf_keras.mixed_precision.LossScaleOptimizer",
    "mesh": "compressed tables are not sharded by DTensor",
    "lr": "use learning_rate",
    "decay": "use weight_decay, or a schedule as learning_rate",
}


class OptimizerAdapter(Optimizer):
    """Gives a subclass the same few hooks on each flavour of Keras.

    See `tf_basis.adapters.keras3.OptimizerAdapter`.
    """

    def __init__(
        self,
        learning_rate: Any,
        gradient_accumulation_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        steps = gradient_accumulation_steps
        received = {"gradient_accumulation_steps": steps, **kwargs}
        arguments.check(self, "tf_keras", received, ARGUMENTS, ADVICE)
        super().__init__(**kwargs)
        self.gradient_accumulation_steps = steps
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.dense_optimizer = None

    def build(self, var_list: list) -> None:
        """Creates all state for these variables, once."""
        if self._is_built():
            return
        arguments.check_inner(self, self.dense_optimizer)
        # Keras would give tables averages of their own size.
        use_ema, self.use_ema = self.use_ema, False
        try:
            super().build(var_list)
        finally:
            self.use_ema = use_ema
        self._create_slots(list(var_list))
        if use_ema:
            self._create_averages(var_list)
        if self.gradient_accumulation_steps:
            with tf.init_scope():
                counter = tf.Variable(
                    0, name="accumulated_batches", dtype=tf.int64, trainable=False
                )
            self._variables.append(counter)
            self._create_accumulator(var_list, lambda: counter, counter)
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

    def _add_checked(self, name, values, check) -> tf.Variable:
        with tf.init_scope():
            variable = tf.Variable(values, trainable=False, name=name)
        restore = variable._restore_from_tensors

        def checked(restored_tensors: dict):
            check(*restored_tensors.values())
            return restore(restored_tensors)

        variable._restore_from_tensors = checked
        self._variables.append(variable)
        return variable

    def _add_rows(self, reference, name, row_shape, dtype) -> tf.Variable:
        colocate = self._distribution_strategy.extended.colocate_vars_with
        with tf.init_scope(), colocate(reference):
            rows = tf.Variable(
                tf.zeros([0, *row_shape], dtype),
                shape=[None, *row_shape],
                name=f"{name}/{path_of(reference)}",
                trainable=False,
            )
        self._variables.append(rows)
        return rows

    def _add_average(self, variable):
        return self.add_variable_from_reference(
            variable, "average", initial_value=variable
        )

    @tf.autograph.experimental.do_not_convert  # nothing below needs it
    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs
    ):
        """tf_keras's, once the rows of all slices are known to exist."""
        pairs = list(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        grads_and_vars = list(zip(self._row_ids(grads, variables), variables))
        checks = self._row_checks(*zip(*grads_and_vars)) if grads_and_vars else []
        present = [(g, v) for g, v in grads_and_vars if g is not None]
        with tf.control_dependencies(checks):
            if not (self.gradient_accumulation_steps and present):
                return super().apply_gradients(
                    grads_and_vars, name, skip_gradients_aggregation, **kwargs
                )
            with tf.name_scope(name or self.name), tf.init_scope():
                self.build([v for _, v in grads_and_vars])
            aggregate = kwargs.get("experimental_aggregate_gradients", True)
            if aggregate and not skip_gradients_aggregation:
                present = self.aggregate_gradients(present)
            gradients, variables = map(list, zip(*present))
            self._accumulate(
                gradients,
                variables,
                lambda means: self._apply_means(means, variables, name),
            )
            return self._iterations

    def _apply_means(self, means, variables, name) -> None:
        pairs = list(zip(means, variables, strict=True))
        super().apply_gradients(pairs, name, skip_gradients_aggregation=True)

    def _compute_current_learning_rate(self):
        schedule, steps = self._learning_rate, self.gradient_accumulation_steps
        if not (steps and self._is_built() and _is_schedule(schedule)):
            super()._compute_current_learning_rate()
            return
        # Schedules count batches, `iterations` counts updates.
        batches = self._iterations * steps + self._accumulator.counter
        self._current_learning_rate.assign(schedule(batches))

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
        return tf.__internal__.distribute.interim.maybe_merge_call(
            self._step_across_replicas,
            self._distribution_strategy,
            own,
            [v for _, v in grads_and_vars],
        )

    def _step_across_replicas(self, distribution, own, updated):
        # As tf_keras does, but the averages include variables of `dense_optimizer`.
        def step(variable, gradient):
            if self.jit_compile:
                key = id(self._var_key(variable))
                return self._update_step_xla(gradient, variable, key)
            return self._update_step(gradient, variable)

        for gradient, variable in own:
            distribution.extended.update(variable, step, args=(gradient,), group=False)
        if self.use_ema:
            self._update_model_variables_moving_average(updated)
            if self.ema_overwrite_frequency:
                due = (self.iterations + 1) % self.ema_overwrite_frequency == 0
                overwrite = self._overwrite_model_variables_with_average_value
                tf.cond(due, lambda: overwrite(updated), lambda: None)
        return self.iterations.assign_add(1)

    def _update_model_variables_moving_average(self, var_list):
        if self.use_ema:
            averaged = [v for v, _ in self._averaged(var_list)]
            super()._update_model_variables_moving_average(averaged)

    def _overwrite_model_variables_with_average_value(self, var_list):
        averaged = [v for v, _ in self._averaged(var_list)]
        super()._overwrite_model_variables_with_average_value(averaged)

    def finalize_variable_values(self, var_list):
        """tf_keras's, for variables of the `dense_optimizer` too."""
        super().finalize_variable_values(var_list)
        _, delegated = self._split((None, v) for v in var_list)
        if delegated:
            self.dense_optimizer.finalize_variable_values([v for _, v in delegated])

    def update_step(self, gradient, variable):
        """One step of one variable of our own."""
        self._step_variable(gradient, variable, self.learning_rate)

    @property
    def variables(self) -> list:
        """Those of the `dense_optimizer` come last."""
        inner = self.dense_optimizer.variables if self.dense_optimizer else []
        own = super().variables
        return type(own)(list(own) + list(inner))

    def _own_variables(self) -> list:
        return list(self._variables)

    def _is_built(self) -> bool:
        return getattr(self, "_built", False)

    def get_config(self) -> dict:
        """The arguments that the base takes."""
        config = super().get_config()
        rate = self._serialize_hyperparameter(self._learning_rate)
        config["learning_rate"] = rate if isinstance(rate, dict) else float(rate)
        config["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        return config


def _is_schedule(learning_rate: Any) -> bool:
    schedules = tf_keras.optimizers.schedules
    return isinstance(learning_rate, schedules.LearningRateSchedule)
