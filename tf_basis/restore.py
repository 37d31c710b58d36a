"""Going on from an export: all of its state, or an error and nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import checksums, export_manifest, hyperparameters, restore_tables
from tf_basis.adapters import model_state
from tf_basis.export_manifest import Entry

Pair = tuple[Entry, tf.Variable]

_OTHER_STATE = (
    "another invariant_scalar, scalar_frequency_power or stale_decay keeps other state"
)


def restore_optimizer(
    model: Any, path: Any, *, weights: bool = True, migrate: bool = False
) -> None:
    """Takes the state of the optimizer, and the weights, from an export.

    Training then goes on to the same bits as if it had not been interrupted: with
    iterations, learning rates that were assigned, accumulated gradients, averages and
    loss scales. Variables are matched by their order; shapes, types and names (without
    the numbers that Keras appends) must agree. All of this, and the checksum of
    every file, is checked before anything changes; the optimizer is built if it is not.

    A table whose layout is another here than in the export is refused, or with
    `migrate=True` taken over as `resize` would: another number of buckets or exclusive
    rows, another hash or seed, other formats. Rows are then hashed anew, and where
    rows of several buckets meet, moments are averaged over them
    (`tf_basis.transfer.move_buckets`); what belongs to rows stays; formats are rounded
    to nearest. Other rows or columns, another momentum mode, scalar or optimizer are
    always refused, as is another version of the hash functions. To go on with the
    layout of the export instead, make the optimizer from the config in
    `tf_basis.json`.

    Args:
      model: compiled, with the same architecture and Keras as the exported one.
      path: a directory that `export_saved_model` wrote.
      weights: whether to restore the weights of the model (and seeds of random layers
        on Keras 3) too. Default True. Vocabularies are not restored: layers that have
        one must have that of the export, in its order. A `.keras` file keeps it.
      migrate: whether to take state of another table layout over. Default False.

    Raises:
      ValueError: the export does not fit the model, is damaged, or has no optimizer.
        Nothing has been changed then, but that the optimizer is built.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> tf_basis.export_saved_model(model, "export")
    >>> restore_optimizer(model, "export")
    """
    for name, value in [("weights", weights), ("migrate", migrate)]:
        hyperparameters.check(name, value, hyperparameters.flag)
    directory = Path(path)
    flavor = model_state.flavor_of_model(model)
    content = export_manifest.read(directory)
    _require("flavor of Keras", flavor, content["flavor"], directory)
    if content["optimizer"] is None:
        raise ValueError(
            f"path must be an export with include_optimizer=True, received '{path}'"
        )
    optimizer = model_state.optimizer_of(model, flavor)
    classes = export_manifest.class_names(optimizer)
    _require("optimizer", classes, content["optimizer"]["classes"], directory)
    _require_vocabularies(model, content.get("vocabularies"), directory)

    changed = restore_tables.changed_tables(optimizer, content["tables"], migrate)
    places = export_manifest.places_of(optimizer)
    theirs = content["optimizer_variables"]
    slots = {(e["table"], e["slot"]): e for e in theirs if "table" in e}
    others, same = [], []  # of no table, and of tables with the same layout
    for name, variable in model_state.optimizer_variables(model, flavor):
        place = places.get(id(variable))
        if place is None:
            others.append((name, variable))
        elif place["table"] not in changed:
            same.append((name, variable, (place["table"], place["slot"])))
    pairs = _matched(others, [e for e in theirs if "table" not in e], "optimizer")
    extra = {p for p in slots if p[0] not in changed} - {p for _, _, p in same}
    if extra:
        lacks = [slots[place]["name"] for place in sorted(extra)]
        raise ValueError(
            f"the optimizer lacks state that the export has: {lacks} ({_OTHER_STATE})"
        )
    entries = [slots.get(place) for _, _, place in same]
    pairs += _matched([v[:2] for v in same], entries, "optimizer")
    if weights:
        own = model_state.model_variables(model, flavor)
        pairs += _matched(own, content["weights"], "model")

    read = reader(directory)
    moved = []
    for number, layout in changed.items():
        stored = {
            name: read(e) for (table, name), e in slots.items() if table == number
        }
        part, _ = export_manifest.tables_of(optimizer)[number]
        step = _saved_iterations(part, pairs, read)
        moved += restore_tables.moved_values(optimizer, number, layout, stored, step)
    for entry, variable in pairs:
        variable.assign(read(entry))
    for variable, value in moved:
        variable.assign(value)
    for part, _ in export_manifest.tables_of(optimizer):
        part._update_fingerprint()


def _require(what: str, ours: Any, theirs: Any, directory: Path) -> None:
    if ours != theirs:
        raise ValueError(
            f"model must have the {what} of the export, {theirs!r}, received {ours!r} "
            f"(to restore '{directory}')"
        )


def _require_vocabularies(model: Any, theirs: list | None, directory: Path) -> None:
    ours = export_manifest.vocabularies_of(model)
    if theirs is None:  # an export of an earlier version
        return
    if len(ours) != len(theirs):
        _require("layers with a vocabulary", *map(_names, (ours, theirs)), directory)
    for own, their in zip(ours, theirs):
        if own["sha256"] != their["sha256"]:
            raise ValueError(
                f"model must have the vocabulary of the export in '{own['layer']}', "
                f"{their['ids']} ids in their order, received {own['ids']} ids that "
                f"are others or in another order (to restore '{directory}'): rows "
                "would be taken for those of other ids. Adapt it on the same data, or "
                "load the model from a file of Keras, which keeps vocabularies"
            )


def _names(vocabularies: list[dict[str, Any]]) -> list[str]:
    return [entry["layer"] for entry in vocabularies]


def _saved_iterations(optimizer: Any, pairs: list[Pair], read: Callable) -> int:
    counter = optimizer._keras.tensorflow_variable(optimizer._iterations)
    (entry,) = [entry for entry, variable in pairs if variable is counter]
    return int(read(entry))


def _matched(
    ours: model_state.Named, theirs: Sequence[Entry | None], whose: str
) -> list[Pair]:
    """Pairs of what is stored and where it belongs, in order.

    Raises:
      ValueError: they do not fit.
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"the {whose} has {len(ours)} variables of this kind, the export "
            f"{len(theirs)}: here {[n for n, _ in ours]}, there "
            f"{[e['name'] for e in theirs]}"
        )
    for (name, variable), entry in zip(ours, theirs):
        if entry is None:
            raise ValueError(
                f"the {whose} has '{name}', which the export lacks ({_OTHER_STATE})"
            )
        dtype, shape = tf.as_dtype(variable.dtype).name, variable.shape
        if (
            not _same_path(name, entry["name"])
            or dtype != entry["dtype"]
            or not shape.is_compatible_with(entry["shape"])
        ):
            raise ValueError(
                f"the {whose} has '{name}', {dtype} of shape {tuple(shape)}, where the "
                f"export has '{entry['name']}', {entry['dtype']} of shape "
                f"{tuple(entry['shape'])}"
            )
    return [(entry, variable) for (_, variable), entry in zip(ours, theirs)]


def _same_path(ours: str, theirs: str) -> bool:
    """But for numbers that were appended to names, and scopes of tf_keras before it."""
    paths = [re.sub(r"_\d+(?=[/_]|$)", "", p).split("/") for p in (ours, theirs)]
    shorter = min(map(len, paths))
    return paths[0][-shorter:] == paths[1][-shorter:]


def reader(directory: Path) -> Callable[[Entry], np.ndarray]:
    """Reads the value of an entry, or raises ValueError where it is damaged."""
    prefix = str(directory / export_manifest.VARIABLES)
    try:
        reader = tf.train.load_checkpoint(prefix)
    except Exception as error:  # of several kinds, by what is damaged
        raise ValueError(f"'{prefix}' is damaged: {error}") from error

    def read(entry: Entry) -> np.ndarray:
        try:
            value = reader.get_tensor(entry["key"])
        except Exception as error:
            raise ValueError(
                f"'{entry['name']}' in '{prefix}' is damaged: {error}"
            ) from error
        value = np.asarray(value)
        same = list(value.shape) == entry["shape"]
        found = checksums.of_array(value) if same else f"of shape {value.shape}"
        export_manifest.check(f"{prefix}: {entry['name']}", entry["sha256"], found)
        return value

    return read
