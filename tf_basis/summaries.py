"""Numbers for TensorBoard, without the package tensorboard."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def write_value(tag: str, value: Any, step: int, plugin: str) -> None:
    """Writes a value to the default writer, for a plugin of TensorBoard.

    `tf.summary.scalar` and `.histogram` would need the package tensorboard.

    Args:
      tag: under which it appears.
      value: numbers in the form that the plugin takes.
      step: of the training.
      plugin: `"scalars"` or `"histograms"`.
    """
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(tag, tf.constant(value), step=step, metadata=metadata)
