"""Scalars of a training, in a folder for TensorBoard."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_basis.summaries import write_value


class ScalarWriter:
    """Writes scalars to a folder.

    Args:
      folder: where.
    """

    def __init__(self, folder: str) -> None:
        self._writer = tf.summary.create_file_writer(folder)

    def write(self, numbers: dict[str, float], step: int) -> None:
        """One point for each tag."""
        with self._writer.as_default():
            for tag, value in numbers.items():
                write_value(tag, np.float32(value), step, "scalars")

    def flush(self) -> None:
        """What was written is in the files."""
        self._writer.flush()
