"""What the state of one table looks like: loads, steps, scalars and moments.

Rows and buckets pass in blocks. Besides a block (some 10 MB) 24 bytes a bucket
are in memory, never a copy of the table or of its moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis.diagnostics.distribution import Distribution
from tf_basis.diagnostics.tables import Table
from tf_basis.moments import MOMENTS, bias_of, buckets_of, chunks
from tf_basis.rules.leaders import VOTES_TO_OWN

# Of the shared buckets, which share counts as the most crowded, or most touched.
TOP = 0.01
# Numbers of a row whose buckets are looked up, for the size of blocks; and as many
# copies of what is read are in memory at once.
_PER_ROW, _COPIES = 8, 8
_NEAR = 1e-6  # of a clip limit


@dataclass
class Measures:
    """The numbers of one table.

    Attributes:
      numbers: a dict, ready for JSON; see `docs/diagnostics.md`.
      distributions: by name, what TensorBoard and the page draw.
    """

    numbers: dict[str, Any]
    distributions: dict[str, Distribution] = field(default_factory=dict)


def measure(table: Table) -> Measures:
    """Looks at all rows and buckets of a table once or twice."""
    mapping = table.layout.mapping
    found = Measures({}, {})
    load, hashed = _load(table)
    steps = np.zeros(mapping.num_buckets, np.int32)
    for first, last in _blocks(mapping.num_buckets, _PER_ROW):
        steps[first:last] = table.slots["bucket_steps"].block(first, last)
    numbers = found.numbers
    numbers["path"] = table.path
    numbers["optimizer"] = table.optimizer
    numbers["rows"], numbers["dim"] = mapping.n_rows, table.layout.dim
    numbers["buckets"] = mapping.num_buckets
    numbers["exclusive_rows"] = "auto" if table.layout.led else mapping.owners
    numbers["compression"] = mapping.n_rows / mapping.num_buckets
    numbers["hashing"] = mapping.hashing
    numbers["momentum"] = table.layout.momentum
    numbers["invariant_scalar"] = table.rule.invariant_scalar
    numbers["moment_dtype"] = table.layout.moment_dtype
    numbers["energy_dtype"] = table.layout.energy_dtype
    numbers["epsilon"] = table.rule.epsilon
    numbers["state_bytes"] = table.bytes
    bytes_of = {name: slot.bytes for name, slot in table.slots.items()}
    numbers["bytes_by_slot"] = bytes_of
    numbers["load"] = _load_numbers(load, mapping.owners)
    numbers["touched"] = _touched(steps)
    found.distributions["bucket_load"] = _spread(load)
    found.distributions["bucket_steps"] = _spread(steps)
    v_mean = _moments(table, steps, found)
    _scalars(table, load, steps, v_mean, hashed, found)
    return found


def _blocks(count: int, numbers: int) -> Iterator[tuple[int, int]]:
    return chunks(count, _COPIES * max(numbers, _PER_ROW))


def _spread(counts: np.ndarray) -> Distribution:
    spread = Distribution()
    for first, last in _blocks(len(counts), _PER_ROW):
        spread.add(counts[first:last])
    return spread


def _load(table: Table) -> tuple[np.ndarray, bool]:
    """Rows by bucket; and whether some row has two."""
    mapping = table.layout.mapping
    load = np.zeros(mapping.num_buckets, np.int32)
    two = False
    for first, last in _blocks(mapping.n_rows, _PER_ROW):
        buckets = buckets_of(mapping, np.arange(first, last))
        _count(load, buckets[:, 0])
        if buckets.shape[1] > 1:
            other = buckets[:, 1] != buckets[:, 0]
            two |= bool(other.any())
            _count(load, buckets[other, 1])
    return load, two


def _count(load: np.ndarray, buckets: np.ndarray) -> None:
    if len(load) <= len(buckets):
        load += np.bincount(buckets, minlength=len(load)).astype(np.int32)
    else:
        np.add.at(load, buckets, np.int32(1))  # of one type: much faster


def _load_numbers(load: np.ndarray, owners: int) -> dict[str, Any]:
    """Of the shared buckets; of all where no bucket is shared."""
    shared = load[owners:] if owners < len(load) else load
    return {
        "min": int(shared.min()),
        "mean": float(shared.mean()),
        "max": int(shared.max()),
        "std": float(shared.std()),
        "empty": int(np.count_nonzero(shared == 0)),
        "shared_buckets": len(shared) if owners < len(load) else 0,
    }


def _touched(steps: np.ndarray) -> dict[str, Any]:
    count = int(np.count_nonzero(steps))
    return {
        "buckets": count,
        "share": count / len(steps),
        "steps_mean": float(steps.mean(dtype=np.float64)),
        "steps_max": int(steps.max()),
    }


def _moments(table: Table, steps: np.ndarray, found: Measures) -> np.ndarray | None:
    """Describes both moments; mean_j of the second without its bias, by bucket."""
    v_mean = None
    for name in MOMENTS:
        slot = table.slots.get(name)
        if slot is None:
            continue
        spread, touched, vanished, seen = Distribution(4), 0, 0, 0
        least = least_normal(slot.dtype)
        if name == "second_moment":
            v_mean = np.zeros(len(slot), np.float64)
        for first, last in _blocks(len(slot), table.layout.dim):
            values = slot.block(first, last)
            counts = steps[first:last]
            spread.add(values)
            used = values[counts > 0]
            touched += used.size
            vanished += int(np.count_nonzero(np.abs(used) < least))
            seen += int(np.count_nonzero(np.abs(used) > 0))
            if v_mean is not None and name == "second_moment":
                bias = bias_of(table.rule, name, counts)
                wide = values.mean(axis=1, dtype=np.float64)
                v_mean[first:last] = np.divide(
                    wide, bias, out=np.zeros_like(wide), where=bias > 0
                )
        numbers = spread.as_dict()
        if not touched:
            share = zeros = None
        else:
            share, zeros = vanished / touched, 1.0 - seen / touched
        numbers["zeros_touched"], numbers["vanished_touched"] = zeros, share
        found.numbers[name] = numbers
        found.distributions[name] = spread
    return v_mean


def least_normal(dtype: tf.DType) -> float:
    """The smallest positive number of a format with all of its bits."""
    return 2.0**-14 if dtype == tf.float16 else 2.0**-126


def top_buckets(counts: np.ndarray, owners: int) -> np.ndarray:
    """A mask: the shared buckets with the highest counts, a share `TOP`, and ties."""
    mask = np.zeros(len(counts), bool)
    shared = counts[owners:]
    if len(shared):
        kept = max(round(TOP * len(shared)), 1)
        limit = np.partition(shared, len(shared) - kept)[len(shared) - kept]
        mask[owners:] = shared >= max(limit, 1)
    return mask


def _scalars(table, load, steps, v_mean, two, found: Measures) -> None:
    """The scalars of rows that share a bucket and have been seen."""
    kind, mapping = table.rule.invariant_scalar, table.layout.mapping
    if kind is None:
        return
    low, high = table.rule.scalar_range
    owners = mapping.owners
    masks = {
        "scalars_crowded": top_buckets(load, owners),
        "scalars_touched": top_buckets(steps, owners),
    }
    spreads = {name: Distribution() for name in ("scalars", *masks)}
    at_low = at_high = moved = rows_seen = 0
    width = table.layout.dim if two else _PER_ROW
    for first, last in _blocks(mapping.n_rows, width):
        rows = np.arange(first, last)
        buckets = buckets_of(mapping, rows)
        shares = ~owned(table, rows, buckets)
        if kind == "energy":
            energies = table.slots["row_energy"].block(first, last).astype(np.float64)
            seen = shares & (energies > 0)
            if two:  # of which the smaller counts, column by column
                mean = second_hat_mean(table, buckets[seen])
            else:
                mean = v_mean[buckets[seen, 0]]
            scalars = np.sqrt(mean / energies[seen])
            scalars = np.clip(scalars, low, high)
        else:
            seen = shares if table.layout.momentum == "shared" else ~shares
            seen = seen & (steps[buckets] > 0).all(axis=1)
            if "row_steps" in table.slots:
                seen &= table.slots["row_steps"].block(first, last) > 0
            scalars = table.slots["scalar"].block(first, last)[seen].astype(np.float64)
        rows_seen += len(scalars)
        at_low += int(np.count_nonzero(scalars <= low * (1 + _NEAR)))
        at_high += int(np.count_nonzero(scalars >= high * (1 - _NEAR)))
        moved += int(
            np.count_nonzero(np.abs(np.log(np.maximum(scalars, 1e-30))) > 0.01)
        )
        spreads["scalars"].add(scalars)
        at = buckets[seen]
        for name, mask in masks.items():
            spreads[name].add(scalars[mask[at].any(axis=1)])
    found.distributions |= spreads
    for name, spread in spreads.items():
        found.numbers[name] = spread.as_dict()
    found.numbers["crowded_buckets"] = int(masks["scalars_crowded"].sum())

    def share(count: int) -> float | None:
        return count / rows_seen if rows_seen else None

    found.numbers["scalars"] |= {
        "range": [low, high if np.isfinite(high) else None],
        "at_low": share(at_low),
        "at_high": share(at_high),
        "moved": share(moved),
    }


def owned(table: Table, rows: np.ndarray, buckets: np.ndarray) -> np.ndarray:
    """Whether rows have a bucket of their own, found during training or not."""
    own = buckets[:, 0] < table.layout.mapping.owners
    if table.layout.led:
        votes = table.slots["leader_votes"][buckets[:, 0]]
        leads = table.slots["leader"][buckets[:, 0]] == rows
        own |= leads & (votes >= VOTES_TO_OWN)
    return own


def second_hat_mean(table: Table, buckets: np.ndarray) -> np.ndarray:
    """mean_j of the second moment without its bias, as rows with these buckets read."""
    hats = []
    for column in buckets.T:
        steps = table.slots["bucket_steps"][column]
        bias = np.maximum(bias_of(table.rule, "second_moment", steps), 1e-30)
        moment = table.slots["second_moment"][column].astype(np.float64)
        hats.append(moment / bias[:, None])
    return np.min(hats, axis=0).mean(axis=1)
