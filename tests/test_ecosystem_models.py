"""BasisAdam in models: frozen, shared and reused tables, callbacks, compiled steps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    batches_of,
    is_compressed,
    keras_of,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
    to_numpy,
)

ROWS, DIM = 300, 4
keras = keras_of(active_flavor())


def two_inputs(kind, optimizer, run_eagerly=False, jit_compile=False):
    """A regression on two ids: one table twice, or for both as one input, or two."""
    first = keras.Input((1,), dtype="int32")
    second = keras.Input((1,), dtype="int32")

    def table(name):
        return keras.layers.Embedding(ROWS, DIM, name=name)

    if kind == "twice":
        shared = table("users")
        rows = [shared(first), shared(second)]
    elif kind == "once":
        rows = [table("users")(keras.layers.Concatenate()([first, second]))]
    else:
        rows = [table("users")(first), table("items")(second)]
    rows = [keras.layers.Flatten()(r) for r in rows]
    rows = keras.layers.Concatenate()(rows) if len(rows) > 1 else rows[0]
    outputs = keras.layers.Dense(1, name="out")(rows)
    model = keras.Model([first, second], outputs)
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile(optimizer, "mse", run_eagerly=run_eagerly, jit_compile=jit_compile)
    return model


def pairs(count=64):
    rng = np.random.default_rng(1)
    x = [rng.integers(0, 40, (count, 1)).astype(np.int32) for _ in range(2)]
    return x, (x[0] - x[1]).astype(np.float32) / 40


def basis(**kwargs):
    arguments = {"tables": "embeddings", "num_buckets": 20, "learning_rate": 0.05}
    return make_optimizer(**{**arguments, **kwargs})


def fit(model, epochs=2, **kwargs):
    x, y = pairs()
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(x, y, epochs=epochs, **options).history


def table_of(model, name):
    (table,) = [
        v for v in model.weights if f"{name}/embeddings" in getattr(v, "path", v.name)
    ]
    return table


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"clipnorm": 0.1}]
)
def test_a_table_used_twice(backend, options):
    """Its two gradients arrive as one, as if the ids had come in one batch."""
    twice = two_inputs("twice", basis(**options))
    once = two_inputs("once", basis(**options))
    fit(twice), fit(once)
    for a, b in zip(twice.weights, once.weights, strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-5, atol=1e-6)
    state = twice.optimizer.table_state(table_of(twice, "users"))
    x, _ = pairs()
    assert set(np.flatnonzero(state["row_energy"])) == set(np.concatenate(x).ravel())


def test_several_tables_keep_their_states_apart(backend):
    model = two_inputs("two", basis())
    losses = fit(model, epochs=6)["loss"]
    assert losses[-1] < losses[0]
    for x, name in zip(pairs()[0], ("users", "items"), strict=True):
        state = model.optimizer.table_state(table_of(model, name))
        assert set(np.flatnonzero(state["row_energy"])) == set(x.ravel())


def test_a_frozen_table_has_no_state_and_stays(backend):
    model = two_inputs("two", "sgd")
    model.get_layer("items").trainable = False
    model.compile(basis(), "mse")
    before = {n: to_numpy(table_of(model, n)) for n in ("users", "items")}
    fit(model)
    assert is_compressed(model.optimizer, table_of(model, "users"))
    assert not is_compressed(model.optimizer, table_of(model, "items"))
    np.testing.assert_array_equal(before["items"], to_numpy(table_of(model, "items")))
    assert np.any(before["users"] != to_numpy(table_of(model, "users")))
    with pytest.raises(ValueError, match="trainable"):
        basis(tables=[table_of(model, "items")]).build(model.trainable_variables)


def test_a_table_that_is_frozen_later_keeps_its_state(backend):
    model = two_inputs("two", basis())
    fit(model)
    items = table_of(model, "items")
    before = {**model.optimizer.table_state(items), "theta": to_numpy(items)}
    optimizer = model.optimizer
    model.get_layer("items").trainable = False
    model.compile(optimizer, "mse")
    fit(model)
    after = {**optimizer.table_state(items), "theta": to_numpy(items)}
    assert_same_bits(before, after)


@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.1},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"use_ema": True}, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:use_ema leaves compressed tables out")
def test_eager_graph_and_xla_agree(options):
    models = [
        two_inputs("two", basis(**options), **how)
        for how in ({}, {"run_eagerly": True}, {"jit_compile": True})
    ]
    for model in models:
        fit(model)
        for a, b in zip(model.weights, models[0].weights, strict=True):
            np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-4, atol=1e-5)


def test_accumulation_under_jit_compile_is_a_clear_error():
    model = two_inputs("two", basis(gradient_accumulation_steps=2), jit_compile=True)
    with pytest.raises(ValueError, match="gradient_accumulation_steps") as error:
        fit(model)
    assert "jit_compile" in str(error.value)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_reduce_lr_on_plateau(backend, accumulate):
    """A model that cannot get better loses its rate, by the factor asked for."""
    model = two_inputs("two", basis(gradient_accumulation_steps=accumulate))
    callback = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=1e9, verbose=0
    )
    fit(model, epochs=4, callbacks=[callback])
    rate = float(to_numpy(tf.convert_to_tensor(model.optimizer.learning_rate)))
    assert rate == pytest.approx(0.05 * 0.5**3)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_a_rate_of_zero_by_the_scheduler_changes_nothing(backend, accumulate):
    model = two_inputs("two", basis(gradient_accumulation_steps=accumulate))
    callback = keras.callbacks.LearningRateScheduler([0.0, 0.1].__getitem__)
    before = model.get_weights()
    fit(model, epochs=1, callbacks=[callback])
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    fit(model, epochs=2, initial_epoch=1, callbacks=[callback])
    assert any(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize("accumulate", [None, 2])
def test_custom_loop_does_what_fit_does(backend, accumulate):
    fitted = make_click_model(make_optimizer(gradient_accumulation_steps=accumulate))
    looped = make_click_model(make_optimizer(gradient_accumulation_steps=accumulate))
    loss_of = keras.losses.BinaryCrossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, looped(x, training=True))
        variables = looped.trainable_variables
        gradients = tape.gradient(loss, variables)
        looped.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for x, y in batches_of(0, 5):
        fitted.train_on_batch(x, y)
        step(tf.constant(x), tf.constant(y))
    left = optimizer_arrays(fitted.optimizer, fitted.weights)
    right = optimizer_arrays(looped.optimizer, looped.weights)
    assert left.keys() == right.keys()
    for key, value in left.items():
        np.testing.assert_allclose(value, right[key], rtol=1e-4, atol=1e-6)
