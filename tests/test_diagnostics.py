"""CollisionReport in `fit`, and reports of optimizers that contain others."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor

import tf_basis
from tf_basis import diagnostics, distributed

keras = tf.keras
ROWS = 300
rng = np.random.default_rng(0)
X = (rng.zipf(1.3, (128, 2)) % ROWS).astype(np.int32)
Y = rng.normal(size=(128, 1)).astype(np.float32)
SHARED = {"momentum": "shared", "num_buckets": 2}


def model_of(optimizer, **more):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(ROWS, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", **more)
    return model


def adam(**settings):
    return tf_basis.BasisAdam(1e-2, min_rows=10, **{"num_buckets": 30, **settings})


def fit(model, *callbacks, epochs=1, **more):
    model.fit(
        X, Y, 32, epochs, verbose=0, shuffle=False, callbacks=list(callbacks), **more
    )


def test_reports_come_in_their_time_and_training_is_the_same(tmp_path):
    plain, watched = model_of(adam(**SHARED)), model_of(adam(**SHARED))
    page = tmp_path / "page.html"
    watch = tf_basis.CollisionReport(
        shadow_rows=8, log_dir=tmp_path / "logs", html=page
    )
    fit(plain, epochs=2)
    with pytest.warns(UserWarning, match="few_buckets: '.*embeddings': 150 rows") as w:
        fit(watched, watch, epochs=2)
    assert sum("few_buckets" in str(each.message) for each in w) == 1
    assert [record["epoch"] for record in watch.history] == [1, 2]
    assert [record["step"] for record in watch.history] == [4, 8]
    for a, b in zip(plain.get_weights(), watched.get_weights()):
        np.testing.assert_array_equal(a, b)
    (first,), (last,) = (record["tables"] for record in watch.history)
    assert first["shadows"]["rows"] == 8 == last["shadows"]["rows"]
    assert max(first["shadows"]["by_row"]["steps"]) <= 4
    assert last["shadows"]["update_error"]["median"] > 0.2
    assert "few_buckets" in page.read_text(encoding="utf-8")
    (file,) = (tmp_path / "logs" / "rank_0").glob("*")
    events = tf.compat.v1.train.summary_iterator(str(file))
    tags = {(v.tag, e.step) for e in events for v in e.summary.value}
    prefix = f"tables/{last['path']}"
    assert {(f"{prefix}/second_moment", s) for s in (4, 8)} <= tags
    # It leaves nothing behind.
    assert watched.optimizer._basis.watchers == [] and watch.last.step == 8


def test_rows_go_on_in_the_next_fit_or_start_again():
    model = model_of(adam(**SHARED), run_eagerly=True)
    watch = tf_basis.CollisionReport(shadow_rows=8)
    with pytest.warns(UserWarning, match="few_buckets"):
        fit(model, watch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has warned
        fit(model, watch)
    counts = [
        max(record["tables"][0]["shadows"]["by_row"]["steps"])
        for record in watch.history
    ]
    assert counts[1] == 2 * counts[0] > 4  # of the same batches
    # Where steps were missed they start from what they see: 12 steps of a bucket.
    fit(model)
    fit(model, watch)
    (table,) = watch.history[-1]["tables"]
    assert max(table["shadows"]["by_row"]["steps"]) in (14, 15, 16)
    assert table["shadows"]["second_moment_error"]["median"] < 0.1


def test_steps_of_a_fit_that_failed_and_ranks():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = model_of(adam(), run_eagerly=True)
    watch = tf_basis.CollisionReport(3, "step", verbose=1, shadow_rows=4)
    with pytest.raises(KeyboardInterrupt):
        fit(model, watch, Stop())
    fit(model, watch)
    assert [record["batch"] for record in watch.history] == [3]
    assert len(model.optimizer._basis.watchers) == 0
    silent = tf_basis.CollisionReport(ranks=[1])
    fit(model, silent)
    assert silent.history == [] and silent.shadows is None


def loss_scaled(inner):
    keras3 = active_flavor() == "keras3"
    scaling = keras.optimizers if keras3 else keras.mixed_precision
    return scaling.LossScaleOptimizer(inner, initial_scale=1024.0)


def several(inner):
    if active_flavor() == "tf_keras":
        pytest.skip("tf_keras has no MultiOptimizer")
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    optimizers = keras.optimizers
    choice = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*embeddings": inner})
    return optimizers.MultiOptimizer(choice)


WRAPPERS = {
    "loss_scale": loss_scaled,
    "distributed": distributed.DistributedOptimizer,
    "several": several,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_optimizers_inside_others_have_exact_rows(wrapper):
    inner = adam(num_buckets=ROWS, gradient_accumulation_steps=2)
    model = model_of(WRAPPERS[wrapper](inner), run_eagerly=True)
    watch = tf_basis.CollisionReport()
    fit(model, watch, epochs=3)
    (table,) = watch.last.tables
    # The gradients are those that the table is given: scaled back, accumulated.
    assert table["shadows"]["update_error"]["max"] < 1e-4
    assert table["optimizer"] == "BasisAdam" and table["touched"]["steps_max"] == 6
    assert max(table["shadows"]["by_row"]["steps"]) == 6


@pytest.mark.long
def test_compiled_steps_and_growing_tables():
    model = model_of(adam(), jit_compile=True)
    watch = tf_basis.CollisionReport()
    grow = tf_basis.GrowBuckets({1: 2})
    fit(model, grow, watch, epochs=2)
    first, last = (record["tables"][0] for record in watch.history)
    assert (first["buckets"], last["buckets"]) == (30, 60)
    assert max(last["shadows"]["by_row"]["steps"]) == 8


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"every": 0}, "every .* at least 1, received 0"),
        ({"unit": "hour"}, "unit must be one of 'epoch', 'step'"),
        ({"shadow_rows": 0}, "shadow_rows .* received 0"),
        ({"seed": 1.5}, "seed must be"),
        ({"html": ""}, "html must be None or the path of a file"),
        ({"log_dir": 3}, "log_dir must be None or the path"),
        ({"ranks": 1}, "ranks must be None or a list"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        tf_basis.CollisionReport(**arguments)


@pytest.mark.parametrize("argument", ["html", "log_dir"])
def test_where_nothing_can_be_written_is_said_before_the_first_batch(
    argument, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("no folder")
    model = model_of(adam(), run_eagerly=True)

    def refused(place):
        watch = tf_basis.CollisionReport(**{argument: place})
        with pytest.raises(OSError, match=f"^{argument} .*received '{tmp_path}"):
            fit(model, watch)

    refused(tmp_path / "file" / "in" / "it")
    refused(tmp_path / "file" / "it")
    if argument == "html":
        refused(tmp_path)
    # What permissions say, which do not bind a superuser.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(tmp_path / "locked" / "it")
    other_rank = tf_basis.CollisionReport(**{argument: tmp_path / "file" / "x"})
    other_rank.ranks = [1]
    assert int(tf.convert_to_tensor(model.optimizer.iterations)) == 0
    fit(model, other_rank)


def test_a_model_that_fit_builds_is_looked_at_too():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(ROWS, 4)

        def call(self, ids):
            return tf.reduce_sum(self.table(ids), axis=[1, 2])

    model = Model()
    model.compile(adam(), "mse", run_eagerly=True)
    watch = tf_basis.CollisionReport(shadow_rows=8)
    fit(model, watch)
    assert watch.history[0]["tables"][0]["shadows"]["rows"] == 8


def test_other_optimizers_are_refused():
    model = model_of(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"with an optimizer of tf_basis, received"):
        fit(model, diagnostics.CollisionReport())
