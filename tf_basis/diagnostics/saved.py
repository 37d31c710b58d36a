"""Tables in files: what `export_saved_model` wrote, and `.keras`."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import distributed, export_manifest, layers, layout_record, restore
from tf_basis import optimizers as kinds
from tf_basis.adapters import flavor as flavors
from tf_basis.adapters import keras_modules
from tf_basis.diagnostics.report import Report, report, report_of
from tf_basis.diagnostics.tables import Slot, Table, parts_of, table_of
from tf_basis.distributed import snapshot
from tf_basis.optimizers import fingerprint, selection
from tf_basis.tables import TableLayout

_OTHERS = (
    "restore it into its model (see docs/saving.md and docs/checkpoints.md) and call "
    "tf_basis.diagnostics.report(model.optimizer)"
)
_NEEDS_MODEL = (
    "give the model that the state is of as a .keras file (--model of the command), or "
    + _OTHERS
)
_OTHER_KERAS = {
    "tf_keras": "it was written by tf_keras: set TF_USE_LEGACY_KERAS=1",
    "keras3": "it was written by Keras 3: unset TF_USE_LEGACY_KERAS",
}


def report_file(path: Path, model: Path | None = None) -> Report:
    """The report of the tables in a file.

    Args:
      path: an export with optimizer state, or a `.keras` file; with `model` also a
        `.weights.h5` file, a `tf.train.Checkpoint` (a prefix, or the folder with the
        last one), or a folder of `distributed.CheckpointCallback`.
      model: a `.keras` file of the same model, compiled, that the state is read into.

    Raises:
      ValueError: it is none of these, is damaged, or has no such optimizer.
    """
    if model is not None:
        return _of_state(path, model)
    if path.is_dir() and (path / export_manifest.NAME).exists():
        return _of_export(path)
    if path.suffix == ".keras" and path.is_file():
        loaded = _model_of_archive(path)
        _check_optimizer(path, loaded)
        return report(loaded.optimizer)
    kind = "directory" if path.is_dir() else "file"
    inside = sorted(path.glob(f"*/{export_manifest.NAME}")) if path.is_dir() else []
    if inside:
        exports = ", ".join(f"'{manifest.parent}'" for manifest in inside)
        raise ValueError(
            f"path must be one export, received the directory '{path}' with {exports}"
        )
    raise ValueError(
        f"path must be an export of export_saved_model or a .keras file, received the "
        f"{kind} '{path}': {_NEEDS_MODEL}"
    )


# ---- exports --------------------------------------------------------------------


def _of_export(path: Path) -> Report:
    content = export_manifest.read(path)
    if content["optimizer"] is None:
        raise ValueError(
            f"path must be an export with include_optimizer=True, received '{path}'"
        )
    optimizer = _optimizer_of(content["optimizer"]["config"], content["flavor"])
    entries = content["optimizer_variables"]
    read = restore.reader(path)
    steps = [e for e in entries if not e["shape"] and _is_counter(e["name"])]
    step = int(read(steps[0])) if steps else None
    slots: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if "table" in entry:
            slots.setdefault(entry["table"], {})[entry["slot"]] = entry
    prints = [read(e) for e in entries if _is_fingerprint(e["name"])]
    records = content["tables"]
    owners = list(_owners(optimizer, prints))
    if len(owners) != len(records):
        raise ValueError(
            f"'{path}' has {len(records)} tables, but the optimizers that its config "
            f"describes have {len(owners)}: {_OTHERS}"
        )
    return report_of(list(_tables(owners, records, slots, read)), step)


def _owners(optimizer: Any, prints: Sequence[np.ndarray]) -> Iterator[tuple]:
    """For each table its optimizer, and its numbers; see `Table.place`.

    Optimizers without variables, which have no fingerprint, are passed over.
    """
    parts = enumerate(parts_of(optimizer))
    for saved in prints:
        kind = fingerprint.kind_in(saved)
        for place, part in parts:
            if any(cls.__name__ == kind for cls in type(part).__mro__):
                for number in range(fingerprint.tables_in(saved)):
                    yield part, (place, number)
                break


def _tables(owners, records, slots, read) -> Iterator[Table]:
    for number, (record, (part, place)) in enumerate(zip(records, owners)):
        held = {name: Slot(read(e)) for name, e in slots.get(number, {}).items()}
        layout = _with_scalar(layout_record.layout_of(record), part, held)
        yield table_of(part, layout, held, place=place)


def _with_scalar(layout: TableLayout, part: Any, slots: Mapping) -> TableLayout:
    """The layout with the settings of its scalars, as far as they are written down.

    A table's own settings are in the config where `table_settings` has them; those
    that a layer left on its table are not, but for the kind, which the slots tell.
    """
    settings = selection.settings_of(layout.path, {}, part.table_settings)
    scalar = {k: v for k, v in settings.items() if k in selection.SCALAR_SETTINGS}
    if "scalar_range" in scalar:
        scalar["scalar_range"] = tuple(scalar["scalar_range"])
    kinds = {"row_energy": "energy", "scalar": "learned"}
    kind = next((kinds[name] for name in slots if name in kinds), None)
    if part.invariant_scalar != kind or "invariant_scalar" in scalar:
        scalar["invariant_scalar"] = kind
    return replace(layout, scalar=tuple(sorted(scalar.items())))


def _optimizer_of(config: Any, flavor: str) -> Any:
    _register(flavor)
    try:
        return flavors.load_adapter(flavor).deserialize(config)
    except Exception as error:  # of several kinds, by what is missing here
        raise ValueError(
            f"the optimizer of the export cannot be made here "
            f"({type(error).__name__}: {error}): {_OTHERS}"
        ) from error


def _register(flavor: str) -> None:
    """Lets this Keras know all classes of the package."""
    kinds.for_flavor(flavor)
    distributed.for_flavor(flavor)
    assert layers  # which registers its own


def _is_fingerprint(name: str) -> bool:
    # Keras numbers the names of several.
    return bool(re.fullmatch(rf"(.*/)?{fingerprint.NAME}(_\d+)?", name))


def _is_counter(name: str) -> bool:
    return name.split("/")[-1] in ("iteration", "iterations")


# ---- .keras ---------------------------------------------------------------------


def _model_of_archive(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # reads everything
            version = json.loads(archive.read("metadata.json"))["keras_version"]
    except Exception as error:  # of many kinds, by which byte is wrong
        raise ValueError(
            f"'{path}' is damaged, or no .keras file: {type(error).__name__}: {error}"
        ) from error
    if damaged is not None:
        raise ValueError(
            f"'{path}' is damaged: '{damaged}' in it differs from its checksum"
        )
    flavor = "tf_keras" if str(version).startswith("2.") else "keras3"
    try:
        _register(flavor)
        model = keras_modules.keras_of(flavor).models.load_model(path)
    except Exception as error:  # of several kinds, by what is missing here
        advice = _OTHERS if flavor == flavors.active() else _OTHER_KERAS[flavor]
        raise ValueError(
            f"the model in '{path}' cannot be loaded here "
            f"({type(error).__name__}: {error}): {advice}"
        ) from error
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"'{path}' has no optimizer: it was saved without one")
    return model


def _check_optimizer(path: Path, model: Any) -> None:
    if not parts_of(model.optimizer):
        raise ValueError(
            f"'{path}' was trained without an optimizer of tf_basis, with "
            f"{type(model.optimizer).__name__}: no table in it is compressed"
        )


# ---- state without a config -----------------------------------------------------


def _of_state(path: Path, model_path: Path) -> Report:
    if model_path.suffix != ".keras" or not model_path.is_file():
        raise ValueError(f"model must be a .keras file, received '{model_path}'")
    model = _model_of_archive(model_path)
    with tf.init_scope():
        model.optimizer.build(model.trainable_variables)
    _check_optimizer(model_path, model)
    try:
        _read_state(path, model)
    except ValueError:
        raise
    except Exception as error:  # of several kinds, by what does not fit
        raise ValueError(
            f"'{path}' cannot be read into the model of '{model_path}' "
            f"({type(error).__name__}: {error})"
        ) from error
    return report(model.optimizer)


def _read_state(path: Path, model: Any) -> None:
    if path.name.endswith(".weights.h5"):
        model.load_weights(path)
        return
    if path.is_dir() and snapshot.complete(path):
        distributed.restore_checkpoint(path, model)
        return
    prefix = tf.train.latest_checkpoint(str(path)) if path.is_dir() else str(path)
    if prefix is None or not Path(f"{prefix}.index").exists():
        raise ValueError(
            "path must be a .weights.h5 file, the prefix or folder of a "
            "tf.train.Checkpoint, or a folder of CheckpointCallback, received "
            f"'{path}'"
        )
    names = {key.split("/")[0] for key, _ in tf.train.list_variables(prefix)}
    parts = {"model": model, "optimizer": model.optimizer}
    parts = {name: part for name, part in parts.items() if name in names}
    status = tf.train.Checkpoint(**parts).read(prefix)
    status.assert_existing_objects_matched()
    status.expect_partial()  # that there is a counter of saves does not matter
    if not int(tf.convert_to_tensor(parts_of(model.optimizer)[0].iterations)):
        raise ValueError(
            f"'{path}' has no state of an optimizer that has taken a step under "
            f"'model' or 'optimizer', received {sorted(names)}"
        )
