"""What `allreduce.py` runs on every rank: the exchanges, and the training step."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import link
import numpy as np

BLOCK = 2048


class Timed:
    """Something that all ranks do at once: seconds and bytes of every call."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name, self.call = name, call
        self.seconds: list[list[float]] = []  # by round
        self.bytes: list[float] = []  # of all ranks, per call, by round

    def measure(self, calls: int, hvd: Any, tf: Any) -> None:
        """`calls` calls, each begun by all ranks together."""
        times = []
        hvd.allreduce(tf.zeros([1]), op=hvd.Sum)
        before = link.sent_bytes()
        for _ in range(calls):
            hvd.allreduce(tf.zeros([1]), op=hvd.Sum)
            start = time.perf_counter()
            self.call()
            times.append(time.perf_counter() - start)
        hvd.allreduce(tf.zeros([1]), op=hvd.Sum)
        self.bytes.append((link.sent_bytes() - before) / calls)
        self.seconds.append(times)


def rounds(timed: Sequence[Timed], settings: dict, calls: int, hvd: Any) -> dict:
    """All take turns; a call lasts as long as on the rank where it lasts longest."""
    import tensorflow as tf

    for each in timed:
        each.call()  # traces
        each.call()
    for number in range(settings["rounds"]):
        start = number % len(timed)
        for each in [*timed[start:], *timed[:start]]:
            each.measure(calls, hvd, tf)
    found = {}
    for each in timed:
        everyone = hvd.allgather_object(each.seconds)
        found[each.name] = {
            "seconds": np.max(everyone, axis=0).tolist(),
            "bytes": each.bytes,
        }
    return found


def exchanges(elements: int, hvd: Any) -> list[Timed]:
    """The ways to average `elements` numbers, and the parts of the quantised one."""
    import tensorflow as tf

    from tf_basis.distributed import OneBitExchange, quantize
    from tf_basis.distributed.world import World
    from tf_basis.ops import quantize_ops

    world = World()
    rng = tf.random.Generator.from_seed(hvd.rank())
    values = tf.Variable(rng.normal([elements]))
    exchange = OneBitExchange(elements, BLOCK)
    form = {"bits": 1, "block": BLOCK}
    splits = [quantize.message_bytes(n, **form) for n in exchange._owned]
    mine = int(exchange.server_error.shape[0])
    residual = tf.Variable(tf.zeros([elements]))
    owed = tf.Variable(tf.zeros([mine]))
    mean = tf.Variable(tf.zeros([elements]))
    sent = tf.zeros([sum(splits)], tf.uint8)
    received = tf.zeros([world.size * splits[world.rank]], tf.uint8)
    reply = tf.zeros([splits[world.rank]], tf.uint8)
    name = f"bench{elements}"

    @tf.function
    def float32(x):
        return world.total(x, f"{name}/float32") / world.size

    @tf.function
    def float16(x):
        total = world.total(tf.cast(x, tf.float16), f"{name}/float16")
        return tf.cast(total, tf.float32) / world.size

    @tf.function
    def float16_casts(x):
        return tf.cast(tf.cast(x, tf.float16), tf.float32) / world.size

    @tf.function
    def one_bit(x):
        exchange.average(x, into=mean)

    @tf.function
    def one_bit_wire(sent, reply):
        # The gather needs what was scattered: an unused collective would be pruned.
        received = world.scatter(sent, splits, f"{name}/scatter")
        return world.gather(tf.maximum(reply, received[0]), f"{name}/gather")

    @tf.function
    def one_bit_arithmetic(x, received, message):
        unusable = quantize.count_unusable(x)
        with tf.control_dependencies([unusable]):
            own, _ = quantize.quantize(residual, x, **form)
        with tf.control_dependencies([own]):
            reply = quantize.average(owed, received, workers=world.size, **form)
        with tf.control_dependencies([reply]):
            quantize_ops.dequantize_into(mean, message, **form)
        return unusable

    def of(function: Callable, *arguments: tf.Tensor) -> Callable[[], Any]:
        return lambda: function(*arguments)

    x = values.read_value()
    return [
        Timed("float32", of(float32, x)),
        Timed("float16", of(float16, x)),
        Timed("float16 casts", of(float16_casts, x)),
        Timed("1 bit", of(one_bit, x)),
        Timed("1 bit, wire", of(one_bit_wire, sent, reply)),
        Timed("1 bit, arithmetic", of(one_bit_arithmetic, x, received, sent)),
    ]


def tower_step(
    widths: Sequence[int],
    batch: int,
    make_optimizer: Callable[[], Any] | None,
    hvd: Any,
) -> Callable[[], Any]:
    """A training step of a tower of dense layers; without an optimizer: gradients."""
    import keras
    import tensorflow as tf

    rng = np.random.default_rng(hvd.rank())
    x = tf.constant(rng.standard_normal((batch, widths[0])), tf.float32)
    y = tf.constant(rng.integers(0, 2, (batch, 1)), tf.float32)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(n, activation="relu") for n in widths[1:]]
    model = keras.Sequential(
        [keras.Input((widths[0],)), *layers, keras.layers.Dense(1)]
    )
    optimizer = make_optimizer() if make_optimizer else None
    if optimizer is not None:
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        if optimizer is None:
            return [tf.identity(g) for g in gradients]
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def call() -> Any:
        result = step(x, y)
        if optimizer is not None and int(optimizer.skipped_steps):
            raise RuntimeError("a step was skipped: it costs nothing, do not count")
        return result

    call.optimizer = optimizer
    return call


def training_steps(widths: Sequence[int], batch: int, hvd: Any) -> list[Timed]:
    """A step with both optimizers, and without any."""
    import keras

    from tf_basis.distributed import DistributedOptimizer, OneBitAdam

    # Rates that change nothing: a warm-up of one step is no basis for real ones.
    makers = {
        "Adam, float32": lambda: DistributedOptimizer(keras.optimizers.Adam(1e-12)),
        "OneBitAdam": lambda: DistributedOptimizer(OneBitAdam(1e-12, warmup_steps=1)),
        "gradients only": None,
    }
    return [
        Timed(name, tower_step(widths, batch, make, hvd))
        for name, make in makers.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-settings", required=True)
    settings, hvd = link.start(parser.parse_args().rank_settings)
    if settings["task"] == "step":
        timed = training_steps(settings["widths"], settings["batch"], hvd)
    else:
        timed = exchanges(settings["elements"], hvd)
    found = rounds(timed, settings, settings["calls"], hvd)
    if hvd.rank() == 0:
        link.report(settings, found)


if __name__ == "__main__":
    main()
