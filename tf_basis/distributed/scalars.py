"""Numbers for TensorBoard, without the package tensorboard."""

from __future__ import annotations

import tensorflow as tf


class ScalarWriter:
    """Writes scalars to a folder.

    Args:
      folder: where.
    """

    def __init__(self, folder: str) -> None:
        self._writer = tf.summary.create_file_writer(folder)
        # `tf.summary.scalar` would need the package tensorboard.
        self._metadata = tf.compat.v1.SummaryMetadata()
        self._metadata.plugin_data.plugin_name = "scalars"

    def write(self, numbers: dict[str, float], step: int) -> None:
        """One point for each tag."""
        with self._writer.as_default():
            for tag, value in numbers.items():
                number = tf.constant(value, tf.float32)
                tf.summary.write(tag, number, step=step, metadata=self._metadata)

    def flush(self) -> None:
        """What was written is in the files."""
        self._writer.flush()
