"""Retrieval with keras-rs: `DistributedEmbedding` and `BruteForceRetrieval`, BasisAdam.

A user is his own row and the mean of the items that he liked last; likes come from the
ratings of 4 or more, and each user's last fifth of them, by time, is the test part. On
CPU and GPU the tables of `DistributedEmbedding` are ordinary weights with sparse
gradients; the model's optimizer trains them, not one that their `TableConfig` names.

    python examples/keras_rs_retrieval.py
"""

from __future__ import annotations

import argparse
import os
import sys

if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
    print("error: for Keras 3: unset TF_USE_LEGACY_KERAS", file=sys.stderr)
    sys.exit(2)
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import movielens_data
import numpy as np
import retrieval_data as data
import retrieval_scores as scores
import tensorflow as tf
from comparison import verbosity

try:
    import keras_rs
except ImportError as error:
    print(f"error: {error}: pip install 'tf_basis[keras-rs]' first", file=sys.stderr)
    sys.exit(2)

import tf_basis

DIM = 32
MARGIN = 1.5  # times popularity's hit@10, on MovieLens-100K with the default settings


class Likes(keras.Model):
    """Scores of a batch's items for each of its users, [batch, batch]."""

    def __init__(self, users: int, items: int, recent: int, seed: int):
        super().__init__()
        layers = keras_rs.layers

        def table(name, rows, seed):
            start = keras.initializers.RandomNormal(stddev=0.1, seed=seed)
            return layers.TableConfig(name, rows, DIM, initializer=start)

        user, item = table("user", users, seed), table("item", items, seed + 1)
        out = (None, DIM)
        self.embed = layers.DistributedEmbedding(
            {
                "user": layers.FeatureConfig("user", user, (None,), out),
                "recent": layers.FeatureConfig("recent", item, (None, recent), out),
                "item": layers.FeatureConfig("item", item, (None,), out),
            }
        )
        self.correct = layers.SamplingProbabilityCorrection()
        self.without_hits = layers.RemoveAccidentalHits()

    def call(self, inputs):
        share, ids = inputs["share"], {k: v for k, v in inputs.items() if k != "share"}
        vectors = self.embed(ids)
        query = vectors["user"] + vectors["recent"]
        logits = keras.ops.matmul(query, keras.ops.transpose(vectors["item"]))
        logits = self.correct(logits, share)
        labels = keras.ops.eye(keras.ops.shape(share)[0])
        return self.without_hits(logits, labels, inputs["item"])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        own = keras.ops.arange(keras.ops.shape(y_pred)[0])  # on the diagonal
        loss = keras.losses.sparse_categorical_crossentropy
        return keras.ops.mean(loss(own, y_pred, from_logits=True))


def recent_likes(user: np.ndarray, item: np.ndarray, users: int, length: int):
    """The likes before each one, and after a user's last, as lists of items."""
    own: list[list[int]] = [[] for _ in range(users)]
    before = []
    for u, i in zip(user.tolist(), item.tolist()):  # in time order
        before.append(own[u][-length:])
        own[u].append(i)
    return before, [o[-length:] for o in own]


def train(log: movielens_data.Log, args: argparse.Namespace) -> bool:
    """Trains on early ratings, prints scores on late ones; is the claim true?"""
    early, late = data.split_by_user(log)
    print(f"{len(early):,} ratings to train on, {len(late):,} to test")
    keras.utils.set_random_seed(args.seed)
    users, items = np.unique(log.user[early]), data.by_frequency(log.item[early])
    user, item = data.codes(log.user[early], users), data.codes(log.item[early], items)
    before, after = recent_likes(user, item, len(users), args.recent)
    share = (np.bincount(item)[item] / len(item)).astype(np.float32)
    x = {"user": user, "item": item, "share": share}
    x["recent"] = tf.ragged.constant(before, ragged_rank=1, dtype=tf.int32)
    batches = tf.data.Dataset.from_tensor_slices(x)
    batches = batches.shuffle(len(user), seed=args.seed).batch(args.batch_size)
    model = Likes(len(users), len(items), args.recent, args.seed)
    model.compile(tf_basis.BasisAdam(args.learning_rate, min_rows=args.min_rows))
    model.fit(
        batches.map(lambda x: (x, x["item"])),
        epochs=args.epochs,
        shuffle=False,
        verbose=verbosity(),
    )
    tables = model.embed.get_embedding_tables()
    recent = tf.ragged.constant(after, ragged_rank=1, dtype=tf.int32)
    everybody = np.arange(len(users))
    vectors = model.embed({"user": everybody, "recent": recent, "item": everybody * 0})
    retrieval = keras_rs.layers.BruteForceRetrieval(tables["item"], k=len(items))
    top, place = map(np.array, retrieval(vectors["user"] + vectors["recent"]))
    score = np.empty_like(top)
    np.put_along_axis(score, place, top, 1)
    for name, size in model.optimizer.state_bytes().items():
        print(f"optimizer state, {name}: {size:,} bytes")
    wanted = data.codes(log.user[late], users), data.codes(log.item[late], items)
    return scores.compare("keras-rs", score, (user, item), wanted, MARGIN)


def main(argv: list[str] | None = None) -> int:
    parser = scores.make_parser(__doc__, epochs=5, batch_size=1024, learning_rate=0.01)
    parser.add_argument("--min-rows", type=scores.positive, default=500)
    parser.add_argument("--recent", type=scores.positive, default=10)
    return scores.run(parser, train, argv)


if __name__ == "__main__":
    sys.exit(main())
