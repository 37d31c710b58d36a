"""BasisAdam among other parts of Keras: optimizers, callbacks, layers, arguments."""

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
    make_slices,
    make_variable,
    optimizer_arrays,
    to_numpy,
)

keras3_only = pytest.mark.skipif(
    active_flavor() != "keras3", reason="tf_keras has no MultiOptimizer"
)


def table_of(model, rows=12_000):
    (table,) = [v for v in model.trainable_variables if v.shape[0] == rows]
    return table


def train(model, start=0, stop=4):
    for x, y in batches_of(start, stop):
        model.train_on_batch(x, y)
    return model


# ---- arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
    "flavor, name, hint",
    [
        ("tf_keras", "loss_scale_factor", "LossScaleOptimizer"),
        ("tf_keras", "lr", "learning_rate"),
        ("tf_keras", "no_such_argument", "clipnorm"),
        ("keras3", "jit_compile", "model.compile"),
        ("keras3", "decay", "weight_decay"),
        ("keras3", "no_such_argument", "clipnorm"),
    ],
)
def test_an_argument_that_this_keras_does_not_know(flavor, name, hint):
    with pytest.raises(TypeError, match=name) as error:
        make_optimizer(flavor, **{name: 3.5})
    for part in (hint, "3.5", "tf_keras" if flavor == "tf_keras" else "Keras 3"):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), "8"])
def test_bad_loss_scale_factor(value):
    with pytest.raises(ValueError, match="loss_scale_factor") as error:
        make_optimizer("keras3", loss_scale_factor=value)
    assert repr(value) in str(error.value)


def test_keras_checks_its_own_arguments(flavor):
    with pytest.raises(ValueError, match="ema_momentum"):
        make_optimizer(flavor, use_ema=True, ema_momentum=3.0)


def test_a_dense_optimizer_that_scales_losses_is_an_error(flavor):
    """It would divide gradients that nobody multiplied."""
    optimizers = keras_of(flavor).optimizers
    wrap = keras_of(flavor).mixed_precision.LossScaleOptimizer
    inner = [wrap(optimizers.SGD())]
    if flavor == "keras3":
        inner.append(optimizers.SGD(loss_scale_factor=8.0))
    for each in inner:
        optimizer = make_optimizer(flavor, dense_optimizer=each)
        with pytest.raises(ValueError, match="dense_optimizer must not scale losses"):
            optimizer.build([make_variable(np.ones(3), flavor)])


# ---- weight decay ------------------------------------------------------------


@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_exclude_from_weight_decay(flavor, backend, by):
    """With a gradient of zero only the decay moves a variable."""
    names = ("table_a", "table_b", "dense_a", "dense_b")
    shapes = ((20, 2), (20, 2), (3,), (3,))
    variables = [
        make_variable(np.ones(shape), flavor, name)
        for name, shape in zip(names, shapes, strict=True)
    ]
    optimizer = make_optimizer(
        flavor, tables="table", num_buckets=4, learning_rate=0.5, weight_decay=0.5
    )
    excluded = {"var_list": variables[1::2], "var_names": ["_b"]}[by]
    optimizer.exclude_from_weight_decay(**{by: excluded})
    optimizer.build(variables)
    gradients = [make_slices([3, 3, 5], np.zeros((3, 2)), (20, 2))] * 2
    gradients += [tf.zeros(3)] * 2
    for _ in range(2):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    rate = 0.75**2
    expected = np.ones((20, 2))
    expected[[3, 5]] = rate
    np.testing.assert_allclose(to_numpy(variables[0]), expected)
    np.testing.assert_allclose(to_numpy(variables[2]), rate)
    for variable in variables[1::2]:
        np.testing.assert_array_equal(to_numpy(variable), 1)


# ---- other optimizers --------------------------------------------------------

DENSE = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Nadam": {},
    "Ftrl": {},
    "Lion": {},
    "AdamW": {"weight_decay": 0.1},
    "Adafactor": {},
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_optimizer_of_any_kind(flavor, name, rng):
    """It does to its variables, with its own schedule, what it does by itself."""
    optimizers = keras_of(flavor).optimizers
    schedule = optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)

    def new():
        return getattr(optimizers, name)(learning_rate=schedule, **DENSE[name])

    values = rng.normal(size=(4, 3))
    ours, theirs = (make_variable(values, flavor, "dense") for _ in range(2))
    table = make_variable(np.ones((20, 2)), flavor, "table")
    inner, alone = new(), new()
    optimizer = make_optimizer(
        flavor, tables="table", num_buckets=4, dense_optimizer=inner, clipvalue=5.0
    )
    optimizer.build([table, ours])
    for _ in range(4):
        gradient = tf.constant(rng.normal(size=(4, 3)), tf.float32)
        slices = make_slices([1, 1], np.ones((2, 2)), (20, 2))
        optimizer.apply_gradients([(slices, table), (gradient, ours)])
        alone.apply_gradients([(gradient, theirs)])
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    assert np.any(to_numpy(ours) != values.astype(np.float32))
    assert not np.any(to_numpy(table)[1] == 1)
    assert int(to_numpy(inner.iterations)) == 4


@keras3_only
@pytest.mark.parametrize("accumulate", [None, 2])
def test_multi_optimizer_is_like_a_dense_optimizer(backend, accumulate, tmp_path):
    """Each with its own rate; and the file holds the state of both."""
    optimizers = keras_of("keras3").optimizers
    arguments = {"learning_rate": 0.02, "gradient_accumulation_steps": accumulate}
    arguments["tables"] = "embeddings"

    def sgd():
        return optimizers.SGD(0.125, momentum=0.5)

    basis = make_optimizer(**arguments)
    choice = optimizers.OptimizerMap(sgd(), {".*embeddings": basis})
    model = make_click_model(optimizers.MultiOptimizer(choice))
    other = make_click_model(make_optimizer(**arguments, dense_optimizer=sgd()))
    train(model)
    train(other)
    ours, theirs = model.optimizer.optimizers
    assert (float(ours.learning_rate), float(theirs.learning_rate)) == (
        pytest.approx(0.02),
        0.125,
    )
    ours.learning_rate = 0.05  # of this one alone
    assert float(theirs.learning_rate) == 0.125
    ours.learning_rate = 0.02
    assert is_compressed(ours, table_of(model))
    assert int(ours.iterations) == 4 // (accumulate or 1)
    if accumulate is None:  # SGD beside BasisAdam does not accumulate
        for a, b in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
    path = str(tmp_path / "model.keras")
    train(model, 4, 5).save(path)
    restored = tf.keras.models.load_model(path)
    for each in (model, restored):
        train(each, 5, 8)
    assert_same_bits(
        optimizer_arrays(model.optimizer, model.weights),
        optimizer_arrays(restored.optimizer, restored.weights),
    )


@keras3_only
def test_multi_optimizer_sets_the_loss_scale_of_its_parts(backend):
    optimizers = keras_of("keras3").optimizers
    models = []
    for factor in (None, 2.0**6):
        basis = make_optimizer(learning_rate=0.02, tables="embeddings")
        choice = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*embeddings": basis})
        multi = optimizers.MultiOptimizer(choice, loss_scale_factor=factor)
        assert basis.loss_scale_factor == factor
        models.append(train(make_click_model(multi)))
    for a, b in zip(*(m.weights for m in models), strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-5, atol=1e-7)
