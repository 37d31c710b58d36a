"""Matrix factorization with BPR on Gowalla: the task of `quality.py` that ranks items.

The published split of LightGCN: 29,858 users, 40,981 items, 810,128 pairs to train on.
Users and items have a table each, d = 64; a step pulls each pair of a user and an item
of theirs away from an item drawn at random:

    loss = mean of softplus(-<u, i - j>) + reg/2 · mean of (|u|² + |i|² + |j|²)

Scored over all items that a user has not had in training, for every user of the test
part: Recall@20 and NDCG@20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

DIM = 64
TOP = 20
GROUP = 64
HELD_OUT = 0.1  # of the training pairs, to choose rates by
FILES = ("train_user", "train_item", "test_user", "test_item")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all optimizers have in common."""

    epochs: int = 25
    batch: int = 8192
    reg: float = 1e-2
    spread: float = 0.1  # standard deviation of the first weights


@dataclasses.dataclass
class Pairs:
    """Pairs of user and item to train on, and others to be found."""

    users: int
    items: int
    train: np.ndarray  # [n, 2]
    test: np.ndarray

    def tuning(self, seed: int = 0) -> Pairs:
        """Without the test part: some of the training pairs are to be found."""
        order = np.random.default_rng(seed).permutation(len(self.train))
        held = int(len(order) * HELD_OUT)
        test, train = self.train[order[:held]], self.train[order[held:]]
        return Pairs(self.users, self.items, train, test)


def load(path: Path) -> Pairs:
    """The pairs of a folder with train.txt and test.txt, or of an .npz.

    A line of the texts is a user and the user's items; the .npz has the int arrays
    train_user, train_item, test_user and test_item.
    """
    if path.is_dir():
        train, test = (read_text(path / f"{part}.txt") for part in ("train", "test"))
    else:
        with np.load(path) as file:
            missing = [name for name in FILES if name not in file.files]
            if missing:
                raise ValueError(
                    f"{path}: must hold {', '.join(FILES)}; no {missing[0]!r}"
                )
            columns = [file[name].astype(np.int64) for name in FILES]
        train, test = np.stack(columns[:2], 1), np.stack(columns[2:], 1)
    users, items = np.maximum(train.max(0), test.max(0)) + 1
    return Pairs(int(users), int(items), train, test)


def read_text(path: Path) -> np.ndarray:
    """Pairs [n, 2] of lines of a user and its items."""
    lines = [np.array(line.split(), np.int64) for line in path.read_text().splitlines()]
    lines = [line for line in lines if len(line) > 1]
    users = np.repeat([line[0] for line in lines], [len(line) - 1 for line in lines])
    return np.stack([users, np.concatenate([line[1:] for line in lines])], 1)


def triples(pairs: Pairs, rng: np.random.Generator) -> np.ndarray:
    """An epoch [n, 3]: user, item of theirs, any item; in random order."""
    chosen = pairs.train[rng.permutation(len(pairs.train))]
    return np.insert(chosen, 2, rng.integers(0, pairs.items, len(chosen)), axis=1)


def make_epoch(
    tables: list[Any], optimizer: Any, settings: Settings
) -> Callable[[tf.Tensor], None]:
    """A function that walks through an epoch of triples."""
    user_table, item_table = tables

    def loss_of(batch: tf.Tensor) -> tf.Tensor:
        u = tf.gather(user_table.value, batch[:, 0])
        i, j = (tf.gather(item_table.value, batch[:, column]) for column in (1, 2))
        margin = tf.reduce_sum(u * (i - j), axis=1)
        squares = tf.reduce_sum(u * u + i * i + j * j, axis=1)
        return tf.reduce_mean(tf.nn.softplus(-margin) + settings.reg / 2 * squares)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def epoch(rows: tf.Tensor) -> None:
        for step in tf.range(tf.shape(rows)[0] // settings.batch):
            start = step * settings.batch
            with tf.GradientTape() as tape:
                loss = loss_of(rows[start : start + settings.batch])
            gradients = tape.gradient(loss, [t.value for t in tables])
            optimizer.apply_gradients(list(zip(gradients, tables)))

    return epoch


def highest(scores: np.ndarray) -> np.ndarray:
    """Columns of the TOP largest values of each line, largest first.

    They are in the TOP groups of columns with the largest maxima. A group has every
    n-th column, so that the maxima of all groups are taken at the speed of memory.
    """
    lines, columns = scores.shape
    groups = columns // GROUP
    folded = scores.reshape(lines, GROUP, groups)
    chosen = np.argpartition(folded.max(axis=1), -TOP, axis=1)[:, -TOP:]
    values = np.take_along_axis(folded, chosen[:, None, :], axis=2)
    place = tf.math.top_k(values.reshape(lines, -1), TOP).indices.numpy()
    return place // TOP * groups + np.take_along_axis(chosen, place % TOP, axis=1)


def score(pairs: Pairs, users: np.ndarray, items: np.ndarray) -> dict[str, float]:
    """Recall@20 and NDCG@20, means over the users that have something to be found."""

    def lists(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        data = data[np.argsort(data[:, 0], kind="stable")]
        return data[:, 1], np.searchsorted(data[:, 0], np.arange(pairs.users + 1))

    had, had_at = lists(pairs.train)
    find, find_at = lists(pairs.test)
    asked = np.flatnonzero(np.diff(find_at))
    discount = 1 / np.log2(np.arange(TOP) + 2)
    ideal = np.cumsum(discount)
    recalls, gains = [], []
    filled = max(-len(items) % GROUP, TOP * GROUP - len(items))
    items = np.pad(items, [(0, filled), (0, 0)])
    for part in np.array_split(asked, max(1, len(asked) // 256)):
        scores = users[part] @ items.T
        scores[:, pairs.items :] = -np.inf
        for line, user in enumerate(part):
            scores[line, had[had_at[user] : had_at[user + 1]]] = -np.inf
        best = highest(scores)
        for line, user in enumerate(part):
            wanted = find[find_at[user] : find_at[user + 1]]
            hit = np.isin(best[line], wanted)
            recalls.append(hit.sum() / len(wanted))
            gains.append(discount @ hit / ideal[min(TOP, len(wanted)) - 1])
    return {"recall": float(np.mean(recalls)), "ndcg": float(np.mean(gains))}


def train(
    pairs: Pairs,
    make_optimizer: Callable[[list[Any]], Any],
    seed: int,
    settings: Settings,
) -> tuple[dict[str, float], Any]:
    """Trains from the seed and scores; also returns the optimizer."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    tables = [
        keras.Variable(
            rng.normal(0, settings.spread, (rows, DIM)).astype(np.float32), name=name
        )
        for name, rows in (("users", pairs.users), ("items", pairs.items))
    ]
    optimizer = make_optimizer(tables)
    epoch = make_epoch(tables, optimizer, settings)
    first = float(optimizer.learning_rate)
    for number in range(settings.epochs):
        optimizer.learning_rate.assign(first * (1 - number / settings.epochs))
        epoch(tf.constant(triples(pairs, rng)))
    return score(pairs, *(t.numpy() for t in tables)), optimizer
