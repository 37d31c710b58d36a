"""Next item of a session: causal self-attention (SASRec) on one table, with BasisAdam.

A user's ratings in time order are a session. Each place predicts the item after it,
among a few random others; the last item of each session is the test part. History, next
items and random ones are features of one table, so that a step has one gather and one
sparse gradient; padded places are masked and touch no row.

    python examples/sasrec.py

Reference: Kang and McAuley, Self-attentive sequential recommendation, ICDM 2018.
"""

from __future__ import annotations

import argparse
import os
import sys

if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
    print("error: for Keras 3: unset TF_USE_LEGACY_KERAS", file=sys.stderr)
    sys.exit(2)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import movielens_data
import numpy as np
import retrieval_data as data
import retrieval_scores as scores
import tensorflow as tf
from comparison import verbosity

import tf_basis
from tf_basis.layers import EmbeddingCollection, FeatureConfig, TableConfig

DIM, HEADS, DROPOUT = 48, 2, 0.3
RANDOM = 16  # items beside the next one that a place chooses from
MARGIN = 1.5  # times popularity's hit@10, on MovieLens-100K with the default settings


class SASRec(keras.Model):
    """Scores of `choices` [batch, length, k] after each place of `history`."""

    def __init__(self, items: int, length: int, blocks: int):
        super().__init__()
        start = keras.initializers.RandomNormal(stddev=0.1)
        table = TableConfig("item", items, DIM, start, compression_ratio=10.0)
        place, choice = (None, length), (None, length, 1 + RANDOM)
        self.embed = EmbeddingCollection(
            [
                FeatureConfig("history", table, place, (*place, DIM)),
                FeatureConfig("choices", table, choice, (*choice, DIM)),
            ]
        )
        layers = keras.layers
        self.positions = layers.Embedding(length, DIM)
        self.drop = layers.Dropout(DROPOUT)
        self.attention = [
            layers.MultiHeadAttention(HEADS, DIM // HEADS, dropout=DROPOUT)
            for _ in range(blocks)
        ]
        self.hidden = [layers.Dense(2 * DIM, "relu") for _ in range(blocks)]
        self.out = [layers.Dense(DIM) for _ in range(blocks)]
        self.norms = [layers.LayerNormalization() for _ in range(2 * blocks + 1)]

    def call(self, inputs, training=False):
        there = inputs["history"] >= 0
        wide = there[..., None] & tf.ones_like(inputs["choices"], tf.bool)
        vectors = self.embed(inputs, mask={"history": there, "choices": wide})
        states = self.encode(vectors["history"], there, training)
        return keras.ops.einsum("bld,blkd->blk", states, vectors["choices"])

    def encode(self, x, there, training=False):
        """What each place expects next, from the places up to it."""
        x += self.positions(keras.ops.arange(x.shape[1]))
        x = self.drop(x, training=training)
        for n in range(len(self.attention)):
            y = self.norms[2 * n](x)
            x += self.attention[n](
                y,
                x,
                attention_mask=there[:, None],
                use_causal_mask=True,
                training=training,
            )
            y = self.out[n](self.hidden[n](self.norms[2 * n + 1](x)))
            x += self.drop(y, training=training)
        return self.norms[-1](x)

    def scores_of_all(self, history: np.ndarray) -> np.ndarray:
        """Scores of all items after the last place, [batch, items]."""
        table = self.embed.table("item")
        states = [
            self.encode(keras.ops.take(table, keras.ops.maximum(h, 0), axis=0), h >= 0)[
                :, -1
            ]
            for h in np.split(history, range(256, len(history), 256))
        ]
        return np.concatenate(states) @ table.numpy().T


def make_batches(sessions, items: int, args: argparse.Namespace) -> tf.data.Dataset:
    """Windows of the sessions, the next items and new random ones in each epoch."""
    ends = [(s, end) for s in sessions for end in range(len(s), 1, -args.length)]
    windows = [s[max(0, end - args.length - 1) : end] for s, end in ends]
    history = data.padded([w[:-1] for w in windows], args.length)
    following = data.padded([w[1:] for w in windows], args.length)

    def choices(history, following):
        shape = (*history.shape, RANDOM)
        others = tf.random.uniform(shape, 0, items, tf.int32, seed=args.seed)
        x = {"history": history, "choices": tf.concat([following[:, None], others], 1)}
        return x, tf.zeros_like(history), tf.cast(history >= 0, tf.float32)

    made = tf.data.Dataset.from_tensor_slices((history, following))
    made = made.shuffle(len(history), seed=args.seed).map(choices)
    return made.batch(args.batch_size).prefetch(2)


def train(log: movielens_data.Log, args: argparse.Namespace) -> bool:
    """Trains on all but the last items, prints scores on those; is the claim true?"""
    sessions = data.leave_last_out(log)
    items, before = len(sessions.items), sessions.before
    count = [len(s) for s in before]
    print(f"{sum(count):,} ratings to train on, the last of {len(count):,} users kept")
    keras.utils.set_random_seed(args.seed)
    model = SASRec(items, args.length, args.blocks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf_basis.BasisAdam(args.learning_rate), loss)
    batches = make_batches(before, items, args)
    model.fit(batches, epochs=args.epochs, shuffle=False, verbose=verbosity())
    user = np.arange(len(count))
    seen = np.repeat(user, count), np.concatenate(before)
    for name, size in model.optimizer.state_bytes().items():
        if "item" in name or name == "total":
            print(f"optimizer state, {name}: {size:,} bytes")
    score = model.scores_of_all(data.padded(before, args.length))
    return scores.compare("SASRec", score, seen, (user, sessions.last), MARGIN)


def main(argv: list[str] | None = None) -> int:
    parser = scores.make_parser(__doc__, epochs=25, batch_size=128, learning_rate=2e-3)
    parser.add_argument("--length", type=scores.positive, default=50)
    parser.add_argument("--blocks", type=scores.positive, default=2)
    return scores.run(parser, train, argv)


if __name__ == "__main__":
    sys.exit(main())
