"""Retrieval with TensorFlow Recommenders: two towers on tf_keras, with BasisAdam.

A user tower and an item tower learn from the ratings of 4 or more; each user's last
fifth of them, by time, is the test part (split by the clock alone, most users of the
test part would be unknown). Top-k accuracy stands beside that of recommending the most
popular items to everybody.

MovieLens-100K gives tables of 943 and 1,400 rows: far too small to need a compressed
optimizer, hence `min_rows=500`. What it shows is the wiring.

    python examples/tfrs_two_tower.py
"""

from __future__ import annotations

import argparse
import os
import sys

# TensorFlow Recommenders wants tf.keras to be tf_keras: say so before any import.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import movielens_data
import numpy as np
import tensorflow as tf
from comparison import verbosity

try:
    import tensorflow_recommenders as tfrs
except ImportError as error:
    print(f"error: {error}: pip install 'tf_basis[tfrs]' first", file=sys.stderr)
    sys.exit(2)

import tf_basis

KS = (1, 5, 10, 50, 100)
DIM = 32


def split_by_user(log: movielens_data.Log) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the liked ratings: each user's first four fifths, and the rest."""
    liked = np.flatnonzero(log.label)
    _, user, count = np.unique(log.user[liked], return_inverse=True, return_counts=True)
    order = np.argsort(user, kind="stable")  # by user, each in time order
    place = np.empty(len(liked), np.int64)
    place[order] = np.arange(len(liked)) - (np.cumsum(count) - count)[user[order]]
    early = place < np.ceil(count[user] * movielens_data.TRAIN_SHARE)
    return liked[early], liked[~early]


def make_tower(ids: np.ndarray, seed: int) -> tf.keras.Sequential:
    """Id string -> row in frequency order (row 0 is unknown) -> embedding."""
    lookup = tf.keras.layers.StringLookup()
    lookup.adapt(ids)
    start = tf.keras.initializers.RandomNormal(stddev=0.1, seed=seed)
    table = tf.keras.layers.Embedding(
        lookup.vocabulary_size(), DIM, embeddings_initializer=start
    )
    return tf.keras.Sequential([tf.keras.Input((), dtype=tf.string), lookup, table])


class TwoTower(tfrs.Model):
    """Dot product of a user's and an item's embedding, softmax over the batch."""

    def __init__(self, user: np.ndarray, item: np.ndarray, seed: int):
        super().__init__()
        self.user_tower = make_tower(user, seed)
        self.item_tower = make_tower(item, seed + 1)
        items = tf.data.Dataset.from_tensor_slices(np.unique(item)).batch(2048)
        candidates = items.map(lambda ids: (ids, self.item_tower(ids)))
        self.task = tfrs.tasks.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(candidates, ks=KS),
            remove_accidental_hits=True,
        )

    def compute_loss(self, inputs, training=False):
        return self.task(
            self.user_tower(inputs["user"]),
            self.item_tower(inputs["item"]),
            candidate_sampling_probability=inputs["probability"],
            candidate_ids=inputs["item"],
            compute_metrics=not training,
        )


def make_dataset(user: np.ndarray, item: np.ndarray) -> tf.data.Dataset:
    """Pairs, with the chance that a batch's random entry is this item."""
    _, code, count = np.unique(item, return_inverse=True, return_counts=True)
    share = (count[code] / len(item)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(
        {"user": user, "item": item, "probability": share}
    )


def top_k(model: TwoTower, test: tf.data.Dataset) -> list[float]:
    """TFRS's own top-k accuracy, which ranks what the user has liked before too."""
    result = model.evaluate(test.batch(4096), return_dict=True, verbose=0)
    return [result[f"factorized_top_k/top_{k}_categorical_accuracy"] for k in KS]


def top_k_of_new(score: np.ndarray, log, train, test) -> list[float]:
    """Top-k accuracy among the items that the user has not liked before.

    `score` is [users, items] in the order of np.unique of the training part. An item
    that the training part does not hold cannot be recommended, and counts as missed.
    """
    users, items = np.unique(log.user[train]), np.unique(log.item[train])
    old = (
        np.searchsorted(users, log.user[train]),
        np.searchsorted(items, log.item[train]),
    )
    score = np.array(score, np.float64)
    score[old] = -np.inf
    rank = np.full(len(test), np.inf)
    for n, (user, item) in enumerate(zip(log.user[test], log.item[test], strict=True)):
        place = np.searchsorted(items, item)
        if place < len(items) and items[place] == item:
            row = score[np.searchsorted(users, user)]
            rank[n] = 1 + np.count_nonzero(row > row[place])
    return [float(np.mean(rank <= k)) for k in KS]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="ratings.csv, u.data, ratings.dat or *.inter")
    parser.add_argument("--cache-dir", help="where MovieLens-100K is kept")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        path = args.data or movielens_data.fetch_movielens(args.cache_dir)
        log = movielens_data.load(path)
        train, test = parts = split_by_user(log)
        if not len(test):
            raise ValueError(f"{path}: no user has enough ratings of 4 or more")
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tf.keras.utils.set_random_seed(args.seed)
    user, item = log.user[train], log.item[train]
    model = TwoTower(user, item, args.seed)
    model.compile(tf_basis.BasisAdam(args.learning_rate, min_rows=500))
    batches = make_dataset(user, item).shuffle(len(user), seed=args.seed)
    test_set = make_dataset(log.user[test], log.item[test])
    untrained = top_k(model, test_set)
    model.fit(batches.batch(args.batch_size), epochs=args.epochs, verbose=verbosity())
    users, (items, count) = np.unique(user), np.unique(item, return_counts=True)
    score = model.user_tower(users).numpy() @ model.item_tower(items).numpy().T
    popular = np.broadcast_to(count, score.shape)
    lines = {
        "TFRS metric, before training": untrained,
        "TFRS metric, after training": top_k(model, test_set),
        "new items, popularity": top_k_of_new(popular, log, *parts),
        "new items, two towers": top_k_of_new(score, log, *parts),
    }
    print(f"\n{len(train):,} ratings to train on, {len(test):,} to test")
    print(f"{'top-k accuracy, k =':<30}" + "".join(f"{k:>8}" for k in KS))
    for name, values in lines.items():
        print(f"{name:<30}" + "".join(f"{value:>8.4f}" for value in values))
    for name, size in model.optimizer.state_bytes().items():
        print(f"optimizer state, {name}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
