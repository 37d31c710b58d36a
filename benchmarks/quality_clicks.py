"""Click-through rates: the tasks of `quality.py` on MovieLens-100K and Zipf ids.

Both train the DeepFM of examples/movielens_ctr.py in one pass: one table of 16 columns,
one of linear weights and 15 of latent factors. The towers have Adam, whatever the
table has.

* MovieLens-100K: whether a rating is 4 or more, crossed features, the last fifth of the
  ratings by time to be scored; rates are chosen on the last tenth of the rest.
* Zipf: clicks of a known teacher, a factorization machine with random weights; ids of
  each field are Zipf-distributed. The teacher's own AUC is the most that is possible.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import keras
import movielens_ctr
import movielens_data
import numpy as np
import tensorflow as tf
from comparison import auc, log_loss
from movielens_features import Features, forget_users, make_features

TOWER_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all optimizers have in common."""

    batch: int
    epochs: int = 1


@dataclasses.dataclass
class Clicks:
    """Examples; the first `n_train` are to train on, the others to be scored."""

    features: Features
    label: np.ndarray
    n_train: int
    bound: float | None = None  # AUC of the teacher
    forgotten: float = 0.0  # share of training examples whose user is hidden


def movielens(path: str | None, tuning: bool) -> Clicks:
    """The ratings of a file, or of MovieLens-100K; for tuning without the test part."""
    log = movielens_data.load(path or movielens_data.fetch_movielens())
    n_train = int(log.n_train * 0.9) if tuning else log.n_train
    end = log.n_train if tuning else len(log.label)
    features = make_features(log, n_train)
    rows, weights = features.rows[:end], features.weights[:end]
    features = dataclasses.replace(features, rows=rows, weights=weights)
    return Clicks(features, log.label[:end], n_train, forgotten=movielens_ctr.FORGOTTEN)


def zipf(
    examples: int, sizes: tuple[int, ...], tuning: bool, exponent: float = 1.05
) -> Clicks:
    """Clicks of the teacher; for tuning other examples of the same teacher."""
    teacher = np.random.default_rng(0)
    draw = np.random.default_rng(2 if tuning else 1)
    factors = 8
    linear = [0.5 * teacher.standard_normal(n) for n in sizes]
    latent = [0.3 * teacher.standard_normal((n, factors)) for n in sizes]
    rows, start = [], 0
    logit, total, own = np.full(examples, -1.0), 0.0, 0.0
    for size, w, v in zip(sizes, linear, latent):
        mass = np.cumsum(np.arange(1, size + 1) ** -exponent)
        ids = np.searchsorted(mass, draw.random(examples) * mass[-1])
        logit += w[ids]
        total, own = total + v[ids], own + (v * v).sum(1)[ids]
        rows.append(start + ids)
        start += size
    logit += 0.5 * ((total * total).sum(1) - own)
    label = (draw.random(examples) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    n_train = int(0.8 * examples)
    fields = [f"field {i}" for i in range(len(sizes))]
    weights = np.ones((examples, len(sizes)), np.float32)
    features = Features(
        np.stack(rows, 1).astype(np.int32),
        weights,
        np.arange(len(sizes)),
        fields,
        list(sizes),
        [],
    )
    bound = auc(label[n_train:], logit[n_train:])
    return Clicks(features, label, n_train, bound)


def train(
    clicks: Clicks,
    make_optimizer: Callable[[list[Any]], Any],
    seed: int,
    settings: Settings,
) -> tuple[dict[str, float], Any]:
    """Trains from the seed and scores; also returns the table's optimizer."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    features, n_train = clicks.features, clicks.n_train
    model = movielens_ctr.make_model(features, seed)
    table = model.get_layer("table").embeddings
    towers = [v for v in model.trainable_variables if v is not table]
    optimizer, of_towers = make_optimizer([table]), keras.optimizers.Adam(TOWER_RATE)
    of_towers.build(towers)
    rows = forget_users(features, clicks.forgotten, seed)[:n_train]

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, rows.shape[1]], tf.int32),
            tf.TensorSpec([None, rows.shape[1]], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ]
    )
    def epoch(rows, weights, label):
        for step in tf.range(tf.shape(rows)[0] // settings.batch):
            part = step * settings.batch
            end = part + settings.batch
            with tf.GradientTape() as tape:
                logit = model([rows[part:end], weights[part:end]], training=True)
                losses = tf.nn.sigmoid_cross_entropy_with_logits(
                    label[part:end], logit[:, 0]
                )
                loss = tf.reduce_mean(losses)
            of_table, *others = tape.gradient(
                loss, [table.value, *(v.value for v in towers)]
            )
            optimizer.apply_gradients([(of_table, table)])
            of_towers.apply_gradients(list(zip(others, towers)))

    for _ in range(settings.epochs):
        order = rng.permutation(n_train)
        arrays = (rows, features.weights[:n_train], clicks.label[:n_train])
        epoch(*(tf.constant(x[order]) for x in arrays))
    logit = movielens_ctr.scores(model, features, n_train, len(clicks.label))
    label = clicks.label[n_train:]
    return {"auc": auc(label, logit), "log_loss": log_loss(label, logit)}, optimizer
