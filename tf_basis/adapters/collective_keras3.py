"""Where an exchange between ranks enters a step of any Keras 3 optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_basis.adapters import arguments, keras3
from tf_basis.adapters.collective import CollectiveHooks, Hidden
from tf_basis.ops import dispatch

Optimizer = keras3.Optimizer


class CollectiveAdapter(CollectiveHooks):
    """See `CollectiveHooks`."""

    def build(self, variables: list) -> None:
        """The optimizer's, then the state of the exchange, once."""
        if self.built:
            return
        super().build(variables)
        self._build_collective(list(variables))

    def _add_state(self, name: str, elements: int, dtype: tf.DType) -> tf.Variable:
        variable = self.add_variable(
            shape=(elements,), dtype=dtype.name, initializer="zeros", name=name
        )
        return keras3.tensorflow_variable(variable)

    def _backend_apply_gradients(self, grads: list, trainable_variables: list) -> None:
        if dispatch.in_xla():
            raise ValueError(
                "jit_compile must be False: Horovod's collectives cannot be compiled "
                "by XLA, received a step that is"
            )
        self._reducing = Hidden(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate) -> None:
        del learning_rate  # what it is while the step is taken may be another

        def update(pairs: list) -> None:
            if pairs:
                grads, variables = map(list, zip(*pairs))
                super(CollectiveHooks, self)._apply_weight_decay(variables)
                super(CollectiveAdapter, self)._backend_update_step(
                    grads, variables, self.learning_rate
                )

        self._take_step(list(zip(grads, trainable_variables)), update)


class CollectiveOptimizer(CollectiveAdapter, Optimizer):
    """The base of an optimizer that exchanges for itself."""

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        arguments.check(self, "Keras 3", kwargs, keras3.ARGUMENTS, keras3.ADVICE)
        super().__init__(learning_rate=learning_rate, **kwargs)


def built(optimizer: Any) -> bool:
    """Whether the optimizer has its variables."""
    return optimizer.built


def copy_state(source: Any, target: Any) -> None:
    """Builds `target` as `source` is, which has the same class but for the exchange."""
    target.build(source._trainable_variables)
    # What the exchange needs comes after the variables of the optimizer itself.
    for old, new in zip(source._variables, target._variables):
        new.assign(old)
    inner = getattr(source, "dense_optimizer", None)
    if inner is not None:
        for old, new in zip(inner.variables, target.dense_optimizer.variables):
            new.assign(old)
