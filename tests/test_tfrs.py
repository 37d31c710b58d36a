"""TensorFlow Recommenders with BasisAdam: ranking, retrieval, and two ranks."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor, is_compressed, make_optimizer, to_numpy
from horovod_helpers import launch_fixture

if active_flavor() != "tf_keras":
    pytest.skip("TensorFlow Recommenders needs tf_keras", allow_module_level=True)
if importlib.util.find_spec("tensorflow_recommenders") is None:
    pytest.skip("tensorflow_recommenders is not installed", allow_module_level=True)

import tfrs_models

checks = launch_fixture("recommenders", ranks=2)


def train(model, data, epochs=8, **arguments):
    """Losses of the epochs, with tables at 10:1."""
    model.compile(
        make_optimizer(learning_rate=0.02, min_rows=50, compression_ratio=10.0),
        **arguments,
    )
    batches = data.shuffle(2000, seed=1).batch(100)
    return model.fit(batches, epochs=epochs, verbose=0).history["loss"]


def assert_tables_are_sparse_and_compressed(model, batch):
    tables = [v for v in model.trainable_variables if "embeddings" in v.name]
    assert len(tables) == 2
    with tf.GradientTape() as tape:
        loss = model.compute_loss(batch, training=True)
    for table, gradient in zip(tables, tape.gradient(loss, tables), strict=True):
        assert isinstance(gradient, tf.IndexedSlices)
        assert is_compressed(model.optimizer, table)
        state = model.optimizer.table_state(table)
        rows, dim = table.shape
        assert state["second_moment"].shape == (-(-rows // 10), dim)
        assert np.count_nonzero(state["row_energy"]) > rows // 2


def test_ranking_with_cross_layer():
    """The rating is a product of the two rows: the cross layer learns it."""
    model = tfrs_models.Ranker()
    data = tfrs_models.ratings(seed=0)
    losses = train(model, data)
    assert losses[-1] < 0.2 * losses[0]
    assert_tables_are_sparse_and_compressed(model, next(iter(data.batch(50))))
    kernels = [v for v in model.trainable_variables if "cross" in v.name]
    assert kernels and not any(is_compressed(model.optimizer, v) for v in kernels)


def test_retrieval_with_factorized_top_k():
    """Users like items of their own kind, a tenth of all."""
    model = tfrs_models.Retriever()
    data = tfrs_models.likes(seed=0)

    def top_ten():
        result = model.evaluate(data.batch(500), return_dict=True, verbose=0)
        return result["factorized_top_k/top_10_categorical_accuracy"]

    model.compile()
    before = top_ten()
    losses = train(model, data)
    assert losses[-1] < 0.8 * losses[0]
    assert before < 0.2 and top_ten() > 0.9
    assert_tables_are_sparse_and_compressed(model, next(iter(data.batch(50))))


def test_two_ranks_stay_equal_to_the_bit(checks):
    """Both tasks at once, on other data on each rank."""
    first, second = checks["ranking_and_retrieval"]
    assert first["data"] != second["data"]
    assert first["weights"] == second["weights"]
    assert first["state"] == second["state"]
    assert first["compressed"] == second["compressed"] == 2
    for result in (first, second):
        assert result["losses"][-1] < 0.6 * result["losses"][0]


def test_a_frozen_tower_stays():
    model = tfrs_models.Retriever()
    model.item_tower.trainable = False
    before = to_numpy(model.item_tower.weights[0])
    train(model, tfrs_models.likes(seed=0).take(100), epochs=1)
    np.testing.assert_array_equal(before, to_numpy(model.item_tower.weights[0]))
