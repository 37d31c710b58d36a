"""SavedModels that serve anywhere and hold the state of the optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_basis import export_manifest, hyperparameters, replacing
from tf_basis.adapters import flavor as flavors
from tf_basis.adapters import model_state
from tf_basis.ops import loader

SIGNATURE = "serving_default"


def export_saved_model(
    model: Any,
    path: Any,
    include_optimizer: bool = True,
    *,
    inputs: Any = None,
    overwrite: bool = False,
) -> None:
    """Writes a SavedModel that serves without this package and can be trained on.

    Its signature `serving_default` is the model's call with `training=False`. It takes
    named tensors: by the keys of a model that is called with a dict, else by the names
    of its `keras.Input`s; what is no letter or digit becomes `_`. It gives named
    tensors: by the keys of a dict, else by the names of the output layers, else
    `output_1` and so on. No op of this package is in the graph, and the files load
    where `tf_basis` cannot be imported.

    Beside `saved_model.pb` lies `tf_basis.json`: versions, the optimizer's config, the
    layout of each table (rows, buckets, hash, seed, rows of their own, formats), the
    name, shape, type and checksum of each variable, and a checksum of the vocabulary of
    each layer that has one. `restore_optimizer` reads it.

    The directory is written under another name and renamed, so that a process that is
    killed leaves at `path` what was there before. On several ranks call it on one; the
    residuals in it are that rank's (`DistributedOptimizer`), and
    `tf_basis.distributed.CheckpointCallback` saves those of all.

    Args:
      model: of Keras 3 or tf_keras; a subclassed one must have been called.
      path: the directory to write.
      include_optimizer: whether to save the state of the model's optimizer, which is
        built for that if it is not. Default True.
      inputs: `tf.TensorSpec`s in the structure that the model is called with. Default
        None: what the model knows. Subclassed models of Keras 3 need it, which records
        the shapes of their inputs, but not the types.
      overwrite: whether to replace an existing directory. Default False.

    Raises:
      ValueError: `model` has not been called or compiled, or `path` exists.

    Example:

    >>> x = tf.keras.Input((3,), name="x")
    >>> model = tf.keras.Model(x, tf.keras.layers.Dense(1, name="score")(x))
    >>> export_saved_model(model, "export", include_optimizer=False)
    >>> tf.saved_model.load("export").signatures["serving_default"].output_dtypes
    {'score': tf.float32}
    """
    for name, value in [
        ("include_optimizer", include_optimizer),
        ("overwrite", overwrite),
    ]:
        hyperparameters.check(name, value, hyperparameters.flag)
    flavor = model_state.flavor_of_model(model)
    structure = model_state.input_structure(model, flavor, inputs)
    optimizer = model_state.optimizer_of(model, flavor) if include_optimizer else None
    serve, signature = _serving_function(model, structure)
    weights = model_state.model_variables(model, flavor)
    state = model_state.optimizer_variables(model, flavor) if include_optimizer else []

    root = tf.Module()
    root.weights = [v for _, v in weights]
    root.optimizer = [v for _, v in state]
    known = set(map(id, root.weights))
    root.others = [v for v in serve.graph.variables if id(v) not in known]
    root.resources = model_state.resources_of(model)
    with replacing.new_directory(Path(path).absolute(), overwrite) as directory:
        tf.saved_model.save(root, str(directory), signatures={SIGNATURE: serve})
        content = {
            "versions": export_manifest.versions(flavor),
            "flavor": flavor,
            "signature": signature,
            "optimizer": None,
            "tables": [],
            "vocabularies": export_manifest.vocabularies_of(model),
            "weights": export_manifest.entries_of(weights, "weights"),
            "optimizer_variables": export_manifest.entries_of(state, "optimizer"),
        }
        if include_optimizer:
            content["optimizer"] = {
                "classes": export_manifest.class_names(optimizer),
                "config": flavors.load_adapter(flavor).serialize(optimizer),
            }
            content["tables"] = export_manifest.layouts_of(optimizer)
            places = export_manifest.places_of(optimizer)
            for entry, (_, variable) in zip(content["optimizer_variables"], state):
                entry.update(places.get(id(variable), {}))
        export_manifest.write(directory, content)


def _serving_function(model: Any, structure: Any) -> tuple[Callable, dict]:
    """The traced call of the model, and its inputs and outputs in words."""
    specs = tf.nest.flatten(structure)
    keys = model_state.joined_paths(structure)
    if not isinstance(structure, dict):
        keys = [s.name or f"input_{i + 1}" for i, s in enumerate(specs)]
    names = [_identifier(key) for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(
            "inputs must have names that differ in letters and digits, received "
            f"{keys} for '{model.name}'"
        )

    def call(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        arguments = tf.nest.pack_sequence_as(structure, [tensors[n] for n in names])
        outputs = model(arguments, training=False)
        flat = tf.nest.flatten(outputs)
        found = dict(zip(model_state.output_names(model, outputs), flat, strict=True))
        return {name: tf.convert_to_tensor(value) for name, value in found.items()}

    with loader.use("off"):  # the twins: no op of this package in the graph
        serve = tf.function(call, autograph=False).get_concrete_function(
            **{n: tf.TensorSpec(s.shape, s.dtype, n) for n, s in zip(names, specs)}
        )

    def described(named: dict) -> dict:
        return {
            name: {"shape": _sizes(t.shape), "dtype": t.dtype.name}
            for name, t in named.items()
        }

    outputs = serve.structured_outputs
    return serve, {
        "inputs": described(dict(zip(names, specs))),
        "outputs": described(outputs),
    }


def _identifier(name: str) -> str:
    """As TensorFlow writes the name of an argument."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{name}" if name[:1].isdigit() else name


def _sizes(shape: tf.TensorShape) -> list[int | None] | None:
    return None if shape.rank is None else shape.as_list()
