"""Where an exchange between ranks enters a step of any Keras 3 optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_basis.adapters import arguments, keras3
from tf_basis.ops import dispatch

Optimizer = keras3.Optimizer


class CollectiveAdapter:
    """Mixed before a Keras optimizer, or a class derived from one.

    A subclass defines `_build_collective(variables)`, which may call `_add_state`;
    `_reduced(gradients, variables)`, called once per update, after accumulation and
    before clipping; and `_take_step(pairs, update)`, which calls `update(pairs)`
    where the step is to be taken.
    """

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
        self._reducing = _Hidden(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: list) -> list:
        grads, kept = self._reduced(list(grads), self._reducing.items)
        clipped = super()._clip_gradients([g for g, k in zip(grads, kept) if k])
        rest = iter(clipped)
        return [next(rest) if k else g for g, k in zip(grads, kept)]

    def _apply_weight_decay(self, variables: Any) -> None:
        pass  # with the step, which may be skipped

    def _backend_update_step(self, grads, trainable_variables, learning_rate) -> None:
        def update(pairs: list) -> None:
            if pairs:
                grads, variables = map(list, zip(*pairs))
                super(CollectiveAdapter, self)._apply_weight_decay(variables)
                super(CollectiveAdapter, self)._backend_update_step(
                    grads, variables, learning_rate
                )

        self._take_step(list(zip(grads, trainable_variables)), update)


class CollectiveOptimizer(CollectiveAdapter, Optimizer):
    """The base of an optimizer that exchanges for itself."""

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        arguments.check(self, "Keras 3", kwargs, keras3.ARGUMENTS, keras3.ADVICE)
        super().__init__(learning_rate=learning_rate, **kwargs)


class _Hidden:
    """A list that Keras does not track."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)


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
