"""DistributedOptimizer, tape and OneBitAdam on real ranks: equal bits, right values."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import active_flavor
from horovod_helpers import launch_fixture

checks = launch_fixture("optimizer", ranks=2, timeout=600)

PAIRS = [
    "basis_with_onebit_adam",
    "literal_policy",
    "automatic_warmup",
    "basis_alone_in_one_bit",
]


def all_equal(values) -> bool:
    return all(v == values[0] for v in values)


@pytest.mark.parametrize("name", PAIRS)
def test_ranks_stay_equal_to_the_bit(checks, name):
    """Batches have duplicates, and another size on every rank."""
    results = checks[name]
    assert all_equal([r["weights"] for r in results])
    assert all_equal([r["state"] for r in results])
    assert all_equal([r["iterations"] for r in results])
    assert all(0 < r["residuals"] < r["variables"] for r in results)
    assert all(np.isfinite(r["loss"]) for r in results)


def test_automatic_warmup_ends_at_the_same_step(checks):
    ends = [r["frozen_at"] for r in checks["automatic_warmup"]]
    assert all_equal(ends)
    assert 10 < ends[0] < 50
    assert ends[0] % 10 == 0


def test_golden_onebit_adam(checks):
    for errors in checks["golden_onebit_adam"]:
        assert set(errors) == {"frozen", "corrected"}
        assert max(errors.values()) < 1e-4


def test_equals_one_process_with_the_mean_gradient(checks):
    for worst in checks["equals_one_process"]:
        assert set(worst) == {"adam", "clipped", "decayed", "basis"}
        assert max(worst.values()) < 2e-6


def test_accumulation_communicates_once_per_update(checks):
    for result in checks["accumulation_communicates_once_per_update"]:
        # Means over ranks of step + rank: 0.5, 1.5, ... 5.5.
        np.testing.assert_allclose(result["mean"], [-6.0] * 4, rtol=1e-6)
        np.testing.assert_allclose(result["sum"], [-18.0] * 4, rtol=1e-6)
        assert result["exchanges"] == 2


def test_a_missing_gradient_on_one_rank_is_an_error_on_all(checks):
    for result in checks["different_kinds_of_gradients"]:
        assert "ranks have gradients of different kinds" in result["error"]
        assert result["unchanged"]


@pytest.mark.parametrize(
    "name, told",
    [
        ("different_variables", "rank 1: a_kernel (4, 5) float32"),
        ("different_policies", "'rules': [['.*', 2, 1]]"),
    ],
)
def test_different_ranks_are_an_error_on_all(checks, name, told):
    for message in checks[name]:
        assert message.startswith("ValueError: all ranks must have the same")
        assert told in message


@pytest.mark.parametrize("name", ["wrapped", "onebit_adam"])
def test_a_nan_on_one_rank_skips_the_step_on_all(checks, name):
    results = [r[name] for r in checks["not_finite_on_one_rank"]]
    assert all(r["kept"] and r["moved"] for r in results)
    assert all((r["skipped"], r["iterations"]) == (1, 5) for r in results)
    assert all_equal([r["weights"] for r in results])


def test_loss_scaling_agrees(checks):
    for result in checks["loss_scaling"]:
        assert result["once"] == [-1.5] * 4
        assert result["kept"]
        assert result["scale"] == 2.0


def test_weights_of_ranks(checks):
    for result in checks["weights_of_ranks"]:
        np.testing.assert_allclose(result["weighted"], [-20 / 3] * 4, rtol=1e-6)
        np.testing.assert_allclose(result["alone"], [-20 / 3 - 2] * 4, rtol=1e-6)
        assert result["nobody"]
        assert result["skipped"] == 1


def test_a_variable_with_an_interval_steps_with_the_mean(checks):
    for path in checks["intervals"]:
        slow, fast = np.transpose(path)
        np.testing.assert_allclose(slow, [0, 0, -1.5, -1.5, -1.5, -6.0])
        np.testing.assert_allclose(fast, -np.cumsum(np.arange(6) + 0.5))


def test_uneven_batches_weigh_every_example_the_same(checks):
    results = checks["uneven_batches"]
    assert all_equal([r["weights"] for r in results])
    assert all(r["difference"] < 1e-5 for r in results)
    assert all(r["steps"] == 4 for r in results)


def test_tape(checks):
    results = checks["tape"]
    for result in results:
        np.testing.assert_allclose(result["rows"][:4], [0, 2, 0.5, 0.5])
        assert result["finite"] == [True, False]
        assert result["zeros"]
        assert "interval must be 1" in result["interval"]
    assert all_equal([r["dense"] for r in results])


@pytest.mark.skipif(
    active_flavor() == "keras3", reason="Horovod's own optimizer is one of tf_keras"
)
def test_horovods_own_optimizer_takes_the_compression(checks):
    results = checks["horovods_own_optimizer"]
    assert all_equal([r["weights"] for r in results])
    assert all(r["difference"] < 1e-5 for r in results)


def test_a_saved_model_brings_the_wrapping_back(checks):
    for result in checks["saving"]:
        assert result["class"] == "DistributedOptimizer"
        assert result["is_basis"]
        assert result["inner"] == "OneBitAdam"
        assert result["config"]
        assert result["same"]
        assert result["goes_on"]


def test_a_caught_error_ends_no_job(checks):
    for result in checks["a_caught_error_ends_no_job"]:
        assert "They differ for" in result["error"]
        assert "b_kernel" in result["error"] and "a_kernel" not in result["error"]
        assert result["steps"] >= 2


def test_a_wrong_folder_on_one_rank_is_an_error_on_all(checks):
    for result in checks["no_folder_on_one_rank"]:
        for asked in ("save", "restore"):
            told = "rank 1: directory must be the path of a folder, received 3"
            assert told in result[asked]
        assert not result["written"]
        assert "rank 1: directory needs a folder" in result["fit"] and result["kept"]
