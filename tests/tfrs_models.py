"""Small models of TensorFlow Recommenders, and data that they can learn."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

USERS, ITEMS, DIM = 200, 100, 8
keras = tf.keras


def ratings(seed: int, count: int = 2000) -> tf.data.Dataset:
    """The product of what is hidden in user and item, with a little noise."""
    hidden = np.random.default_rng(7)
    of_user, of_item = hidden.normal(size=USERS), hidden.normal(size=ITEMS)
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, USERS, count), rng.integers(0, ITEMS, count)
    rating = of_user[user] * of_item[item] + rng.normal(0, 0.1, count)
    return tf.data.Dataset.from_tensor_slices(
        {"user": user, "item": item, "rating": rating.astype(np.float32)}
    )


def likes(seed: int, count: int = 2000) -> tf.data.Dataset:
    """Users and items come in ten kinds; a user likes his own."""
    rng = np.random.default_rng(seed)
    user, other = rng.integers(0, USERS, count), rng.integers(0, ITEMS // 10, count)
    return tf.data.Dataset.from_tensor_slices(
        {"user": user, "item": other * 10 + user % 10}
    )


def table(rows: int, seed: int) -> keras.layers.Embedding:
    start = keras.initializers.RandomNormal(stddev=0.3, seed=seed)
    return keras.layers.Embedding(rows, DIM, embeddings_initializer=start)


class Ranker(tfrs.Model):
    """Cross layer and dense layer over both rows, squared error."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.user_tower, self.item_tower = table(USERS, 1), table(ITEMS, 2)
        self.cross = tfrs.layers.dcn.Cross()
        self.top = keras.layers.Dense(1)
        self.task = tfrs.tasks.Ranking(
            loss=keras.losses.MeanSquaredError(),
            metrics=[keras.metrics.RootMeanSquaredError()],
        )

    def compute_loss(self, inputs, training=False):
        user, item = self.user_tower(inputs["user"]), self.item_tower(inputs["item"])
        crossed = self.cross(tf.concat([user, item], 1))
        return self.task(
            labels=inputs["rating"],
            predictions=self.top(crossed)[:, 0],
            compute_metrics=not training,
        )


class Retriever(tfrs.Model):
    """A table for users, one for items; softmax over the batch."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.user_tower, self.item_tower = table(USERS, 1), table(ITEMS, 2)
        items = tf.data.Dataset.range(ITEMS).batch(50)
        candidates = items.map(lambda ids: (ids, self.item_tower(ids)))
        self.task = tfrs.tasks.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(candidates, ks=(10,)),
            remove_accidental_hits=True,
        )

    def compute_loss(self, inputs, training=False):
        return self.task(
            self.user_tower(inputs["user"]),
            self.item_tower(inputs["item"]),
            candidate_ids=inputs["item"],
            compute_metrics=not training,
        )


class Both(Ranker):
    """Both tasks on the same rows."""

    def __init__(self):
        super().__init__()
        self.retrieval = tfrs.tasks.Retrieval(remove_accidental_hits=True)

    def compute_loss(self, inputs, training=False):
        liked = self.retrieval(
            self.user_tower(inputs["user"]),
            self.item_tower(inputs["item"]),
            sample_weight=tf.cast(inputs["rating"] > 0, tf.float32),
            candidate_ids=inputs["item"],
        )
        return super().compute_loss(inputs, training) + liked / 1000.0
