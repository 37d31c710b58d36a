"""Quantisation in functions, under XLA, with any number of threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import BACKENDS, run_python, state_digest
from quantize_helpers import Ranks, check_step, random_values, variable, widths

from tf_basis.distributed.quantize import (
    WIDTHS,
    average,
    count_unusable,
    dequantize,
    message_bytes,
    quantize,
)


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
import test_quantize_functions
test_quantize_functions.print_digests()
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
