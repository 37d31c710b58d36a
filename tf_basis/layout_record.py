"""Layouts of tables as plain values: written beside state, compared when it is read.

Two layouts with the same shapes may send rows to other buckets (another hash or seed)
or mean other things by the same numbers, so shapes alone do not tell.
"""

from __future__ import annotations

from typing import Any

from tf_basis import hashing
from tf_basis.ops.hash_ops import RowMapping
from tf_basis.tables import TableLayout

Record = dict[str, Any]

# What `migrate=True` can change, see `tf_basis.restore`.
MIGRATED = (
    "buckets",
    "exclusive_rows",
    "hashing",
    "seed",
    "domains",
    "moment_dtype",
    "energy_dtype",
)
# What does not matter where every row owns its bucket.
_OF_SHARING = (
    "exclusive_rows",
    "owner_list",
    "hashing",
    "hash_version",
    "seed",
    "domains",
)


def record_of(layout: TableLayout) -> Record:
    """The layout, ready for JSON.

    `exclusive_rows` is a number, the list of the rows or `"auto"`; `domains` says
    which rows were added together, see `RowMapping`.
    """
    mapping = layout.mapping
    owners: Any = list(mapping.owner_rows) or mapping.exclusive_rows
    return {
        "path": layout.path,
        "rows": mapping.n_rows,
        "dim": layout.dim,
        "buckets": mapping.num_buckets,
        "exclusive_rows": "auto" if layout.led else owners,
        "hashing": mapping.hashing,
        "hash_version": hashing.FORMAT_VERSION,
        "seed": mapping.seed,
        "domains": list(mapping.domains),
        "momentum": layout.momentum,
        "moment_dtype": layout.moment_dtype,
        "energy_dtype": layout.energy_dtype,
    }


def layout_of(record: Record) -> TableLayout:
    """The reverse of `record_of`."""
    owners = record["exclusive_rows"]
    led, listed = owners == "auto", isinstance(owners, list)
    mapping = RowMapping(
        record["rows"],
        record["buckets"],
        0 if led else len(owners) if listed else owners,
        record["hashing"],
        record["seed"],
        tuple(owners) if listed else (),
        tuple(record["domains"]),
    )
    return TableLayout(
        record["path"],
        record["dim"],
        mapping,
        record["momentum"],
        led,
        record["moment_dtype"],
        record["energy_dtype"],
    )


def differences(ours: Record, theirs: Record) -> dict[str, tuple[Any, Any]]:
    """Field -> (value in `ours`, value in `theirs`), where rows or state differ."""
    ignored = {"path"}
    if all(r["buckets"] >= r["rows"] for r in (ours, theirs)):
        ignored |= {*_OF_SHARING}
    return {
        name: (value, theirs[name])
        for name, value in ours.items()
        if name not in ignored and value != theirs[name]
    }


def in_words(path: str, found: dict[str, tuple[Any, Any]]) -> str:
    """For an error message."""
    parts = [
        f"{name} {_short(a)} here, {_short(b)} there" for name, (a, b) in found.items()
    ]
    return f"'{path}' has {'; '.join(parts)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(value)} in all)"
