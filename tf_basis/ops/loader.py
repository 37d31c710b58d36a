"""Finds, checks and loads the library of C++ ops.

The library is optional: every op has a twin in plain TensorFlow, and a caller that
gets None from `compiled()` takes the twin.  `TF_BASIS_OPS` says what is wanted:

auto     the library if it is there and fits this TensorFlow, else the twins
off      the twins
require  the library, else a RuntimeError

A library that was built for another TensorFlow, or is damaged, can crash the
process, so build_info.json is compared with both before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf

from tf_basis._version import __version__

MODES = ("auto", "off", "require")
ENVIRONMENT_VARIABLE = "TF_BASIS_OPS"
LIBRARY_NAME = "_tf_basis_ops.so"
BUILD_INFO_NAME = "build_info.json"
REBUILD = (
    "to rebuild, in the directory of the tf_basis sources: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)


class OpLibrary:
    """One built library and the description beside it, loaded at most once."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / LIBRARY_NAME
        self.build_info: dict[str, Any] | None = None
        self.reason: str | None = None
        self.module: ModuleType | None = None
        self._tried = False
        self._lock = threading.Lock()

    def load(self) -> ModuleType | None:
        """The generated op wrappers, or None; then `reason` says why.

        Warns once if a library is there and cannot be used.  None at all is no
        cause for a warning: a pure-Python wheel has none.
        """
        with self._lock:
            if not self._tried:
                self._tried = True
                self.reason = self._check() or self._open()
                if self.reason is not None and self.path.exists():
                    warnings.warn(
                        f"the C++ ops of tf_basis are not used: {self.reason}; "
                        f"falling back to plain TensorFlow; {REBUILD}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
            return self.module

    def _check(self) -> str | None:
        """Why the library must not be loaded, or None."""
        if not self.path.exists():
            return f"{self.path} does not exist"
        info_path = self.path.with_name(BUILD_INFO_NAME)
        try:
            info = json.loads(info_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{info_path} cannot be read ({error})"
        if not isinstance(info, dict):
            return f"{info_path} must hold an object, got {type(info).__name__}"
        self.build_info = info
        built, running = info.get("tensorflow_version"), tf.__version__
        if _release(built) != _release(running):
            return f"built for TensorFlow {built}, but {running} is running"
        built, running = info.get("cxx11_abi_flag"), _running_abi_flag()
        if built != running:
            return f"built with C++ ABI flag {built}, but TensorFlow uses {running}"
        built = info.get("package_version")
        if built != __version__:
            return f"built from tf_basis {built}, but {__version__} is running"
        # A cut-off file would end the process; one of another build lies about this.
        checksum = hashlib.sha256(self.path.read_bytes()).hexdigest()
        if info.get("library_sha256") != checksum:
            return f"{self.path} is not the file that {info_path} describes"
        return None

    def _open(self) -> str | None:
        try:
            self.module = tf.load_op_library(str(self.path))
        except (tf.errors.OpError, RuntimeError, OSError) as error:
            return f"{self.path} cannot be loaded ({error})"
        return None


def _release(version: object) -> tuple[str, ...] | None:
    """(major, minor, patch) of a version string."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return found.groups() if found else None


def _running_abi_flag() -> int | None:
    for flag in tf.sysconfig.get_compile_flags():
        if flag.startswith("-D_GLIBCXX_USE_CXX11_ABI="):
            return int(flag.partition("=")[2])
    return None


_library = OpLibrary(Path(__file__).resolve().parent)
_mode: str | None = None


def _checked(name: str, mode: object) -> str:
    if mode not in MODES:
        raise ValueError(f"{name} must be one of {', '.join(MODES)}, got {mode!r}")
    return str(mode)


def get_mode() -> str:
    """The mode in force: the last `set_mode`, else `TF_BASIS_OPS`, else auto."""
    global _mode
    if _mode is None:
        value = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
        _mode = _checked(f"environment variable {ENVIRONMENT_VARIABLE}", value)
    return _mode


def set_mode(mode: str) -> None:
    """Sets the mode of this process: auto, off or require.

    A `tf.function` keeps what was chosen when it was traced.
    """
    global _mode
    _mode = _checked("mode", mode)


@contextlib.contextmanager
def use(mode: str) -> Iterator[None]:
    """Sets the mode inside a `with` block and restores the old one after it."""
    old = get_mode()
    set_mode(mode)
    try:
        yield
    finally:
        set_mode(old)


def compiled() -> ModuleType | None:
    """The generated op wrappers if they are to be used now, else None.

    Raises:
        RuntimeError: the mode is require and the library cannot be used.
    """
    mode = get_mode()
    if mode == "off":
        return None
    module = _library.load()
    if module is None and mode == "require":
        raise RuntimeError(
            f"{ENVIRONMENT_VARIABLE}=require, but the C++ ops of tf_basis cannot be "
            f"used: {_library.reason}; {REBUILD}"
        )
    return module


def status() -> dict[str, Any]:
    """What a diagnosis needs; never raises for want of the library.

    Returns:
        loaded (the library is loaded in this process), mode, path, reason (why
        the ops are not used, or None) and build_info (None if not read).
    """
    mode = get_mode()
    if mode != "off":
        _library.load()
    off = "the mode is off" if mode == "off" else None
    return {
        "loaded": _library.module is not None,
        "mode": mode,
        "path": str(_library.path),
        "reason": off or _library.reason,
        "build_info": _library.build_info,
    }
