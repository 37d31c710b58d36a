"""Optimizers of embedding tables that Keras does not have, in plain TensorFlow.

Rivals of BASIS in `quality.py`, each in the form its authors give, with steps on the
rows of a batch only (where not said otherwise) and no state beyond what is listed. They
are written to be read: for the quality they reach, not for their speed.

An optimizer has Keras's `apply_gradients`; gradients are `tf.IndexedSlices`, whose
repeated rows are summed first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


class RowOptimizer:
    """What all rivals share: sums repeated rows, moves rows, counts bytes of state."""

    def __init__(self, tables: Sequence[Any], rate: float) -> None:
        self.learning_rate = tf.Variable(float(rate))
        self.count = tf.Variable(0, dtype=tf.int64)
        self.states = {
            id(table): self.make_state(*(int(n) for n in table.shape))
            for table in tables
        }

    def make_state(self, rows: int, dim: int) -> dict[str, tf.Variable]:
        """The state of a table."""
        raise NotImplementedError

    def change(
        self, state: dict[str, tf.Variable], rows: tf.Tensor, g: tf.Tensor, t: tf.Tensor
    ) -> tf.Tensor:
        """Updates the state; returns what is subtracted, before the rate."""
        raise NotImplementedError

    def apply_gradients(self, pairs: Sequence[tuple[tf.IndexedSlices, Any]]) -> None:
        t = tf.cast(self.count.assign_add(1), tf.float32)
        for slices, table in pairs:
            rows, places = tf.unique(tf.cast(slices.indices, tf.int64))
            g = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
            change = self.change(self.states[id(table)], rows, g, t)
            table.value.scatter_sub(tf.IndexedSlices(self.learning_rate * change, rows))

    def state_bytes(self) -> int:
        """Bytes of all state, without the count of steps."""
        variables = [v for state in self.states.values() for v in state.values()]
        return sum(v.dtype.size * math.prod(v.shape) for v in variables)


def zeros(*shape: int) -> tf.Variable:
    return tf.Variable(tf.zeros(shape), trainable=False)


def put(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Writes rows; returns the values."""
    variable.scatter_update(tf.IndexedSlices(values, rows))
    return values


def adam_step(m: tf.Tensor, v: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
    """Adam's direction from its moments, as Keras computes it."""
    correction = tf.sqrt(1 - tf.pow(BETA_2, t)) / (1 - tf.pow(BETA_1, t))
    return correction * m / (tf.sqrt(v) + EPSILON)


class LazyAdam(RowOptimizer):
    """Adam whose moments move in the steps that touch their row."""

    def make_state(self, rows, dim):
        return {"m": zeros(rows, dim), "v": zeros(rows, dim)}

    def change(self, state, rows, g, t):
        m = BETA_1 * tf.gather(state["m"], rows) + (1 - BETA_1) * g
        v = BETA_2 * tf.gather(state["v"], rows) + (1 - BETA_2) * g * g
        return adam_step(put(state["m"], rows, m), put(state["v"], rows, v), t)


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum for each row: s += mean g², step g/√s."""

    def make_state(self, rows, dim):
        return {"s": zeros(rows)}

    def change(self, state, rows, g, t):
        s = tf.gather(state["s"], rows) + tf.reduce_mean(g * g, axis=1)
        put(state["s"], rows, s)
        return g / (tf.sqrt(s)[:, None] + EPSILON)


class Adafactor(RowOptimizer):
    """Adafactor as published (arXiv 1804.04235), without relative steps or momentum.

    R and C decay over the whole table in every step, and the step is clipped by its
    root mean square over the whole table, in which untouched rows are zeros.
    """

    def make_state(self, rows, dim):
        return {"r": zeros(rows), "c": zeros(dim)}

    def change(self, state, rows, g, t):
        beta = 1 - tf.pow(t, -0.8)
        square = g * g
        n, dim = state["r"].shape[0], state["c"].shape[0]
        floor = 1e-30
        state["r"].assign(beta * state["r"] + (1 - beta) * floor)
        own = (1 - beta) * tf.reduce_mean(square, axis=1)
        state["r"].scatter_add(tf.IndexedSlices(own, rows))
        column = tf.reduce_sum(square, axis=0) / n + floor
        state["c"].assign(beta * state["c"] + (1 - beta) * column)
        r = tf.gather(state["r"], rows)
        scale = tf.reduce_mean(state["r"])
        u = g / tf.sqrt(r[:, None] / scale * state["c"])
        root = tf.sqrt(tf.reduce_sum(u * u) / (n * dim))
        return u / tf.maximum(1.0, root)


class SM3(RowOptimizer):
    """SM3-II (arXiv 1901.11150) with covers of rows and columns, without momentum."""

    def make_state(self, rows, dim):
        return {"row": zeros(rows), "column": zeros(dim)}

    def change(self, state, rows, g, t):
        row = tf.gather(state["row"], rows)
        v = tf.minimum(row[:, None], state["column"]) + g * g
        put(state["row"], rows, tf.reduce_max(v, axis=1))
        state["column"].assign(tf.maximum(state["column"], tf.reduce_max(v, axis=0)))
        return g / tf.sqrt(v + 1e-30)


class CountSketchAdam(RowOptimizer):
    """Adam with both moments in sketches of depth 3 (arXiv 1902.00179).

    A count sketch with signs and the median for the first moment, a count-min sketch
    for the second. Both together have the rows of lazy Adam divided by `ratio`.
    """

    DEPTH = 3
    PRIME = 2_147_483_647

    def __init__(self, tables, rate, ratio: float) -> None:
        self.ratio = ratio
        draw = np.random.default_rng(0).integers(1, self.PRIME, (4, self.DEPTH))
        self.a, self.b, self.c, self.d = tf.constant(draw)
        super().__init__(tables, rate)

    def make_state(self, rows, dim):
        width = max(1, math.ceil(rows / self.ratio / self.DEPTH))
        return {name: zeros(self.DEPTH * width, dim) for name in ("m", "v")}

    def change(self, state, rows, g, t):
        width = state["m"].shape[0] // self.DEPTH
        ids = rows[None, :] + 1
        places = (self.a[:, None] * ids + self.b[:, None]) % self.PRIME % width
        places += width * tf.range(self.DEPTH, dtype=tf.int64)[:, None]
        odd = (self.c[:, None] * ids + self.d[:, None]) % self.PRIME % 2
        sign = tf.cast(1 - 2 * odd, tf.float32)[:, :, None]

        def median():
            x, y, z = tf.unstack(sign * tf.gather(state["m"], places))
            low, high = tf.minimum(x, y), tf.maximum(x, y)
            return tf.maximum(low, tf.minimum(high, z))

        def least():
            return tf.reduce_min(tf.gather(state["v"], places), axis=0)

        def add(name, change):
            flat = tf.reshape(change, [-1, change.shape[-1]])
            state[name].scatter_add(tf.IndexedSlices(flat, tf.reshape(places, [-1])))

        add("m", sign * (1 - BETA_1) * (g - median()))
        same = tf.ones([self.DEPTH, 1, 1])
        add("v", same * (1 - BETA_2) * (g * g - least()))
        return adam_step(median(), tf.maximum(least(), 0.0), t)


class EightBitAdam(RowOptimizer):
    """Lazy Adam with moments in 8-bit dynamic floats (arXiv 2110.02861).

    A block is a row: it has the largest magnitude of each moment in float32, and for
    each element the number of the nearest of 256 values between -1 (or 0) and 1.
    """

    def __init__(self, tables, rate) -> None:
        self.numbers = {n: Nearest(dynamic_codes(n == "m")) for n in ("m", "v")}
        super().__init__(tables, rate)

    def make_state(self, rows, dim):
        state = {}
        for name, number_of in self.numbers.items():
            state[name] = tf.Variable(tf.fill([rows, dim], number_of(tf.constant(0.0))))
            state[name + "_scale"] = zeros(rows)
        return state

    def change(self, state, rows, g, t):
        def read(name):
            numbers = tf.cast(tf.gather(state[name], rows), tf.int32)
            scale = tf.gather(state[name + "_scale"], rows)
            return tf.gather(self.numbers[name].values, numbers) * scale[:, None]

        def write(name, values):
            scale = tf.reduce_max(tf.abs(values), axis=1)
            part = tf.math.divide_no_nan(values, scale[:, None])
            put(state[name], rows, self.numbers[name](part))
            put(state[name + "_scale"], rows, scale)

        m = BETA_1 * read("m") + (1 - BETA_1) * g
        v = BETA_2 * read("v") + (1 - BETA_2) * g * g
        write("m", m)
        write("v", v)
        return adam_step(m, v, t)


class Nearest:
    """The number of the nearest of some ascending values, for many float32.

    In place of a search, which takes most of the time of a step: a table over the
    leading 18 bits of a float32, whose cells are so narrow that the middle between two
    values is in a cell of its own.
    """

    SHIFT = 14

    def __init__(self, values: np.ndarray) -> None:
        values = values.astype(np.float32)
        middles = (values[1:] + values[:-1]) / 2
        first = np.arange(1 << (32 - self.SHIFT), dtype=np.uint32) << self.SHIFT
        last = first | np.uint32((1 << self.SHIFT) - 1)
        ends = np.stack([first, last]).view(np.float32)
        finite = np.isfinite(ends[1])
        ends = np.searchsorted(middles, ends)
        if np.ptp(ends[:, finite], axis=0).max() > 1:
            raise ValueError("values must be further apart: two middles in one cell")
        self.values = tf.constant(values)
        self.below = tf.constant(ends.min(axis=0), tf.int32)
        self.middles = tf.constant([*middles, np.inf], tf.float32)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        cell = tf.bitwise.right_shift(tf.bitcast(x, tf.uint32), self.SHIFT)
        number = tf.gather(self.below, tf.cast(cell, tf.int32))
        above = x > tf.gather(self.middles, number)
        return tf.cast(number + tf.cast(above, tf.int32), tf.uint8)


def dynamic_codes(signed: bool) -> np.ndarray:
    """The 256 values of a dynamic 8-bit float, ascending.

    Leading zeros of the code are the decimal exponent, the bits after the first one a
    fraction: few digits for small numbers, many for large ones.
    """
    values = [0.0, 1.0]
    exponents = 7
    for exponent in range(exponents):
        steps = 2 ** (exponent + (0 if signed else 1))
        edges = np.linspace(0.1, 1, steps + 1)
        middles = (edges[1:] + edges[:-1]) / 2
        positive = 10.0 ** (exponent - exponents + 1) * middles
        values += [*positive, *(-positive if signed else [])]
    return np.sort(np.array(values))
