"""Options of the 1-bit exchange against numpy, which knows what all ranks have."""

from __future__ import annotations

import contextlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import to_numpy
from horovod_follow import (
    ALL,
    BLOCK,
    ELEMENTS,
    SIZE,
    digest,
    follow,
    gradients,
    one_bit,
)
from horovod_pairs import applier, keras, new
from horovod_rank import check, error_of
from reference import onebit_options as reference

from tf_basis import config, distributed
from tf_basis.distributed.world import World
from tf_basis.ops import loader


@contextlib.contextmanager
def counted_bytes(found: list):
    """The bytes that this rank puts into the exchange."""
    original = {name: getattr(World, name) for name in ("scatter", "gather")}

    def counting(name):
        def call(self, tensor, *rest):
            if tensor.dtype == tf.uint8:
                found.append(int(tf.size(tensor)))
            return original[name](self, tensor, *rest)

        return call

    for name in original:
        setattr(World, name, counting(name))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(World, name, function)


# ---- the amplitude phase -------------------------------------------------------


@check
def amplitudes():
    """Eager, so that the bytes of every exchange are seen."""
    results = {}
    for ops in ("require", "off"):
        for bits in (1, 2):
            with loader.use(ops):
                exchange = distributed.OneBitExchange(
                    4000, 64, bits=bits, amplitude_interval=3
                )
                expected = reference.Exchange(4000, SIZE, 64, 3, bits)
                worst, sent, digests = 0.0, [], []
                for step in range(7):
                    given, found = gradients(step, 4000), []
                    with counted_bytes(found):
                        result = exchange.average(tf.constant(given[hvd.rank()]))
                    worst = max(worst, np.abs(result - expected.average(given)).max())
                    sent.append(sum(found))
                    digests.append(digest(result))
                results[ops, bits] = {
                    "worst": float(worst),
                    "sent": sent,
                    "digests": digests,
                    "residual": float(
                        np.abs(
                            exchange.worker_error - expected.worker[hvd.rank()]
                        ).max()
                    ),
                    "traffic": exchange.amplitudes[bits].traffic.numpy().tolist(),
                }
    return results


# ---- metadata, and what adapts to it -------------------------------------------


def train_sgd(compression, steps: int, rate=0.1, see=lambda optimizer: None):
    variable = new(np.ones(ELEMENTS), "theta")
    optimizer = distributed.DistributedOptimizer(
        keras.optimizers.SGD(rate), compression
    )
    optimizer.build([variable])
    apply, seen = applier(optimizer, [variable]), []
    for step in range(steps):
        apply(tf.constant(gradients(step)[hvd.rank()]))
        seen.append(see(optimizer))
    return variable, seen, optimizer


@check
def statistics_are_of_all_ranks():
    settings = {"policy": ALL, "block": BLOCK, "clip_value": 2.0, "statistics": True}
    compression = distributed.OneBitCompression(**settings)
    _, seen, _ = train_sgd(
        compression, 4, see=lambda optimizer: optimizer.quantization_statistics
    )
    # What numpy knows: after step 4 all ranks know of the exchange of step 3.
    exchange = reference.Exchange(ELEMENTS, SIZE, BLOCK)
    expected = []
    for step in range(3):
        u = gradients(step) + exchange.worker
        clipped = int((np.abs(u) > 2.0).sum())
        exchange.average(np.clip(u, -2.0, 2.0) - exchange.worker)
        total, squares, errors = exchange.sums
        n = SIZE * ELEMENTS
        expected.append(
            {
                "mean": total / n,
                "variance": squares / n - (total / n) ** 2,
                "relative_error": errors / squares,
                "residual_norm": np.sqrt(errors / SIZE),
                "clipped_share": clipped / n,
                "bits": 1.0,
            }
        )
    return {"seen": seen[1:], "expected": expected, "first": seen[0]}


@check
def adaptive_rate():
    settings = {"floor": 0.2, "smoothing": 0.7}
    compression = distributed.OneBitCompression(
        ALL, block=BLOCK, adaptive_rate=settings
    )
    variable, _, optimizer = train_sgd(compression, 8)
    theta, exchange, error = (
        np.ones(ELEMENTS),
        reference.Exchange(ELEMENTS, SIZE, BLOCK),
        0,
    )
    factors = []
    for step in range(8):
        if step:
            new_error = exchange.sums[2] / exchange.sums[1]
            error = new_error if error == 0 else 0.7 * error + 0.3 * new_error
        factors.append(max(0.2, 1 - error))
        theta = theta - 0.1 * factors[-1] * exchange.average(gradients(step))
    return {
        "difference": float(np.abs(to_numpy(variable) - theta).max()),
        "digest": digest(variable),
        "factors": factors,
        "rate": float(to_numpy(optimizer.learning_rate)),
    }


def wide_of(optimizer) -> tf.Tensor:
    return optimizer._distribution.reducer.channels[0].exchange.wide[0]


@check
def adaptive_bits():
    settings = {"raise_above": 0.3, "lower_below": 0.2, "patience": 2}
    compression = distributed.OneBitCompression(
        ALL, block=BLOCK, adaptive_bits=settings, amplitude_interval=2
    )
    variable, seen, _ = train_sgd(compression, 16, see=lambda o: 1.0 + int(wide_of(o)))
    theta, exchange = np.ones(ELEMENTS), reference.Exchange(ELEMENTS, SIZE, BLOCK, 2)
    streak, bits = 0, []
    for step in range(16):
        if step:
            error = exchange.sums[2] / exchange.sums[1]
            wide = exchange.bits == 2
            streak = streak + 1 if (error < 0.2 if wide else error > 0.3) else 0
            if streak == 2:
                exchange.bits, streak, exchange.age = 3 - exchange.bits, 0, 0
        bits.append(float(exchange.bits))
        theta = theta - 0.1 * exchange.average(gradients(step))
    return {
        "difference": float(np.abs(to_numpy(variable) - theta).max()),
        "digest": digest(variable),
        "seen": seen,
        "expected": bits,
    }


# ---- delay and local steps -----------------------------------------------------


ADAPTS = {
    "adaptive_rate": {"floor": 0.2, "smoothing": 0.7},
    "adaptive_bits": {"raise_above": 0.3, "lower_below": 0.15, "patience": 2},
    "amplitude_interval": 2,
}
# The same as a settings file has it.
YAML = """
optimizer: {type: 1bit_adam, lr: 0.02, betas: [0.8, 0.99], eps: 1e-3}
compensation: {adaptive_rate: {floor: 0.2, smoothing: 0.7}}
quantization:
  warmup_steps: 3
  rules: [[".*", 1]]
  block: 16
  adaptive_bits: {raise_above: 0.3, lower_below: 0.15, patience: 2}
communication: {amplitude_interval: 2}
"""


@check
def one_bit_adam_adapts():
    make, expected = one_bit(**ADAPTS)
    seen = {"bits": [], "expected_bits": [], "factors": []}

    def each(step, optimizer, expected):
        del step
        (channel,) = optimizer._exchange.channels
        seen["bits"].append(1 + int(channel.exchange.wide[0]))
        seen["expected_bits"].append(expected.exchange.bits)
        seen["factors"].append(expected.factor)

    alone = follow(make, expected, each=each)
    expected = one_bit(**ADAPTS)[1]
    loaded = lambda: config.load(YAML).dense_optimizer  # noqa: E731
    return {"alone": alone, "loaded": follow(loaded, expected, wrap=True), **seen}


@check
def delayed():
    uneven = [[1.0 + r + (s % 2) for r in range(SIZE)] for s in range(12)]
    return {
        "alone": follow(
            *one_bit(delay=1, staleness_decay=0.5, weight_decay=0.1), weights=uneven
        ),
        "skips": follow(*one_bit(delay=1), bad=[(1, 0), (6, SIZE - 1)]),
        "wrapped": follow(*one_bit(delay=1), wrap=True, bad=[(6, 0)]),
    }


@check
def delayed_gradients():
    """SGD steps with the mean of the step before; nothing is lost in a skipped one.

    Embeddings step at once, and nothing as large as a table waits.
    """
    variable = new(np.zeros(ELEMENTS), "theta")
    table, tied = new(np.zeros((9, 2)), "embeddings"), new(np.zeros(8), "embeddings_1")
    compression = distributed.OneBitCompression(
        [("theta", 32)], delay=1, staleness_decay=0.5
    )
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(1.0), compression)
    optimizer.build([variable, table, tied])

    @tf.function
    def apply(gradient):
        values = tf.reshape(gradient[:4], [2, 2])
        rows = tf.IndexedSlices(values, tf.constant([0, 8]), [9, 2])
        optimizer.apply_gradients(
            [(gradient, variable), (rows, table), (gradient[:8], tied)]
        )

    seen = []
    for step in range(5):
        given = gradients(step)[hvd.rank()]
        if step == 2 and hvd.rank() == 0:
            given[0] = np.nan
        apply(tf.constant(given))
        seen.append(-to_numpy(variable))
    means = [gradients(s).mean(axis=0) for s in range(5)]
    # Step 2 is skipped, with its gradient; what it was to apply comes in step 3.
    late = [0 * means[0], means[0], 0 * means[0], means[1], means[3]]
    expected = 0.5 * np.cumsum(late, 0)
    at_once = means[0] + means[1] + means[3] + means[4]
    moved = [to_numpy(table)[[0, 8]].ravel(), to_numpy(tied)]
    return {
        "difference": float(np.abs(np.array(seen) - expected).max()),
        "at_once": [float(np.abs(m + at_once[: len(m)]).max()) for m in moved],
        "waiting": [tuple(v.shape) for v in optimizer.residual_variables],
        "pending": float(np.abs(optimizer.residual_variables[0].numpy()).max()),
    }


@check
def local_steps():
    uneven = [[1.0 + r + (s % 2) for r in range(SIZE)] for s in range(12)]
    uneven[5][0] = uneven[8][0] = 0.0

    def early(step, optimizer, expected):
        if step == 9:
            optimizer.synchronize()
            optimizer.synchronize()  # nothing is left to do
            expected.synchronize()

    return {
        "three": follow(*one_bit(local_steps=3, weight_decay=0.1)),
        "doubling": follow(*one_bit(local_steps=4, local_steps_doubling=2)),
        "uneven": follow(*one_bit(local_steps=3), weights=uneven, bad=[(6, 0)]),
        "synchronized": follow(*one_bit(local_steps=4), each=early, steps=11),
        "wrapped": follow(*one_bit(local_steps=3), wrap=True),
    }


@check
def local_steps_of_more_bits():
    """Variables of 16 and 32 bits go alone too, at rates too small for float16."""
    results = {}
    for bits in (16, 32):
        make, expected = one_bit(local_steps=3, policy=[(".*", bits)], rate=1e-6)
        expected.exchange.average = lambda given: given.mean(axis=0)
        results[bits] = follow(make, expected)
    return results


@check
def settings_of_one_rank():
    """All ranks hear what differs."""

    def build(wrap, **settings):
        optimizer = distributed.OneBitAdam(**settings)
        if wrap:
            adam = keras.optimizers.Adam(**settings)
            optimizer = distributed.DistributedOptimizer(adam)
        optimizer.build([new(np.ones(4), "theta")])

    mine = hvd.rank() == 1
    found = [error_of(build, False, local_steps=2 if mine else 1)]
    if "keras.src" in keras.optimizers.Adam.__module__ and hasattr(
        keras.optimizers.Adam(), "gradient_accumulation_steps"
    ):
        steps = {"gradient_accumulation_steps": 2 if mine else None}
        found += [error_of(build, wrap, **steps) for wrap in (False, True)]
    return found


@check
def bad_settings():
    weird = {
        "delay": {"delay": 2},
        "staleness_decay": {"staleness_decay": 0.0},
        "amplitude_interval": {"amplitude_interval": 0},
        "adaptive_bits": {"adaptive_bits": {"patience": 0}},
        "adaptive_rate": {"adaptive_rate": 0.5},
        "flips": {"adaptive_bits": {"raise_above": 0.1, "lower_below": 0.5}},
        "no_delay": {"staleness_decay": 0.5},
    }
    found = {
        name: error_of(distributed.OneBitCompression, **arguments)
        for name, arguments in weird.items()
    }
    for name, arguments in {
        "local_steps": {"local_steps": 0},
        "doubling": {"local_steps_doubling": 5},
        "moments": {"local_steps": 2, "moments": "corrected", "total_steps": 9},
        "both": {"local_steps": 2, "delay": 1},
    }.items():
        found[name] = error_of(distributed.OneBitAdam, **arguments)
    every = distributed.OneBitAdam(delay=1, policy=[(".*", 16, 5)])
    found["interval"] = error_of(every.build, [new(np.ones(4), "theta")])
    return found
