"""A DLRM on several ranks: BasisAdam for the table, OneBitAdam for the towers.

    horovodrun -np 2 --gloo python examples/horovod_dlrm.py
    horovodrun -np 2 --gloo python examples/horovod_dlrm.py --compression none
    python examples/horovod_dlrm.py --data synthetic          # one process

Runs on Keras 3 and, with TF_USE_LEGACY_KERAS=1, on tf_keras. Gradients of the towers
travel in one bit per element after a warm-up, or in 16 or 32 (--compression); rows of
the table travel as rows. Rank 0 prints the bytes it sends and the time of a step, and
the AUC on the test part.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import movielens_data
import numpy as np
import tensorflow as tf
from comparison import auc
from dlrm_data import Clicks, from_movielens, synthetic
from dlrm_model import TABLE, make_model, scores
from traffic import sent_bytes

import tf_basis
from tf_basis import distributed

PLAIN = {"none": 32, "fp16": 16}  # bits of all dense gradients


def start_horovod() -> tuple[int, int]:
    """This rank, and how many there are; one where nobody launched several."""
    try:
        import horovod.tensorflow as hvd
    except ImportError:
        if int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
            raise
        return 0, 1
    hvd.init()
    return hvd.rank(), hvd.size()


def make_optimizer(args: argparse.Namespace, total_steps: int):
    """BasisAdam for the table; Adam or OneBitAdam for everything else."""
    rule = {"tables": f"{TABLE}/embeddings", "compression_ratio": args.ratio}
    if args.compression == "onebit":
        dense = distributed.OneBitAdam(
            args.learning_rate, warmup_steps=args.warmup_steps, total_steps=total_steps
        )
        basis = tf_basis.BasisAdam(args.learning_rate, dense_optimizer=dense, **rule)
        # OneBitAdam exchanges for itself: this is about the rows alone.
        compression = distributed.OneBitCompression(sparse_values=args.sparse_values)
    else:
        basis = tf_basis.BasisAdam(args.learning_rate, **rule)
        compression = distributed.OneBitCompression(
            [(".*", PLAIN[args.compression])], sparse_values=args.sparse_values
        )
    return distributed.DistributedOptimizer(basis, compression)


def batches(clicks: Clicks, args: argparse.Namespace, rank: int, ranks: int):
    """This rank's share of the training part, in as many steps as everybody's."""
    mine = slice(rank, clicks.n_train, ranks)
    data = tf.data.Dataset.from_tensor_slices(
        (clicks.inputs(mine), clicks.label[mine, np.newaxis])
    )
    data = data.shuffle(100_000, seed=args.seed).batch(args.batch_size)
    if args.steps is not None:
        data = data.take(args.steps)
    return distributed.even_batches(data).prefetch(2)


class StepMeter(tf.keras.callbacks.Callback):
    """Seconds and bytes sent of every step."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.sent = sent_bytes()
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)
        if self.sent is not None:
            self.bytes.append((sent_bytes() or 0) - self.sent)

    def report(self, name: str, steps: slice) -> str:
        """Medians over these steps."""
        line = f"{name}: {1e3 * np.median(self.seconds[steps]):.1f} ms per step"
        if not self.bytes:
            return f"{line}, bytes not counted here"
        return f"{line}, {np.median(self.bytes[steps]):,.0f} bytes sent per step"


def parse(argv: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="'synthetic', or ratings; default: MovieLens-100K, fetched")
    add("--cache-dir", help="where MovieLens-100K is kept")
    add("--examples", type=positive, default=400_000, help="of synthetic data")
    add("--compression", choices=("none", "fp16", "onebit"), default="onebit")
    add("--sparse-values", choices=("float32", "float16", "1bit"), default="float32")
    add("--warmup-steps", type=positive, help="of OneBitAdam; default: a tenth of all")
    add("--ratio", type=float, default=100.0, help="rows per bucket of BasisAdam")
    add("--learning-rate", type=float, default=1e-3)
    add("--batch-size", type=positive, default=256, help="examples a rank")
    add("--epochs", type=positive, default=1)
    add("--steps", type=positive, help="at most so many in an epoch")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rank, ranks = start_horovod()
    try:
        if args.data == "synthetic":
            clicks = synthetic(args.examples)
        else:
            path = args.data or movielens_data.fetch_movielens(args.cache_dir)
            clicks = from_movielens(movielens_data.load(path))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    data = batches(clicks, args, rank, ranks)
    steps = int(data.cardinality())
    total_steps = steps * args.epochs
    # Ranks start differently on purpose: the callback makes them equal.
    model = make_model(clicks, args.seed + rank)
    model.compile(
        make_optimizer(args, total_steps),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
    if rank == 0:
        dense = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
        dense -= int(np.prod(model.get_layer(TABLE).embeddings.shape))
        print(
            f"{ranks} ranks, {clicks.n_train:,} examples to train on, "
            f"{total_steps:,} steps; table of {clicks.n_rows:,} rows, "
            f"{dense:,} parameters in towers; compression {args.compression}",
            flush=True,
        )
    meter = StepMeter()
    callbacks = [
        distributed.BroadcastCallback(),
        distributed.MetricAverageCallback(),
        meter,
    ]
    model.fit(
        data,
        epochs=args.epochs,
        callbacks=callbacks,
        shuffle=False,  # the dataset does
        verbose=2 if rank == 0 else 0,
    )
    if rank == 0:
        settled = slice(total_steps // 2, None)
        if args.compression == "onebit":
            warm = args.warmup_steps or max(1, total_steps // 10)
            # The first steps trace; where there are no others they must do.
            first = min(3, warm - 1)
            print(meter.report("warm-up", slice(first, warm)))
            settled = slice(max(warm, total_steps // 2), None)
        if total_steps > (settled.start or 0):
            print(meter.report("step", settled))
        test = slice(clicks.n_train, len(clicks.label))
        value = auc(clicks.label[test], scores(model, clicks, test))
        print(f"AUC of {test.stop - test.start:,} test examples: {value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
