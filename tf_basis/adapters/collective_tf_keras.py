"""Where an exchange between ranks enters a step of any tf_keras optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from tf_basis.adapters import arguments
from tf_basis.adapters import tf_keras as adapter
from tf_basis.adapters.collective import CollectiveHooks, Hidden

Optimizer = adapter.Optimizer


class CollectiveAdapter(CollectiveHooks):
    """See `CollectiveHooks`."""

    def build(self, var_list: list) -> None:
        """The optimizer's, then the state of the exchange, once."""
        already = built(self)
        super().build(var_list)
        if not already:
            self._build_collective(list(var_list))
            self._built = True

    def _add_state(self, name: str, elements: int, dtype: tf.DType) -> tf.Variable:
        with tf.init_scope():
            variable = tf.Variable(
                tf.zeros([elements], dtype), trainable=False, name=name
            )
        self._variables.append(variable)
        return variable

    def apply_gradients(self, grads_and_vars, name=None, **kwargs):
        """tf_keras's, with the exchange inside."""
        grads_and_vars = list(grads_and_vars)
        self._reducing = Hidden(v for g, v in grads_and_vars if g is not None)
        return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def _deduplicate_sparse_grad(self, grads: list) -> list:
        return grads  # summed when they were reduced

    def _internal_apply_gradients(self, grads_and_vars):
        before = tf.identity(self.iterations)

        def update(pairs: list) -> None:
            if pairs:
                super(CollectiveHooks, self)._apply_weight_decay([v for _, v in pairs])
                super(CollectiveAdapter, self)._internal_apply_gradients(pairs)

        self._take_step(list(grads_and_vars), update)
        # A step that was not taken is counted too, as in Keras 3.
        return self.iterations.assign(before + 1)


class CollectiveOptimizer(CollectiveAdapter, Optimizer):
    """The base of an optimizer that exchanges for itself."""

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        steps = kwargs.pop("gradient_accumulation_steps", None)
        if steps is not None:
            raise ValueError(
                "gradient_accumulation_steps must be None in this optimizer on "
                f"tf_keras, received {steps!r}"
            )
        agree_in_loss_scaling()
        arguments.check(self, "tf_keras", kwargs, adapter.ARGUMENTS, adapter.ADVICE)
        if kwargs.get("use_ema"):
            raise ValueError(
                "use_ema must be False in this optimizer on tf_keras, received True"
            )
        super().__init__(**kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list: list) -> None:
        """Once, however often: tf_keras calls it in every step that it traces."""
        super().build(var_list)
        self._built = True

    def get_config(self) -> dict[str, Any]:
        """The arguments that the base takes."""
        config = super().get_config()
        rate = self._serialize_hyperparameter(self._learning_rate)
        config["learning_rate"] = rate if isinstance(rate, dict) else float(rate)
        return config


def agree_in_loss_scaling() -> None:
    """Makes all ranks of tf_keras's LossScaleOptimizer leave out the same steps.

    Each would look at its own gradients, while the optimizer inside waits for the
    others.
    """
    wrapper = tf_keras.mixed_precision.LossScaleOptimizer
    cls = type(wrapper(tf_keras.optimizers.SGD()))
    original = cls.apply_gradients
    if getattr(original, "_agrees", False):
        return

    def apply_gradients(self, grads_and_vars, **kwargs):
        agree = getattr(self.inner_optimizer, "_all_ranks_finite", None)
        if agree is None or not self.dynamic:
            return original(self, grads_and_vars, **kwargs)
        grads_and_vars = list(grads_and_vars)
        with tf.init_scope():
            self.inner_optimizer.build([v for _, v in grads_and_vars])
        state, update = self._loss_scale, type(self._loss_scale).update

        def agreed(gradients):
            values = [
                g.values if isinstance(g, tf.IndexedSlices) else g
                for g in tf.nest.flatten(gradients)
                if g is not None
            ]
            finite = [tf.reduce_all(tf.math.is_finite(v)) for v in values]
            good = agree(tf.reduce_all(tf.stack(finite)))
            return update(state, [tf.where(good, 0.0, float("nan"))])

        object.__setattr__(state, "update", agreed)
        try:
            return original(self, grads_and_vars, **kwargs)
        finally:
            object.__delattr__(state, "update")

    apply_gradients._agrees = True
    cls.apply_gradients = apply_gradients


def built(optimizer: Any) -> bool:
    """Whether the optimizer has its variables."""
    return getattr(optimizer, "_built", False)


def copy_state(source: Any, target: Any) -> None:
    """Builds `target` as `source` is, which has the same class but for the exchange."""
    raise ValueError(
        "optimizer must not have been built yet: wrap it before the model is compiled "
        f"or trained, received the built optimizer '{source.name}'"
    )
