"""compression="auto": the rule, one process, and two ranks that measure unlike."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from horovod_helpers import launch_fixture

from tf_basis import distributed
from tf_basis.distributed import auto, compression
from tf_basis.distributed.reducer import Spec
from tf_basis.distributed.world import World

checks = launch_fixture("balanced", ranks=2, timeout=300)
BITS = {"none": 32, "fp16": 16}


def test_all_ranks_measure_and_decide_alike(checks):
    first, second = checks["measured"]
    assert first["choice"] == second["choice"]
    chosen, seconds = first["choice"]
    assert list(seconds) == ["none", "fp16", "onebit"] and chosen in seconds
    assert chosen == auto.choose(seconds) and min(seconds.values()) > 0
    for rank in (first, second):
        assert rank["before"] == "auto"
        expected = compression.named(chosen).policy.get_config()
        assert rank["policy"] == expected
        np.testing.assert_allclose(rank["kernel"], -1.5, rtol=1e-6)


def test_the_config_holds_the_decision(checks):
    for rank in checks["measured"]:
        assert rank["again"] and rank["again_choice"] is None
        assert rank["variables"][0] == rank["variables"][1]


def test_ranks_that_measure_unlike_decide_alike_by_the_slowest(checks):
    first, second = checks["decided_by_the_slowest"]
    for (choice, moved), (theirs, _), expected in zip(first, second, ["fp16", "none"]):
        assert choice == theirs and choice.compression == expected
        np.testing.assert_allclose(moved, -1.5, rtol=1e-6)
    assert first[0][0].seconds == {"none": 90, "fp16": 20, "onebit": 18}


def test_a_tape_decides_too(checks):
    for found in checks["a_tape_decides_too"]:
        # Of 1 bit: the mean of gradients that are alike, to the rounding of scales.
        np.testing.assert_allclose(found, 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    "none, fp16, onebit, expected",
    [
        (1.0, 1.0, 1.0, "none"),
        (3.0, 2.9, 2.01, "none"),  # not by the margin
        (3.1, 3.0, 1.99, "onebit"),
        (3.0, 2.0, 1.5, "fp16"),
        (1.0, 5.0, 0.6, "onebit"),
        (1.0, 0.95, 0.9, "none"),
    ],
)
def test_what_is_less_exact_must_be_clearly_faster(none, fp16, onebit, expected):
    assert auto.choose({"none": none, "fp16": fp16, "onebit": onebit}) == expected


def test_one_process_exchanges_nothing_and_measures_nothing():
    optimizer = distributed.DistributedOptimizer(tf.keras.optimizers.SGD(), "auto")
    with pytest.raises(ValueError, match="must be built first"):
        optimizer.compression_choice  # noqa: B018
    assert optimizer.get_config()["compression"] == "auto"
    optimizer.build(_kernels())
    assert optimizer.compression_choice == auto.Choice("none", {})
    policy = optimizer.get_config()["compression"]["policy"]
    assert policy == compression.named("none").policy.get_config()
    for bad in ("Auto", 3):
        with pytest.raises(ValueError, match=r"'onebit', 'auto'\) or .* received"):
            distributed.DistributedOptimizer(tf.keras.optimizers.SGD(), bad)


def _kernels():
    layer = tf.keras.layers.Dense(3)
    layer.build((None, 2))
    return layer.trainable_weights


def test_long_buffers_are_measured_in_part_and_tables_not_at_all(monkeypatch):
    monkeypatch.setattr(auto, "MOST_ELEMENTS", 1000)
    specs = [
        Spec("table/embeddings", (10**9, 64), "float32"),
        Spec("own/kernel", (10**9, 64), "float32", leave=True),
        Spec("dense/kernel", (100, 79), "float32"),
        Spec("dense/bias", (100,), "float32"),
    ]
    for name in auto.CANDIDATES:
        sent = compression.named(name)
        run, scale = auto.exchange_of(sent, specs, World(), "part")
        assert scale == 8
        run()
