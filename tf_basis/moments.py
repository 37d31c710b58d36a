"""Moments, their bias and their formats in numpy, for state that moves as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tf_basis.ops import hash_ops
from tf_basis.ops.hash_ops import RowMapping
from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.rules.formats import LOG8_LEVELS

State = dict[str, np.ndarray]

MOMENTS = ("first_moment", "second_moment")
OF_ROWS = ("row_energy", "scalar", "row_steps")
LARGEST_COUNT = np.iinfo(np.int32).max
_CHUNK_NUMBERS = 1 << 22


def keep_of(rule: BucketRule, name: str) -> float:
    """The decay of a moment."""
    return (rule.first if name == "first_moment" else rule.second)[0]


def seen_part(keep: float, steps: np.ndarray) -> np.ndarray:
    """1 - keep^steps: the sum of the weights of all gradients in a moment."""
    steps = np.maximum(np.asarray(steps, np.float64), 0.0)
    return -np.expm1(steps * np.log(keep)) if keep else (steps > 0).astype(np.float64)


def bias_of(rule: BucketRule, name: str, steps: np.ndarray) -> np.ndarray:
    """What a moment is divided by to lose its bias; 1 without bias correction."""
    if not rule.bias_correction:
        return np.ones(np.shape(steps))
    return seen_part(keep_of(rule, name), steps)


def divide_rows(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """total [S, d] / weight [S] in float64, and 0 where the weight is 0."""
    some = weight > 0
    return np.where(some[:, None], total / np.where(some, weight, 1.0)[:, None], 0.0)


def aged(rule: BucketRule, state: State, step: int) -> State:
    """The state with the decay that `stale_decay` does at a bucket's next touch."""
    if not rule.stale_decay:
        return state
    steps = state["bucket_steps"].astype(np.int64)
    missed = np.where(steps > 0, np.maximum(step - state["last_step"], 0), 0)
    result = dict(state)
    for name in MOMENTS:
        if name in state:
            decay = keep_of(rule, name) ** missed[: len(state[name])].astype(np.float64)
            result[name] = (state[name] * decay[:, None]).astype(np.float32)
    result["bucket_steps"] = np.minimum(steps + missed, LARGEST_COUNT)
    if "leader_steps" in state:
        counts = state["leader_steps"].astype(np.int64)
        counts += np.where(counts > 0, missed, 0)
        result["leader_steps"] = np.minimum(counts, LARGEST_COUNT)
    result["last_step"] = np.full_like(state["last_step"], step)
    return result


def to_format(values: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """Numbers in the format of a slot, rounded to nearest; uint8 is log8."""
    values = np.asarray(values)
    if dtype == tf.uint8:
        values = values.astype(np.float32)
        above = np.clip(np.searchsorted(LOG8_LEVELS, values), 1, len(LOG8_LEVELS) - 1)
        lower = values - LOG8_LEVELS[above - 1] < LOG8_LEVELS[above] - values
        code = np.maximum(above - lower, 1)  # 0 is "not seen yet"
        return np.where(values > 0, code, 0).astype(np.uint8)
    if dtype == tf.float16:  # which would overflow
        values = np.clip(values, -65504.0, 65504.0)
    return values.astype(dtype.as_numpy_dtype)


def chunks(count: int, dim: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover [0, count), of a bounded number of numbers each."""
    size = max(_CHUNK_NUMBERS // max(dim, 8), 1)
    for first in range(0, count, size):
        yield first, min(first + size, count)


def buckets_of(mapping: RowMapping, rows: np.ndarray) -> np.ndarray:
    """[R, 1], or (double) [R, 2] buckets of rows."""
    found = hash_ops.map_rows(tf.constant(rows, tf.int64), mapping).numpy()
    return found.reshape(len(rows), mapping.buckets_per_row)


def rows_that_own(mapping: RowMapping, first: int, last: int) -> np.ndarray:
    """The rows that own the buckets first to last - 1, all below `mapping.owners`."""
    if mapping.owner_rows:
        return np.asarray(mapping.owner_rows[first:last], np.int64)
    return np.arange(first, last, dtype=np.int64)


def bucket_pairs(
    old: RowMapping, new: RowMapping, dim: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """How many rows each shared bucket of `new` gets from each bucket of `old`.

    Yields chunks of (bucket - owners, old bucket, rows), ascending in both. A row with
    two buckets passes each on to the one of the same hash, or half of each to one
    that both hashes give, or that it alone has; one bucket is passed on to both.
    """
    for first, last in chunks(new.n_rows, dim):
        rows = np.arange(first, last, dtype=np.int64)
        targets, sources = buckets_of(new, rows), buckets_of(old, rows)
        hashes = max(targets.shape[1], sources.shape[1])
        both = targets[:, 0] == targets[:, -1]  # all rows, with one bucket a row
        codes, parts = [], []
        for h in range(hashes):
            target, source = (t[:, min(h, t.shape[1] - 1)] for t in (targets, sources))
            shares = target >= new.owners
            base = (target[shares] - new.owners) * old.num_buckets
            codes.append(base + source[shares])
            parts.append(np.where(both[shares], 1, hashes))
        codes, position = np.unique(np.concatenate(codes), return_inverse=True)
        if len(codes):
            weight = np.bincount(position, np.concatenate(parts))
            yield *np.divmod(codes, old.num_buckets), weight / hashes
