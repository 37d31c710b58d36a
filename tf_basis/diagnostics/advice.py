"""What the numbers of a table say to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_basis.diagnostics.tables import Table
from tf_basis.engine import LEAST_FLOAT16_EPSILON

# Practitioners' alarms.
MOST_IMBALANCE = MOST_MEAN_LOAD = 100.0
# Shares of scalars that have been seen.
AT_LIMITS, MOVED = 0.1, 0.01
# How far scalars go and come back, and which share of them.
SWING, SWINGING = 0.1, 0.5
# Steps after which scalars that have not moved will not.
STEPS_TO_MOVE = 100
# Relative error of shadow rows that have had enough steps.
MOST_ERROR, ENOUGH_ROWS = 0.75, 5
VANISHED = 0.01


class Advice(NamedTuple):
    """One thing to do.

    Attributes:
      code: a short word that does not change between versions.
      path: of the table.
      message: a sentence or two.
    """

    code: str
    path: str
    message: str


def advise(table: Table, numbers: dict[str, Any]) -> list[Advice]:
    """All that is to be said of one table.

    Args:
      table: for its rule.
      numbers: see `measures.measure`, with "shadows" where there are any.
    """
    found = [
        *_of_load(numbers),
        *_of_scalars(table, numbers),
        *_of_shadows(numbers),
        *_of_moments(table, numbers),
    ]
    return [Advice(code, table.path, message) for code, message in found]


def swing(numbers: Sequence[dict[str, Any]]) -> list[Advice]:
    """Whether learned scalars of shadow rows go up and down, in three reports.

    Args:
      numbers: of one table, in order.
    """
    found = [(n.get("shadows") or {}).get("by_row") for n in numbers]
    if len(found) != 3 or not all(found):
        return []
    if numbers[-1]["invariant_scalar"] != "learned":
        return []
    known = [dict(zip(each["rows"], each["scalars"])) for each in found]
    rows = [row for row in known[0] if row in known[1] and row in known[2]]
    logs = np.log(np.maximum([[k[row] for k in known] for row in rows], 1e-30))
    moves = np.diff(logs.reshape(-1, 3), axis=1)
    swings = (moves.prod(axis=1) < 0) & (np.abs(moves) > SWING).all(axis=1)
    if not len(rows) or swings.mean() <= SWINGING:
        return []
    message = (
        f"the scalars of {swings.sum()} of {len(rows)} rows went one way and back by "
        f"more than {SWING:.0%} in three reports: divide scalar_learning_rate by ten"
    )
    return [Advice("scalar_rate_high", numbers[-1]["path"], message)]


def _of_load(numbers: dict[str, Any]):
    load = numbers["load"]
    if not load["shared_buckets"]:
        return
    ratio = load["max"] / max(load["min"], 1)
    if ratio > MOST_IMBALANCE:
        yield (
            "bad_balance",
            f"the fullest bucket has {load['max']} rows, the emptiest {load['min']} "
            f"(over {MOST_IMBALANCE:g} to 1): use hashing='balanced', which gives each "
            "as many",
        )
    # With two buckets a row, each counts in both.
    mean = load["mean"] / (2 if numbers["hashing"] == "double" else 1)
    if mean > MOST_MEAN_LOAD:
        yield (
            "few_buckets",
            f"{mean:.0f} rows share a bucket on average (over "
            f"{MOST_MEAN_LOAD:g}): give more buckets (compression_ratio, num_buckets "
            "or state_budget; `GrowBuckets` or `resize` in the course of a training), "
            "or keep them if the shadow rows' errors and the metric on validation data "
            "are well",
        )


def _of_scalars(table: Table, numbers: dict[str, Any]):
    scalars = numbers.get("scalars")
    if not scalars or not scalars["count"]:
        return
    low, high, share = scalars["at_low"], scalars["at_high"], scalars["moved"]
    limits = scalars["range"]
    clipped = low + high
    learned = table.rule.invariant_scalar == "learned"
    if clipped > AT_LIMITS:
        words = (
            f"{low:.0%} of the scalars are at the lower limit {limits[0]:g}, "
            f"{high:.0%} at the upper one"
        )
        if learned:
            yield (
                "scalar_rate_high",
                f"{words}: divide scalar_learning_rate by ten; in trouble narrow "
                "scalar_range, to (0.5, 2)",
            )
        else:
            yield (
                "scalars_at_limits",
                f"{words}: rows of one bucket differ by more than scalar_range lets "
                "them; give more buckets, give the frequent rows buckets of their own "
                "(exclusive_rows), or widen scalar_range",
            )
    if learned and share < MOVED and numbers["touched"]["steps_max"] >= STEPS_TO_MOVE:
        yield (
            "scalar_rate_low",
            f"after {numbers['touched']['steps_max']} steps of a bucket only "
            f"{share:.1%} of the scalars are more than 1 % away from 1: multiply "
            "scalar_learning_rate by ten",
        )


def _of_shadows(numbers: dict[str, Any]):
    shadows = numbers.get("shadows")
    if not shadows or shadows["settled"] < ENOUGH_ROWS:
        return
    error = shadows["update_error"]["median"]
    if error is not None and error > MOST_ERROR:
        hint = ""
        if numbers["momentum"] == "shared":
            hint = (
                ", or momentum='exclusive' (BasisSGD: momentum_mode), which lets rows "
                "follow no neighbours' gradients"
            )
        yield (
            "collision_error",
            f"half of {shadows['settled']} rows get updates that are {error:.0%} or "
            "more away from those of exact state: give more buckets, or the frequent "
            f"rows buckets of their own (exclusive_rows){hint}",
        )


def _of_moments(table: Table, numbers: dict[str, Any]):
    for name in ("first_moment", "second_moment"):
        moment = numbers.get(name)
        if moment and moment["non_finite"]:
            yield (
                "non_finite",
                f"{moment['non_finite']} numbers of the {name.replace('_', ' ')} are "
                "not finite: go back to a checkpoint, clip gradients (row_clipnorm, "
                "clipnorm), and find the source with GradientStatistics",
            )
    second = numbers.get("second_moment")
    if not second or not (second["vanished_touched"] or 0.0) > VANISHED:
        return
    least, dtype = least_epsilon(table.layout.moment_dtype), table.layout.moment_dtype
    if table.asked_epsilon < least:
        used = ""
        if table.rule.epsilon != table.asked_epsilon:
            used = f" (in this table {table.rule.epsilon:.3g} is used in its place)"
        yield (
            "epsilon_small",
            f"{second['vanished_touched']:.0%} of the second moments in use are too "
            f"small for {dtype}, and epsilon={table.asked_epsilon:g} does not make up "
            f"for them{used}: set epsilon to {least:.3g} or more, scale the loss up, "
            "or use "
            + ("bfloat16" if dtype == "float16" else "a larger epsilon anyway"),
        )


def least_epsilon(dtype: str) -> float:
    """The root of the smallest second moment that a format keeps apart from 0."""
    return LEAST_FLOAT16_EPSILON if dtype == "float16" else 2.0**-63
