"""A small recommender and optimizers for it, trained on every rank."""

from __future__ import annotations

import hashlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import active_flavor

import tf_basis
from tf_basis import distributed
from tf_basis.adapters import flavor

keras = tf.keras
KERAS3 = active_flavor() == "keras3"
ROWS = 3000


def new(value, name):
    value = np.asarray(value, np.float32)
    if KERAS3:
        return keras.Variable(value, name=name)
    return tf.Variable(value, name=name)


def raw(variable):
    return flavor.load_adapter(active_flavor()).tensorflow_variable(variable)


def digest(*arrays) -> str:
    joined = b"".join(np.ascontiguousarray(np.asarray(a)).tobytes() for a in arrays)
    return hashlib.sha256(joined).hexdigest()


def gradients(rank: int, step: int, shape) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=shape).astype(np.float32)


def shared_state(optimizer) -> list:
    """All optimizer variables but the residuals, as arrays."""
    own = {id(v) for v in optimizer.residual_variables}
    return [raw(v).numpy() for v in optimizer.variables if id(raw(v)) not in own]


def applier(optimizer, variables):
    @tf.function
    def apply(*gradients):
        optimizer.apply_gradients(list(zip(gradients, variables)))

    return apply


def model_of(optimizer, loss="mse"):
    keras.utils.set_random_seed(7)
    ids = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(ROWS, 8, name="table")(ids)
    small = keras.layers.Embedding(ROWS, 2, name="small")(ids)
    x = keras.layers.Concatenate()([x, small])
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(64, activation="relu", name="tower")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.Dense(48, activation="relu", name="top")(x)
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(x))
    model.compile(optimizer, loss)
    return model


def data(rank: int, examples: int):
    rng = np.random.default_rng([5, rank])
    # Few rows, so that batches are full of duplicates.
    x = rng.integers(0, 40, (examples, 3)).astype(np.int32)
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)


def fit(optimizer, steps=50, sizes=(16, 24, 8, 16)):
    """`steps` steps with batches of another size on every rank."""
    model = model_of(optimizer)
    size = sizes[hvd.rank()]
    x, y = data(hvd.rank(), size * steps)
    history = model.fit(x, y, batch_size=size, epochs=1, shuffle=False, verbose=0)
    return {
        "weights": digest(*[w.numpy() for w in model.weights]),
        "state": digest(*shared_state(optimizer)),
        "variables": len(optimizer.variables),
        "residuals": len(optimizer.residual_variables),
        "loss": float(history.history["loss"][-1]),
        "iterations": int(optimizer.iterations.numpy()),
    }


def pair(steps=50, **onebit):
    inner = distributed.OneBitAdam(0.01, warmup_steps=10, **onebit)
    optimizer = tf_basis.BasisAdam(0.01, compression_ratio=10.0, dense_optimizer=inner)
    return fit(distributed.DistributedOptimizer(optimizer), steps)
