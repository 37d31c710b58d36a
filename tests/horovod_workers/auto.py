"""compression="auto" on two ranks; started by `balanced`, in one launch."""

from __future__ import annotations

import contextlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import to_numpy
from horovod_pairs import new
from horovod_rank import check

from tf_basis import distributed
from tf_basis.distributed import auto

keras = tf.keras


def variables():
    return [new(np.zeros((64, 96)), "kernel"), new(np.zeros(96), "bias")]


def one_step(optimizer, made):
    mine = 1.0 + hvd.rank()
    optimizer.apply_gradients([(tf.fill(v.shape, mine), v) for v in made])
    return to_numpy(made[0])


@check
def measured():
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(1.0), "auto")
    before, made = optimizer.get_config()["compression"], variables()
    one_step(optimizer, made)  # builds
    config = optimizer.get_config()
    again = type(optimizer).from_config(config)
    again.build(variables())
    return {
        "before": before,
        "choice": optimizer.compression_choice,
        "policy": config["compression"]["policy"],
        "again": again.get_config()["compression"] == config["compression"],
        "again_choice": again.compression_choice,
        "variables": [[tuple(v.shape) for v in _all(o)] for o in (optimizer, again)],
        "kernel": to_numpy(made[0]),
    }


def _all(optimizer):
    own = optimizer.variables
    return own() if callable(own) else own


@contextlib.contextmanager
def slow_on_rank_1(seconds):
    """Of rank 1 the clock is another one; it takes part all the same."""
    real, calls = auto.timed, []

    def timed(run, world):
        real(run, world)
        calls.append(run)
        return seconds[(len(calls) - 1) % len(seconds)]

    if hvd.rank() == 1:
        auto.timed = timed
    try:
        yield
    finally:
        auto.timed = real


@check
def decided_by_the_slowest():
    found = []
    for seconds in [(90, 20, 18), (90, 88, 89)]:
        sgd = keras.optimizers.SGD(1.0)
        optimizer = distributed.DistributedOptimizer(sgd, "auto")
        made = variables()
        with slow_on_rank_1(seconds):
            optimizer.build(made)
        found.append((optimizer.compression_choice, one_step(optimizer, made)))
    return found


@check
def a_tape_decides_too():
    (kernel, _), mine = variables(), 1.0 + hvd.rank()

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            y = mine * tf.reduce_sum(tf.convert_to_tensor(kernel))
        native = getattr(kernel, "value", kernel)
        native = native if isinstance(native, tf.Variable) else kernel
        tape = distributed.DistributedGradientTape(tape, "auto")
        return tape.gradient(y, native)

    with slow_on_rank_1((90, 80, 20)):
        return to_numpy(gradient())
