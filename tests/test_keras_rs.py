"""keras-rs with BasisAdam: EmbedReduce, DistributedEmbedding, BruteForceRetrieval."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    is_compressed,
    make_optimizer,
    optimizer_arrays,
    to_numpy,
)

if active_flavor() != "keras3":
    pytest.skip("keras-rs needs Keras 3", allow_module_level=True)
if importlib.util.find_spec("keras_rs") is None:
    pytest.skip("keras_rs is not installed", allow_module_level=True)

import keras
import keras_rs

ROWS, DIM, KINDS = 200, 8, 10
layers = keras_rs.layers


def basis(**kwargs):
    return make_optimizer(learning_rate=0.02, min_rows=50, **kwargs)


def examples(count=600):
    """An item, three items of the history, and whether the item is of their kind."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, KINDS, (count, 1))
    history = rng.integers(0, ROWS // KINDS, (count, 3)) * KINDS + kind
    same = rng.integers(0, 2, count)
    item = rng.integers(0, ROWS // KINDS, count) * KINDS
    item += np.where(same, kind[:, 0], rng.integers(0, KINDS, count))
    return {"item": item, "history": history}, same.astype(np.float32)


def symbols(length=3):
    return {
        "item": keras.Input((), dtype="int64", name="item"),
        "history": keras.Input((length,), dtype="int64", name="history"),
    }


def clicks(embed, inputs):
    """A dot product of the two vectors that `embed` makes, and a bias."""
    vectors = embed(inputs)
    dot = keras.layers.Dot(1)([vectors["item"], vectors["history"]])
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(dot))


def reduced():
    """EmbedReduce: one table for the item, one for the mean of the history."""
    tables = {
        name: layers.EmbedReduce(ROWS, DIM, name=f"{name}_table")
        for name in ("item", "history")
    }
    return lambda inputs: {name: t(inputs[name]) for name, t in tables.items()}


def distributed(optimizer="adam"):
    """DistributedEmbedding: both features from one table."""
    table = layers.TableConfig("item", ROWS, DIM, optimizer=optimizer)
    return layers.DistributedEmbedding(
        {
            "item": layers.FeatureConfig("item", table, (None,), (None, DIM)),
            "history": layers.FeatureConfig("history", table, (None, 3), (None, DIM)),
        }
    )


def tables_of(model):
    return [v for v in model.trainable_variables if v.shape == (ROWS, DIM)]


def train(model, optimizer, epochs=25):
    model.compile(optimizer, "binary_crossentropy")
    x, y = examples()
    return model.fit(x, y, batch_size=100, epochs=epochs, verbose=0).history["loss"]


@pytest.mark.parametrize("make, tables", [(reduced, 2), (distributed, 1)])
def test_trains_saves_and_loads(make, tables, tmp_path):
    keras.utils.set_random_seed(1)
    model = clicks(make(), symbols())
    losses = train(model, basis(compression_ratio=10.0))
    assert losses[-1] < 0.5 * losses[0]
    found = tables_of(model)
    assert len(found) == tables
    for table in found:
        state = model.optimizer.table_state(table)
        assert state["second_moment"].shape == (ROWS // 10, DIM)
        assert np.count_nonzero(state["row_energy"]) > ROWS // 2
    path = str(tmp_path / "model.keras")
    model.save(path)
    restored = keras.models.load_model(path)
    assert_same_bits(
        optimizer_arrays(model.optimizer, model.weights),
        optimizer_arrays(restored.optimizer, restored.weights),
    )


@pytest.mark.parametrize("form", ["dense", "weighted", "ragged", "sparse"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_gradients_of_tables_are_sparse(form, dtype):
    """What the docs say of row 0 and of padding too."""
    layer = layers.EmbedReduce(ROWS, DIM, combiner="sum", dtype=dtype)
    ids = np.array([[7, 9], [9, 5]])
    weights, wanted = None, [5, 7, 9]
    if form == "weighted":
        weights = tf.constant([[1.0, 1.0], [1.0, 0.0]])
    elif form == "ragged":
        ids, wanted = tf.RaggedTensor.from_row_lengths([7, 9, 9], [2, 1]), [7, 9]
    elif form == "sparse":
        ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [7, 9, 9], [2, 2])
        wanted = [0, 7, 9]
    layer.build((2, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(layer(ids, weights), tf.float32))
    gradient = tape.gradient(loss, layer.embeddings.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(set(gradient.indices.numpy())) == wanted
    dense = tf.convert_to_tensor(gradient).numpy()[:, 0]
    five = 1.0 if form == "dense" else 0.0
    np.testing.assert_array_equal(dense[[0, 5, 7, 9]], [0.0, five, 1.0, 2.0])


def test_the_models_optimizer_trains_the_tables_of_distributed_embedding():
    """Off TPUs the optimizer of a TableConfig has no say; settings go by the path."""
    keras.utils.set_random_seed(1)
    models = [clicks(distributed(o), symbols()) for o in (basis(num_buckets=5), "sgd")]
    models[1].set_weights(models[0].get_weights())
    settings = {"distributed_embedding.*/item/": {"num_buckets": 7}}
    for model in models:
        keras.utils.set_random_seed(2)
        train(model, basis(table_settings=settings), epochs=1)
        (table,) = tables_of(model)
        assert table.path.endswith("/item/embeddings")
        assert len(model.optimizer.table_state(table)["second_moment"]) == 7
    for a, b in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


class Retriever(keras.Model):
    """Histories against the batch's items."""

    def __init__(self):
        super().__init__()
        self.embed = distributed()
        self.without_hits = layers.RemoveAccidentalHits()

    def call(self, inputs):
        vectors = self.embed(inputs)
        scores = vectors["history"] @ keras.ops.transpose(vectors["item"])
        labels = keras.ops.eye(keras.ops.shape(scores)[0])
        return self.without_hits(scores, labels, inputs["item"])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        own = keras.ops.arange(keras.ops.shape(y_pred)[0])
        loss = keras.losses.sparse_categorical_crossentropy
        return keras.ops.mean(loss(own, y_pred, from_logits=True))


def test_brute_force_retrieval_finds_the_kind():
    keras.utils.set_random_seed(1)
    model = Retriever()
    x, same = examples(2000)
    x = {name: value[same == 1] for name, value in x.items()}
    retrieval = layers.BruteForceRetrieval(k=10, return_scores=False)

    def share_of_own_kind():
        queries = model.embed(x)["history"]
        retrieval.update_candidates(model.embed.get_embedding_tables()["item"])
        found = retrieval(queries).numpy()
        return np.mean(found % KINDS == x["history"][:, :1] % KINDS)

    before = share_of_own_kind()
    model.compile(basis(compression_ratio=10.0))
    losses = model.fit(x, x["item"], batch_size=100, epochs=8, verbose=0)
    losses = losses.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert before < 0.4 and share_of_own_kind() > 0.95
    (table,) = tables_of(model)
    assert is_compressed(model.optimizer, table)
