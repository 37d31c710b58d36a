"""BalancedBatch on two ranks, the second of which is half as fast."""

from __future__ import annotations

import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import to_numpy
from horovod_pairs import new
from horovod_rank import check, error_of

import horovod_workers.auto  # noqa: F401  its checks run in this launch too
from tf_basis import distributed

keras = tf.keras
N, STEPS, EVERY = 48, 26, 4
SECONDS = 1e-3  # of an example on rank 0


class Slow(keras.layers.Layer):
    """Takes its time for every example, and keeps what it was given."""

    def __init__(self):
        super().__init__(trainable=False)
        self.seen = []

    def call(self, x):
        def work(x):
            time.sleep(SECONDS * (1 + hvd.rank()) * len(x))
            self.seen.append(x)
            return x

        same = tf.numpy_function(work, [x], tf.float32)
        return tf.ensure_shape(same, x.shape)


def examples():
    """Of this rank, endless: features, target and a weight of the user's own."""
    rng = np.random.default_rng([2, hvd.rank()])
    x = rng.normal(size=(500, 3)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] - x[:, 1:2], 1 + x[:, 2]))
    return data.repeat()


@check
def sizes_follow_the_speed():
    slow, first = Slow(), np.array([[0.3], [-0.2], [0.1]], np.float32)
    model = keras.Sequential([keras.Input((3,)), slow, keras.layers.Dense(1)])
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse")
    model.set_weights([first, np.zeros(1, np.float32)])
    balance = distributed.BalancedBatch(N, every=EVERY, smoothing=0.25)
    before = balance.sizes
    model.fit(
        balance.batches(examples()).prefetch(3),
        steps_per_epoch=STEPS // 2,
        epochs=2,
        verbose=0,
        callbacks=[balance],
    )
    return {
        "before": before,
        "sizes": balance.sizes,
        "history": balance.history,
        "seen": list(slow.seen),
        "first": first,
        "weights": [to_numpy(w) for w in model.weights],
        "iterations": int(to_numpy(optimizer.iterations)),
    }


def constant(value):
    """Endless examples whose features all are `value`."""
    parts = (np.full((5, 8), value, np.float32), np.full((5, 16), -100, np.float32))
    return tf.data.Dataset.from_tensor_slices(parts).repeat()


def fixed(sizes):
    balance = distributed.BalancedBatch(16, maximum=12)
    balance._plan.change(0, sizes)  # as if speeds had been so
    return balance


@check
def one_bit_scales_weigh_by_examples():
    """All gradients of a rank are alike, so that a bit says them exactly."""
    layer = keras.layers.Dense(16, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    before, found = model.get_weights()[0], {}
    for bits in (1, 32):
        model.set_weights([before])
        sent = distributed.OneBitCompression([(".*", bits)], reset_interval=None)
        sgd = keras.optimizers.SGD(16.0)
        optimizer = distributed.DistributedOptimizer(sgd, sent)
        model.compile(optimizer, "mae", run_eagerly=True)
        balance = fixed([12, 4])
        data = balance.batches(constant(1.0 + 4 * hvd.rank()))
        model.fit(data, steps_per_epoch=1, verbose=0, callbacks=[balance])
        found[bits] = before - model.get_weights()[0]
    return found


@check
def a_loop_of_its_own_assigns_weights():
    kernel = new(np.zeros((8, 16)), "kernel")
    sgd = keras.optimizers.SGD(1.0)
    optimizer = distributed.DistributedOptimizer(sgd)
    optimizer.build([kernel])
    balance, lengths = fixed([12, 4]), []
    data = balance.batches(constant(1.0 + 4 * hvd.rank()), weights=False)
    for x, _ in data.take(2):
        lengths.append(len(x))
        optimizer.step_weight.assign(len(x))
        gradient = tf.fill([8, 16], tf.reduce_mean(x))
        optimizer.apply_gradients([(gradient, kernel)])
        balance.step(optimizer)
    return {"lengths": lengths, "kernel": to_numpy(kernel)}


@check
def mistakes_end_on_all_ranks():
    kernel = new(np.zeros((8, 16)), "kernel")
    plain = keras.optimizers.SGD(0.1)
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([kernel])

    def steps(balance, optimizer, read=None):
        batches = None if read is None else iter(read.batches(constant(1.0)))
        for _ in range(4):
            if batches is not None:
                next(batches)
            optimizer.apply_gradients([(tf.ones([8, 16]), kernel)])
            balance.step(optimizer)

    one = distributed.BalancedBatch
    unequal = one(16 + hvd.rank())
    return {
        "ignored": error_of(steps, one(16, every=1), optimizer),
        "other": error_of(steps, one(16, every=1), optimizer, one(16)),
        "unequal": error_of(steps, unequal, optimizer, unequal),
        "plain": error_of(steps, one(16), plain),
        "small": error_of(one, 9, minimum=5),
    }
