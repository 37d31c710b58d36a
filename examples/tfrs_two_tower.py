"""Retrieval with TensorFlow Recommenders: two towers on tf_keras, with BasisAdam.

A user tower and an item tower learn from the ratings of 4 or more; each user's last
fifth of them, by time, is the test part. Hits among new items stand beside those of
recommending the most popular ones to everybody.

MovieLens-100K gives tables of 943 and 1,400 rows: far too small to need a compressed
optimizer, hence `min_rows`. What it shows is the wiring.

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
import retrieval_data as data
import retrieval_scores as scores
import tensorflow as tf
from comparison import verbosity

try:
    import tensorflow_recommenders as tfrs
except ImportError as error:
    print(f"error: {error}: pip install 'tf_basis[tfrs]' first", file=sys.stderr)
    sys.exit(2)

import tf_basis

DIM = 32
MARGIN = 1.3  # times popularity's hit@10, on MovieLens-100K with the default settings


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
            metrics=tfrs.metrics.FactorizedTopK(candidates, ks=scores.KS),
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


def print_top_k(when: str, model: TwoTower, test: tf.data.Dataset) -> None:
    """TFRS's own top-k accuracy, which ranks what the user has liked before too."""
    result = model.evaluate(test.batch(4096), return_dict=True, verbose=0)
    values = [
        result[f"factorized_top_k/top_{k}_categorical_accuracy"] for k in scores.KS
    ]
    print(f"{f'TFRS top-k, {when}':<30}" + "".join(f"{v:>8.4f}" for v in values))


def train(log: movielens_data.Log, args: argparse.Namespace) -> bool:
    """Trains on early ratings, prints scores on late ones; is the claim true?"""
    early, late = data.split_by_user(log)
    print(f"{len(early):,} ratings to train on, {len(late):,} to test")
    tf.keras.utils.set_random_seed(args.seed)
    user, item = log.user[early], log.item[early]
    model = TwoTower(user, item, args.seed)
    model.compile(tf_basis.BasisAdam(args.learning_rate, min_rows=args.min_rows))
    batches = make_dataset(user, item).shuffle(len(user), seed=args.seed)
    test_set = make_dataset(log.user[late], log.item[late])
    print_top_k("before training", model, test_set)
    model.fit(batches.batch(args.batch_size), epochs=args.epochs, verbose=verbosity())
    print_top_k("after training", model, test_set)
    users, items = np.unique(user), np.unique(item)
    seen = data.codes(user, users), data.codes(item, items)
    wanted = data.codes(log.user[late], users), data.codes(log.item[late], items)
    score = model.user_tower(users).numpy() @ model.item_tower(items).numpy().T
    for name, size in model.optimizer.state_bytes().items():
        print(f"optimizer state, {name}: {size:,} bytes")
    return scores.compare("two towers", score, seen, wanted, MARGIN)


def main(argv: list[str] | None = None) -> int:
    parser = scores.make_parser(__doc__, epochs=5, batch_size=1024, learning_rate=0.01)
    parser.add_argument("--min-rows", type=scores.positive, default=500)
    return scores.run(parser, train, argv)


if __name__ == "__main__":
    sys.exit(main())
