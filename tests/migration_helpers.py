"""A trained Adam for the tests of migration, and what may follow it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers import keras_of, make_variable, to_numpy, variables_of

N_ROWS, DIM, UNSEEN = 120, 4, 100  # rows from UNSEEN on get no gradient

KINDS = {
    "owners": {"num_buckets": N_ROWS},
    "shared": {"num_buckets": 12},
    "exclusive": {"num_buckets": 17, "exclusive_rows": 5},
    "listed": {"num_buckets": 17, "exclusive_rows": [9, 50, 105]},
    "momentum": {"num_buckets": 12, "momentum": "shared"},
    "double": {"num_buckets": 24, "momentum": "shared", "hashing": "double"},
    "auto": {"num_buckets": 12, "exclusive_rows": "auto"},
    "plain": {"num_buckets": 12, "invariant_scalar": None, "bias_correction": False},
    "learned": {
        "num_buckets": 12,
        "momentum": "shared",
        "invariant_scalar": "learned",
        "scalar_frequency_power": 0.5,
    },
    "stale": {"num_buckets": 12, "momentum": "shared", "stale_decay": True},
    "low": {
        "num_buckets": 17,
        "exclusive_rows": 5,
        "moment_dtype": "bfloat16",
        "energy_dtype": "log8",
    },
}


def trained_adam(flavor, steps=20, kind="Adam", seed=0, **arguments):
    """An Adam after some steps on a table and a bias; rows of different scales."""
    rng = np.random.default_rng(seed)
    table = make_variable(rng.normal(size=(N_ROWS, DIM)), flavor, "table")
    bias = make_variable(np.zeros(3), flavor, "bias")
    adam = getattr(keras_of(flavor).optimizers, kind)(0.01, **arguments)
    scale = np.exp(rng.uniform(-1, 1, (N_ROWS, 1)))
    for _ in range(steps):
        dense = scale * rng.normal(size=(N_ROWS, DIM))
        dense[UNSEEN:] = 0
        pairs = [(dense, table), (rng.normal(size=3), bias)]
        adam.apply_gradients([(tf.constant(g, tf.float32), v) for g, v in pairs])
    return adam, table, bias


def moments_of(adam) -> list[np.ndarray]:
    """m and v of the table, whatever the order of the flavour."""
    found = [to_numpy(v) for v in variables_of(adam)]
    return [v for v in found if v.shape == (N_ROWS, DIM)]
