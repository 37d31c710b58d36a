"""Weights of layers of either Keras that take the place of others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def like(old: Any, shape: tuple[int, ...], initializer: Callable) -> Any:
    """A new weight with the path, type and `trainable` of another, not tracked."""
    if isinstance(old, tf.Variable):  # tf_keras
        scope, _, name = old.name.split(":")[0].rpartition("/")
        with tf.name_scope(f"{scope}/" if scope else ""):
            return tf.Variable(
                lambda: initializer(shape, dtype=old.dtype),
                trainable=old.trainable,
                name=name,
                dtype=old.dtype,
                shape=shape,
            )
    import keras

    *scopes, name = old.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(
            initializer,
            shape=shape,
            dtype=old.dtype,
            trainable=old.trainable,
            autocast=False,
            name=name,
        )


def exchange(layer: Any, attribute: str, new: Any) -> None:
    """Makes `new` the weight of a layer that has no other."""
    tracker = getattr(layer, "_tracker", None)
    if tracker is not None:  # Keras 3 locks a layer once it is built
        layer._untrack_variable(getattr(layer, attribute))
        tracker.unlock()
        layer._track_variable(new)
        setattr(layer, attribute, new)
        tracker.lock()
    else:  # tf_keras forgets the old one by itself
        setattr(layer, attribute, new)
