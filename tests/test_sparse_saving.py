"""Accumulated gradients and averages in fit, and in files written between updates."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    batches_of,
    keras_of,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
    to_numpy,
    variables_of,
)

STEPS = 3
KINDS = {
    "plain": {},
    "schedule": {},
    "dense_optimizer": {"exclusive_rows": 40},
    "averages": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
}
# The files of Keras have all kinds in the quick run, checkpoints these.
FEW = [pytest.param(k, marks=[] if k == "plain" else pytest.mark.long) for k in KINDS]
pytestmark = pytest.mark.filterwarnings("ignore:use_ema leaves compressed tables out")


def make_model(kind="plain", steps=STEPS, **kwargs):
    optimizers = keras_of(active_flavor()).optimizers
    arguments = {"learning_rate": 0.02, **KINDS[kind]}
    if kind == "schedule":
        decay = optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
        arguments["learning_rate"] = decay
    if kind == "dense_optimizer":
        arguments["dense_optimizer"] = optimizers.SGD(0.05, momentum=0.9)
    optimizer = make_optimizer(gradient_accumulation_steps=steps, **arguments)
    return make_click_model(optimizer, **kwargs)


def train(model, start, stop):
    for x, y in batches_of(start, stop):
        model.train_on_batch(x, y)
    return model


def arrays_of(model):
    return optimizer_arrays(model.optimizer, model.weights)


def rows_accumulated(optimizer) -> int:
    """How many rows of the compressed table wait for the next update."""
    (rows,) = [v for v in variables_of(optimizer) if "accumulator_rows" in v.name]
    return to_numpy(rows).size


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_fit_updates_every_third_batch(backend, run_eagerly):
    """With the learning rate of the update, as for one batch three times as large."""
    model = make_model(run_eagerly=run_eagerly)
    large = make_model(steps=None, run_eagerly=run_eagerly)
    x, y = batches_of(0, 1, size=96 * 2)[0]
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    large.fit(x, y, batch_size=96, epochs=2, shuffle=False, verbose=0)
    assert int(to_numpy(tf.convert_to_tensor(model.optimizer.iterations))) == 4
    for ours, theirs in zip(model.weights, large.weights, strict=True):
        np.testing.assert_allclose(
            to_numpy(ours), to_numpy(theirs), rtol=2e-4, atol=2e-5
        )
    model.summary(print_fn=lambda *args, **kwargs: None)


@pytest.mark.parametrize("kind", KINDS)
def test_keras_file_resumes_between_updates(kind, tmp_path):
    model = train(make_model(kind), 0, STEPS + 2)
    assert rows_accumulated(model.optimizer) > 0
    path = str(tmp_path / "model.keras")
    model.save(path)
    restored = tf.keras.models.load_model(path)
    assert restored.optimizer.gradient_accumulation_steps == STEPS
    assert_same_bits(arrays_of(model), arrays_of(restored))
    assert rows_accumulated(restored.optimizer) == rows_accumulated(model.optimizer)
    train(model, 5, 10)
    train(restored, 5, 10)
    assert_same_bits(arrays_of(model), arrays_of(restored))


@pytest.mark.parametrize("kind", FEW)
def test_checkpoint_resumes_between_updates(kind, tmp_path):
    model = train(make_model(kind), 0, STEPS + 2)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "ckpt"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [n for n in names if "accumulated_grad" in n or "moving_average" in n]
    other = train(make_model(kind), 10, 11)  # with another number of rows
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(
        path
    ).assert_existing_objects_matched()
    assert_same_bits(arrays_of(model), arrays_of(other))
    train(model, 5, 8)
    train(other, 5, 8)
    assert_same_bits(arrays_of(model), arrays_of(other))


def test_checkpoint_is_restored_into_an_optimizer_that_is_built_later(tmp_path):
    model = train(make_model(), 0, STEPS + 2)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "ckpt"))
    other = make_model()
    checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    status = checkpoint.read(path)
    other.optimizer.build(other.trainable_variables)
    status.assert_existing_objects_matched()
    assert_same_bits(arrays_of(model), arrays_of(other))


def test_own_variables_and_weights_between_updates():
    model = train(make_model(), 0, STEPS + 2)
    store = {}
    model.optimizer.save_own_variables(store)
    other = train(make_model(), 10, 11)
    other.set_weights(model.get_weights())
    other.optimizer.load_own_variables(store)
    assert_same_bits(arrays_of(model), arrays_of(other))
    third = train(make_model(), 10, 12)
    third.set_weights(model.get_weights())
    third.optimizer.set_weights([to_numpy(v) for v in variables_of(model.optimizer)])
    assert_same_bits(arrays_of(model), arrays_of(third))
    for each in (model, other, third):
        train(each, 5, 8)
        assert_same_bits(arrays_of(model), arrays_of(each))


def test_saved_model_holds_the_accumulated_rows(tmp_path):
    model = train(make_model(), 0, STEPS + 1)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    shapes = tf.train.list_variables(str(tmp_path / "saved" / "variables/variables"))
    rows = rows_accumulated(model.optimizer)
    assert [rows, 8] in [list(shape) for _, shape in shapes]
    tf.saved_model.load(str(tmp_path / "saved"))


def test_state_of_another_layout_is_still_refused():
    model = train(make_model(), 0, 1)
    weights = [to_numpy(v) for v in variables_of(model.optimizer)]
    with pytest.raises(ValueError, match="shapes"):
        model.optimizer.set_weights(weights[:-1])
    (at,) = [i for i, w in enumerate(weights) if w.shape == (120, 8)]
    weights[at] = weights[at][:-1]
    with pytest.raises(ValueError, match="shapes"):
        model.optimizer.set_weights(weights)
