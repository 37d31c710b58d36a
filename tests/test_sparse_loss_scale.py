"""Loss scaling: of slices as of dense gradients; a step with a NaN is left out."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    optimizer_arrays,
    to_numpy,
)
from sparse_helpers import nothing_made_dense, ops_of_size

ROWS, DIM = 1_000, 4
SCALE = 2.0**10  # powers of two leave the digits as they are


class Run:
    """A table and a dense variable, perhaps behind a LossScaleOptimizer."""

    def __init__(self, flavor, scaler=None, **kwargs):
        self.table = make_variable(np.ones((ROWS, DIM)), flavor, "table")
        self.dense = make_variable(np.ones((3,)), flavor, "dense")
        self.variables = [self.table, self.dense]
        self.basis = make_optimizer(flavor, tables=["table"], num_buckets=10, **kwargs)
        self.optimizer, self.flavor = self.basis, flavor
        if scaler is not None:
            wrap = keras_of(flavor).mixed_precision.LossScaleOptimizer
            self.optimizer = wrap(self.basis, **scaler)
        self.optimizer.build(self.variables)

    def gradients(self, ids, values, dense, scale=1.0):
        """Of a loss that was scaled, as far as this flavour leaves unscaling to it."""
        values = np.asarray(values, np.float32) * np.float32(scale)
        dense = tf.constant(np.asarray(dense, np.float32) * np.float32(scale))
        gradients = [make_slices(ids, values, (ROWS, DIM)), dense]
        if hasattr(self.optimizer, "get_unscaled_gradients"):
            self.optimizer.get_scaled_loss(tf.constant(1.0))
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        return gradients

    def step(self, *args, **kwargs):
        with nothing_made_dense():
            gradients = self.gradients(*args, **kwargs)
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def arrays(self):
        return optimizer_arrays(self.basis, self.variables)

    @property
    def scale(self) -> float:
        name = "dynamic_scale" if self.flavor == "keras3" else "loss_scale"
        return float(to_numpy(tf.convert_to_tensor(getattr(self.optimizer, name))))


def steps_of(rng, count=4):
    for _ in range(count):
        ids = rng.integers(0, 50, 30)
        yield ids, rng.normal(size=(30, DIM)), rng.normal(size=3)


def test_loss_scale_factor_on_slices(backend, rng):
    """Only Keras 3 has it; there `/` is a TypeError on IndexedSlices."""
    run, plain = Run("keras3", loss_scale_factor=SCALE), Run("keras3")
    assert float(run.optimizer.scale_loss(tf.constant(2.0))) == 2 * SCALE
    for batch in steps_of(rng):
        run.step(*batch, scale=SCALE)
        plain.step(*batch)
    assert_same_bits(run.arrays(), plain.arrays())


def test_loss_scale_factor_with_accumulation_and_clipping(backend, rng):
    arguments = {"gradient_accumulation_steps": 2, "clipnorm": 0.5}
    run, plain = (
        Run("keras3", loss_scale_factor=SCALE, **arguments),
        Run("keras3", **arguments),
    )
    for batch in steps_of(rng):
        run.step(*batch, scale=SCALE)
        plain.step(*batch)
    assert_same_bits(run.arrays(), plain.arrays())


@pytest.mark.parametrize("accumulate", [None, 2])
def test_loss_scale_optimizer_gives_the_same_bits(flavor, backend, rng, accumulate):
    scaler = {"initial_scale": SCALE, "dynamic_growth_steps": 3}
    arguments = {"gradient_accumulation_steps": accumulate}
    run, plain = Run(flavor, scaler, **arguments), Run(flavor, **arguments)
    for number, batch in enumerate(steps_of(rng, 6), 1):
        run.step(*batch, scale=run.scale)
        plain.step(*batch)
        assert run.scale == SCALE * 2 ** (number // 3)
    assert_same_bits(run.arrays(), plain.arrays())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["first", "last", "dense"])
def test_a_step_that_is_not_finite_is_left_out(flavor, backend, bad, where, rng):
    """Also where a later value of the same id hides the bad one from Keras's check."""
    run = Run(flavor, {"initial_scale": SCALE})
    for batch in steps_of(rng, 2):
        run.step(*batch, scale=SCALE)
    before = run.arrays()
    iterations = int(to_numpy(tf.convert_to_tensor(run.basis.iterations)))
    values, dense = np.ones((3, DIM)), np.ones(3)
    if where == "dense":
        dense[1] = bad
    else:
        values[0 if where == "first" else -1, 2] = bad
    run.step([7, 8, 7], values, dense, scale=SCALE)
    after = run.arrays()
    if flavor == "tf_keras":  # which counts the step nevertheless
        counter = next(iter(before))
        assert before.pop(counter) == iterations
        assert after.pop(counter) == iterations + 1
    assert_same_bits(before, after)
    assert run.scale == SCALE / 2
    run.step(*next(steps_of(rng)), scale=run.scale)
    assert np.any(to_numpy(run.table) != before[sorted(before)[-2]])


def test_a_skipped_batch_is_not_accumulated(flavor, backend, rng):
    run = Run(flavor, {"initial_scale": SCALE}, gradient_accumulation_steps=2)
    plain = Run(flavor, gradient_accumulation_steps=2)
    first, second = steps_of(rng, 2)
    run.step(*first, scale=SCALE)
    plain.step(*first)
    run.step([7], [[np.nan] * DIM], np.ones(3), scale=SCALE)
    run.step(*second, scale=run.scale)
    plain.step(*second)
    for ours, theirs in zip(run.variables, plain.variables, strict=True):
        if flavor == "keras3":
            assert to_numpy(ours).tobytes() == to_numpy(theirs).tobytes()
    state = run.basis.table_state(run.table), plain.basis.table_state(plain.table)
    assert_same_bits(*state)


def test_loss_scale_optimizer_makes_nothing_of_the_tables_size(flavor, backend):
    """Keras 3's own check of finiteness would; the fixture of this file sees it."""
    run = Run(flavor, {"initial_scale": SCALE})

    @tf.function
    def step(ids, values):
        gradients = [tf.IndexedSlices(values, ids, (ROWS, DIM)), tf.ones(3)]
        if flavor == "tf_keras":
            gradients = run.optimizer.get_unscaled_gradients(gradients)
        run.optimizer.apply_gradients(zip(gradients, run.variables, strict=True))

    with nothing_made_dense():
        traced = step.get_concrete_function(tf.constant([1, 2]), tf.ones((2, DIM)))
    assert ops_of_size(traced, ROWS) == set()
    if flavor == "keras3":
        isfinite = tf.function(
            lambda: keras_of(flavor).ops.isfinite(
                run.gradients([1], np.ones((1, DIM)), np.ones(3))[0]
            )
        )
        assert ops_of_size(isfinite.get_concrete_function(), ROWS)


def embedding_model(policy, optimizer):
    """A model whose only layers are an embedding and a linear output."""
    keras = keras_of(active_flavor())
    policies = keras.mixed_precision
    set_policy = (
        getattr(policies, "set_dtype_policy", None) or policies.set_global_policy
    )
    set_policy(policy)
    try:
        inputs = keras.Input((2,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, DIM)(inputs)
        outputs = keras.layers.Dense(1, dtype="float32")(keras.layers.Flatten()(rows))
        model = keras.Model(inputs, outputs)
        rng = np.random.default_rng(1)
        model.set_weights(
            [rng.normal(size=w.shape).astype(np.float16) for w in model.get_weights()]
        )
        model.compile(optimizer, "mse")
        return model
    finally:
        set_policy("float32")


@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("wrapped", ["by hand", "by compile"])
def test_mixed_float16_policy(backend, accumulate, wrapped):
    """It learns what it learns in float32, and no gradient is made dense."""
    wrap = keras_of(active_flavor()).mixed_precision.LossScaleOptimizer
    rng = np.random.default_rng(2)
    x = rng.integers(0, 60, (64, 2)).astype(np.int32)
    y = (x.sum(axis=1, keepdims=True) % 3).astype(np.float32)
    models = []
    for policy in ("mixed_float16", "float32"):
        optimizer = make_optimizer(
            tables="embeddings",
            num_buckets=10,
            learning_rate=0.05,
            gradient_accumulation_steps=accumulate,
        )
        if wrapped == "by hand" and policy == "mixed_float16":
            optimizer = wrap(optimizer, initial_scale=64.0)  # nothing overflows
        model = embedding_model(policy, optimizer)
        with nothing_made_dense():
            model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
        models.append(model)
    mixed, single = models
    assert isinstance(mixed.optimizer, type(wrap(make_optimizer())))
    table = mixed.trainable_variables[0]
    assert tf.as_dtype(table.dtype) == tf.float32
    state = mixed.optimizer.inner_optimizer.table_state(table)
    assert state["second_moment"].shape == (10, DIM)
    rows = set(np.flatnonzero(state["row_energy"]))
    if wrapped == "by compile":  # its scale of 2**15 makes the first steps overflow
        assert rows and rows <= set(x.ravel())
        return
    assert rows == set(x.ravel())
    for a, b in zip(mixed.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)
    losses = [float(m.evaluate(x, y, verbose=0)) for m in models]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
