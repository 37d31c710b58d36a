"""What an exchange in a step of an optimizer has in common on both flavours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CollectiveHooks:
    """Mixed before a Keras optimizer, or a class derived from one.

    A subclass defines `_build_collective(variables)`, which may call `_add_state`;
    `_reduced(gradients, variables)`, called once per update, after accumulation and
    before clipping; and `_take_step(pairs, update)`, which calls `update(pairs)`
    where the step is to be taken.
    """

    _reducing: Hidden

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
