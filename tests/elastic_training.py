"""What a rank of `test_elastic.py` runs: `elastic_training.py loop|fit folder steps`.

Rank 0 writes a line for each commit: how many ranks, how many steps. The test adds and
removes hosts, and kills ranks, when it has read what it waits for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod_pairs import model_of
from horovod_workers.checkpoint import make, stepper, summary

from tf_basis import distributed

EVERY = 5  # steps between commits


def seed() -> int:
    return int(os.environ.get("TF_BASIS_SEED", "0"))


def examples(rng, size: int):
    """Something that embeddings can learn."""
    worth = np.random.default_rng(99).normal(size=40)
    x = rng.integers(0, 40, (size, 3)).astype(np.int32)
    return x, worth[x].mean(axis=1, keepdims=True).astype(np.float32)


def batch(number: int, size: int = 24):
    """The ranks share a batch, however many they are."""
    x, y = examples(np.random.default_rng([number, seed()]), size)
    mine = slice(hvd.rank(), None, hvd.size())
    return tf.constant(x[mine]), tf.constant(y[mine])


def model_of_seed():
    # A variance that is frozen after a few steps would let some seeds diverge.
    model = model_of(make("pair", warmup_steps=100))
    rng = np.random.default_rng(seed())
    noise = [0.05 * rng.normal(size=w.shape) for w in model.get_weights()]
    model.set_weights([w + n for w, n in zip(model.get_weights(), noise)])
    return model


def note(folder: Path, **what) -> None:
    with open(folder / "log", "a") as log:
        log.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


def loss_of(model) -> float:
    x, y = examples(np.random.default_rng(123), 400)
    return float(np.mean((model(x).numpy() - y) ** 2))


@distributed.elastic_run
def loop(state, folder: Path, steps: int):
    note(folder, rank=hvd.rank(), size=hvd.size(), step=state.step, host=host())
    step = stepper(state.model)  # traced for the ranks that there are now
    while state.step < steps:
        step(*batch(state.step))
        state.step += 1
        if state.step % EVERY == 0:
            if hvd.rank() == 0:
                note(folder, size=hvd.size(), step=state.step)
                pace()
            state.commit()


@distributed.elastic_run
def fit(state, folder: Path, steps: int):
    note(
        folder, rank=hvd.rank(), size=hvd.size(), step=state.epoch * EVERY, host=host()
    )
    callback = distributed.ElasticCallback(state, every=EVERY)
    while state.epoch * EVERY < steps:
        numbers = range(state.epoch * EVERY, (state.epoch + 1) * EVERY)

        def batches(numbers=numbers):
            yield from map(batch, numbers)

        specs = (tf.TensorSpec([None, 3], tf.int32), tf.TensorSpec([None, 1]))
        data = tf.data.Dataset.from_generator(batches, output_signature=specs)
        if hvd.rank() == 0:
            note(folder, size=hvd.size(), step=state.epoch * EVERY)
            pace()
        state.model.fit(
            data,
            initial_epoch=state.epoch,
            epochs=state.epoch + 1,
            verbose=0,
            callbacks=[callback],
        )


def host() -> str:
    return os.environ["HOROVOD_HOSTNAME"]


def pace() -> None:
    """Training must last until ranks have come and gone."""
    time.sleep(float(os.environ.get("TF_BASIS_PACE", "0")))


def main() -> None:
    what, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    model = model_of_seed()
    if what == "loop":
        state = distributed.ElasticState(model, step=0)
        loop(state, folder, steps)
    else:
        state = distributed.ElasticState(model, epoch=0, batch=0)
        fit(state, folder, steps)
    note(
        folder, rank=hvd.rank(), done=hvd.size(), loss=loss_of(model), **summary(model)
    )


if __name__ == "__main__":
    main()
