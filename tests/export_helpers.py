"""Models with named inputs, and exports of them, for the tests of exports."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers import (
    active_flavor,
    batches_of,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
)

from tf_basis import optimizers
from tf_basis.distributed import DistributedOptimizer, OneBitAdam

ADAM = {"learning_rate": 0.02}


def make_kind(kind: str):
    """Optimizers whose state covers what an export must hold."""
    keras, classes = tf.keras, optimizers.for_flavor(active_flavor())
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    onebit = {"warmup_steps": 5}
    if kind == "loss_scale":
        loss_scaled = (
            keras.optimizers if active_flavor() == "keras3" else (keras.mixed_precision)
        )
        return loss_scaled.LossScaleOptimizer(make_optimizer(**ADAM))
    return {
        "adam": lambda: make_optimizer(**ADAM, exclusive_rows=40, use_ema=True),
        "sgd": lambda: classes.BasisSGD(0.05, 0.9, gradient_accumulation_steps=3),
        "adagrad": lambda: classes.BasisAdagrad(decay, energy_dtype="log8"),
        "onebit": lambda: OneBitAdam(0.01, **onebit),
        "inside": lambda: make_optimizer(**ADAM, dense_optimizer=OneBitAdam(**onebit)),
        "distributed": lambda: DistributedOptimizer(
            make_optimizer(**ADAM, moment_dtype="bfloat16"), "onebit"
        ),
        "keras": lambda: keras.optimizers.Adam(0.02),
    }[kind]()


def train(model, start: int, stop: int):
    for x, y in batches_of(start, stop, size=16):
        model.train_on_batch(x, y)
    return model


def make_model(kind: str):
    return make_click_model(make_kind(kind), run_eagerly=True)


def arrays_of(model) -> dict:
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return optimizer_arrays(inner, model.weights)


def make_named_model(seed=0):
    """A functional model of two named inputs with a dict of outputs."""
    layers = tf.keras.layers
    user = tf.keras.Input((2,), dtype="int64", name="user")
    price = tf.keras.Input((1,), name="price")
    embedded = layers.Flatten()(layers.Embedding(300, 4)(user))
    joined = layers.Concatenate()([embedded, price])
    hidden = layers.Dropout(0.5, seed=3)(layers.Dense(5, activation="relu")(joined))
    outputs = {"click/rate": layers.Dense(1)(hidden), "score": layers.Dense(2)(hidden)}
    model = tf.keras.Model({"user": user, "price": price}, outputs)
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    return model


def make_list_model():
    """Inputs by their names, strings that are looked up."""
    layers = tf.keras.layers
    word = tf.keras.Input((1,), dtype="string", name="word")
    number = tf.keras.Input((1,), name="number-1")
    ids = layers.StringLookup(vocabulary=["a", "b", "c"])(word)
    embedded = layers.Flatten()(layers.Embedding(4, 3)(ids))
    outputs = layers.Dense(1, name="out")(layers.Concatenate()([embedded, number]))
    return tf.keras.Model([word, number], outputs)


class Subclassed(tf.keras.Model):
    """Called with a dict; its types are known once it was (on tf_keras)."""

    def __init__(self):
        super().__init__()
        self.table = tf.keras.layers.Embedding(300, 4)
        self.tower = tf.keras.layers.Dense(1)

    def call(self, inputs):
        embedded = self.table(inputs["ids"])
        return self.tower(tf.reduce_mean(embedded, axis=1) * inputs["weight"])


SUBCLASSED_INPUTS = {
    "ids": tf.TensorSpec((None, 3), tf.int64),
    "weight": tf.TensorSpec((None, 1), tf.float32),
}


def random_inputs(rng, size=7) -> dict:
    """Arrays for the signatures of all models here, by name."""
    return {
        "user": rng.integers(0, 300, (size, 2)),
        "price": rng.normal(size=(size, 1)).astype(np.float32),
        "word": rng.choice(["a", "c", "zebra"], (size, 1)),
        "number_1": rng.normal(size=(size, 1)).astype(np.float32),
        "ids": rng.integers(0, 300, (size, 3)),
        "weight": rng.normal(size=(size, 1)).astype(np.float32),
    }
