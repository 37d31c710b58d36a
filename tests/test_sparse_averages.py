"""use_ema: dense variables are averaged as Keras does it, compressed tables not."""

from __future__ import annotations

import warnings

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
    make_slices,
    make_variable,
    optimizer_arrays,
    to_numpy,
    variables_of,
)
from sparse_helpers import nothing_made_dense

ROWS, DIM = 40, 3
SILENT = pytest.mark.filterwarnings("ignore:use_ema leaves compressed tables out")


class Run:
    """The table stands between two dense variables: averages must not slip."""

    def __init__(self, flavor, build=True, function=False, **kwargs):
        values = {"first": (4,), "table": (ROWS, DIM), "last": (5,)}
        self.variables = [
            make_variable(np.ones(shape) * (i + 1), flavor, name)
            for i, (name, shape) in enumerate(values.items())
        ]
        self.first, self.table, self.last = self.variables
        kwargs = {"learning_rate": 0.1, "num_buckets": 5, **kwargs}
        self.optimizer = make_optimizer(flavor, tables=["table"], **kwargs)
        if build:
            self.optimizer.build(self.variables)
        self._apply = tf.function(self._apply_all) if function else self._apply_all

    def _apply_all(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def step(self, rng):
        gradients = [
            tf.constant(rng.normal(size=4), tf.float32),
            make_slices([1, 7, 1], rng.normal(size=(3, DIM)), (ROWS, DIM)),
            tf.constant(rng.normal(size=5), tf.float32),
        ]
        with nothing_made_dense():
            self._apply(gradients)

    def values(self):
        return [to_numpy(v) for v in self.variables]

    def averages(self):
        return [
            to_numpy(v) for v in variables_of(self.optimizer) if "average" in v.name
        ]


def test_one_warning_names_the_tables(flavor):
    run = Run(flavor, build=False, use_ema=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run.step(np.random.default_rng(0))
    messages = [str(w.message) for w in caught if "use_ema" in str(w.message)]
    assert len(messages) == 1
    assert "table" in messages[0] and "first" not in messages[0]


def test_no_warning_without_tables(flavor):
    optimizer = make_optimizer(flavor, use_ema=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer.build([make_variable(np.ones(4), flavor)])


@SILENT
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_averages_are_those_of_the_values(flavor, backend, function, rng):
    run = Run(flavor, function=function, use_ema=True, ema_momentum=0.75)
    plain = Run(flavor)
    expected = [plain.values()[0], plain.values()[2]]
    state = rng.bit_generator.state
    for number in range(5):
        rng.bit_generator.state = state
        run.step(rng)
        rng.bit_generator.state = state
        plain.step(rng)
        state = rng.bit_generator.state
        first, _, last = plain.values()
        # Keras 3 starts from the values after the first step, tf_keras before it.
        momentum = 0.0 if flavor == "keras3" and number == 0 else 0.75
        expected = [
            momentum * e + (1 - momentum) * v
            for e, v in zip(expected, (first, last), strict=True)
        ]
    for value, same in zip(run.values(), plain.values(), strict=True):
        np.testing.assert_allclose(value, same, rtol=1e-6)
    averages = run.averages()
    assert [a.shape for a in averages] == [(4,), (5,)]
    for average, value in zip(averages, expected, strict=True):
        np.testing.assert_allclose(average, value, rtol=1e-5)


@SILENT
def test_dense_variables_follow_keras(flavor, rng):
    """Overwriting and finalizing included, and the table in between is skipped."""
    ema = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    run = Run(flavor, **ema)
    theirs = [make_variable(run.values()[i], flavor) for i in (0, 2)]
    adam = keras_of(flavor).optimizers.Adam(0.1, epsilon=1e-8, **ema)
    table = run.values()[1]
    for _ in range(8):
        gradients = [tf.constant(rng.normal(size=n), tf.float32) for n in (4, 5)]
        slices = make_slices([1, 7], np.ones((2, DIM)), (ROWS, DIM))
        ours = [gradients[0], slices, gradients[1]]
        run.optimizer.apply_gradients(zip(ours, run.variables, strict=True))
        adam.apply_gradients(zip(gradients, theirs, strict=True))
        for mine, value in zip(run.values()[::2], theirs, strict=True):
            np.testing.assert_allclose(mine, to_numpy(value), rtol=1e-6)
        assert np.any(run.values()[1] != table)  # which goes on without averages
        table = run.values()[1]
    run.optimizer.finalize_variable_values(run.variables)
    adam.finalize_variable_values(theirs)
    for mine, value in zip(run.values()[::2], theirs, strict=True):
        np.testing.assert_allclose(mine, to_numpy(value), rtol=1e-6)
    np.testing.assert_array_equal(run.values()[1], table)


@SILENT
def test_finalizing_some_variables_leaves_the_others(flavor, rng):
    run = Run(flavor, use_ema=True, ema_momentum=0.5)
    for _ in range(3):
        run.step(rng)
    before = run.values()
    run.optimizer.finalize_variable_values([run.table, run.last])
    after = run.values()
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])
    np.testing.assert_array_equal(after[2], run.averages()[1])
    assert np.any(before[2] != after[2])


@SILENT
def test_averages_of_variables_of_the_dense_optimizer(flavor, rng):
    inner = keras_of(flavor).optimizers.SGD(0.1)
    run = Run(flavor, use_ema=True, ema_momentum=0.5, dense_optimizer=inner)
    for _ in range(3):
        run.step(rng)
    assert all(np.any(a != v) for a, v in zip(run.averages(), run.values()[::2]))
    table = run.values()[1]
    run.optimizer.finalize_variable_values(run.variables)
    for average, value in zip(run.averages(), run.values()[::2], strict=True):
        np.testing.assert_array_equal(average, value)
    np.testing.assert_array_equal(table, run.values()[1])


def test_the_dense_optimizer_may_average_for_itself(flavor, rng):
    inner = keras_of(flavor).optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    run = Run(flavor, dense_optimizer=inner)
    for _ in range(3):
        run.step(rng)
    before = run.values()
    run.optimizer.finalize_variable_values(run.variables)
    after = run.values()
    assert np.any(before[0] != after[0]) and np.any(before[2] != after[2])
    np.testing.assert_array_equal(before[1], after[1])


@SILENT
def test_averages_with_accumulation_move_with_the_updates(flavor, backend, rng):
    run = Run(flavor, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2)
    for _ in range(2):
        run.step(rng)
    first = run.values()
    start = [np.ones(4), 3 * np.ones(5)]
    for average, value, old in zip(run.averages(), first[::2], start, strict=True):
        # Keras 3's average starts here; tf_keras's started before the update.
        expected = value if flavor == "keras3" else (value + old) / 2
        np.testing.assert_allclose(average, expected, rtol=1e-6)


@SILENT
def test_fit_finalizes_and_the_file_keeps_the_averages(backend, tmp_path):
    ema = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}
    model = make_click_model(make_optimizer(learning_rate=0.02, **ema))
    x, y = batches_of(0, 1, size=160)[0]
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    averages = [
        to_numpy(v) for v in variables_of(model.optimizer) if "average" in v.name
    ]
    dense = [to_numpy(v) for v in model.trainable_variables if v.shape[0] != 12_000]
    assert len(averages) == len(dense) == 5
    for average, value in zip(averages, dense, strict=True):
        np.testing.assert_array_equal(average, value)
    path = str(tmp_path / "model.keras")
    model.save(path)
    restored = tf.keras.models.load_model(path)
    assert {k: restored.optimizer.get_config()[k] for k in ema} == ema
    for each in (model, restored):
        for batch in batches_of(1, 6):
            each.train_on_batch(*batch)
    assert_same_bits(
        optimizer_arrays(model.optimizer, model.weights),
        optimizer_arrays(restored.optimizer, restored.weights),
    )
    assert active_flavor() in type(model.optimizer)._keras.__name__
