"""What quantisation refuses, before anything changes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from quantize_helpers import variable

from tf_basis.distributed.quantize import average, dequantize, message_bytes, quantize

GOOD = {"bits": 1, "block": 8}

BAD_FORMATS = [
    ({"bits": 3}, "bits must be .* received 3"),
    ({"bits": 1.0}, "bits must be .* received 1.0"),
    ({"bits": True}, "bits must be .* received True"),
    ({"bits": None}, "bits must be .* received None"),
    ({"block": 0}, "block must be .* received 0"),
    ({"block": 12}, "block must be a multiple of 8, received 12"),
    ({"block": "8"}, "block must be .* received '8'"),
    ({"block": 8.0}, "block must be .* received 8.0"),
]


@pytest.mark.parametrize("bad, message", BAD_FORMATS, ids=str)
def test_bad_format(bad, message):
    arguments, residual = GOOD | bad, variable([1.0])
    for call in (
        lambda: message_bytes(1, **arguments),
        lambda: quantize(residual, [1.0], **arguments),
        lambda: average(residual, tf.zeros([5], tf.uint8), workers=1, **arguments),
        lambda: dequantize(tf.zeros([5], tf.uint8), 1, **arguments),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    np.testing.assert_array_equal(residual.numpy(), [1.0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e39, "1"])
def test_bad_clip_value(value):
    words = rf"clip_value must be .* received {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=words):
        quantize(variable([1.0]), [1.0], clip_value=value, **GOOD)


def test_bad_counts_and_residuals():
    message = tf.zeros([5], tf.uint8)
    with pytest.raises(ValueError, match=r"workers must be .* received 0"):
        average(variable([1.0]), message, workers=0, **GOOD)
    with pytest.raises(ValueError, match=r"elements must be .* received -1"):
        dequantize(message, -1, **GOOD)
    with pytest.raises(ValueError, match=r"elements must be .* received 1\.5"):
        message_bytes(1.5, **GOOD)
    for bad in (
        tf.constant([1.0]),
        tf.Variable([1.0], dtype=tf.float64),
        variable([[1.0]]),
        tf.Variable([1.0], shape=[None]),
    ):
        with pytest.raises(ValueError, match="residual must"):
            quantize(bad, [1.0], **GOOD)


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_wrong_lengths_change_nothing(backend, function):
    residual = variable(np.ones(20))
    size = message_bytes(20, **GOOD)

    def wrapped(call):
        return tf.function(call, autograph=False) if function else call

    for length in (0, 19, 21):
        call = wrapped(lambda x: quantize(residual, x, **GOOD))
        with pytest.raises(tf.errors.InvalidArgumentError, match="values must have"):
            call(tf.ones([length]))
    for length in (0, size, 2 * size - 1, 2 * size + 1, 3 * size):
        call = wrapped(lambda x: average(residual, x, workers=2, **GOOD))
        with pytest.raises(tf.errors.InvalidArgumentError, match="messages must have"):
            call(tf.zeros([length], tf.uint8))
    for length in (0, size - 1, size + 1):
        call = wrapped(lambda x: dequantize(x, 20, **GOOD))
        with pytest.raises(tf.errors.InvalidArgumentError, match="message must have"):
            call(tf.zeros([length], tf.uint8))
    np.testing.assert_array_equal(residual.numpy(), np.ones(20))


def test_the_ops_check_what_reaches_them_directly():
    from tf_basis.ops import loader

    with loader.use("require"):
        library = loader.compiled()
    message = tf.zeros([5], tf.uint8)
    for arguments, words in (
        ({"elements": 2**62, **GOOD}, "elements must be"),
        ({"elements": -1, **GOOD}, "elements must be"),
        ({"elements": 1, "bits": 3, "block": 8}, "bits must be"),
        ({"elements": 1, "bits": 1, "block": 9}, "block must be"),
        ({"elements": 1, "bits": 1, "block": 2**63 - 8}, None),
    ):
        if words is None:
            assert library.tf_basis_dequantize_blocks(message, **arguments).shape == 1
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            library.tf_basis_dequantize_blocks(message, **arguments)
    for residual, words in (
        (tf.Variable([1, 2]), "must be float, received int32"),
        (tf.Variable([[1.0, 2.0]]), "residual must be of rank 1"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            library.tf_basis_quantize_blocks(
                residual.handle, [[1.0, 2.0]], [], [], **GOOD
            )


def test_sizes_beyond_32_bits():
    assert message_bytes(2**40, bits=1, block=2048) == 2**37 + 4 * 2**29
    assert message_bytes(2**40 + 9, bits=2, block=2048) == 2**38 + 8 * 2**29 + 8 + 3
