"""DeepFM on a log in Criteo's format, read as a stream: the file may be any size.

    python examples/criteo_deepfm.py --data 'day_*.gz'
    python examples/criteo_deepfm.py            # a generated file

13 integers and 26 categories, hashed into one table, whose state `BasisAdam` keeps in a
hundredth of its rows. Every tenth batch is left out of the training and tested on,
beside the constant that predicts the share of clicks for everybody.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import criteo_data
import numpy as np
import tensorflow as tf
from comparison import auc, log_loss, verbosity

import tf_basis
from tf_basis.layers import EmbeddingCollection, FeatureConfig, TableConfig

CLAIMED_GAIN = 0.05  # of the log-loss, against the constant


class FactorizationMachine(tf.keras.layers.Layer):
    """Sum over all pairs of fields of the dot products of their vectors, [b, 1]."""

    def call(self, vectors):
        squares = tf.reduce_sum(tf.square(vectors), axis=1)
        pairs = tf.square(tf.reduce_sum(vectors, axis=1)) - squares
        return 0.5 * tf.reduce_sum(pairs, axis=1, keepdims=True)


def make_model(rows: int, dim: int, ratio: float) -> tf.keras.Model:
    """Returns logits: linear terms, pairs of fields, and a deep tower."""
    layers = tf.keras.layers
    start = tf.keras.initializers.RandomNormal(stddev=0.01)
    columns = criteo_data.CATEGORIES
    features = [
        FeatureConfig(
            name,
            TableConfig(name, rows, width, start, compression_ratio=ratio),
            (None, columns),
            (None, columns, width),
        )
        for name, width in (("rows", dim), ("linear", 1))
    ]
    numbers = tf.keras.Input((criteo_data.NUMBERS,), name="numbers")
    ids = tf.keras.Input((columns,), dtype="int64", name="rows")
    found = EmbeddingCollection(features, name="tables")({"rows": ids, "linear": ids})
    deep = layers.Concatenate()([numbers, layers.Flatten()(found["rows"])])
    for width in (128, 64):
        deep = layers.Dense(width, activation="relu")(deep)
    parts = [
        layers.Dense(1)(numbers),
        layers.Dense(1, use_bias=False)(layers.Flatten()(found["linear"])),
        FactorizationMachine()(found["rows"]),
        layers.Dense(1)(deep),
    ]
    return tf.keras.Model({"numbers": numbers, "rows": ids}, layers.Add()(parts))


class Memory(tf.keras.callbacks.Callback):
    """Resident memory of this process, in MB, every so many steps."""

    def __init__(self, every: int = 20):
        super().__init__()
        self.every, self.megabytes = every, []

    def on_train_batch_end(self, batch, logs=None):
        if batch % self.every == 0 and os.path.exists("/proc/self/statm"):
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def test_scores(model: tf.keras.Model, data: tf.data.Dataset) -> list[np.ndarray]:
    """Labels and logits of all batches."""
    parts = [(label, model(inputs, training=False)) for inputs, label in data]
    return [np.concatenate(p)[:, 0].astype(np.float64) for p in zip(*parts)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="file or pattern, plain or .gz; default: a generated file")
    add("--generate", type=int, default=100_000, help="examples of the generated file")
    add("--rows", type=int, default=1_000_000, help="of the table of all categories")
    add("--dim", type=int, default=8)
    add("--ratio", type=float, default=100.0, help="rows per bucket of BasisAdam")
    add("--batch-size", type=int, default=1024)
    add("--epochs", type=int, default=1)
    add("--learning-rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, pattern: str) -> None:
    paths = criteo_data.find(pattern)
    train = criteo_data.stream(paths, args.rows, args.batch_size)
    test = criteo_data.stream(paths, args.rows, args.batch_size, test=True)
    model = make_model(args.rows, args.dim, args.ratio)
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tf_basis.BasisAdam(args.learning_rate), loss)
    memory = Memory()
    model.fit(train, epochs=args.epochs, callbacks=[memory], verbose=verbosity())
    label, logit = test_scores(model, test)
    share = label.mean()
    constant = log_loss(label, np.full(len(label), np.log(share / (1 - share))))
    ours = log_loss(label, logit)
    gain = 1 - ours / constant
    print(f"{len(label):,} test examples, {share:.1%} clicks")
    print(f"{'':<10}{'AUC':>8}{'log-loss':>10}")
    print(f"{'constant':<10}{0.5:>8.4f}{constant:>10.4f}")
    print(f"{'DeepFM':<10}{auc(label, logit):>8.4f}{ours:>10.4f}  {gain:.1%} less")
    print(f"at least {CLAIMED_GAIN:.0%} less is claimed: {gain >= CLAIMED_GAIN}")
    print(f"optimizer state: {model.optimizer.state_bytes()['total']:,} bytes")
    if memory.megabytes:
        settled = memory.megabytes[len(memory.megabytes) // 4 :]
        print(f"memory: {settled[0]:,.0f} MB, at the end {settled[-1]:,.0f} MB")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    tf.keras.utils.set_random_seed(args.seed)
    try:
        if args.data:
            run(args, args.data)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "generated.tsv")
                criteo_data.generate(path, args.generate, args.seed)
                run(args, path)
    except (ValueError, tf.errors.InvalidArgumentError, tf.errors.DataLossError) as e:
        print(f"error: {getattr(e, 'message', e)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
