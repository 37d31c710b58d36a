"""DLRM on Keras 3 with multi-hot features: ragged ids, tables that features share.

    python examples/dlrm_ragged.py

Will a user like this film? From the user, the film, its genres (any number), and the
films that the user liked before (any number, none at first), which are looked up in the
table of the film itself. MovieLens-100K or ratings of your own; the last fifth of each
user's is tested on, beside the film's share of likes so far, which is its popularity.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import movielens_data
import numpy as np
import tensorflow as tf
from comparison import auc, log_loss, verbosity
from dlrm_model import Interactions
from movielens_features import earlier, encode, smoothed

import tf_basis
from tf_basis.layers import EmbeddingCollection, FeatureConfig, TableConfig

CLAIMED_GAIN = 0.05  # of the AUC, against popularity
HISTORY = 30  # films of the past, at most


def rows_of(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Rows by frequency, and how many there are."""
    codes = encode(values)
    order = np.argsort(-np.bincount(codes), kind="stable")
    return np.argsort(order)[codes], len(order)


def histories(user: np.ndarray, film: np.ndarray, liked: np.ndarray) -> tf.RaggedTensor:
    """The films that each rating's user liked before it, the last ones."""
    past, lists = {}, []
    for u, f, like in zip(user, film, liked):
        mine = past.setdefault(u, [])
        lists.append(mine[-HISTORY:])
        if like:
            mine.append(f)
    return tf.ragged.constant(lists, tf.int64)


def features(log: movielens_data.Log) -> tuple[dict, list[FeatureConfig], np.ndarray]:
    """Inputs of all ratings, what the features are, and which ratings to train on."""
    liked = log.label
    (user, users), (film, films) = rows_of(log.user), rows_of(log.item)
    names = [log.items.get(i, ((), None))[0] for i in log.item]
    genre = encode([g for each in names for g in each])
    user_past = earlier(user, log.time, liked)
    film_past = earlier(film, log.time, liked)
    train = user_past[:, 0] < movielens_data.TRAIN_SHARE * np.bincount(user)[user]
    shares = [smoothed(p, liked[train].mean()) for p in (user_past, film_past)]
    numbers = [np.log(s / (1 - s)) for s in shares]
    # No more than 50: the counts of the test part are larger than those before.
    numbers += [np.log1p(np.minimum(p[:, 0], 50)) / 4 for p in (user_past, film_past)]
    inputs = {
        "numbers": np.stack(numbers, axis=1).astype(np.float32),
        "user": user,
        "film": film,
        "genres": tf.RaggedTensor.from_row_lengths(genre, list(map(len, names))),
        "history": histories(user, film, liked),
    }
    rows = {"user": users, "film": films, "genre": int(genre.max()) + 1}
    start = tf.keras.initializers.RandomUniform(-0.05, 0.05)
    small = {"initializer": start, "compression_ratio": 10.0}
    table = {name: TableConfig(name, n, 16, **small) for name, n in rows.items()}
    configs = [
        FeatureConfig("user", table["user"]),
        FeatureConfig("film", table["film"]),
        FeatureConfig("genres", table["genre"], (None, None)),
        FeatureConfig("history", table["film"], (None, None)),
    ]
    return inputs, configs, train


def make_model(configs: list[FeatureConfig]) -> tf.keras.Model:
    """Returns logits."""
    layers = tf.keras.layers
    numbers = tf.keras.Input((4,), name="numbers")
    ids = {
        f.name: tf.keras.Input(
            f.input_shape[1:], dtype="int64", name=f.name, ragged=f.combined
        )
        for f in configs
    }
    found = EmbeddingCollection(configs, name="tables")(ids)
    bottom = layers.Dense(16)(layers.Dense(32, activation="relu")(numbers))
    stack = layers.Lambda(lambda x: tf.stack(x, 1))([found[f.name] for f in configs])
    crossed = Interactions()([bottom, stack])
    hidden = layers.Dropout(0.3)(layers.Dense(64, activation="relu")(crossed))
    return tf.keras.Model({"numbers": numbers, **ids}, layers.Dense(1)(hidden))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="u.data, ratings.dat, ratings.csv or *.inter, films beside it")
    add("--cache-dir", help="where MovieLens-100K is kept")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=256)
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        path = args.data or movielens_data.fetch_movielens(args.cache_dir)
        log = movielens_data.load(path)
        if not log.items:
            raise ValueError(f"{path}: no file of films with genres is beside it")
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tf.keras.utils.set_random_seed(args.seed)
    inputs, configs, train = features(log)
    model = make_model(configs)
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tf_basis.BasisAdam(args.learning_rate), loss)

    def part(chosen: np.ndarray) -> tf.data.Dataset:
        places = np.flatnonzero(chosen)
        parts = {name: tf.gather(value, places) for name, value in inputs.items()}
        return tf.data.Dataset.from_tensor_slices((parts, log.label[places, None]))

    data = part(train).shuffle(len(train), seed=args.seed).batch(args.batch_size)
    model.fit(data, epochs=args.epochs, verbose=verbosity())
    logit = model.predict(part(~train).batch(4096), verbose=0)[:, 0].astype(np.float64)
    test, popular = log.label[~train], inputs["numbers"][~train, 1].astype(np.float64)
    print(f"\n{train.sum():,} ratings to train on, {len(test):,} to test")
    print(f"{'':<12}{'AUC':>8}{'log-loss':>10}")
    for name, score in (("popularity", popular), ("DLRM", logit)):
        print(f"{name:<12}{auc(test, score):>8.4f}{log_loss(test, score):>10.4f}")
    gain = auc(test, logit) - auc(test, popular)
    print(f"AUC {gain:+.4f}; {CLAIMED_GAIN:+} is claimed: {gain >= CLAIMED_GAIN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
