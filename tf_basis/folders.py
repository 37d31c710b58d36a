"""Whether a folder can be written in, asked before a training begins."""

from __future__ import annotations

import os

import tensorflow as tf


def make_writable(argument: str, folder: str | os.PathLike) -> None:
    """Makes a folder, and those it is in, unless it is there.

    Args:
      argument: whose folder it is, for the error.
      folder: its path; also one of a remote file system that TensorFlow knows.

    Raises:
      OSError: it cannot be made, or files cannot be written in it.
    """
    problem = None
    try:
        tf.io.gfile.makedirs(folder)
    except tf.errors.OpError as error:
        problem = error.message
    if problem is None and not tf.io.gfile.isdir(folder):
        problem = "it is a file"
    local = os.path.isdir(folder)  # what others allow they say when they are written
    if problem is None and local and not os.access(folder, os.W_OK | os.X_OK):
        problem = "permission denied"
    if problem is not None:
        raise OSError(
            f"{argument} needs a folder that can be made and written in, received "
            f"'{os.fspath(folder)}': {problem}"
        )


def check_file(argument: str, path: str | os.PathLike) -> None:
    """Makes the folder of a file that is to be written, or replaced, later.

    Raises:
      OSError: it cannot be, see `make_writable`; or `path` is a folder, or a file that
        must not be changed.
    """
    make_writable(argument, os.path.dirname(path) or ".")
    if os.path.isdir(path) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise OSError(
            f"{argument} must be the path of a file that can be written, received "
            f"'{os.fspath(path)}'"
        )
