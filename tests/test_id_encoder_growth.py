"""Vocabularies and tables that grow."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_same_bits,
    make_optimizer,
    optimizer_arrays,
    state_of,
    to_numpy,
)

import tf_basis
from tf_basis import layers
from tf_basis.layers import EmbeddingCollection, FeatureConfig, IdEncoder, TableConfig


def test_a_table_grows_with_its_vocabulary(tmp_path, rng):
    """In the middle of a training: old rows to the bit, and training goes on."""
    keras = tf.keras
    vocabulary = [f"w{i}" for i in range(40)]
    encoder = IdEncoder(name="words")
    encoder.adapt(vocabulary[:30] + vocabulary[:12])
    assert encoder.num_rows == 31
    table = TableConfig(
        "w",
        encoder.num_rows,
        4,
        num_buckets=9,
        exclusive_rows=3,
        row_frequencies=encoder.row_frequencies(),
    )
    embed = EmbeddingCollection(
        [FeatureConfig("word", table), FeatureConfig("other", TableConfig("o", 5, 2))],
        concatenate=True,
        name="embed",
    )
    word = keras.Input((), dtype="string", name="word")
    other = keras.Input((), dtype="int64", name="other")
    outputs = embed({"word": encoder(word), "other": other})
    model = keras.Model({"word": word, "other": other}, keras.layers.Dense(1)(outputs))
    model.compile(make_optimizer(learning_rate=0.05), "mse")

    def fit(which, some, n=96, seed=0, model=model):
        rng = np.random.default_rng(seed)
        i = rng.integers(0, some, n)
        x = {
            "word": tf.constant([vocabulary[j] for j in i]),
            "other": tf.constant(i % 5),
        }
        y = np.sin(i)[:, None].astype(np.float32)
        call = which.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=5)
        return call.history["loss"], x

    _, x = fit(model, 30)
    old = embed.table("w")
    before = state_of(model.optimizer, old)
    buckets = model.optimizer.buckets(old)
    predicted = model.predict(x, verbose=0)
    order = [v.shape for v in model.trainable_variables]
    function = tf.function(lambda rows: embed({"word": rows, "other": rows * 0}))
    function(tf.constant([7]))

    encoder.adapt(vocabulary)
    assert encoder.num_rows == 41
    with pytest.raises(Exception, match=r"must be in \[0, 31\)"):
        embed({"word": encoder(vocabulary), "other": np.zeros(40, int)})
    embed.grow("w", encoder.num_rows, model.optimizer)
    tf_basis.retrace(model)

    new = embed.table("w")
    after = state_of(model.optimizer, new)
    assert after["theta"].shape == (41, 4) and after["row_energy"].shape == (41,)
    assert_same_bits({k: after[k][: len(v)] for k, v in before.items()}, before)
    np.testing.assert_array_equal(model.optimizer.buckets(new)[:31], buckets)
    assert after["theta"][31:].std(axis=1).all() and not after["row_energy"][31:].any()
    assert [tuple(v.shape) for v in model.trainable_variables] == [
        (41, 4) if tuple(s) == (31, 4) else tuple(s) for s in order
    ]
    assert getattr(new, "path", new.name) == getattr(old, "path", old.name)
    np.testing.assert_array_equal(model.predict(x, verbose=0), predicted)
    with pytest.raises(Exception, match=r"\[0, 0\)"):
        function(tf.constant([7]))  # as it was traced

    path = str(tmp_path / "model.keras")
    model.save(path)
    again = keras.models.load_model(path)
    losses, _ = fit(model, 40, seed=1)
    assert losses[-1] < 0.8 * losses[0]
    assert (to_numpy(new)[31:] != after["theta"][31:]).any(axis=1).sum() > 5
    fit(again, 40, seed=1)
    assert_same_bits(
        optimizer_arrays(again.optimizer, again.weights),
        optimizer_arrays(model.optimizer, model.weights),
    )
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    written = checkpoint.write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(
        written
    ).assert_existing_objects_matched()


def test_a_table_grows_alone(flavor):
    """Before it is built, and without an optimizer; the config knows."""
    table = TableConfig("t", 5, 2, initializer="ones")
    features = [FeatureConfig("a", table), FeatureConfig("b", table, (None, 3))]
    made = layers.for_flavor(flavor).EmbeddingCollection
    layer = made(features)
    layer.grow("t", 6)
    layer.build(None)
    layer.grow("t", 8)
    assert to_numpy(layer.table("t")).tolist() == [[1, 1]] * 8
    assert [f.table.vocabulary_size for f in layer.features] == [8, 8]
    again = made.from_config(layer.get_config())
    assert [f.table.vocabulary_size for f in again.features] == [8, 8]
    assert len(layer.trainable_weights) == 1
    assert layer({"a": np.array([7]), "b": np.array([[5, 6, 7]])})["b"].shape == (1, 2)


def test_bad_growth():
    layer = EmbeddingCollection([FeatureConfig("f", TableConfig("t", 5, 2))])
    layer.build(None)
    keras = tf.keras
    for arguments, words in [
        (("u", 9), "table must be one of 't', received 'u'"),
        (("t", 4), "vocabulary_size must be .* at least 5, the rows of 't', rec.* 4"),
        (("t", 9, keras.optimizers.SGD()), "optimizer must be one of tf_basis"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer.grow(*arguments)
    optimizer = make_optimizer()
    optimizer.build([tf.Variable(tf.zeros([3, 2]))])
    with pytest.raises(ValueError, match="old_variable must be a variable that"):
        layer.grow("t", 9, optimizer)
    assert tuple(layer.table("t").shape) == (5, 2)
    assert layer({"f": np.array([4])})["f"].shape == (1, 2)
