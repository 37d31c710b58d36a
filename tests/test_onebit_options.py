"""Amplitude and metadata phases, what adapts, delay, local steps: on two ranks."""

from __future__ import annotations

import numpy as np
import pytest
from horovod_helpers import launch_fixture

checks = launch_fixture("options", ranks=2, timeout=300)
in_fit = launch_fixture("options_fit", ranks=2, timeout=580)
OPS = [("require", 1), ("require", 2), ("off", 1), ("off", 2)]


def equal(values) -> bool:
    return all(v == values[0] for v in values)


@pytest.mark.parametrize("case", OPS, ids=str)
def test_scales_travel_in_every_third_exchange(checks, case):
    results = [r[case] for r in checks["amplitudes"]]
    assert equal([r["digests"] for r in results])
    ops, bits = case
    # A rank sends the codes of all 4000 elements and of the 2016 or 1984 it owns.
    for result, owned in zip(results, (2048, 1952)):
        assert result["worst"] < 1e-5 and result["residual"] < 1e-5
        codes, headers = (4000 + owned) * bits // 8, 3 * 5
        scales = 4 * bits * (-(-4000 // 64) + -(-owned // 64))
        for step, sent in enumerate(result["sent"]):
            if step % 3:
                assert sent == codes + headers
            elif ops == "off":
                assert sent == codes + headers + scales
            else:  # deflated
                assert codes + headers < sent < codes + headers + scales
        sent, plain = result["traffic"]
        assert plain == 3 * scales
        assert sent == plain if ops == "off" else sent < plain


def test_statistics_are_of_all_ranks(checks):
    first, second = checks["statistics_are_of_all_ranks"]
    assert first == second
    assert first["first"] == {}  # nothing is known yet
    for seen, expected in zip(first["seen"], first["expected"]):
        assert set(seen) == {"1bit"}
        for name, value in expected.items():
            np.testing.assert_allclose(seen["1bit"][name], value, rtol=1e-4, atol=1e-7)
        assert expected["clipped_share"] > 0


def test_the_rate_follows_the_error(checks):
    first, second = checks["adaptive_rate"]
    assert first["digest"] == second["digest"]
    assert first["difference"] < 1e-5
    assert first["factors"][0] == 1 and 0.2 < min(first["factors"]) < 0.9
    assert first["rate"] == pytest.approx(0.1)


def test_bits_rise_and_fall(checks):
    first, second = checks["adaptive_bits"]
    assert first["digest"] == second["digest"]
    assert first["seen"] == first["expected"]
    assert first["difference"] < 1e-5
    assert {1.0, 2.0} == set(first["seen"])
    assert first["seen"].index(2.0) < len(first["seen"]) - 1 - first["seen"][
        ::-1
    ].index(1.0)


@pytest.mark.parametrize("case", ["alone", "loaded"])
def test_one_bit_adam_adapts_rate_bits_and_scales(checks, case):
    """From arguments, and from a settings file inside a `DistributedOptimizer`."""
    found = checks["one_bit_adam_adapts"]
    assert equal([r[case]["digests"] for r in found])
    for result in found:
        assert result[case]["worst"] < 2e-5 and result[case]["moved"] > 0.01
        assert result["bits"] == result["expected_bits"]
        assert result["bits"] == [1] * 8 + [2, 2, 1, 1]
        assert result["factors"][3] == 1 and 0.6 < min(result["factors"]) < 0.7


@pytest.mark.parametrize("case", ["alone", "skips", "wrapped"])
def test_delayed_steps(checks, case):
    results = [r[case] for r in checks["delayed"]]
    assert equal([r["digests"] for r in results])
    for result in results:
        assert result["worst"] < 2e-5
        assert result["skipped"] == {"alone": 0, "skips": 2, "wrapped": 1}[case]
        assert result["moved"] > 0.01


def test_delayed_gradients(checks):
    for result in checks["delayed_gradients"]:
        assert result["difference"] < 1e-6 and max(result["at_once"]) < 1e-6
        assert result["pending"] > 0.1 and result["waiting"] == [(50,)]


@pytest.mark.parametrize(
    "case", ["three", "doubling", "uneven", "synchronized", "wrapped"]
)
def test_local_steps(checks, case):
    results = [r[case] for r in checks["local_steps"]]
    assert equal([r["digests"] for r in results])
    for result in results:
        assert result["worst"] < 2e-5
        assert result["skipped"] == (1 if case == "uneven" else 0)
        assert result["moved"] > 0.01
    together = [step for step, apart in enumerate(results[0]["apart"]) if not apart]
    assert together == {
        "three": [0, 1, 2, 5, 8, 11],
        "doubling": [0, 1, 2, 3, 5, 9],
        "uneven": [0, 1, 2, 5, 8, 11],
        "synchronized": [0, 1, 2, 6],
        "wrapped": [0, 1, 2, 5, 8, 11],
    }.get(case)


@pytest.mark.parametrize("bits", [16, 32])
def test_local_steps_of_more_bits(checks, bits):
    results = [r[bits] for r in checks["local_steps_of_more_bits"]]
    assert equal([r["digests"] for r in results])
    for result in results:
        assert result["worst"] < 0.05 * result["moved"]  # a rounding of variables


def test_settings_of_one_rank_are_an_error_on_all(checks):
    first, second = checks["settings_of_one_rank"]
    assert first == second
    assert (
        "rank 0: OneBitAdam local_steps=1; rank 1: OneBitAdam local_steps=2"
        in (first[0])
    )
    for error in first[1:]:
        assert "gradient_accumulation_steps=None" in error


def test_bad_settings(checks):
    for found in checks["bad_settings"]:
        for name, words in {
            "delay": "delay must be an integer of 0 or 1, received 2",
            "staleness_decay": "staleness_decay must be a number above 0, at most 1",
            "amplitude_interval": "amplitude_interval must be an integer of at least 1",
            "adaptive_bits": "patience must be an integer of at least 1, received 0",
            "flips": "adaptive_bits.lower_below must be below raise_above",
            "no_delay": "staleness_decay must be 1 where delay is 0, received 0.5",
            "adaptive_rate": "adaptive_rate must be None, True, an AdaptiveRate",
            "local_steps": "local_steps must be an integer of at least 1, received 0",
            "doubling": "local_steps_doubling must be None where local_steps is 1",
            "moments": "moments must be 'frozen' with local_steps=2",
            "both": "delay must be 0 with local_steps=2, received 1",
            "interval": "interval must be 1 with delay=1, received 5 for theta",
        }.items():
            assert found[name].startswith("ValueError: ") and words in found[name], name


@pytest.mark.long
@pytest.mark.parametrize("case", ["amplitudes", "bits", "delay", "local"])
def test_training_goes_on_from_a_checkpoint(in_fit, case):
    results = [r[case] for r in in_fit["saved_and_resumed"]]
    assert equal(results)
    assert results[0]["whole"] == results[0]["resumed"] != results[0]["half"]


@pytest.mark.long
def test_callbacks_in_fit(in_fit):
    first, second = in_fit["callbacks_in_fit"]
    assert first["digest"] == second["digest"]
    # Warm-up to 3, the first exchange in step 7, of which the gather of step 8 tells.
    assert first["records"] == [8]
    assert first["last"] == second["last"] != {}
    group = "dense_optimizer/1bit"
    assert f"quantization/{group}/relative_error" in first["keys"]
    assert 0 < first["last"][group]["relative_error"] < 2
    # Due after 2, 4, 6 and 8 batches; the ranks met after 7 only, and at the end.
    assert first["checks"] >= 2
    assert "compression must keep statistics" in first["without"]
