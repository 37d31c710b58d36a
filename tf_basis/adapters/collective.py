"""What an exchange in a step of an optimizer has in common on both flavours."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


class CollectiveHooks:
    """Mixed before a Keras optimizer, or a class derived from one.

    A subclass defines `_build_collective(variables)`, which may call `_add_state`;
    `_reduced(gradients, variables)`, called once per update, after accumulation and
    before clipping; and `_take_step(pairs, update)`, which calls `update(pairs)`
    where the step is to be taken.
    """

    _reducing: Hidden

    def load_own_variables(self, store: Any) -> None:
        """Keras's, but residuals of another number of ranks start from zero."""
        own = getattr(self, "_own_variables", None)
        variables = list(own() if own is not None else self.variables)
        residuals = {id(v) for v in self.residual_variables}
        values = {key: store[key] for key in list(store.keys())}
        lost = 0
        for i, variable in enumerate(variables):
            value = values.get(str(i))
            native = variable if isinstance(variable, tf.Variable) else variable.value
            if id(native) not in residuals or value is None:
                continue
            if tuple(value.shape) != tuple(native.shape):
                lost += int(np.count_nonzero(np.asarray(value)))
                values[str(i)] = np.zeros(native.shape, native.dtype.as_numpy_dtype)
        if lost:
            warnings.warn(
                f"optimizer '{self.name}': the state is that of another rank or number "
                f"of ranks, so residuals start from zero: {lost} numbers that were "
                "still owed are lost (tf_basis.distributed.restore_checkpoint keeps "
                "them)",
                stacklevel=2,
            )
        super().load_own_variables(values)

    def _clip_gradients(self, grads: list) -> list:
        grads, kept = self._reduced(list(grads), self._reducing.items)
        clipped = super()._clip_gradients([g for g, k in zip(grads, kept) if k])
        rest = iter(clipped)
        return [next(rest) if k else g for g, k in zip(grads, kept)]

    def _apply_weight_decay(self, variables: Any) -> None:
        pass  # with the step, which may be skipped


class Hidden:
    """A list that Keras does not track."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
