"""The rivals of benchmarks/quality.py against their rules in float64, on all rows."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor

keras = pytest.importorskip("keras")

pytestmark = pytest.mark.skipif(
    active_flavor() != "keras3", reason="the benchmark is Keras 3's"
)
ROWS, DIM, RATE = 7, 4, 0.05
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


def batches(steps: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row ids with repetitions, and their gradients."""
    rng = np.random.default_rng(3)
    return [
        (rng.integers(0, ROWS, 5), rng.normal(size=(5, DIM)).astype(np.float32))
        for _ in range(steps)
    ]


def dense(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    g = np.zeros((ROWS, DIM))
    np.add.at(g, ids, values.astype(np.float64))
    return g


def start() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)


def trained(make) -> np.ndarray:
    """The table after all batches."""
    table = keras.Variable(start(), name="table")
    optimizer = make([table], RATE)
    for ids, values in batches():
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(ids), (ROWS, DIM))
        optimizer.apply_gradients([(slices, table)])
    return table.numpy()


def lazy_adam(g, touched, t, state):
    m, v = state.setdefault("m", np.zeros(g.shape)), state.setdefault("v", g * 0)
    m[touched] = BETA_1 * m[touched] + (1 - BETA_1) * g[touched]
    v[touched] = BETA_2 * v[touched] + (1 - BETA_2) * g[touched] ** 2
    rate = np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
    return rate * m / (np.sqrt(v) + EPSILON)


def row_wise_adagrad(g, touched, t, state):
    s = state.setdefault("s", np.zeros((ROWS, 1)))
    s += (g**2).mean(1, keepdims=True)
    return g / (np.sqrt(s) + EPSILON)


def adafactor(g, touched, t, state):
    r, c = state.setdefault("r", np.zeros(ROWS)), state.setdefault("c", np.zeros(DIM))
    beta = 1 - t**-0.8
    square = g**2 + 1e-30
    r[:] = beta * r + (1 - beta) * square.mean(1)
    c[:] = beta * c + (1 - beta) * square.mean(0)
    u = g / np.sqrt(np.outer(r, c) / r.mean())
    return u / max(1.0, np.sqrt((u**2).mean()))


def sm3(g, touched, t, state):
    row, column = state.setdefault("r", np.zeros(ROWS)), state.setdefault("c", g[0] * 0)
    v = np.minimum.outer(row, column) + g**2
    row[touched] = v[touched].max(1)
    column[:] = np.maximum(column, v[touched].max(0))
    return g / np.sqrt(v + 1e-30)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("LazyAdam", lazy_adam),
        ("RowWiseAdagrad", row_wise_adagrad),
        ("Adafactor", adafactor),
        ("SM3", sm3),
    ],
)
def test_rival_follows_its_rule(benchmark, name, rule):
    theta, state = start().astype(np.float64), {}
    for t, (ids, values) in enumerate(batches(), start=1):
        touched = np.unique(ids)
        change = rule(dense(ids, values), touched, float(t), state)
        theta[touched] -= RATE * change[touched]
    got = trained(getattr(benchmark("rivals"), name))
    np.testing.assert_allclose(got, theta, rtol=2e-5, atol=2e-6)


def test_count_sketch_without_collisions_is_lazy_adam(benchmark):
    rivals = benchmark("rivals")
    wide = trained(lambda tables, rate: rivals.CountSketchAdam(tables, rate, 1e-3))
    np.testing.assert_allclose(wide, trained(rivals.LazyAdam), rtol=1e-5, atol=1e-6)
    narrow = trained(lambda tables, rate: rivals.CountSketchAdam(tables, rate, 3.0))
    assert np.abs(narrow - wide).max() > 1e-2


def test_eight_bit_adam_is_near_lazy_adam(benchmark):
    rivals = benchmark("rivals")
    got, exact = trained(rivals.EightBitAdam), trained(rivals.LazyAdam)
    assert 0 < np.abs(got - exact).max() < 0.02
    for signed in (True, False):
        codes = rivals.dynamic_codes(signed)
        assert len(np.unique(codes)) == 256
        assert codes[-1] == 1 and codes[0] == (-codes[-2] if signed else 0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code_is_that_of_a_search(signed, benchmark, rng):
    rivals = benchmark("rivals")
    codes = rivals.dynamic_codes(signed).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(end)) for end in (-2, 2)]
    small = 10.0 ** rng.uniform(-20, 0, 1000)
    x = np.concatenate([codes, middles, *beside, small, -small, [0.0, -0.0]])
    x = x.astype(np.float32)
    got = rivals.Nearest(codes)(tf.constant(x)).numpy()
    np.testing.assert_array_equal(got, np.searchsorted(middles, x))
    with pytest.raises(ValueError, match="values must be further apart"):
        rivals.Nearest(np.array([0.5, 0.5001, 0.50011], np.float32))


def test_bytes_of_the_rivals(benchmark):
    rivals, table = benchmark("rivals"), keras.Variable(start(), name="table")
    cells = ROWS * DIM
    expected = {
        "LazyAdam": 8 * cells,
        "RowWiseAdagrad": 4 * ROWS,
        "Adafactor": 4 * (ROWS + DIM),
        "SM3": 4 * (ROWS + DIM),
        "EightBitAdam": 2 * cells + 8 * ROWS,
    }
    for name, size in expected.items():
        assert getattr(rivals, name)([table], RATE).state_bytes() == size
    # 3 hashed rows of each moment: ceil(7 / 2 / 3) = 2 wide.
    assert rivals.CountSketchAdam([table], RATE, 2).state_bytes() == 2 * 3 * 2 * 16
