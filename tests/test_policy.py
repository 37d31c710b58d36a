"""Which variables travel in how many bits."""

from __future__ import annotations

import numpy as np
import pytest

from tf_basis.distributed import (
    NORMALIZATION_EVERY_10,
    AdaptiveBits,
    AdaptiveRate,
    OneBitCompression,
    Policy,
    Rule,
)
from tf_basis.distributed.compression import named
from tf_basis.distributed.policy import Way, kind_of

PATHS = [
    ("user/embeddings", (1000, 8), "embedding", 32),
    ("dense/kernel", (64, 64), "dense_kernel", 1),
    ("dense/kernel:0", (64, 64), "dense_kernel", 1),
    ("attention/query/kernel", (64, 4, 16), "dense_kernel", 1),
    ("lstm/lstm_cell/recurrent_kernel", (64, 256), "dense_kernel", 1),
    ("conv2d/kernel", (3, 3, 64, 64), "conv_kernel", 2),
    ("conv1d/kernel", (3, 64, 64), "conv_kernel", 2),
    ("separable/depthwise_kernel", (3, 3, 512, 1), "conv_kernel", 2),
    ("dense/bias", (4096,), "bias", 16),
    ("norm/gamma", (4096,), "normalization", 16),
    ("batch_normalization/beta", (4096,), "normalization", 16),
    ("scale", (4096,), "normalization", 16),
    ("some/vector", (4096,), "other", 16),
    ("some/matrix", (64, 64), "dense_kernel", 1),
]


@pytest.mark.parametrize("path, shape, kind, bits", PATHS)
def test_default_table(path, shape, kind, bits):
    assert kind_of(path, shape) == kind
    assert Policy().way(path, shape) == Way(bits, 1)


def test_small_variables_travel_in_16_bits():
    assert Policy().way("dense/kernel", (31, 33)) == Way(16, 1)
    assert Policy(min_elements=1).way("dense/kernel", (2, 2)) == Way(1, 1)
    # An embedding keeps its 32, and a rule of the user's own counts for all sizes.
    assert Policy().way("small/embeddings", (3, 2)) == Way(32, 1)
    assert Policy([("dense_kernel", 2)]).way("dense/kernel", (2, 2)) == Way(2, 1)


def test_own_rules_come_first_and_the_first_counts():
    policy = Policy([("tower_1/", 2), Rule("dense_kernel", 32), NORMALIZATION_EVERY_10])
    assert policy.way("tower_1/dense/bias", (4,)) == Way(2, 1)
    assert policy.way("tower_2/dense/kernel", (64, 64)) == Way(32, 1)
    assert policy.way("norm/gamma", (64,)) == Way(16, 10)
    assert Policy(**policy.get_config()).get_config() == policy.get_config()


@pytest.mark.parametrize(
    "rule, message",
    [
        (("dense_kernel", 3), "bits must be one of 1, 2, 16, 32, received 3"),
        (("dense_kernel", 1, 0), r"interval must be an integer of at least 1.*0"),
        (("(", 1), r"match must be one of the kinds .* received '\('"),
        (("", 1), r"match must be one of the kinds .* received ''"),
        (("dense_kernel",), r"rules must be a list of \(match, bits\)"),
        (7, r"rules must be a list of \(match, bits\).* received 7"),
        (("dense_kernel", 1.0), "bits must be one of 1, 2, 16, 32, received 1.0"),
        (("dense_kernel", np.ones(2)), "bits must be one of .* received array"),
        (("dense_kernel", 1, 1, "a b"), "group must be letters, .* received 'a b'"),
    ],
)
def test_bad_rules(rule, message):
    with pytest.raises(ValueError, match=message):
        Policy([rule])
    if isinstance(rule, tuple) and len(rule) > 1:
        with pytest.raises(ValueError, match=message):
            Rule(*rule)


@pytest.mark.parametrize("rules", [3, "dense_kernel", "", {}])
def test_rules_that_are_no_list(rules):
    with pytest.raises(ValueError, match=r"rules must be a list of .* received"):
        Policy(rules)


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (AdaptiveBits, {"raise_above": "x"}, "raise_above must be a number .* 'x'"),
        (AdaptiveBits, {"lower_below": -1}, "lower_below must be .* above 0, .* -1"),
        (AdaptiveBits, {"patience": 1.5}, "patience must be an integer .* 1.5"),
        (AdaptiveBits, {"raise_above": 0.5}, "lower_below must be .* 0.75 and 0.5"),
        (AdaptiveRate, {"floor": "x"}, "floor must be a number between 0 .* 'x'"),
        (AdaptiveRate, {"smoothing": 10**400}, "smoothing must be .* received 1000"),
    ],
)
def test_settings_that_adapt_are_checked_when_made(kind, arguments, message):
    with pytest.raises(ValueError, match="^" + message):
        kind(**arguments)
    name = "adaptive_bits" if kind is AdaptiveBits else "adaptive_rate"
    with pytest.raises(ValueError, match=rf"^{name}\.{message}"):
        OneBitCompression(**{name: arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"block": 12}, "block must be an integer that is a multiple of 8.* 12"),
        ({"clip_value": 0.0}, "clip_value must be None or a number above 0.* 0.0"),
        ({"reset_interval": 0}, "reset_interval must be None or an integer.* 0"),
        ({"reset": "drop"}, "reset must be one of 'flush', 'zero', received 'drop'"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0.*-1"),
        ({"sparse_values": "int8"}, "sparse_values must be one of .* 'int8'"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        OneBitCompression(**arguments)


def test_names_of_compressions():
    way = ("dense/kernel", (64, 64))
    assert named(None).policy.way(*way) == named("none").policy.way(*way) == Way(32, 1)
    assert named("fp16").policy.way(*way) == Way(16, 1)
    assert named("onebit").policy.way(*way) == Way(1, 1)
    assert named(OneBitCompression).policy.way(*way) == Way(1, 1)
    own = OneBitCompression(block=64)
    assert named(own) is own
    assert named(own.get_config()).get_config() == own.get_config()
    with pytest.raises(ValueError, match=r"compression must be None, one of .* 'zip'"):
        named("zip")
