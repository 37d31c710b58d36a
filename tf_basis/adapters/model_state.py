"""What a model of either Keras consists of: variables, tables, inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis.adapters import flavor as flavors
from tf_basis.adapters import keras_modules

Named = list[tuple[str, tf.Variable]]


def flavor_of_model(model: Any) -> str:
    """`"keras3"` or `"tf_keras"`.

    Raises:
      ValueError: it is no model of either.
    """
    roots = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    name = "tf_keras" if "tf_keras" in roots else "keras3"
    if not roots & {"keras", "tf_keras"} or not isinstance(
        model, keras_modules.keras_of(name).Model
    ):
        raise ValueError(
            f"model must be a model of Keras 3 or tf_keras, received {model!r}"
        )
    return name


def model_variables(model: Any, flavor: str) -> Named:
    """Weights and seeds of random layers, by path; not those of metrics."""
    if flavor == "tf_keras":
        return _named(model.weights, flavor)
    metrics = set(map(id, model.metrics_variables))
    return _named((v for v in model.variables if id(v) not in metrics), flavor)


def optimizer_variables(model: Any, flavor: str) -> Named:
    """All state of the model's built optimizer and of those inside it, by path."""
    optimizer = model.optimizer
    listed = optimizer.variables
    found = list(listed() if callable(listed) else listed)
    if flavor == "tf_keras":
        # It lists neither learning rates nor loss scales.
        known = {id(v) for v in [*found, *model.variables]}
        for part in tf.train.TrackableView(optimizer).descendants():
            if isinstance(part, tf.Variable) and id(part) not in known:
                found.append(part)
    return _named(found, flavor)


def optimizer_of(model: Any, flavor: str) -> Any:
    """The model's optimizer, built.

    Raises:
      ValueError: there is none, or it is one of the legacy classes of tf_keras.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not hasattr(optimizer, "build"):
        raise ValueError(
            "model must be compiled with an optimizer (not a legacy one), received "
            f"one with optimizer={optimizer!r}"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(inner, "built" if flavor == "keras3" else "_built", False):
        if not model.built:
            raise ValueError(
                "model must be built, so that its optimizer can be: call it on data "
                f"first, received '{model.name}'"
            )
        with tf.init_scope():
            optimizer.build(list(model.trainable_variables))
    return optimizer


def optimizers_inside(optimizer: Any) -> list:
    """The optimizer, and those that it contains."""
    found = [optimizer]
    parts = [
        getattr(optimizer, n, None) for n in ("inner_optimizer", "dense_optimizer")
    ]
    # MultiOptimizer
    for part in [*parts, *(getattr(optimizer, "optimizers", None) or ())]:
        if part is not None:
            found += optimizers_inside(part)
    return found


def resources_of(model: Any) -> list:
    """What a graph of the model may need beside variables: lookup tables."""
    return [
        part
        for part in tf.train.TrackableView(model).descendants()
        if hasattr(part, "resource_handle") and not isinstance(part, tf.Variable)
    ]


def vocabularies_of(model: Any) -> list[tuple[str, Any]]:
    """(name, ids in the order of rows) of each layer that gives rows to ids."""
    found = []
    for part in tf.train.TrackableView(model).descendants():
        # IdEncoder has the first, Keras's lookups the second.
        for method in ("vocabulary", "get_vocabulary"):
            if callable(getattr(part, method, None)):
                found.append((part.name, getattr(part, method)()))
                break
    return found


def input_structure(model: Any, flavor: str, inputs: Any) -> Any:
    """The `TensorSpec`s that the model is called with, named.

    Args:
      model: of this flavour.
      flavor: of the model.
      inputs: the caller's own, which outrank what the model knows.

    Raises:
      ValueError: the model does not know them, or they are no plain tensors.
    """
    if inputs is None and flavor == "tf_keras":
        spec = model.save_spec()
        inputs = spec[0][0] if spec and spec[0] else None
    elif inputs is None:
        inputs = getattr(model, "_inputs_struct", None)
        if inputs is None:
            listed = getattr(model, "inputs", None)
            inputs = listed[0] if listed and len(listed) == 1 else listed or None
    if inputs is None:
        called = flavor == "keras3" and getattr(model, "_build_shapes_dict", None)
        if called:
            raise ValueError(
                "inputs must be given for a subclassed model of Keras 3, which records "
                "the shapes of what it is called with, but not the types: TensorSpecs "
                f"in that structure, received None for '{model.name}', called with "
                f"the shapes {dict(called)}"
            )
        raise ValueError(
            "model must have been called on data, so that its inputs are known, "
            f"received '{model.name}'"
        )
    return tf.nest.map_structure(_tensor_spec, inputs)


def output_names(model: Any, outputs: Any) -> list[str]:
    """The names of the flat outputs: keys, else names of layers, else numbers."""
    flat = tf.nest.flatten(outputs)
    if isinstance(outputs, dict):
        return joined_paths(outputs)
    known = list(getattr(model, "output_names", None) or ())
    if len(set(known)) == len(known) == len(flat):
        return known
    return [f"output_{i + 1}" for i in range(len(flat))]


def joined_paths(structure: Any, prefix: Sequence[str] = ()) -> list[str]:
    """For each leaf of a structure, in order, its keys joined by `_`."""
    if isinstance(structure, dict):
        items = [(str(k), structure[k]) for k in sorted(structure)]
    elif isinstance(structure, (list, tuple)):
        items = [(str(i + 1), v) for i, v in enumerate(structure)]
    else:
        return ["_".join(prefix)]
    return [p for k, v in items for p in joined_paths(v, [*prefix, k])]


def _tensor_spec(leaf: Any) -> tf.TensorSpec:
    plain = isinstance(leaf, tf.TensorSpec) or not isinstance(leaf, tf.TypeSpec)
    if not plain or getattr(leaf, "sparse", False) or getattr(leaf, "ragged", False):
        raise ValueError(
            "inputs must be dense tensors in a serving signature, neither sparse nor "
            f"ragged, received {leaf!r}"
        )
    return tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype), name=leaf.name)


def _named(variables: Any, flavor: str) -> Named:
    native_of = flavors.load_adapter(flavor).tensorflow_variable
    found, seen = [], set()
    for variable in variables:
        native = native_of(variable)
        if id(native) not in seen:
            seen.add(id(native))
            path = getattr(variable, "path", None) or variable.name
            found.append((re.sub(r":\d+$", "", path), native))
    return found
