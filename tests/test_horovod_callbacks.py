"""Callbacks, `broadcast_variables` and `average_metrics` on two ranks and on one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same_bits, make_click_model, to_numpy
from horovod_helpers import launch_fixture, run_ranks

from tf_basis import distributed
from tf_basis.distributed import broadcast

checks = launch_fixture(
    "callbacks", ranks=2, timeout=300, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
)
CHECKED_FIRST = "ValueError: all ranks must have the same variables"

# ---- broadcast ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, root",
    [
        ("basis_adam_starts_alike", 0),
        ("root_rank_one", 1),
        ("unbuilt_optimizer_starts_alike", 0),
        ("loss_scale_optimizer_starts_alike", 0),
        ("multi_optimizer_starts_alike", 0),
    ],
)
def test_ranks_start_with_the_state_of_the_root(checks, name, root):
    ranks = checks[name]
    if ranks == [None, None]:
        pytest.skip("tf_keras has no MultiOptimizer")
    assert ranks[0]["before"] != ranks[1]["before"]
    assert ranks[0]["started"] == ranks[1]["started"]
    if name != "unbuilt_optimizer_starts_alike":  # there the callback built it
        assert ranks[1]["started"] == [ranks[root]["before"]]
    assert ranks[0]["variables"] > 10


def test_the_scale_of_losses_is_sent(checks):
    first, second = (r["scales"] for r in checks["loss_scale_optimizer_starts_alike"])
    assert first[0] != second[0] and first[1] == second[1]


def test_every_fit_starts_alike_whatever_its_first_epoch(checks):
    for first, second in zip(*checks["every_fit_broadcasts_once"]):
        assert first["before"] != second["before"]
        assert first["started"][0] == second["started"][0]
    (first, second), _ = checks["every_fit_broadcasts_once"]
    assert (len(first["started"]), len(second["started"])) == (2, 1)


def test_residuals_are_not_sent(checks):
    first, second = checks["residuals_stay"]
    np.testing.assert_array_equal(first["local"], np.full(3, 10.0, np.float32))
    np.testing.assert_array_equal(second["local"], np.full(3, 11.0, np.float32))
    assert first["weights"] == second["weights"]


def test_the_distributed_optimizer_keeps_residuals_by_rank(checks):
    first, second = checks["distributed_optimizer_keeps_its_residuals"]
    pairs = list(zip(first["residuals"], second["residuals"]))
    assert any(np.any(a) and not np.array_equal(a, b) for a, b in pairs)
    for a, b in zip(first["shared"], second["shared"]):
        np.testing.assert_array_equal(a, b)


def test_a_model_without_weights_is_alike_after_its_first_batch(checks):
    first, second = checks["late_model_is_alike_after_its_first_batch"]
    assert first == second


def test_every_dtype_arrives_to_the_bit(checks):
    for result in checks["every_dtype_arrives_to_the_bit"]:
        assert len(result["got"]) == 2
        for got in result["got"].values():
            assert got == result["wanted"]


def test_differing_variables_are_refused_on_all_ranks(checks):
    for rank, result in enumerate(checks["differing_variables_are_refused"]):
        shape, dtype, number, named, root, roots, text = result["errors"]
        for error in (shape, dtype, number, named, roots):
            assert error.startswith(CHECKED_FIRST)
        assert "rank 0: 'wide' (2, 3)" in shape and "rank 1: 'wide' (2, 4)" in shape
        assert "int32" in dtype and "int64" in dtype
        assert "rank 0: nothing; rank 1: 'more'" in number
        assert "'one'" in named and "'other'" in named
        assert "root_rank must be one of the 2 ranks, received 2" in root
        assert "rank 0: root_rank 0; rank 1: root_rank 1" in roots
        assert "variables must hold numbers, received 'text'" in text
        assert result["model"].startswith(CHECKED_FIRST)
        assert result["before"] == 1.0 + rank
        # Numbers of layers do not count: this one was sent.
        assert result["numbered"] is None and result["after"] == 1.0


def test_process_sets_are_worlds_of_their_own(checks):
    for rank, result in enumerate(checks["process_set_of_one"]):
        assert result["value"] == rank and result["mean"] == rank
        assert "process_set must contain this rank" in result["other"]


PART = """
import horovod.tensorflow as hvd, tensorflow as tf
from horovod_rank import report
from tf_basis import distributed
part = hvd.ProcessSet([0, 2])
hvd.init(process_sets=[part])
variable = tf.Variable([float(hvd.rank())])
if hvd.rank() != 1:
    distributed.broadcast_variables([variable], root_rank=1, process_set=part)
hvd.allreduce(tf.ones(1))  # a rank that ends takes Horovod along on all
report(float(variable[0]))
"""


@pytest.mark.long
def test_the_root_is_counted_inside_the_process_set():
    assert [result.value for result in run_ranks(PART, 3)] == [2.0, 1.0, 2.0]


# ---- metrics --------------------------------------------------------------------


def test_metrics_are_averaged_over_the_ranks_that_have_them(checks):
    first, second = checks["metrics_are_averaged"]
    for rank, result in enumerate((first, second)):
        plain = result["plain"]
        assert plain["loss"] == (0.1 + 1.1) / 2 and plain["note"] == f"r{rank}"
        assert plain["val_loss"] == 3.0 and plain["other"] == 0.5
        np.testing.assert_array_equal(plain["f1"], [0.0, 0.5])
        assert result["weighted"] == {"loss": (1 * 1.0 + 3 * 2.0) / 4}
        assert result["zero"] == {"loss": 7.0}
        assert result["empty"] == {}
        assert "metric 'x' must have one shape on all ranks" in result["shapes"]
        assert "received -1 on rank 1" in result["weights"]
        assert "weight must be above 0 on some rank" in result["none"]
    assert list(first["plain"]) == ["loss", "note", "f1", "val_loss", "other"]


def test_logs_are_averaged_before_later_callbacks(checks):
    first, second = checks["logs_are_averaged_before_other_callbacks"]
    assert first["seen"] == second["seen"]
    assert first["own"] != second["own"]
    for epoch in range(2):
        a, b, mean = (x[epoch] for x in (first["own"], second["own"], first["seen"]))
        assert "val_loss" not in b
        for name in ("loss", "mae"):
            assert mean[name] == (float(a[name]) + float(b[name])) / 2
        assert mean["val_loss"] == float(a["val_loss"])
        for rank in (first, second):
            for name, value in mean.items():
                assert rank["history"][name][epoch] == value


# ---- learning rate --------------------------------------------------------------


def test_the_learning_rate_warms_up(checks):
    for result in checks["learning_rate_warms_up"]:
        # Three steps an epoch; from lr to 2·lr over two epochs, then left alone.
        rising = [0.1 * (1 + (n + 1) / 6) for n in range(6)]
        np.testing.assert_allclose(result["plain"], [*rising, 0.2, 0.2, 0.2], rtol=1e-6)
        outer, inner = np.transpose(result["nested"])
        np.testing.assert_allclose(outer, [0.3, 0.4, 0.4], rtol=1e-6)
        np.testing.assert_allclose(inner, outer / 4, rtol=1e-6)
        np.testing.assert_allclose(
            result["resumed"], [*rising[3:], 0.2, 0.2, 0.2], 1e-6
        )


def test_ranks_with_more_steps_warm_up_alike(checks):
    first, second = checks["ranks_of_different_length_warm_up_alike"]
    assert (len(first), len(second)) == (2, 4)
    assert first == second[:2]
    np.testing.assert_allclose(second, [0.125, 0.15, 0.175, 0.2], rtol=1e-6)


def test_warm_up_refuses_on_all_ranks(checks):
    for schedule, settings, steps in checks["warm_up_refuses_on_all_ranks"]:
        assert "needs optimizers whose learning rate is a number" in schedule
        assert "on rank 1" in schedule
        assert "must be equal on all ranks" in settings
        assert "steps_per_epoch must be given" in steps and "on rank 1" in steps


# ---- one process, no launcher ---------------------------------------------------


def test_one_process_needs_no_horovod():
    model = make_click_model(tf.keras.optimizers.Adam(0.01))
    before = [to_numpy(w) for w in model.weights]
    x, y = np.ones((8, 3), np.int32), np.zeros((8, 1), np.float32)
    rates, logs = [], []

    class Look(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(to_numpy(self.model.optimizer.learning_rate)))
            if batch == 0:
                for weight, value in zip(self.model.weights, before):
                    np.testing.assert_array_equal(to_numpy(weight), value)

        def on_epoch_end(self, epoch, logs_=None):
            logs.append(dict(logs_))

    history = model.fit(
        x,
        y,
        batch_size=4,
        verbose=0,
        callbacks=[
            distributed.BroadcastCallback(),
            distributed.MetricAverageCallback(),
            distributed.LearningRateWarmupCallback(0.25, warmup_epochs=1),
            Look(),
        ],
    )
    assert rates == [0.25, 0.25]
    assert logs[0]["loss"] == history.history["loss"][0]
    variable = tf.Variable([1.0])
    distributed.broadcast_variables([variable])
    assert_same_bits({"v": variable.numpy()}, {"v": np.float32([1.0])})


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: distributed.BroadcastCallback(-1), "root_rank .* received -1"),
        (lambda: distributed.BroadcastCallback(timeout=0), "timeout .* received 0"),
        (lambda: distributed.MetricAverageCallback(timeout="x"), "timeout .*'x'"),
        (
            lambda: distributed.LearningRateWarmupCallback(0.0),
            "initial_learning_rate .* above 0, received 0.0",
        ),
        (
            lambda: distributed.LearningRateWarmupCallback(0.1, 0),
            "warmup_epochs .* received 0",
        ),
        (
            lambda: distributed.LearningRateWarmupCallback(0.1, steps_per_epoch=0),
            "steps_per_epoch must be None or an integer of at least 1, received 0",
        ),
        (
            lambda: distributed.LearningRateWarmupCallback(0.1, verbose="auto"),
            "verbose must be one of 0, 1, received 'auto'",
        ),
        (
            lambda: distributed.broadcast_variables([], root_rank=1),
            "root_rank must be one of the 1 ranks, received 1",
        ),
        (lambda: distributed.average_metrics({}, weight=float("nan")), "weight .* nan"),
    ],
)
def test_bad_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_chunks_cover_every_byte_once():
    sizes = [0, 5, 12, 0, 1, 30]
    for limit in (1, 4, 5, 13, 100):
        chunks = list(broadcast._chunks(sizes, limit))
        assert all(sum(b - a for _, a, b in c) <= limit for c in chunks)
        assert all(sum(b - a for _, a, b in c) == limit for c in chunks[:-1])
        bytes_of = [(n, i) for c in chunks for n, a, b in c for i in range(a, b)]
        assert bytes_of == [(n, i) for n, s in enumerate(sizes) for i in range(s)]
