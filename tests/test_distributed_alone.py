"""DistributedOptimizer and tape on one process: wrapping, errors, saving."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor, keras_of, make_optimizer, make_variable, to_numpy

from tf_basis import distributed
from tf_basis.adapters import flavor as flavors
from tf_basis.distributed import DistributedGradientTape, DistributedOptimizer

RESUME = """
import sys
import numpy as np
import tensorflow as tf
import tf_basis
model = tf.keras.models.load_model(sys.argv[1] + "/model.keras")
assert type(model.optimizer).__name__ == "DistributedOptimizer"
assert int(tf.convert_to_tensor(model.optimizer.iterations)) == 1
model.fit(np.ones((8, 4), np.float32), np.ones((8, 3)), verbose=0)
expected = np.load(sys.argv[1] + "/weights.npy")
assert np.array_equal(model.get_weights()[0], expected)
print("equal")
"""


def applier(optimizer, variables):
    @tf.function
    def apply(*gradients):
        optimizer.apply_gradients(list(zip(gradients, variables)))

    return apply


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_one_rank_steps_as_without_the_wrapper(flavor, compression):
    """Tables, towers, decay and clipping, to the bit."""
    results = []
    for wrap in (lambda o: o, lambda o: DistributedOptimizer(o, compression)):
        rng = np.random.default_rng(0)
        table = make_variable(rng.normal(size=(50, 4)).astype(np.float32), flavor)
        kernel = make_variable(np.ones((40, 40), np.float32), flavor, "kernel")
        optimizer = wrap(
            make_optimizer(
                flavor,
                min_rows=10,
                compression_ratio=4.0,
                weight_decay=0.1,
                clipnorm=1.0,
            )
        )
        optimizer.build([table, kernel])
        apply = applier(optimizer, [table, kernel])
        for _ in range(4):
            slices = tf.IndexedSlices(
                tf.constant(rng.normal(size=(6, 4)), tf.float32),
                tf.constant(rng.integers(0, 50, 6)),
                tf.constant([50, 4], tf.int64),
            )
            apply(slices, tf.constant(rng.normal(size=(40, 40)), tf.float32))
        results.append([to_numpy(table), to_numpy(kernel)])
    for alone, wrapped in zip(*results):
        np.testing.assert_array_equal(alone, wrapped)


def test_config_and_class(flavor):
    keras = keras_of(flavor)
    adapter = flavors.load_adapter(flavor)
    compression = distributed.OneBitCompression([("norm", 16, 10)], clip_value=2.0)
    inner = keras.optimizers.Adam(0.01, beta_1=0.8)
    wrapped = DistributedOptimizer(inner, compression, timeout=5.0)
    assert isinstance(wrapped, keras.optimizers.Adam)
    config = json.loads(json.dumps(adapter.serialize(wrapped)))
    again = adapter.deserialize(config)
    assert again.get_config() == wrapped.get_config()
    assert again.get_config()["optimizer"]["config"]["beta_1"] == 0.8
    assert again.get_config()["timeout"] == 5.0
    assert type(again) is type(wrapped)


def test_what_may_not_be_wrapped(flavor):
    keras = keras_of(flavor)
    with pytest.raises(ValueError, match="optimizer must be an optimizer of Keras 3"):
        DistributedOptimizer("adam")
    wrapped = DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match=r"must not be distributed already.*SGD"):
        DistributedOptimizer(wrapped)
    with pytest.raises(ValueError, match="dense_optimizer must not be distributed"):
        DistributedOptimizer(make_optimizer(flavor, dense_optimizer=wrapped))
    with pytest.raises(ValueError, match="compression must be None, one of"):
        DistributedOptimizer(keras.optimizers.SGD(), "gzip")
    with pytest.raises(ValueError, match="timeout must be None or a number above 0"):
        DistributedOptimizer(keras.optimizers.SGD(), timeout=-1)
    with pytest.raises(
        ValueError, match="process_set must be None where Horovod is not"
    ):
        DistributedOptimizer(keras.optimizers.SGD(), process_set=3).build(
            [make_variable(np.ones(3, np.float32), flavor)]
        )
    with pytest.raises(ValueError, match="must be built first"):
        _ = wrapped.skipped_steps
    scaling = keras.optimizers if flavor == "keras3" else keras.mixed_precision
    with pytest.raises(ValueError, match="optimizer must be the innermost one"):
        DistributedOptimizer(scaling.LossScaleOptimizer(keras.optimizers.SGD()))


def test_xla_is_refused():
    kernel = make_variable(np.ones((4, 4), np.float32), "keras3", "kernel")
    optimizer = DistributedOptimizer(keras_of("keras3").optimizers.SGD())
    optimizer.build([kernel])

    @tf.function(jit_compile=True)
    def apply(g):
        optimizer.apply_gradients([(g, kernel)])

    with pytest.raises(ValueError, match="jit_compile must be False"):
        apply(tf.ones((4, 4)))


def test_exclusions_from_decay_are_kept(flavor):
    keras = keras_of(flavor)
    kernel = make_variable(np.ones((4, 4), np.float32), flavor, "kernel")
    bias = make_variable(np.ones(4, np.float32), flavor, "bias")
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    wrapped = DistributedOptimizer(optimizer)
    wrapped.build([kernel, bias])
    applier(wrapped, [kernel, bias])(tf.zeros((4, 4)), tf.zeros(4))
    np.testing.assert_allclose(to_numpy(kernel), 0.95)
    np.testing.assert_array_equal(to_numpy(bias), 1.0)


def test_a_built_optimizer_keeps_its_state(flavor):
    keras = keras_of(flavor)
    kernel = make_variable(np.ones((40, 40), np.float32), flavor, "kernel")
    inner = make_optimizer(flavor, dense_optimizer=keras.optimizers.Adam(0.1))
    inner.build([kernel])
    applier(inner, [kernel])(tf.ones((40, 40)))
    if flavor == "tf_keras":
        with pytest.raises(ValueError, match="optimizer must not have been built yet"):
            DistributedOptimizer(inner)
        return
    wrapped = DistributedOptimizer(inner, "onebit")
    assert int(wrapped.iterations) == 1
    for old, new in zip(
        inner.dense_optimizer.variables, wrapped.dense_optimizer.variables
    ):
        np.testing.assert_array_equal(to_numpy(old), to_numpy(new))


def test_tape_passes_everything_on():
    x, y = tf.Variable(3.0), tf.Variable(2.0)
    with DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        z = x * x * y
    assert [float(g) for g in tape.gradient(z, [x, y])] == [12.0, 9.0]
    assert tape.gradient(z, {"x": x, "none": tf.Variable(1.0)})["none"] is None
    assert {v.ref() for v in tape.watched_variables()} == {x.ref(), y.ref()}
    assert bool(tape.finite)


def test_loading_needs_only_the_import(tmp_path):
    """In a new process, without custom_objects, and without Horovod."""
    from helpers import run_python

    keras = tf.keras
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.1), "onebit"), "mse")
    x = np.ones((8, 4), np.float32)
    model.fit(x, np.ones((8, 3)), verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    model.fit(x, np.ones((8, 3)), verbose=0)
    np.save(tmp_path / "weights.npy", model.get_weights()[0])
    done = run_python(
        RESUME,
        str(tmp_path),
        TF_USE_LEGACY_KERAS="1" if active_flavor() == "tf_keras" else "0",
    )
    assert "equal" in done.stdout


@pytest.mark.parametrize("wrap", [lambda o: o, DistributedOptimizer])
def test_rows_grow_beside_onebit_adam(flavor, wrap):
    """The tower's variables are those of a new model; their state goes on."""
    tables = [
        make_variable(np.ones((rows, 4), np.float32), flavor, f"table_{rows}")
        for rows in (40, 60)
    ]
    kernels = [
        make_variable(np.ones((40, 40), np.float32), flavor, f"tower_{i}_kernel")
        for i in range(2)
    ]
    inner = distributed.for_flavor(flavor).OneBitAdam(0.1, warmup_steps=1)
    optimizer = wrap(
        make_optimizer(
            flavor,
            tables="table_",
            min_rows=10,
            compression_ratio=4.0,
            dense_optimizer=inner,
        )
    )
    optimizer.build([tables[0], kernels[0]])
    for table, kernel in zip(tables, kernels):
        if table is tables[1]:
            optimizer.grow_rows(tables[0], table)
            optimizer.grow_rows(kernels[0], kernel)
        apply = applier(optimizer, [table, kernel])
        for _ in range(2):
            before = to_numpy(table), to_numpy(kernel)
            slices = tf.IndexedSlices(
                tf.ones([2, 4]),
                tf.constant([3, int(table.shape[0]) - 1]),
                tf.constant(tuple(table.shape), tf.int64),
            )
            apply(slices, tf.ones((40, 40)))
            assert np.any(to_numpy(table) < before[0])
            assert np.all(to_numpy(kernel) < before[1])
    assert int(optimizer.dense_optimizer._exchange.steps[0]) == 4
    np.testing.assert_allclose(to_numpy(kernels[0]), 0.8, atol=0.01)


def test_a_dense_optimizer_alone_may_not_be_distributed(flavor):
    inner = DistributedOptimizer(keras_of(flavor).optimizers.Adam())
    optimizer = make_optimizer(flavor, dense_optimizer=inner)
    kernel = make_variable(np.ones((4, 4), np.float32), flavor, "kernel")
    with pytest.raises(ValueError, match="dense_optimizer must not be the only one"):
        optimizer.build([kernel])


def test_a_learning_rate_may_be_a_function(flavor):
    wrapped = DistributedOptimizer(make_optimizer(flavor, learning_rate=lambda: 0.25))
    kernel = make_variable(np.ones((4, 4), np.float32), flavor, "kernel")
    wrapped.build([kernel])
    applier(wrapped, [kernel])(tf.ones((4, 4)))
    np.testing.assert_allclose(to_numpy(kernel), 0.75, atol=1e-5)


def test_tapes_of_one_setting_share_their_residuals():
    kernel = tf.Variable(np.zeros((40, 40), np.float32))
    rng = np.random.default_rng(0)
    true, got = np.zeros((40, 40)), np.zeros((40, 40))
    for _ in range(10):
        x = rng.normal(size=(40, 40)).astype(np.float32)
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(kernel * x)
        compression = distributed.OneBitCompression(block=64)
        tape = DistributedGradientTape(tape, compression)
        got += tape.gradient(y, kernel).numpy()
        true += x
    residual = tape._reducer([kernel]).residuals[0].numpy().reshape(40, 40)
    np.testing.assert_allclose(got + residual, true, atol=1e-4)


def test_even_batches_refuses_what_never_ends():
    data = tf.data.Dataset.from_tensor_slices(([[1.0]], [1.0])).batch(1)
    with pytest.raises(ValueError, match="an endless dataset"):
        distributed.even_batches(data.repeat())
    with pytest.raises(ValueError, match=r"dataset must be a tf.data.Dataset.*None"):
        distributed.even_batches(None)


@pytest.mark.parametrize("rate", [float("nan"), -1, -0.5, float("inf")])
def test_bad_learning_rates(flavor, rate):
    with pytest.raises(ValueError, match="learning_rate must be a finite number"):
        distributed.for_flavor(flavor).OneBitAdam(rate)
    assert float(distributed.for_flavor(flavor).OneBitAdam(1).learning_rate) == 1.0
