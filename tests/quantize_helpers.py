"""Vectors, one step of quantisation, and ranks in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from reference import quantize as reference

from tf_basis.distributed.quantize import (
    WIDTHS,
    average,
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
