"""Models whose vocabulary grows take their optimizer along."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_same_bits,
    make_optimizer,
    optimizer_arrays,
    to_numpy,
    variables_of,
)


def make_model(n_rows: int, optimizer=None, seed=0):
    keras = tf.keras
    rng = np.random.default_rng(seed)
    inputs = keras.Input((2,), dtype="int32")
    large = keras.layers.Embedding(n_rows, 4, name="large")(inputs)
    small = keras.layers.Embedding(n_rows // 10, 3, name="small")(inputs // 10)
    joined = keras.layers.Flatten()(keras.layers.Concatenate()([large, small]))
    model = keras.Model(inputs, keras.layers.Dense(1, name="top")(joined))
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def grow_model(model, n_rows: int):
    """The model with more rows, its old ones with the values that they had."""
    new = make_model(n_rows, seed=1)
    for layer, larger in zip(model.layers, new.layers, strict=True):
        weights = layer.get_weights()
        for i, value in enumerate(larger.get_weights()):
            value[: len(weights[i])] = weights[i]
            weights[i] = value
        larger.set_weights(weights)
    optimizer = model.optimizer
    variables = model.trainable_variables, new.trainable_variables
    for old_variable, variable in zip(*variables, strict=True):
        optimizer.grow_rows(old_variable, variable)
    new.compile(optimizer, "mse")
    return new


def fit(model, steps: int, seed: int, n_rows: int = 1000) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, n_rows, (steps * 16, 2)).astype(np.int32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)


@pytest.mark.parametrize("kind", ["plain", "dense_optimizer"])
def test_a_grown_model_learns_what_the_old_one_would(backend, kind, tmp_path):
    """On the old rows to the bit: the same weights, moments and counters."""
    arguments = {"learning_rate": 0.02, "min_rows": 90, "exclusive_rows": 5}

    def make():
        inner = {"dense_optimizer": tf.keras.optimizers.Adam(0.01)}
        extra = inner if kind == "dense_optimizer" else {}
        return make_model(1000, make_optimizer(**arguments, **extra))

    old, other = make(), make()
    fit(old, 6, 0)
    fit(other, 6, 0)
    grown = grow_model(other, 1300)
    fit(old, 6, 2)
    fit(grown, 6, 2)
    for before, after in zip(old.get_weights(), grown.get_weights(), strict=True):
        np.testing.assert_array_equal(after[: len(before)], before)
    pairs = zip(variables_of(old.optimizer), variables_of(grown.optimizer), strict=True)
    for before, after in pairs:
        if "table_layouts" in before.name:
            continue  # which tell the two apart
        before, after = to_numpy(before), to_numpy(after)
        kept = after[: len(before)] if before.ndim else after
        np.testing.assert_array_equal(kept, before)
    fit(grown, 3, 3, 1300)
    checkpoint = tf.train.Checkpoint(model=grown, optimizer=grown.optimizer)
    path = checkpoint.write(str(tmp_path / "ckpt"))
    expected = optimizer_arrays(grown.optimizer, grown.weights)
    fit(grown, 1, 5, 1300)
    checkpoint.read(path).assert_existing_objects_matched()
    assert_same_bits(optimizer_arrays(grown.optimizer, grown.weights), expected)
    path = str(tmp_path / "model.keras")
    grown.save(path)
    restored = tf.keras.models.load_model(path)
    fit(grown, 3, 4, 1300)
    fit(restored, 3, 4, 1300)
    assert_same_bits(
        optimizer_arrays(grown.optimizer, grown.weights),
        optimizer_arrays(restored.optimizer, restored.weights),
    )


def test_a_small_table_stays_dense_when_it_grows(tmp_path):
    """Past min_rows it would be compressed; its state says otherwise."""
    model = make_model(1000, make_optimizer(learning_rate=0.02, min_rows=120))
    fit(model, 3, 0)
    before = [to_numpy(v) for v in variables_of(model.optimizer)]
    grown = grow_model(model, 1300)
    after = [to_numpy(v) for v in variables_of(grown.optimizer)]
    moments = [
        (a, b) for a, b in zip(before, after, strict=True) if a.shape == (100, 3)
    ]
    assert len(moments) == 2
    for old, new in moments:
        assert new.shape == (130, 3) and not new[100:].any() and old.any()
        np.testing.assert_array_equal(new[:100], old)
    fit(grown, 3, 1, 1300)
    path = str(tmp_path / "model.keras")
    grown.save(path)
    restored = tf.keras.models.load_model(path)
    assert_same_bits(
        optimizer_arrays(grown.optimizer), optimizer_arrays(restored.optimizer)
    )
