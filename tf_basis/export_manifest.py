"""`tf_basis.json`: what an export holds, and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import checksums, layout_record
from tf_basis._version import __version__
from tf_basis.adapters import keras_modules, model_state

NAME = "tf_basis.json"
FORMAT, FORMAT_VERSION = "tf_basis export", 1
VARIABLES = "variables/variables"  # where a SavedModel keeps them

Entry = dict[str, Any]


def versions(flavor: str) -> dict[str, str]:
    """Of what wrote the export; for people, none of it is compared."""
    keras = keras_modules.keras_of(flavor).__version__
    return {"tf_basis": __version__, "tensorflow": tf.__version__, flavor: keras}


def entries_of(named: model_state.Named, group: str) -> list[Entry]:
    """Name, shape, type, checksum and place of each variable."""
    entries = []
    for i, (name, variable) in enumerate(named):
        value = _value_of(variable)
        entries.append(
            {
                "name": name,
                "shape": list(value.shape),
                "dtype": tf.as_dtype(variable.dtype).name,
                "sha256": checksums.of_array(value),
                "key": f"{group}/{i}/.ATTRIBUTES/VARIABLE_VALUE",
            }
        )
    return entries


def _value_of(variable: tf.Variable) -> np.ndarray:
    """Without a copy where there is a way: tables are large."""
    read = getattr(variable, "read_value_no_copy", None)
    return np.asarray(tf.convert_to_tensor(variable) if read is None else read())


def class_names(optimizer: Any) -> list[str]:
    """Of the optimizer and of those inside it."""
    names = []
    for part in model_state.optimizers_inside(optimizer):
        wrapped = getattr(part, "_inner_class", None)
        inner = f"({wrapped.__name__})" if wrapped else ""
        names.append(type(part).__name__ + inner)
    return names


def optimizers_with_tables(optimizer: Any) -> list:
    """Those of this package in an optimizer that may have compressed tables."""
    inside = model_state.optimizers_inside(optimizer)
    return [part for part in inside if hasattr(part, "_basis")]


def tables_of(optimizer: Any) -> list[tuple[Any, str]]:
    """(optimizer, key) of every compressed table, in the order of the manifest."""
    return [
        (part, key)
        for part in optimizers_with_tables(optimizer)
        for key in part._basis.layouts
    ]


def places_of(optimizer: Any) -> dict[int, dict[str, Any]]:
    """id of each slot of a table -> the fields that say which it is."""
    return {
        id(slot): {"table": i, "slot": name}
        for i, (part, key) in enumerate(tables_of(optimizer))
        for name, slot in part._basis.slots[key].items()
    }


def layouts_of(optimizer: Any) -> list[layout_record.Record]:
    """The records of all compressed tables."""
    found = tables_of(optimizer)
    return [layout_record.record_of(part._basis.layouts[key]) for part, key in found]


def vocabularies_of(model: Any) -> list[dict[str, Any]]:
    """Of each layer that gives rows to ids: its name, how many ids, their checksum.

    Rows mean nothing under another vocabulary, nor in another order.
    """
    return [
        {"layer": name, "ids": len(ids), "sha256": _of_ids(np.asarray(ids))}
        for name, ids in model_state.vocabularies_of(model)
    ]


def _of_ids(ids: np.ndarray) -> str:
    if np.issubdtype(ids.dtype, np.integer):
        return checksums.of_array(ids.astype(np.int64))
    words = [x if isinstance(x, bytes) else str(x).encode() for x in ids.tolist()]
    lengths = np.array([len(word) for word in words], np.int64)
    joined = np.frombuffer(b"".join(words), np.uint8)
    return checksums.of_array(joined, checksums.of_array(lengths))


def write(directory: Path, content: Mapping[str, Any]) -> None:
    """Adds what is the same for all exports, and checksums of all files, and writes."""
    files = {
        str(file.relative_to(directory)): _digest_of_file(file)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **content}
    # As it will be read, so that the checksum is of that.
    content = json.loads(json.dumps({**content, "files": files}, default=str))
    content["sha256"] = checksums.of_json(content)
    # No newline at the end: whatever is cut off is missed.
    (directory / NAME).write_text(json.dumps(content, indent=1))


def read(directory: Path) -> dict[str, Any]:
    """The manifest of an export all of whose files are as they were written.

    Raises:
      ValueError: there is none, or it is damaged, or of another format version.
    """
    path = directory / NAME
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(
            "path must be a directory that export_saved_model wrote, received "
            f"'{directory}', whose {NAME} cannot be read ({error})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"'{path}' is not the {NAME} of a {FORMAT}")
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"'{path}' must have the format version {FORMAT_VERSION}, which is what "
            f"tf_basis {__version__} reads, received {content.get('format_version')!r}"
        )
    stated = content.pop("sha256", None)
    if stated != checksums.of_json(content):
        raise ValueError(f"'{path}' is damaged: its checksum is not the one it states")
    for name, expected in content["files"].items():
        check(str(directory / name), expected, _digest_of_file(directory / name))
    return content


def check(what: str, expected: str, received: str | None) -> None:
    """Raises ValueError where a checksum is not the one that was written."""
    if received != expected:
        found = "it cannot be read" if received is None else f"sha256 {received}"
        raise ValueError(
            f"'{what}' is damaged: the export was written with sha256 {expected}, now "
            f"{found}"
        )


def _digest_of_file(path: Path) -> str | None:
    result = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                result.update(block)
    except OSError:
        return None
    return result.hexdigest()
