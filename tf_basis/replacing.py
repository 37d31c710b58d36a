"""Directories that appear whole: written beside their place, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _EXCHANGE = -100, 2  # of Linux's renameat2


@contextlib.contextmanager
def new_directory(path: Path, overwrite: bool) -> Iterator[Path]:
    """Gives an empty directory that takes the place of `path` when the block ends.

    Until then, and where the block fails or the process is killed, `path` is what it
    was. What a killed process left beside it is removed by the next one.

    Args:
      path: where the directory is to be.
      overwrite: whether to replace what is there.

    Raises:
      ValueError: something is there and `overwrite` is False.
    """
    _check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.partial-{socket.gethostname()}-"
    _remove_leftovers(path.parent, prefix)
    partial = path.with_name(f"{prefix}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        _flush(partial)
        _check_free(path, overwrite)
        if path.exists():
            _exchange(partial, path)
        else:
            partial.rename(path)
        flush_entry(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_free(path: Path, overwrite: bool) -> None:
    if os.path.lexists(path) and not overwrite:
        raise ValueError(
            f"path must not exist, unless overwrite=True is given, received '{path}'"
        )
    if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink()):
        raise ValueError(f"path must be a directory, received the file '{path}'")


def _remove_leftovers(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{_literal(prefix)}*"):
        pid = left.name[len(prefix) :]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _literal(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        return False  # a directory of an earlier process of this number
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # someone else's
        return True
    return True


def _exchange(new: Path, old: Path) -> None:
    """Swaps two directories at once where the system can, else one after the other."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is not None:
        names = [os.fsencode(new), os.fsencode(old)]
        if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0:
            return
    aside = new.with_name(f"{new.name}.old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def _flush(directory: Path) -> None:
    """What was written reaches the disk before the name does."""
    for folder, _, files in os.walk(directory):
        for name in files:
            flush_entry(Path(folder, name))
        flush_entry(Path(folder))


def flush_entry(path: Path) -> None:
    """Makes a file durable, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
