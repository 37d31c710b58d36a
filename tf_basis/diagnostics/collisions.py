r"""How far what rows share is from what they would have alone.

For a shadow row r with the bucket(s) b, its last gradient g and its own exact moments
M*, V* (without bias: M̂*, V̂*):

    root      D = √V̂_b / s            exact  D* = √V̂*
    update    u = direction / (D + ε)  exact  u* = direction* / (D* + ε)

where the direction is M̂_b, and M̂* the exact one, if the row follows a first moment, and
g for both if it does not; without a second moment u = s·direction. The errors are

    second_moment_error = ‖D − D*‖ / ‖D*‖        update_error = ‖u − u*‖ / ‖u*‖

0 where each row has a bucket of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_basis.diagnostics.measures import owned, second_hat_mean
from tf_basis.diagnostics.tables import Table
from tf_basis.moments import bias_of, buckets_of
from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.transfer import view_of_rows

# Rows with fewer steps are noisy by themselves, shared or not.
ENOUGH_STEPS = 10


def compare(table: Table, known: dict[str, np.ndarray]) -> dict[str, Any]:
    """The errors of shadow rows.

    Args:
      table: as it is now.
      known: of its rows: see `ShadowRows.known_of`.

    Returns:
      `rows`, how many; `settled`, how many of them have had at least 10 steps; of
      each error the mean, median, 90 % quantile and maximum over the settled rows (over
      all where none is); and `by_row`, lists of rows, steps, scalars and errors. An
      error that has no meaning, as a row that has had no gradient but zeros has none,
      is None.
    """
    rows, count = known["rows"], len(known["rows"])
    result: dict[str, Any] = {"rows": count}
    if not count:
        return {**result, "settled": 0}
    mapping = table.layout.mapping
    buckets = buckets_of(mapping, rows)
    view, _ = view_of_rows(table.layout, table.rule, table.slots, rows, buckets)
    scalar = _scalars(table, view, rows, buckets)
    follows = _follow(table, rows, buckets)
    g = known["gradient"].astype(np.float64)
    directions = [
        _direction(table.rule, g, moment, follows)
        for moment in (view.get("first_moment"), _hat(table.rule, known, "first"))
    ]
    errors = {}
    if table.rule.second is None:
        updates = [scalar[:, None] * directions[0], directions[1]]
    else:
        learned = table.rule.invariant_scalar == "learned"
        # The view has the energy's scalar in it.
        own = scalar if learned else np.ones(count)
        roots = [
            np.sqrt(view["second_moment"]) / own[:, None],
            np.sqrt(_hat(table.rule, known, "second")),
        ]
        errors["second_moment_error"] = _relative(*roots)
        updates = [d / (r + table.rule.epsilon) for d, r in zip(directions, roots)]
    errors["update_error"] = _relative(*updates)
    settled = known["counts"] >= ENOUGH_STEPS
    result["settled"] = int(settled.sum())
    of = settled if settled.any() else np.ones(count, bool)
    for name, values in errors.items():
        result[name] = _summary(values[of])
    result["by_row"] = {
        "rows": rows.tolist(),
        "steps": known["counts"].tolist(),
        "scalars": scalar.tolist(),
        **{
            name: [float(v) if np.isfinite(v) else None for v in values]
            for name, values in errors.items()
        },
    }
    return result


def _hat(rule: BucketRule, known: dict[str, np.ndarray], name: str) -> np.ndarray:
    bias = bias_of(rule, f"{name}_moment", known["counts"])
    return known[name] / bias[:, None]


def _scalars(table: Table, view: dict, rows, buckets) -> np.ndarray:
    """What the rows' steps are multiplied by."""
    kind = table.rule.invariant_scalar
    if kind == "learned":
        return table.slots["scalar"][rows].astype(np.float64)
    if kind is None:
        return np.ones(len(rows))
    energy = table.slots["row_energy"][rows].astype(np.float64)
    plain = owned(table, rows, buckets) | (energy == 0)
    mean = second_hat_mean(table, buckets)
    scalar = np.sqrt(mean / np.where(plain, 1.0, energy))
    return np.where(plain, 1.0, np.clip(scalar, *table.rule.scalar_range))


def _follow(table: Table, rows, buckets) -> np.ndarray:
    if table.layout.led:
        return owned(table, rows, buckets)
    return buckets[:, 0] < table.layout.first_moment_rows


def _direction(rule: BucketRule, g, moment, follows) -> np.ndarray:
    if moment is None:
        return g
    if rule.nesterov:
        moment = g + rule.first[0] * moment
    return np.where(follows[:, None], moment, g)


def _relative(shared: np.ndarray, exact: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(exact, axis=1)
    error = np.linalg.norm(shared - exact, axis=1)
    return np.divide(error, size, out=np.full(len(size), np.nan), where=size > 0)


def _summary(values: np.ndarray) -> dict[str, float | None]:
    values = values[np.isfinite(values)]
    if not len(values):
        return {"mean": None, "median": None, "p90": None, "max": None}
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p90": float(np.quantile(values, 0.9)),
        "max": float(values.max()),
    }
