"""Quantisation with error feedback: reference, op and twin; no communication."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import tensorflow as tf
from helpers import load_golden
from quantize_helpers import (
    ONE_BIT_TOLERANCE,
    SIZES,
    Ranks,
    check_step,
    random_values,
    variable,
    widths,
)
from reference import quantize as reference

from tf_basis.distributed import quantize as module
from tf_basis.distributed.quantize import (
    average,
    count_unusable,
    dequantize,
    message_bytes,
    quantize,
)

# ---- golden values and the reference ---------------------------------------------


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("case", range(len(load_golden("onebit_allreduce"))))
def test_golden(backend, case, function):
    case = load_golden("onebit_allreduce")[case]
    elements, workers, block = case["elements"], case["workers"], case["block"]
    ranks = Ranks(elements, workers, 1, block, function)
    exchange = reference.Exchange(elements, workers, 1, block)
    for step in case["steps"]:
        gradients = np.array(step["gradients"], np.float32)
        ours = ranks.average(tf.constant(gradients)).numpy()
        errors = [error.numpy() for error in ranks.worker_errors]
        theirs = exchange.average(step["gradients"])
        for result, worker_error, server_error in (
            (ours, errors, ranks.server_error()),
            (theirs, exchange.worker_errors, exchange.server_error),
        ):
            close = {"actual": result, "desired": step["average"]}
            np.testing.assert_allclose(**close, **ONE_BIT_TOLERANCE)
            close = {"actual": worker_error, "desired": step["worker_error"]}
            np.testing.assert_allclose(**close, **ONE_BIT_TOLERANCE)
            close = {"actual": server_error, "desired": step["server_error"]}
            np.testing.assert_allclose(**close, **ONE_BIT_TOLERANCE)


@widths
@pytest.mark.parametrize("elements, block", SIZES)
def test_quantize_equals_reference(backend, bits, elements, block, rng):
    residual = variable(random_values(rng, elements))
    assert message_bytes(elements, bits=bits, block=block) == len(
        reference.quantize(np.ones(elements), bits, block)[1]
    )
    for _ in range(6):
        before, values = residual.numpy(), random_values(rng, elements)
        message, clipped = quantize(residual, values, bits=bits, block=block)
        assert int(clipped) == 0
        check_step(message, residual, before, values + before, bits, block)


@widths
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("elements, block", SIZES)
def test_average_equals_reference(backend, bits, workers, elements, block, rng):
    residual = variable(random_values(rng, elements))
    for _ in range(3):
        before, total, messages = residual.numpy(), np.float32(0), b""
        for _ in range(workers):
            q, message = reference.quantize(random_values(rng, elements), bits, block)
            total, messages = total + q.astype(np.float32), messages + message
        u = total / np.float32(workers) + before
        messages = np.frombuffer(messages, np.uint8)
        message = average(residual, messages, workers=workers, bits=bits, block=block)
        check_step(message, residual, before, u, bits, block)


def test_exchange_of_two_bits_equals_reference(backend, rng):
    """The golden values are of one bit."""
    ranks, exchange = Ranks(333, 3, 2, 32), reference.Exchange(333, 3, 2, 32)
    for _ in range(3):
        gradients = rng.normal(size=(3, 333)).astype(np.float32)
        np.testing.assert_allclose(
            ranks.average(tf.constant(gradients)).numpy(),
            exchange.average(gradients),
            **ONE_BIT_TOLERANCE,
        )


# ---- nothing is lost -------------------------------------------------------------


@widths
def test_sum_of_quantized_differs_by_the_residual_exactly(backend, bits, rng):
    """Small integers and blocks of 8: up to the mean no number is rounded."""
    residual, sums = variable(np.zeros(64)), np.zeros((2, 64))
    for _ in range(4 if bits == 1 else 1):
        values = rng.integers(-8, 9, 64).astype(np.float32)
        message, _ = quantize(residual, values, bits=bits, block=8)
        sums += [values, dequantize(message, 64, bits=bits, block=8).numpy()]
        if bits == 1:
            np.testing.assert_array_equal(sums[0] - sums[1], residual.numpy())
        else:
            np.testing.assert_allclose(sums[0] - sums[1], residual.numpy(), atol=1e-6)
    assert np.any(residual.numpy())


@widths
def test_sum_of_averages_differs_by_the_residuals(backend, bits, rng):
    ranks, sums = Ranks(100, 2, bits, 16, function=True), np.zeros((2, 100))
    for _ in range(100):
        gradients = rng.normal(size=(2, 100)).astype(np.float32)
        sums += [gradients.mean(axis=0), ranks.average(tf.constant(gradients)).numpy()]
    errors = np.mean([error.numpy() for error in ranks.worker_errors], axis=0)
    left = errors + ranks.server_error()
    np.testing.assert_allclose(sums[0] - sums[1], left, atol=1e-4)
    assert np.abs(left).max() > 0.1 and np.abs(left).max() < 20


@widths
def test_blocks_of_zeros_stay_zero(backend, bits):
    values = np.zeros(40, np.float32)
    values[20:24], values[1:40:2] = 0.5, -0.0  # block 2 (of 16) alone is not zero
    values[20] = 3
    residual = variable(np.zeros(40))
    message, _ = quantize(residual, values, bits=bits, block=16)
    stride = message_bytes(16, bits=bits, block=16)
    for start in (0, 2 * stride):
        assert not message[start : start + 4 * bits].numpy().any()
    restored = dequantize(message, 40, bits=bits, block=16).numpy()
    averaged = average(
        variable(np.zeros(40)),
        tf.concat([message, message], 0),
        workers=2,
        bits=bits,
        block=16,
    )
    again = dequantize(averaged, 40, bits=bits, block=16).numpy()
    for array in (restored, again):
        zeros = np.r_[array[:16], array[32:]]
        assert zeros.tobytes() == bytes(4 * 24)  # +0, every bit
        assert array[16:32].any()
    assert not residual.numpy()[:16].any() and not residual.numpy()[32:].any()


def test_equal_magnitudes_leave_the_low_class_empty(backend):
    values = np.tile(np.float32([0.1, -0.1]), 12)
    residual = variable(np.zeros(24))
    message, _ = quantize(residual, values, bits=2, block=24)
    np.testing.assert_array_equal(message[:8].numpy().view(np.float32), [0, values[0]])
    np.testing.assert_array_equal(dequantize(message, 24, bits=2, block=24), values)
    np.testing.assert_array_equal(residual.numpy(), 0)


@widths
def test_bits_past_the_end_are_zero(backend, bits):
    for elements in range(1, 33):
        residual = variable(np.zeros(elements))
        values = np.ones(elements, np.float32)
        message, _ = quantize(residual, values, bits=bits, block=32)
        number = int.from_bytes(message[4 * bits :].numpy().tobytes(), "little")
        assert number == (1 << (elements * bits)) - 1


# ---- clipping and unusable values --------------------------------------------------


@widths
def test_clip(backend, bits, rng):
    for elements in (5, 16, 75):
        before = rng.normal(size=elements).astype(np.float32)
        values = rng.normal(size=elements).astype(np.float32)
        values[0], before[0] = 0.75, 0.25  # the limit itself is not clipped
        residual = variable(before)
        message, clipped = quantize(
            residual, values, bits=bits, block=32, clip_value=1.0
        )
        u = before + values
        assert int(clipped) == np.sum(np.abs(u) > 1) > 0
        check_step(message, residual, before, np.clip(u, -1, 1), bits, 32)


@pytest.mark.parametrize("elements", [0, 1, 5, 1000, 70_001])
def test_count_unusable(backend, elements, rng):
    values = rng.normal(size=elements).astype(np.float32)
    assert int(count_unusable(values)) == 0
    bad = [np.nan, np.inf, -np.inf, 1.1e37, -3e38, -np.nan]
    at = rng.permutation(elements)[: len(bad)]
    values[at] = bad[: len(at)]
    values[[i for i in range(min(elements, 50)) if i not in at]] = -1e37
    assert int(count_unusable(values)) == len(at)
    assert int(count_unusable(tf.reshape(values, [1, -1, 1]))) == len(at)
    # Graphs are rewritten: `not a <= b` as `a > b`, which no NaN is.
    traced = tf.function(count_unusable)
    assert int(traced(tf.constant(values))) == len(at)


def test_docstrings():
    result = doctest.testmod(module, extraglobs={"tf": tf})
    assert result.attempted > 8 and result.failed == 0
