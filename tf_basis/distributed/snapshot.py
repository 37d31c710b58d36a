"""Files of a distributed checkpoint: plain, checked, complete or not there at all.

    directory/checkpoint-00000007/
        shared.bin         tensors back to back, as they lie in memory
        rank-00000.bin     the same, of one rank
        manifest.json      {"sha256": of the rest, "content": {...}}, written last

The manifest names every tensor of every file in order, with dtype and shape, and the
length and SHA-256 of the file. A folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tf_basis import checksums, replacing

FORMAT = 1
KIND = "tf_basis distributed checkpoint"
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"checkpoint-(\d{8,})")
_CHUNK = 16 << 20


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, cut short, changed, or not ours."""


def folders(directory: Path) -> list[tuple[int, Path]]:
    """Numbers and paths of what checkpoints there are, complete or not, ascending."""
    if not directory.is_dir():
        return []
    found = [(_FOLDER.fullmatch(p.name), p) for p in directory.iterdir()]
    return sorted((int(m[1]), p) for m, p in found if m and p.is_dir())


def complete(directory: Path) -> list[str]:
    """Names of the checkpoints that have a manifest, newest first."""
    found = [p.name for _, p in folders(directory) if (p / MANIFEST).exists()]
    return found[::-1]


def begin(directory: Path) -> str:
    """Makes the folder of the next checkpoint; its name."""
    directory.mkdir(parents=True, exist_ok=True)
    number = max([n for n, _ in folders(directory)], default=0) + 1
    folder = directory / f"checkpoint-{number:08d}"
    folder.mkdir()
    replacing.flush_entry(directory)
    return folder.name


def write_part(
    path: Path, tensors: Iterable[tuple[str, Callable[[], np.ndarray]]]
) -> dict[str, Any]:
    """Writes tensors, given as name and a function for the value; what is in it."""
    digest, length, entries = hashlib.sha256(), 0, []
    with open(path, "wb") as file:
        for name, value in tensors:
            # Not ascontiguousarray first: it makes a vector of a number.
            array = np.asarray(value())
            data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            file.write(data)
            digest.update(data)
            length += len(data)
            dtype = tf.as_dtype(array.dtype).name
            entries.append({"name": name, "dtype": dtype, "shape": list(array.shape)})
        file.flush()
        os.fsync(file.fileno())
    replacing.flush_entry(path.parent)
    return {
        "file": path.name,
        "bytes": length,
        "sha256": digest.hexdigest(),
        "tensors": entries,
    }


def finish(folder: Path, content: dict[str, Any]) -> None:
    """Makes the folder a checkpoint, in one moment."""
    for part in [content["shared"], *content["ranks"]]:
        path = folder / part["file"]
        found = path.stat().st_size if path.exists() else "no file"
        if found != part["bytes"]:
            raise OSError(
                f"{path} must have the {part['bytes']} bytes that its rank has "
                f"written: directory must be one that all ranks share, found {found}"
            )
    content = {"kind": KIND, "format": FORMAT, "byte_order": sys.byteorder, **content}
    content = json.loads(json.dumps(content))  # as it will be read: keys are text
    text = json.dumps(
        {"sha256": checksums.of_json(content), "content": content}, indent=1
    )
    scratch = folder / f"{MANIFEST}.part"
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, folder / MANIFEST)
    replacing.flush_entry(folder)


def prune(directory: Path, keep: int, newest: str) -> None:
    """Removes all before `newest` but the last complete ones, `keep` with it."""
    last = int(_FOLDER.fullmatch(newest)[1])
    older = [p for n, p in folders(directory) if n < last]
    done = [p for p in older if (p / MANIFEST).exists()]
    spared = set(done[len(done) - (keep - 1) :]) if keep > 1 else set()
    for folder in older:
        if folder in spared:
            continue
        # Without its manifest first: what is half removed is no checkpoint.
        (folder / MANIFEST).unlink(missing_ok=True)
        replacing.flush_entry(folder)
        shutil.rmtree(folder, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest.

    Raises:
      DamagedCheckpointError: it cannot be read, or is not what was written.
      ValueError: it is of another format.
    """
    path = folder / MANIFEST
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        said, content = whole["sha256"], whole["content"]
        kind = content["kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"{path} must be the manifest of a {KIND}, but it cannot be read as one "
            f"({type(error).__name__}: {error})"
        ) from error
    if kind != KIND:
        raise ValueError(f"{path} must be of a {KIND}, received {kind!r}")
    found = checksums.of_json(content)
    if found != said:
        raise DamagedCheckpointError(
            f"{path} must have the SHA-256 that it names: it says {said}, its content "
            f"has {found}"
        )
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} must have format {FORMAT}, received {content.get('format')!r}"
        )
    if content["byte_order"] != sys.byteorder:
        raise ValueError(
            f"{path} must be of a machine with byte order {sys.byteorder!r}, received "
            f"{content['byte_order']!r}"
        )
    return content


def verify_part(folder: Path, part: dict[str, Any]) -> None:
    """Raises `DamagedCheckpointError` unless the file is what was written."""
    path = folder / part["file"]
    try:
        length = path.stat().st_size
        if length != part["bytes"]:
            raise DamagedCheckpointError(
                f"{path} must have {part['bytes']} bytes, as its manifest says, but "
                f"it has {length}"
            )
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path} must be there to be read, as its manifest says ({error})"
        ) from error
    if digest.hexdigest() != part["sha256"]:
        raise DamagedCheckpointError(
            f"{path} must have the SHA-256 of its manifest, {part['sha256']}, but it "
            f"has {digest.hexdigest()}"
        )


class PartReader:
    """Reads tensors of a part one by one, in any order."""

    def __init__(self, folder: Path, part: dict[str, Any]) -> None:
        self.tensors = part["tensors"]
        self._path, self._file = folder / part["file"], None
        self._starts, at = [], 0
        for tensor in self.tensors:
            self._starts.append(at)
            at += _length(tensor)

    def __enter__(self) -> PartReader:
        self._file: BinaryIO = open(self._path, "rb")
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def read(self, number: int) -> np.ndarray:
        """The tensor with this number."""
        tensor = self.tensors[number]
        self._file.seek(self._starts[number])
        data = np.empty(_length(tensor), np.uint8)
        if self._file.readinto(memoryview(data)) != len(data):
            raise DamagedCheckpointError(
                f"{self._path} was cut short while it was read"
            )
        dtype = tf.as_dtype(tensor["dtype"]).as_numpy_dtype
        return data.view(dtype).reshape(tensor["shape"])


def _length(tensor: dict[str, Any]) -> int:
    elements = int(np.prod(tensor["shape"], dtype=np.int64))
    return elements * tf.as_dtype(tensor["dtype"]).size
