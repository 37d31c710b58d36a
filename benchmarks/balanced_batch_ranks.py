"""What `balanced_batch.py` runs on every rank: steps of even and of balanced sizes."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import link
import numpy as np


def trainings(settings: dict[str, Any], hvd: Any) -> dict[str, Callable[[int], float]]:
    """What takes turns: each does so many steps and returns examples per second.

    An example takes a fixed time, twice as long on the last rank; or, where that is 0,
    what computing it takes, and the last rank sleeps as long again.
    """
    import keras
    import tensorflow as tf

    from tf_basis.distributed import BalancedBatch, DistributedOptimizer

    total, widths = settings["global_batch"], settings["widths"]
    slowed = hvd.rank() == hvd.size() - 1
    fixed = settings["microseconds"] * 1e-6 * (2 if slowed else 1)
    rng = np.random.default_rng(hvd.rank())
    x = rng.standard_normal((8 * total, widths[0])).astype(np.float32)
    examples = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(n, activation="relu") for n in widths[1:]]
    model = keras.Sequential([keras.Input((widths[0],)), *layers])
    model.add(keras.layers.Dense(1))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1e-6))
    optimizer.build(model.trainable_variables)
    loss = keras.losses.MeanSquaredError()

    @tf.function(reduce_retracing=True)
    def gradients(x, y, weights):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True), weights)
        return tape.gradient(value, model.trainable_variables)

    @tf.function
    def apply(*found):
        optimizer.apply(found, model.trainable_variables)

    def batches(balance):
        return iter(balance.batches(examples).prefetch(2))

    def compute(iterator):
        start = time.perf_counter()
        batch = next(iterator)
        found = gradients(*batch)
        seconds = time.perf_counter() - start
        if fixed:
            time.sleep(max(0.0, fixed * len(batch[1]) - seconds))
        elif slowed:
            time.sleep(seconds)
        return found, len(batch[1])

    even = BalancedBatch(total, every=10**9)
    balanced = BalancedBatch(total, every=settings["every"])
    alone = BalancedBatch(total, every=10**9)
    read = {b: batches(b) for b in (even, balanced, alone)}

    def training(balance):
        def steps(number: int) -> float:
            start = time.perf_counter()
            for _ in range(number):
                apply(*compute(read[balance])[0])
                balance.step(optimizer)
            return total * number / (time.perf_counter() - start)

        return steps

    def without_others(number: int) -> float:
        start, done = time.perf_counter(), 0
        for _ in range(number):
            done += compute(read[alone])[1]
        return done / (time.perf_counter() - start)

    return {
        "even": training(even),
        "balanced": training(balanced),
        "alone": without_others,
        "sizes": lambda _: balanced.sizes,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-settings", required=True)
    settings, hvd = link.start(parser.parse_args().rank_settings)
    turns = trainings(settings, hvd)
    sizes = turns.pop("sizes")
    turns["even"](3)
    turns["balanced"](settings["settle"])
    found: dict[str, list] = {name: [] for name in turns}
    found["sizes"] = [sizes(0)]
    for _ in range(settings["rounds"]):
        for name, steps in turns.items():
            hvd.allgather_object(name)  # all begin together
            found[name].append(hvd.allgather_object(steps(settings["steps"])))
        found["sizes"].append(sizes(0))
    if hvd.rank() == 0:
        link.report(settings, found)


if __name__ == "__main__":
    main()
