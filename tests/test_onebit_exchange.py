"""The 1-bit exchange on real ranks: golden values, conservation, equal bytes."""

from __future__ import annotations

import numpy as np
import pytest
from horovod_helpers import launch_fixture

SETS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
two = launch_fixture("exchange", ranks=2)
three = launch_fixture("exchange", ranks=3, env=SETS)
four = launch_fixture("exchange", ranks=4, env=SETS)


more = [pytest.param(n, marks=pytest.mark.long) for n in ("three", "four")]


@pytest.fixture(params=["two", *more])
def checks(request):
    return request.getfixturevalue(request.param)


def all_equal(values) -> bool:
    return all(v == values[0] for v in values)


@pytest.mark.parametrize("ops", ["op", "twin"])
def test_golden_values(checks, ops):
    for errors in checks[f"golden_{ops}"]:
        assert len(errors) >= 4, "no golden case for this number of ranks"
        assert np.max(errors) < 1e-5


@pytest.mark.parametrize("bits", ["one_bit", "two_bits"])
def test_sums_differ_by_the_residuals_only(checks, bits):
    results = checks[f"conserves_{bits}"]
    assert all_equal([r["digest"] for r in results])
    for result in results:
        assert result["difference"] < 1e-2 * result["lag"]
        assert result["difference"] < 2e-3
        assert result["residual"] > 0.1


def test_flush_sends_what_is_owed(checks):
    results = checks["flush"]
    assert all_equal([r["digest"] for r in results])
    for result in results:
        assert result["lag"] < 1e-5
        assert result["residual"] == 0


def test_one_rank_with_an_infinite_value_leaves_all_residuals(checks):
    results = checks["not_finite_on_one_rank"]
    assert all(r["all_nan"] and r["kept"] for r in results)
    assert all_equal([r["next"] for r in results])


def test_zero_blocks_stay_zero(checks):
    assert all(checks["zero_blocks_stay_zero"])


def test_clipped_elements_are_counted_and_dropped(checks):
    for rank, result in enumerate(checks["clipped"]):
        assert result["count"] == 1 + rank
        sent = (1.0 * (1 + rank) + 0.5 * (15 - rank)) / 16
        expected = [1 - sent] * (1 + rank) + [0.5 - sent] * (15 - rank)
        np.testing.assert_allclose(result["residual"], expected, atol=1e-6)


def test_eager_equals_traced(checks):
    for eager, traced in checks["eager_equals_traced"]:
        assert eager == traced


def test_rows_are_summed_over_ranks(checks):
    results = checks["rows_of_several_tables"]
    assert all_equal([r["digest"] for r in results])
    worst = results[0]["worst"]
    assert worst["float32"] < 1e-6
    assert 1e-6 < worst["float16"] < 2e-3
    assert 1e-2 < worst["1bit"] < 1


def test_horovods_own_tape_takes_the_compression(checks):
    results = checks["horovods_own_tape"]
    assert all_equal([r["digests"] for r in results])
    for result in results:
        # Two tensors, two channels, although it was traced more than once.
        assert result["channels"] == 2
        assert result["difference"] < 1e-4
        assert result["lag"] > 0.1


def test_horovods_tape_takes_the_bare_class_and_sums(checks):
    results = checks["horovods_tape_with_the_bare_class"]
    ranks = len(results)
    for result in results:
        np.testing.assert_allclose(result, [ranks * (ranks + 1) / 2] * 64, rtol=1e-6)


@pytest.mark.long
def test_a_process_set_averages_among_its_ranks(four):
    for rank, result in enumerate(four["a_subset_of_the_ranks"]):
        if rank in (0, 2):
            np.testing.assert_allclose(result, [2.0] * 20)
        else:
            assert "process_set must contain this rank" in result
