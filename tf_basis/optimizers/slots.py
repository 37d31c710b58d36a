"""Exchanging the slots of one variable of a built optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis.adapters import tracking

Specs = Mapping[str, tuple]  # name -> (shape, dtype, start), as `engine.slot_specs`


def raw(variable: Any) -> np.ndarray:
    """The numbers of a variable in its own format."""
    return tf.convert_to_tensor(variable).numpy()


def set_slots(
    optimizer: Any, key: str, variable: Any, specs: Specs, values: Mapping[str, Any]
) -> None:
    """Makes the slots of `variable` those in `specs`.

    A slot whose shape is as before stays the same variable; the others are new ones
    at the same places of the optimizer's variables. `values` are in the formats of
    the slots; without a value a slot keeps its own, or starts as a new one.
    """
    native = optimizer._keras.tensorflow_variable
    old = optimizer._basis.slots[key]
    listed = tracking.own_variables(optimizer)
    tracked = {id(native(v)): v for v in listed}
    theirs = {id(tracked[id(slot)]) for slot in old.values()}
    first = next((i for i, v in enumerate(listed) if id(v) in theirs), len(listed))
    others = [v for v in listed if id(v) not in theirs]
    slots, group = {}, []
    for name, (shape, dtype, start) in specs.items():
        slot = old.get(name)
        if slot is not None and tuple(slot.shape) == tuple(shape):
            group.append(tracked[id(slot)])
        else:
            with optimizer._distribution_strategy.scope():
                slot = optimizer._add_slot(variable, name, tuple(shape), dtype, start)
            group.append(tracking.own_variables(optimizer)[-1])
        if name in values:
            slot.assign(values[name])
        slots[name] = slot
    tracking.replace_variables(optimizer, others[:first] + group + others[first:])
    optimizer._basis.slots[key] = slots
    for slot in old.values():
        if all(slot is not kept for kept in slots.values()):
            empty(slot)


def extend_slots(optimizer: Any, key: str, variable: Any, specs: Specs) -> None:
    """Gives the slots more rows; those behind the old ones start as new ones do."""
    values = {}
    for name, slot in optimizer._basis.slots[key].items():
        shape, dtype, start = specs[name]
        if tuple(slot.shape) != tuple(shape):
            values[name] = np.full(shape, start, tf.as_dtype(dtype).as_numpy_dtype)
            values[name][: slot.shape[0]] = raw(slot)
    set_slots(optimizer, key, variable, specs, values)


def empty(slot: Any) -> None:
    """Frees a replaced variable and lets functions that were traced with it fail.

    They would go on training with state that nothing else sees.
    """
    for part in getattr(slot, "values", [slot]):
        tf.raw_ops.AssignVariableOp(
            resource=part.handle,
            value=tf.zeros([0, *part.shape[1:]], part.dtype),
            validate_shape=False,
        )
