"""GradientStatistics, ReplicaDriftCheck, ResidualOverflowCheck: two ranks, and one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor
from horovod_helpers import launch_fixture

from tf_basis import distributed
from tf_basis.distributed import statistics

checks = launch_fixture("debugging", ranks=2, timeout=300)
keras = tf.keras

# ---- two ranks ------------------------------------------------------------------


def test_statistics_are_those_of_the_rank_and_of_the_ranks_asked(checks):
    found = checks["statistics_are_of_this_rank"]
    for rank, result in enumerate(found):
        np.testing.assert_allclose(
            result["found"], result["expected"], rtol=1e-3, atol=1e-6
        )
        assert result["steps"] == [1, 2, 3]
        assert result["second"] == (3 if rank == 1 else 0)
    assert found[0]["found"] != found[1]["found"]


def test_one_bit_on_one_rank_is_named_on_all(checks):
    found = checks["one_bit_on_one_rank_ends_the_training_on_all"]
    for errors in found:
        message = errors["kernel"]
        assert message.startswith("ReplicaDriftError: after 3 batches")
        assert f"'{errors['kernel_path']}' differs" in message
        assert "ranks [0]: " in message and "ranks [1]: " in message
        assert "and 0 after it" in message and errors["kernel_checks"] == 2
        assert errors["rate"] is None and errors["rate_checks"] == 3
        assert f"'{errors['rate_compared_path']}' differs" in errors["rate_compared"]
        assert errors["rate_compared_checks"] == 2
    # Residuals, which are each rank's own, were left out.
    pairs = zip(*(errors["rate_compared_residuals"] for errors in found))
    assert any(not np.array_equal(a, b) for a, b in pairs)


def test_what_the_ranks_have_apart_is_found_at_the_first_look(checks):
    for found in checks["what_differs_is_found_at_the_first_look"]:
        assert "after 1 batches" in found["averages"]
        assert "moving_mean' differs" in found["averages"]
        assert "after 2 batches" in found["starts"]
        assert "embeddings' differs" in found["starts"]


def test_overflow_warns_once_where_it_is(checks):
    first, second = checks["overflow_warns_the_rank_that_has_it"]
    assert first["messages"] == [] and first["clipped"] == [0]
    (message,) = second["messages"]
    assert "reached clip_value=100" in message and "kernel'" in message
    assert "raise clip_value" in message and second["clipped"][0] > 0


def test_quantization_is_recorded_alike_and_written_by_rank_0(checks):
    first, second = checks["quantization_is_recorded"]
    assert first["history"] == second["history"] and first["logs"] == second["logs"]
    # Three batches: the second knows of the exchange in the first.
    ((batch, groups),) = (record.values() for record in first["history"])
    assert batch == 2 and 0 < groups["1bit"]["relative_error"] < 1
    flat = {f"quantization/1bit/{name}": v for name, v in groups["1bit"].items()}
    assert len(flat) == 6 and first["logs"] == {k: [v] for k, v in flat.items()}
    assert second["scalars"] == {}
    expected = {(k, 2): pytest.approx(v, rel=1e-6) for k, v in flat.items()}
    assert first["scalars"] == expected
    for found in (first, second):
        assert found["plain"].startswith("ValueError: compression must keep statistics")


def test_shadow_rows_are_exact_on_several_ranks(checks):
    first, second = checks["shadow_rows_have_the_gradients_of_all_ranks"]
    assert first == second and first["rows"] == 12
    assert first["update_error"]["max"] < 1e-5


# ---- one process ----------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


def numbers(gradient, shape, scale=1.0) -> dict:
    row = statistics._statistics(gradient, shape, tf.constant(scale)).numpy()
    return dict(zip(statistics.NAMES, row))


def test_statistics_of_slices_are_those_of_the_dense_gradient():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(7, 3)).astype(np.float32)
    values[2] = 0
    slices = tf.IndexedSlices(
        tf.constant(values), tf.constant([4, 1, 0, 4, 9, 1, 1]), (40, 3)
    )
    dense = tf.convert_to_tensor(slices)
    sparse = numbers(slices, (40, 3), 2.0)
    full = dense.numpy().astype(np.float64) / 2
    np.testing.assert_allclose(
        list(sparse.values()),
        [full.mean(), full.std(), full.min(), full.max(), (full == 0).mean(), 0],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        list(numbers(dense, (40, 3), 2.0).values()), list(sparse.values()), rtol=1e-6
    )


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, NAN, 3.0, -INF, 0.0, 0.0], [1.0, 1.5**0.5, 0.0, 3.0, 2 / 6, 2]),
        ([NAN, INF], [NAN, NAN, NAN, NAN, 0, 2]),
        ([-2.0, -2.0], [-2.0, 0.0, -2.0, -2.0, 0.0, 0]),
        (None, [NAN, NAN, NAN, NAN, NAN, -1]),
    ],
)
def test_what_is_not_finite_is_counted_and_left_out(values, expected):
    gradient = None if values is None else tf.constant(values)
    found = numbers(gradient, (len(values or []),))
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-6)


def test_slices_of_a_large_table_stay_sparse():
    shape = (10**12, 8)  # as a dense gradient: 32 TB
    slices = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([5, 10**11], tf.int64))
    found = numbers(slices, shape)
    assert found["zeros"] == 1 - 2e-12 and found["min"] == 0 and found["max"] == 1


def small_model(optimizer, **more):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(20, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", **more)
    return model


X, Y = np.arange(12).reshape(6, 2), np.ones((6, 1), np.float32)


def test_a_traced_fit_records_every_nth_step_and_leaves_nothing(tmp_path):
    # Of a loss 1024 times as large as it is.
    keras3 = active_flavor() == "keras3"
    scaling = keras.optimizers if keras3 else keras.mixed_precision
    sgd = keras.optimizers.SGD(0.0)
    model = small_model(scaling.LossScaleOptimizer(sgd, initial_scale=1024.0))
    callback = distributed.GradientStatistics(2, log_dir=tmp_path, logs=True)
    history = model.fit(
        X, Y, batch_size=2, epochs=2, verbose=0, shuffle=False, callbacks=[callback]
    )
    # The weights stay, so that steps 2 and 4 are batches 1 and 0.
    assert [r["step"] for r in callback.history] == [2, 4, 6]
    for record, batch in zip(callback.history, (1, 0, 2)):
        rows = slice(2 * batch, 2 * batch + 2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X[rows]) - Y[rows]))
        found = list(record["variables"].values())
        for gradient, numbers in zip(tape.gradient(loss, model.weights), found):
            full = tf.convert_to_tensor(gradient).numpy()
            expected = [full.mean(), full.std(), full.min(), full.max()]
            np.testing.assert_allclose(
                list(numbers.values())[:4], expected, rtol=1e-4, atol=1e-7
            )
    last = callback.history[-1]["variables"]
    path = next(iter(last))
    assert history.history[f"gradients/{path}/std"][-1] == last[path]["std"]
    assert last[path]["zeros"] > 0.5 and last[path]["non_finite"] == 0
    tags = [
        (value.tag, event.step)
        for file in tmp_path.glob("rank_0/*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert len(tags) == 3 * 3 * len(statistics.NAMES)
    assert (f"gradients/{path}/mean", 4) in tags
    # Later `fit`s go without.
    assert not {"apply", "apply_gradients"} & set(vars(model.optimizer))
    model.fit(X, Y, verbose=0)
    assert int(callback._state.steps) == 6


def test_a_fit_that_failed_is_counted_once_afterwards():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = small_model(keras.optimizers.SGD(0.1), run_eagerly=True)
    callback = distributed.GradientStatistics(1)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, verbose=0, callbacks=[callback, Stop()])
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[callback])
    assert [r["step"] for r in callback.history] == [1, 2, 3]


def test_one_process_does_not_drift_and_nothing_overflows_without_a_limit():
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = small_model(optimizer, run_eagerly=True)
    check = distributed.ReplicaDriftCheck(1, optimizer=True, non_trainable=True)
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[check])
    assert check.checks == 2
    with pytest.raises(ValueError, match=r"needs an .* clip_value given"):
        model.fit(X, Y, verbose=0, callbacks=[distributed.ResidualOverflowCheck()])


def test_overflow_is_counted_from_the_start_of_each_fit():
    compression = distributed.OneBitCompression(
        [("kernel", 1)], clip_value=1e-4, reset_interval=None
    )
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(0.0), compression)
    model = small_model(optimizer, run_eagerly=True)
    check = distributed.ResidualOverflowCheck(1)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"clip_value=0\.0001") as seen:
            model.fit(X, Y, batch_size=3, verbose=0, callbacks=[check])
        assert len([w for w in seen if "clip_value" in str(w.message)]) == 1
        assert 0 < sum(check.clipped.values()) <= 12
    perfect = model.predict(X, verbose=0)  # no gradient: what is left of before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, perfect, batch_size=3, verbose=0, callbacks=[check])
    assert sum(check.clipped.values()) == 0


@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("GradientStatistics", {"every": 0}, "every .* at least 1, received 0"),
        ("GradientStatistics", {"ranks": 1}, "ranks must be None or a list"),
        ("GradientStatistics", {"ranks": [-1]}, r"ranks .* received \[-1\]"),
        ("GradientStatistics", {"log_dir": ""}, "log_dir must be None or the path"),
        ("GradientStatistics", {"logs": 1}, "logs must be True or False"),
        ("ReplicaDriftCheck", {"every": 2.5}, "every .* received 2.5"),
        ("ReplicaDriftCheck", {"optimizer": None}, "optimizer must be True or False"),
        ("ReplicaDriftCheck", {"timeout": 0}, "timeout .* received 0"),
        ("ResidualOverflowCheck", {"every": True}, "every .* received True"),
    ],
)
def test_bad_arguments_are_refused(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        getattr(distributed, name)(**arguments)
