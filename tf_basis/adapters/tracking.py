"""Exchanges variables of a built optimizer in the lists in which Keras keeps them.

TensorFlow refuses to save a tracked list whose elements were replaced, so the lists
themselves are. Works on the optimizers of both flavours, ours and Keras's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def own_variables(optimizer: Any) -> list:
    """The variables that the optimizer created, in order."""
    return list(optimizer._variables)


def replace_variables(optimizer: Any, variables: Iterable) -> None:
    """Makes these the variables that the optimizer created."""
    variables = list(variables)
    with _untracked(optimizer):
        optimizer._variables = variables
    _forget_children(optimizer)
    if hasattr(optimizer, "_tracker"):  # Keras 3 has a second way to the list
        tracker = optimizer._tracker
        accepts, _ = tracker.config["variables"]
        tracker.config["variables"] = (accepts, optimizer._variables)
        tracker.stored_ids["variables"] = set(map(id, variables))
    forget_traces(optimizer)


def forget_traces(optimizer: Any) -> None:
    """Lets tf_keras trace its compiled step of a variable anew."""
    step = getattr(type(optimizer), "_update_step_xla", None)
    if step is not None:
        bound = step.python_function.__get__(optimizer)
        vars(optimizer)["_update_step_xla"] = tf.function(bound, jit_compile=True)


def rebind(optimizer: Any, old: Any, new: Any) -> None:
    """Lets the optimizer know the model's variable `old` as `new` from now on."""
    old_key, new_key = optimizer._var_key(old), optimizer._var_key(new)
    if hasattr(optimizer, "_index_dict"):  # tf_keras
        optimizer._index_dict = {
            new_key if key == old_key else key: index
            for key, index in optimizer._index_dict.items()
        }
        _forget_children(optimizer)
        return
    indices = optimizer._trainable_variables_indices
    index = indices.pop(old_key)
    indices[new_key] = index
    variables = list(optimizer._trainable_variables)
    variables[index] = new
    with _untracked(optimizer):
        optimizer._trainable_variables = variables


def index_of(optimizer: Any, variable: Any) -> int | None:
    """The number of a model variable in the lists of slots; None if unknown."""
    indices = getattr(optimizer, "_index_dict", None)
    if indices is None:
        indices = getattr(optimizer, "_trainable_variables_indices", {})
    return indices.get(optimizer._var_key(variable))


def _forget_children(optimizer: Any) -> None:
    """tf_keras remembers what a checkpoint of the optimizer holds."""
    vars(optimizer).pop("_coalesced_children", None)


def _untracked(optimizer: Any) -> contextlib.AbstractContextManager:
    """Keras 3 would wrap a list in a type that TensorFlow does not know."""
    if not hasattr(optimizer, "_tracker"):
        return contextlib.nullcontext()
    from keras.src.utils.tracking import DotNotTrackScope

    return DotNotTrackScope()
