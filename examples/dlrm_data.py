"""Clicks for a DLRM: numbers, and rows of one embedding table, for each example."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from movielens_data import Log
from movielens_features import earlier, encode, make_features, smoothed

SYNTHETIC_SIZES = (20_000, 8_000, 3_000, 1_000, 300, 100, 30, 10)
SYNTHETIC_NUMBERS = 13
_LATENT = 4


@dataclasses.dataclass
class Clicks:
    """Examples in time order; the first `n_train` are to train on.

    `dense` is float32 [n, numbers]. `rows` and `weights` have a column per slot;
    `slot_field[s]` is the field that column s belongs to: a field is the weighted mean
    of the rows in its slots, out of the table's `n_rows`.
    """

    dense: np.ndarray
    rows: np.ndarray
    weights: np.ndarray
    slot_field: np.ndarray
    n_rows: int
    label: np.ndarray
    n_train: int

    def inputs(self, part: slice) -> dict[str, np.ndarray]:
        """What the model takes for these examples."""
        return {
            "dense": self.dense[part],
            "rows": self.rows[part],
            "weights": self.weights[part],
        }


def from_movielens(log: Log) -> Clicks:
    """Whether a rating is 4 or more, from earlier ratings of the user and the item."""
    n_train, label = log.n_train, log.label
    features = make_features(log, n_train)
    mean, columns = float(label[:n_train].mean()), []
    for group in (encode(log.user), encode(log.item)):
        past = earlier(group, log.time, label)
        columns += [smoothed(past, mean), np.log1p(past[:, 0])]
    dense = np.stack(columns, axis=1)
    dense = (dense - dense[:n_train].mean(0)) / dense[:n_train].std(0).clip(1e-6)
    return Clicks(
        dense.astype(np.float32),
        features.rows,
        features.weights,
        features.slot_field,
        features.n_rows,
        label,
        n_train,
    )


def synthetic(
    examples: int,
    seed: int = 0,
    test_share: float = 0.2,
    sizes: Sequence[int] = SYNTHETIC_SIZES,
) -> Clicks:
    """Clicks of a random teacher: latent factors of Zipf ids, and a network of numbers.

    Rows are numbered by frequency within a field; fields follow one another.
    """
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((examples, SYNTHETIC_NUMBERS)).astype(np.float32)
    hidden = np.tanh(dense @ rng.standard_normal((SYNTHETIC_NUMBERS, 32)) / 2)
    logit = hidden @ rng.standard_normal(32) / 4
    rows, start, total = [], 0, 0.0
    squares = 0.0
    for size in sizes:
        chances = 1.0 / (np.arange(size) + 5.0)
        ids = rng.choice(size, examples, p=chances / chances.sum())
        logit = logit + 0.5 * rng.standard_normal(size)[ids]
        factors = rng.standard_normal((size, _LATENT))[ids]
        total, squares = total + factors, squares + factors**2
        rows.append(start + ids)
        start += size
    logit += 0.1 * (total**2 - squares).sum(axis=1)  # all pairs of fields
    label = (rng.random(examples) < 1 / (1 + np.exp(1 - logit))).astype(np.float32)
    fields = len(sizes)
    return Clicks(
        dense,
        np.stack(rows, axis=1).astype(np.int32),
        np.ones((examples, fields), np.float32),
        np.arange(fields),
        start,
        label,
        examples - int(examples * test_share),
    )
