"""OneBitAdam and elements whose gradient was zero throughout the warm-up."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_basis.distributed import OneBitAdam

RATE, WARMUP, SILENT = 0.01, 4, slice(0, 3)


@pytest.mark.parametrize("still_silent", [True, False])
def test_they_rest(still_silent):
    rng = np.random.default_rng(0)
    layer = tf.keras.layers.Dense(40, use_bias=False)
    layer.build((None, 60))
    kernel = layer.kernel
    start = np.array(kernel)
    optimizer = OneBitAdam(RATE, warmup_steps=WARMUP)
    optimizer.build([kernel])
    for step in range(WARMUP + 20):
        gradient = rng.standard_normal(start.shape).astype(np.float32)
        if still_silent or step < WARMUP:
            gradient[SILENT] = 0
        optimizer.apply_gradients([(tf.constant(gradient), kernel)])
    moved = np.abs(np.array(kernel) - start)
    # Quantised momentum is never 0; over the root of a variance of 0 it would be a step
    # of 1 / epsilon.
    assert np.all(moved[SILENT] == 0)
    rest = np.delete(moved, SILENT, axis=0)
    assert rest.min() > 0 and np.median(rest) < 20 * RATE
