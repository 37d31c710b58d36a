"""Initial values of tables that are made block by block, and the memory that takes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, keras_of, to_numpy

from tf_basis import layers
from tf_basis.layers import FeatureConfig, TableConfig, blocks

ROWS, DIM, COUNT = 41, 3, 5  # nine blocks, the last one of one row


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", COUNT * DIM + 1)


def table(flavor, initializer, dtype=None):
    config = TableConfig("t", ROWS, DIM, initializer)
    feature = FeatureConfig("f", config)
    layer = layers.for_flavor(flavor).EmbeddingCollection([feature], dtype=dtype)
    layer.build(None)
    return layer.table("t")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_of_random_values(flavor, dtype):
    initializers = keras_of(flavor).initializers
    for make in (
        lambda seed: initializers.RandomUniform(2.0, 3.0, seed=seed),
        lambda seed: initializers.RandomNormal(5.0, 0.1, seed=seed),
        lambda seed: initializers.TruncatedNormal(5.0, 0.1, seed=seed),
        lambda seed: initializers.VarianceScaling(mode="fan_out", seed=seed),
    ):
        first, again, other, unseeded = (
            tf.cast(to_numpy(table(flavor, make(seed), dtype)), tf.float32).numpy()
            for seed in (7, 7, 8, None)
        )
        np.testing.assert_array_equal(first, again)
        assert not (first == other).any(axis=1).all()
        own = tf.cast(make(7)((COUNT, DIM), dtype=dtype), tf.float32)
        np.testing.assert_array_equal(first[:COUNT], own)
        for values in (first, unseeded):  # equal blocks would have few different rows
            assert len(np.unique(values, axis=0)) > 0.8 * ROWS
        mean, spread = first.mean(), first.std()
        whole = tf.cast(make(3)((4000, DIM), dtype=dtype), tf.float32).numpy()
        assert abs(mean - whole.mean()) < 5 * whole.std() / np.sqrt(ROWS * DIM)
        assert 0.6 < spread / whole.std() < 1.5


def test_other_initializers(flavor):
    initializers = keras_of(flavor).initializers
    for make in (
        lambda: initializers.GlorotUniform(seed=1),  # depends on the number of rows
        lambda: initializers.Constant(0.5),
        lambda: initializers.Zeros(),
        lambda: (
            lambda shape, dtype=None, **_: tf.reshape(
                tf.range(float(np.prod(shape))), shape
            )
        ),
    ):
        found = to_numpy(table(flavor, make()))
        np.testing.assert_array_equal(found, make()((ROWS, DIM), dtype="float32"))


def test_small_tables_are_as_keras_makes_them(flavor, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", ROWS * DIM)
    start = keras_of(flavor).initializers.RandomUniform(seed=4)
    np.testing.assert_array_equal(
        to_numpy(table(flavor, start)), start((ROWS, DIM), dtype="float32")
    )


@pytest.mark.long
def test_a_large_table_takes_little_more_than_its_bytes():
    """10M x 64, in processes of their own."""
    script = ROOT / "benchmarks" / "large_table.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "where it is claimed: holds" in done.stdout
