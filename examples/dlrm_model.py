"""A DLRM: numbers through a tower, ids through a table, and the dots of all pairs.

On the Keras that `tf.keras` is: Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from dlrm_data import Clicks

TABLE = "table"


class FieldMeans(tf.keras.layers.Layer):
    """Weighted means of the slots of each field: [b, slots, d] to [b, fields, d]."""

    def __init__(self, slot_field: Sequence[int], **kwargs):
        super().__init__(**kwargs)
        self.slot_field = [int(f) for f in slot_field]
        pool = np.eye(max(self.slot_field) + 1, dtype="float32")[self.slot_field]
        self.pool = pool.tolist()

    def call(self, inputs):
        looked_up, weights = inputs
        weighted = looked_up * weights[:, :, tf.newaxis]
        return tf.einsum("bsd,sf->bfd", weighted, tf.constant(self.pool))

    def get_config(self):
        return {**super().get_config(), "slot_field": self.slot_field}


class Interactions(tf.keras.layers.Layer):
    """The tower's output, and the dot products of all pairs of it and the fields."""

    def call(self, inputs):
        tower, fields = inputs
        vectors = tf.concat([tower[:, tf.newaxis], fields], axis=1)
        n = vectors.shape[1]
        dots = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, n * n])
        first, second = np.tril_indices(n, -1)
        return tf.concat([tower, tf.gather(dots, first * n + second, axis=1)], axis=1)


def make_model(
    clicks: Clicks,
    seed: int,
    dim: int = 16,
    bottom: Sequence[int] = (256, 64),
    top: Sequence[int] = (256, 128),
) -> tf.keras.Model:
    """Returns logits. Hidden layers are normalised."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(seed)

    def tower(x, widths: Sequence[int], name: str):
        for number, width in enumerate(widths):
            x = layers.Dense(width, activation="relu", name=f"{name}_{number}")(x)
            x = layers.LayerNormalization(name=f"{name}_norm_{number}")(x)
        return x

    slots = clicks.rows.shape[1]
    dense = tf.keras.Input((clicks.dense.shape[1],), name="dense")
    rows = tf.keras.Input((slots,), dtype="int32", name="rows")
    weights = tf.keras.Input((slots,), name="weights")
    uniform = tf.keras.initializers.RandomUniform(-0.1, 0.1, seed=seed)
    table = layers.Embedding(
        clicks.n_rows, dim, embeddings_initializer=uniform, name=TABLE
    )
    fields = FieldMeans(clicks.slot_field, name="fields")([table(rows), weights])
    numbers = layers.Dense(dim, name="bottom_out")(tower(dense, bottom, "bottom"))
    crossed = Interactions(name="interactions")([numbers, fields])
    logits = layers.Dense(1, name="top_out")(tower(crossed, top, "top"))
    inputs = {"dense": dense, "rows": rows, "weights": weights}
    return tf.keras.Model(inputs, logits, name="dlrm")


def scores(model: tf.keras.Model, clicks: Clicks, part: slice) -> np.ndarray:
    """Logits of the examples of `part`, in float64."""
    parts = []
    for first in range(part.start, part.stop, 8192):
        inputs = clicks.inputs(slice(first, min(first + 8192, part.stop)))
        tensors = {name: tf.constant(value) for name, value in inputs.items()}
        parts.append(np.asarray(model(tensors, training=False))[:, 0])
    return np.concatenate(parts).astype(np.float64)
