"""A model that differs between ranks, and `fit` with callbacks that look into it."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import active_flavor, to_numpy, variables_of

from tf_basis import BasisAdam, distributed

keras = tf.keras
FLAVOR = active_flavor()
X = np.arange(24, dtype=np.int32).reshape(12, 2) % 30
Y = (X.sum(axis=1, keepdims=True) % 3 == 0).astype(np.float32)


class Spy(keras.callbacks.Callback):
    """Calls functions at the moments given."""

    def __init__(self, **moments):
        super().__init__()
        self.moments = moments

    def on_epoch_begin(self, epoch, logs=None):
        self.moments.get("epoch_begin", lambda *_: None)(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self.moments.get("epoch_end", lambda *_: None)(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self.moments.get("batch_begin", lambda *_: None)(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self.moments.get("batch_end", lambda *_: None)(batch, logs)


def basis_adam(**more):
    dense = keras.optimizers.Adam(0.01 * (hvd.rank() + 1))
    return BasisAdam(
        0.02, compression_ratio=4, tables="embed", dense_optimizer=dense, **more
    )


def make_model(optimizer, width=4, layer=keras.layers.Dense):
    """Weights differ between ranks."""
    keras.utils.set_random_seed(hvd.rank() + 5)
    inputs = keras.Input((2,), dtype="int32")
    hidden = keras.layers.Embedding(30, 4)(inputs)
    hidden = keras.layers.Dropout(0.2)(keras.layers.Flatten()(hidden))
    hidden = keras.layers.BatchNormalization()(layer(width)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    # What a step does is not the matter here: tracing costs more than it saves.
    model.compile(optimizer, "binary_crossentropy", metrics=["mae"], run_eagerly=True)
    return model


def arrays(model) -> dict:
    everything = [*model.variables]
    for each in distributed.callbacks.nested_optimizers(model.optimizer):
        everything += variables_of(each)
    rate = getattr(model.optimizer, "_learning_rate", None)
    everything += [rate] if hasattr(rate, "assign") else []
    return {f"{i:03d}": to_numpy(v) for i, v in enumerate(everything)}


def fit(model, *callbacks, first=0, last=1, **more):
    arguments = {"batch_size": 4, "verbose": 0, "shuffle": False, **more}
    return model.fit(
        X, Y, initial_epoch=first, epochs=last, callbacks=list(callbacks), **arguments
    )


def train_apart(model):
    """Different optimizer state on the ranks, rank 1 has made more steps."""
    fit(model, last=1 + hvd.rank())
    return model
