"""BasisAdam in compile and fit, on the Keras that `tf.keras` is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    batches_of,
    is_compressed,
    make_click_model,
    make_optimizer,
    to_numpy,
)


def table_of(model, rows: int):
    (table,) = [v for v in model.trainable_variables if v.shape[0] == rows]
    return table


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_fit_with_default_arguments(backend, run_eagerly):
    """Only the embedding of at least 10,000 rows is compressed; the loss falls."""
    model = make_click_model(make_optimizer(learning_rate=0.02), run_eagerly)
    x, y = batches_of(0, 1, size=1000)[0]
    history = model.fit(x, y, batch_size=250, epochs=4, shuffle=False, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    compressed = {
        tuple(v.shape): is_compressed(model.optimizer, v)
        for v in model.trainable_variables
    }
    assert [s for s, flag in compressed.items() if flag] == [(12_000, 8)]
    state = model.optimizer.table_state(table_of(model, 12_000))
    assert state["second_moment"].shape == (120, 8)
    assert state["bucket_steps"].max() == 16


def test_eager_and_graph_fit_give_the_same_tables(backend):
    models = []
    for run_eagerly in (False, True):
        model = make_click_model(make_optimizer(learning_rate=0.02), run_eagerly)
        for x, y in batches_of(0, 3):
            model.train_on_batch(x, y)
        models.append(to_numpy(table_of(model, 12_000)))
    np.testing.assert_allclose(models[0], models[1], rtol=1e-5, atol=1e-6)


def test_fit_with_jit_compile():
    """Under XLA the twin runs, and learns what the op learns."""
    losses = []
    for jit_compile in (True, False):
        model = make_click_model(
            make_optimizer(learning_rate=0.02), jit_compile=jit_compile
        )
        x, y = batches_of(0, 1, size=500)[0]
        history = model.fit(x, y, batch_size=250, epochs=3, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_learning_rate_scheduler_callback(backend):
    """An epoch at rate 0 changes no weight; the others do."""
    rates = [0.05, 0.0, 0.02]
    model = make_click_model(make_optimizer(learning_rate=0.02))
    seen, weights = [], []

    class Record(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(float(to_numpy(self.model.optimizer.learning_rate)))
            weights.append([to_numpy(v) for v in self.model.trainable_variables])

    callbacks = [tf.keras.callbacks.LearningRateScheduler(rates.__getitem__), Record()]
    x, y = batches_of(0, 1)[0]
    model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(seen, rates)
    for first, second, third in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)
        assert np.any(second != third)


def test_fit_with_schedule_and_dense_optimizer(backend):
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.9)
    optimizer = make_optimizer(
        learning_rate=schedule,
        exclusive_rows=50,
        dense_optimizer=tf.keras.optimizers.AdamW(schedule, weight_decay=0.01),
    )
    model = make_click_model(optimizer)
    x, y = batches_of(0, 1, size=600)[0]
    history = model.fit(x, y, batch_size=100, epochs=4, shuffle=False, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert int(to_numpy(model.optimizer.iterations)) == 24


def test_partial_last_batch(backend):
    model = make_click_model(make_optimizer(learning_rate=0.02))
    x, y = batches_of(0, 1, size=97)[0]
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    assert all(np.all(np.isfinite(to_numpy(v))) for v in model.trainable_variables)


def test_custom_loop_with_gradient_tape(backend):
    model = make_click_model(make_optimizer(learning_rate=0.02))
    optimizer = model.optimizer
    loss_of = tf.keras.losses.BinaryCrossentropy()
    x, y = batches_of(0, 1)[0]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(tf.constant(y), model(tf.constant(x), training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    losses = [float(step()) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    assert is_compressed(optimizer, table_of(model, 12_000))
