"""Quantisation with error feedback: reference, op and twin; no communication."""

from __future__ import annotations

import doctest
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import BACKENDS, load_golden, run_python, state_digest
from reference import quantize as reference

from tf_basis.distributed import quantize as module
from tf_basis.distributed.quantize import (
    WIDTHS,
    average,
    count_unusable,
    dequantize,
    message_bytes,
    quantize,
)

# Elements and block: short last blocks, none, less than one, groups of 16.
SIZES = [(0, 8), (1, 8), (7, 8), (16, 16), (17, 24), (77, 24), (300, 64), (5000, 2048)]
ONE_BIT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

widths = pytest.mark.parametrize("bits", WIDTHS)


def variable(values) -> tf.Variable:
    return tf.Variable(np.asarray(values, np.float32))


def random_values(rng, elements: int) -> np.ndarray:
    """Elements of many scales, zeros of both signs among them."""
    values = rng.normal(size=elements) * 10.0 ** rng.uniform(-3, 2, elements)
    values[rng.random(elements) < 0.1] = 0.0
    values[rng.random(elements) < 0.1] = -0.0
    return values.astype(np.float32)


def check_step(message, residual, before, u, bits, block):
    """One step against the reference, to the bit; u is float32."""
    quantized, wanted = reference.quantize(u, bits, block)
    assert message.numpy().tobytes() == wanted
    np.testing.assert_array_equal(
        residual.numpy(), (u - quantized.astype(np.float32)).astype(np.float32)
    )
    restored = dequantize(message, len(u), bits=bits, block=block)
    np.testing.assert_array_equal(restored.numpy(), quantized.astype(np.float32))


class Ranks:
    """The two-stage exchange of W ranks in one process."""

    def __init__(self, elements, workers, bits, block, function=False):
        self.elements, self.workers = elements, workers
        self.format = {"bits": bits, "block": block}
        blocks = -(-elements // block)
        per_rank = -(-blocks // workers) * block
        self.ends = [min(j * per_rank, elements) for j in range(workers + 1)]
        self.worker_errors = [variable(np.zeros(elements)) for _ in range(workers)]
        self.server_errors = [
            variable(np.zeros(end - start))
            for start, end in itertools.pairwise(self.ends)
        ]
        call = self._average
        self.average = tf.function(call, autograph=False) if function else call

    def _average(self, gradients):
        """[ranks, n] to [n]"""
        sent = [
            quantize(self.worker_errors[i], gradients[i], **self.format)[0]
            for i in range(self.workers)
        ]
        # Owners own whole blocks, so these are the ends of their parts.
        cuts = [message_bytes(end, **self.format) for end in self.ends]
        parts = []
        for j, (start, end) in enumerate(itertools.pairwise(cuts)):
            received = tf.concat([message[start:end] for message in sent], axis=0)
            error = self.server_errors[j]
            parts.append(average(error, received, workers=self.workers, **self.format))
        return dequantize(tf.concat(parts, axis=0), self.elements, **self.format)

    def server_error(self) -> np.ndarray:
        return np.concatenate([error.numpy() for error in self.server_errors])


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


# ---- variables and functions -------------------------------------------------------


@widths
def test_function_equals_eager_in_order(backend, bits, rng):
    """Two steps and a read in one function; three widths and sizes retrace it."""

    def steps(residual, values, block):
        first, _ = quantize(residual, values, bits=bits, block=block)
        between = residual.read_value()
        second, count = quantize(
            residual, values, bits=bits, block=block, clip_value=0.5
        )
        return first, between, second, count, residual.read_value()

    traced = tf.function(steps, autograph=False)
    traces = set()
    for elements, block in ((20, 8), (20, 16), (33, 16), (20, 8)):
        start, values = rng.normal(size=(2, elements)).astype(np.float32)
        eager, function = variable(start), variable(start)
        results = [
            steps(eager, tf.constant(values), block),
            traced(function, tf.constant(values), block),
        ]
        for one, other in zip(*results):
            assert one.numpy().tobytes() == other.numpy().tobytes()
            assert one.shape == other.shape
        traces.add(traced.experimental_get_tracing_count())
    assert len(traces) >= 3
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(results[0][1], results[0][4])


@widths
def test_static_lengths_in_a_function(backend, bits):
    residual = variable(np.zeros(21))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def exchange(values):
        message, _ = quantize(residual, values, bits=bits, block=8)
        assert message.shape == [message_bytes(21, bits=bits, block=8)]
        message = average(residual, message, workers=1, bits=bits, block=8)
        restored = dequantize(message, 21, bits=bits, block=8)
        assert restored.shape == [21]
        return restored

    assert exchange(tf.ones([21])).shape == [21]
    with pytest.raises(tf.errors.InvalidArgumentError, match="values"):
        exchange(tf.ones([22]))


def test_xla(rng):
    values = rng.normal(size=50).astype(np.float32)
    plain, compiled = variable(np.zeros(50)), variable(np.zeros(50))

    @tf.function(jit_compile=True)
    def step(values):
        message, count = quantize(compiled, values, bits=2, block=16, clip_value=1.0)
        return message, count + count_unusable(values)

    wanted, clipped = quantize(plain, values, bits=2, block=16, clip_value=1.0)
    message, count = step(tf.constant(values))
    np.testing.assert_array_equal(message, wanted)
    np.testing.assert_array_equal(compiled.numpy(), plain.numpy())
    assert int(count) == int(clipped) > 0


@widths
def test_tensors_that_share_the_buffer_keep_their_values(backend, bits, rng):
    start = rng.normal(size=40).astype(np.float32)
    residual = variable(start)
    old = residual.read_value()
    message, _ = quantize(residual, old, bits=bits, block=8)
    np.testing.assert_array_equal(old.numpy(), start)
    check_step(message, residual, start, start + start, bits, 8)


THREADS_SOURCE = """
import sys
import tensorflow as tf
threads = int(sys.argv[1])
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
import test_quantize
test_quantize.print_digests()
assert "horovod" not in sys.modules  # only the exchange needs it
"""


def print_digests() -> None:
    """One line for each backend and width: the hash of all messages and residuals."""
    from tf_basis.ops import loader

    for (backend, mode), bits in itertools.product(BACKENDS.items(), WIDTHS):
        rng = np.random.default_rng(bits)
        values = random_values(rng, 150_003)
        if backend == "op":  # numbers that some threads take for zero
            values[rng.random(150_003) < 0.2] = 1e-40
            values[2048:4096] = rng.normal(size=2048) * 1e-38
        with loader.use(mode):
            arrays = {}
            ranks = Ranks(len(values), 2, bits, 2048)
            for step in range(2):
                result = ranks.average(tf.constant([values, -values + step]))
                arrays[f"average {step}"] = result.numpy()
            arrays["server"] = ranks.server_error()
            for i, error in enumerate(ranks.worker_errors):
                arrays[f"worker {i}"] = error.numpy()
            print(backend, bits, state_digest(arrays), flush=True)


def test_any_thread_count_gives_the_same_bits(capsys):
    print_digests()  # with the threads of this process
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert len(lines) == len({line.split()[-1] for line in lines}) == 4
    for threads in (1, 3):
        other = run_python(THREADS_SOURCE, str(threads)).stdout
        assert other == output, f"{threads} threads differ"


# ---- errors ------------------------------------------------------------------------

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
        library = loader.library()
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


def test_docstrings():
    result = doctest.testmod(module, extraglobs={"tf": tf})
    assert result.attempted > 8 and result.failed == 0
