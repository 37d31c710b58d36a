"""Optimizers with one table, trained on batches made at random."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers import make_slices

import tf_basis
from tf_basis import diagnostics

ROWS, DIM = 400, 4

LEARNED = {"invariant_scalar": "learned", "momentum": "shared"}


def batches(steps, rows=ROWS, size=60, seed=0):
    """Batches with duplicates, a few rows in most of them; rows differ in scale."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(rows, 1)))
    for _ in range(steps):
        ids = (rng.zipf(1.2, size) - 1) % rows
        yield ids, rng.normal(size=(size, DIM)) * scale[ids]


def built(kind="BasisAdam", rows=ROWS, **settings):
    table = tf.Variable(tf.zeros([rows, DIM]), name="table")
    settings = {"num_buckets": 20, **settings}
    optimizer = getattr(tf_basis, kind)(0.01, tables=[table], **settings)
    optimizer.build([table])
    return optimizer, table


def train(optimizer, table, steps=30, data=None):
    shape = tuple(table.shape)
    for ids, values in data or batches(steps, shape[0]):
        gradient = make_slices(ids, values, shape)
        optimizer.apply_gradients([(gradient, table)])


def trained(kind="BasisAdam", steps=30, **settings):
    optimizer, table = built(kind, **settings)
    train(optimizer, table, steps)
    return optimizer, table


def with_shadows(kind="BasisAdam", data=None, steps=30, count=16, **settings):
    optimizer, table = built(kind, **settings)
    with diagnostics.ShadowRows(optimizer, rows=count).attached() as shadows:
        train(optimizer, table, steps, data)
    return optimizer, table, shadows


def errors_of(optimizer, shadows):
    return diagnostics.report(optimizer, shadows).tables[0]["shadows"]
