"""Records of tables that were resized or got rows: what settings alone cannot say.

A record is a dict for JSON, kept in the config by path under `table_growth`:

    num_buckets     B, at most N in effect
    row_counts      N after each time rows were added, the last the current one
    exclusive_rows  K, where former owners outnumber the settings'
    dense           True: the variable is no compressed table, whatever its size

While every row owns its bucket nothing but B is remembered, so a table that shrinks
from there starts from the settings again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tf_basis import budget, hyperparameters
from tf_basis.optimizers import selection
from tf_basis.tables import TableLayout, bucket_count

Record = dict[str, Any]

CONFIG_KEY = "table_growth"
_FACTOR = hyperparameters.real("above 0", lambda v: v > 0)


def read_records(records: Mapping[str, Record]) -> dict[str, Record]:
    """The records in a config."""
    return {path: copy.deepcopy(dict(record)) for path, record in records.items()}


def without_dense(
    tables: Sequence, path_of: Callable[[Any], str], records: Mapping[str, Record]
) -> list:
    """The selected variables, but for those that grew with a dense rule.

    Raises:
      ValueError: a record is of a table that is not selected.
    """
    paths = [path_of(v) for v in tables]
    missing = [p for p, r in records.items() if p not in paths and not r.get("dense")]
    if missing:
        raise ValueError(
            f"the config's {CONFIG_KEY} must hold paths of compressed tables, "
            f"received {missing}; the tables are {paths}"
        )
    return [v for v, p in zip(tables, paths) if not records.get(p, {}).get("dense")]


def table_layouts(
    tables: Sequence[tuple[str, Any]],
    defaults: Mapping[str, Any],
    table_settings: Mapping[str, Mapping[str, Any]],
    state_budget: int | str | None,
    slots_of: budget.SlotsOf,
    records: Mapping[str, Record],
) -> list[TableLayout]:
    """The layouts of all tables, given as pairs of path and variable."""
    others = [(path, v) for path, v in tables if path not in records]
    by_settings = iter(
        budget.table_layouts(others, defaults, table_settings, state_budget, slots_of)
    )
    return [
        layout_of(path, variable, defaults, table_settings, records[path])
        if path in records
        else next(by_settings)
        for path, variable in tables
    ]


def layout_of(
    path: str,
    variable: Any,
    defaults: Mapping[str, Any],
    table_settings: Mapping[str, Mapping[str, Any]],
    record: Record,
) -> TableLayout:
    """The layout of a table with a record.

    Raises:
      ValueError: the settings do not fit the record, or it is of another table.
    """
    own = {k: record[k] for k in ("num_buckets", "exclusive_rows") if k in record}
    layout = selection.layout_of(path, variable, defaults, table_settings, own)
    mapping = layout.mapping
    counts = record.get("row_counts", [mapping.n_rows])
    if counts[-1] != mapping.n_rows:
        raise ValueError(
            f"'{path}' must have the {counts[-1]} rows that it had when the "
            f"optimizer's config was saved, received {mapping.n_rows}"
        )
    if len(counts) == 1 or mapping.hashing != "balanced":
        return layout  # other hashes know no N
    ends = [n - _owners_below(layout, n) for n in counts]
    domains = tuple(sorted({end for end in ends if end > 0}))
    if len(domains) > 1:
        layout = replace(layout, mapping=replace(mapping, domains=domains))
    return layout


def _owners_below(layout: TableLayout, row: int) -> int:
    mapping = layout.mapping
    if mapping.owner_rows:
        return int(np.sum(np.asarray(mapping.owner_rows) < row))
    return min(mapping.owners, row)


def resized(
    layout: TableLayout,
    record: Record,
    num_buckets: int | None,
    factor: float | None,
) -> Record:
    """The record of a table after its buckets were set or multiplied.

    Raises:
      ValueError: not one of `num_buckets` and `factor`, or out of range.
    """
    mapping = layout.mapping
    if (num_buckets is None) == (factor is None):
        raise ValueError(
            "one of num_buckets and factor must be given, received "
            f"num_buckets={num_buckets!r}, factor={factor!r}"
        )
    if factor is not None:
        hyperparameters.check("factor", factor, _FACTOR)
        shared = mapping.num_buckets - mapping.owners
        if shared == 0 and factor < 1:
            raise ValueError(
                f"every row of '{layout.path}' owns its bucket, so there are no "
                f"shared ones to multiply: give num_buckets, received factor={factor!r}"
            )
        num_buckets = mapping.owners + max(round(factor * shared), 1)
    hyperparameters.check("num_buckets", num_buckets, hyperparameters.count)
    if num_buckets >= mapping.n_rows:
        return {"num_buckets": int(num_buckets)}
    return {**record, "num_buckets": int(num_buckets)}


def extended(
    layout: TableLayout,
    record: Record,
    n_rows: int,
    num_buckets: int | None,
    settings: Mapping[str, Any],
) -> Record:
    """The record of a table after it got rows, up to `n_rows`, behind the old ones.

    B stays, where there are shared buckets; `num_buckets` says where there are none.

    Raises:
      ValueError: all buckets have an owner and nothing says what new rows get.
    """
    before = layout.mapping.n_rows
    if layout.mapping.num_buckets < before:
        counts = [*record.get("row_counts", [before]), n_rows]
        return {
            **record,
            "num_buckets": layout.mapping.num_buckets,
            "row_counts": counts,
        }
    given = record.get("num_buckets", settings["num_buckets"])
    asked = given if num_buckets is None else num_buckets
    ratio, own = settings["compression_ratio"], settings["exclusive_rows"]
    own = own if isinstance(own, int) else 0
    owners = max(before, own)
    buckets = bucket_count(n_rows, ratio, owners, asked)
    if owners >= buckets < n_rows:
        raise ValueError(
            f"num_buckets must be given and above {owners} for '{layout.path}', all "
            f"of whose {before} rows own their bucket: the new rows need buckets "
            f"too, received {num_buckets!r}"
        )
    if buckets < n_rows:
        return {"num_buckets": buckets, "exclusive_rows": owners}
    by_settings = bucket_count(n_rows, ratio, own, settings["num_buckets"])
    if by_settings == n_rows and not record and num_buckets is None:
        return {}
    return {"num_buckets": buckets if asked is None else asked}
