"""IdEncoder in the files of its model: vocabularies, counts and exports."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor, make_optimizer

import tf_basis
from tf_basis.layers import EmbeddingCollection, FeatureConfig, IdEncoder, TableConfig

SPECS = {
    "word": tf.TensorSpec([None], tf.string, "word"),
    "number": tf.TensorSpec([None, 2], tf.int64, "number"),
}


def make_model(seed=0):
    """Strings and ragged integers, encoded and embedded; the encoders know nothing."""
    keras = tf.keras
    words = keras.Input((), dtype="string", name="word")
    numbers = keras.Input((None,), dtype="int64", name="number", ragged=True)
    rows = {
        "word": IdEncoder(num_oov=2, name="words")(words),
        "number": IdEncoder("int64", min_count=2, name="numbers")(numbers),
    }
    embed = EmbeddingCollection(
        [
            FeatureConfig("word", TableConfig("w", 60, 4, num_buckets=12)),
            FeatureConfig("number", TableConfig("n", 60, 4), (None, None)),
        ],
        concatenate=True,
        name="embed",
    )
    outputs = keras.layers.Dense(1, name="top")(embed(rows))
    model = keras.Model({"word": words, "number": numbers}, outputs)
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile(make_optimizer(learning_rate=0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def inputs_of(rng, n=32):
    """Words and numbers, and what both together decide."""
    words = rng.integers(0, 40, n)
    numbers = tf.RaggedTensor.from_row_lengths(
        tf.constant(rng.integers(0, 30, 3 * n)), rng.permutation([2, 4] * (n // 2))
    )
    y = (words % 2)[:, None].astype(np.float32)
    return {"word": tf.constant([f"w{i}" for i in words]), "number": numbers}, y


def encoders_of(model):
    return [model.get_layer(name) for name in ("words", "numbers")]


def adapted_model():
    model, (x, _) = make_model(), inputs_of(np.random.default_rng(1))
    for encoder, name in zip(encoders_of(model), ("word", "number")):
        encoder.adapt(x[name])
    return model


def dense(x):
    return {"word": x["word"], "number": x["number"].to_tensor()[:, :2]}


def save_and_load(model, how: str, path):
    keras = tf.keras
    if how == "checkpoint":
        other = make_model(seed=5)
        tf.train.Checkpoint(model=model).write(str(path / "ckpt"))
        tf.train.Checkpoint(model=other).read(str(path / "ckpt")).assert_consumed()
        return other
    if how == "weights":
        other = make_model(seed=5)
        model.save_weights(str(path / "m.weights.h5"))
        other.load_weights(str(path / "m.weights.h5"))
        return other
    model.save(str(path / "m.keras"))
    return keras.models.load_model(str(path / "m.keras"))


@pytest.mark.parametrize("how", ["keras", "weights", "checkpoint"])
def test_files_keep_rows_and_counts(how, tmp_path, rng):
    model, (x, _) = adapted_model(), inputs_of(rng)
    again = save_and_load(model, how, tmp_path)
    np.testing.assert_array_equal(again(x), model(x))
    for encoder, other in zip(encoders_of(model), encoders_of(again)):
        assert_alike(encoder, other, x["word" if encoder.name == "words" else "number"])


def assert_alike(encoder, other, data):
    """As they are, and adapted further."""
    for _ in range(2):
        np.testing.assert_array_equal(encoder.vocabulary(), other.vocabulary())
        counts = other.row_frequencies()
        np.testing.assert_array_equal(encoder.row_frequencies(), counts)
        encoder.adapt(data)
        other.adapt(data)


@pytest.mark.skipif(active_flavor() == "keras3", reason="formats of tf_keras")
def test_files_of_tf_keras(tmp_path):
    """Of the older ones, h5 has no place for a vocabulary: that is an error later."""
    keras = tf.keras
    encoder, word = IdEncoder(name="words"), keras.Input((), dtype="string")
    encoder.adapt(["a", "b", "b"])
    model = keras.Model(word, encoder(word))
    model.save(str(tmp_path / "m"), save_format="tf")
    model.save(str(tmp_path / "m.h5"))
    again = keras.models.load_model(str(tmp_path / "m"))
    assert_alike(encoder, again.get_layer("words"), ["c", "a"])
    assert again(tf.constant(["c", "b", "d"])).numpy().tolist() == [3, 1, 0]
    again = keras.models.load_model(str(tmp_path / "m.h5"))
    with pytest.raises(ValueError, match="s' has no vocabulary: call its adapt first"):
        again(tf.constant(["a"]))


def test_an_export_serves_with_stock_ops(tmp_path, rng):
    model, (x, _) = adapted_model(), inputs_of(rng)
    tf_basis.export_saved_model(model, str(tmp_path / "m"), inputs=SPECS)
    served = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    wanted = np.asarray(model(dense(x)))
    (found,) = served(**dense(x)).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    graph = served.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    assert not [n.op for n in nodes if "Basis" in n.op or n.op == "PyFunc"]


def test_restoring_needs_the_vocabulary_of_the_export(tmp_path):
    model = adapted_model()
    tf_basis.export_saved_model(model, tmp_path / "export", inputs=SPECS)
    same = adapted_model()
    tf_basis.restore_optimizer(same, tmp_path / "export")
    words = encoders_of(model)[0].vocabulary()
    for other in (words[::-1], words[1:], [*words[1:], b"w99"]):
        model = make_model()
        encoder, numbers = encoders_of(model)
        for word in other:
            encoder.adapt([word])
        numbers.adapt(inputs_of(np.random.default_rng(1))[0]["number"])
        before = model.get_weights()
        with pytest.raises(ValueError, match=f"'words', {len(words)} ids .* received"):
            tf_basis.restore_optimizer(model, tmp_path / "export")
        assert all(map(np.array_equal, before, model.get_weights()))


def test_vocabularies_of_keras_count_too(tmp_path):
    def model_of(words):
        word = tf.keras.Input((), dtype="string", name="word")
        lookup = tf.keras.layers.StringLookup(vocabulary=words, name="lookup")
        vectors = tf.keras.layers.Embedding(4, 2)(lookup(word))
        model = tf.keras.Model(word, tf.keras.layers.Dense(1)(vectors))
        model.compile(make_optimizer(), "mse")
        return model

    tf_basis.export_saved_model(model_of(["a", "b"]), tmp_path / "export")
    tf_basis.restore_optimizer(model_of(["a", "b"]), tmp_path / "export")
    with pytest.raises(ValueError, match="vocabulary of the export in 'lookup'"):
        tf_basis.restore_optimizer(model_of(["b", "a"]), tmp_path / "export")
