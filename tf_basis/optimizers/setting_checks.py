"""Checks of settings that only the tables of a model can decide."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Mapping[str, Any]]

# A matrix with so many rows a column is hardly anything but an embedding table.
_ROWS_PER_COLUMN = 32


def rows_of(tables: Sequence, path_of: Callable[[Any], str]) -> dict[str, int]:
    """The number of rows by path; 0 of what is no table (an error of its own)."""
    return {path_of(v): (*v.shape, None)[0] or 0 for v in tables}


def check_patterns(table_settings: Settings, paths: Sequence[str]) -> None:
    """Raises ValueError where a pattern of `table_settings` matches no table."""
    for pattern in table_settings:
        if not any(re.search(pattern, path) for path in paths):
            raise ValueError(
                "table_settings must match the path of at least one compressed table, "
                f"received {pattern!r}; the compressed tables are {list(paths)}"
            )


def frequency_lengths(
    row_frequencies: Any, table_settings: Settings | None
) -> dict[str | None, int]:
    """How many `row_frequencies` there are: by pattern, and of the optimizer (None)."""
    sources = {None: row_frequencies}
    for pattern, settings in (table_settings or {}).items():
        sources[pattern] = settings.get("row_frequencies")
    return {k: len(v) for k, v in sources.items() if v is not None}


def check_frequencies(
    lengths: Mapping[str | None, int],
    table_settings: Settings,
    tables: Mapping[str, int],
) -> None:
    """Raises where a table has another number of rows than of frequencies.

    Args:
      lengths: what `frequency_lengths` returned.
      table_settings: settings by pattern.
      tables: the number of rows by path.
    """
    for path, n_rows in tables.items():
        pattern = _pattern_of(path, table_settings)
        source = pattern if pattern in lengths else None
        if source is None and "exclusive_rows" in table_settings.get(pattern, {}):
            continue  # which outranks the frequencies for all tables
        if lengths.get(source, n_rows) != n_rows:
            raise ValueError(
                f"row_frequencies must have one number for each of the {n_rows} rows "
                f"of '{path}' (table_settings may give tables frequencies of their "
                f"own), received {lengths[source]} numbers"
            )


def check_scalar(
    invariant_scalar: str | None, led: bool, momentum: str, table: str | None = None
) -> None:
    """Raises, or warns, where a learned scalar could not work.

    Args:
      invariant_scalar: what rows have.
      led: whether owners are found during training.
      momentum: the mode.
      table: the path of the table that has these settings. Default None: all.
    """
    if invariant_scalar != "learned":
        return
    where = "" if table is None else f": '{table}'"
    if led:
        raise ValueError(
            "exclusive_rows must not be 'auto' with invariant_scalar='learned', "
            f"which moves the scalars of rows that share a first moment{where}"
        )
    if momentum != "shared":
        warnings.warn(
            "invariant_scalar='learned' moves the scalars of rows that follow a "
            f"first moment only; with momentum={momentum!r} the rows that share "
            f"a bucket keep their scalar at 1 (use momentum='shared'){where}",
            stacklevel=3,
        )


def warn_of_sizes(
    num_buckets: int | None,
    exclusive_rows: Any,
    table_settings: Settings,
    tables: Mapping[str, int],
) -> None:
    """Warns of a size above the rows of every table it is for: it means "all rows".

    One size for tables of many sizes is meant to be above the rows of small ones.
    """
    wide = {"num_buckets": num_buckets, "exclusive_rows": exclusive_rows}
    for source, settings in [(None, wide), *table_settings.items()]:
        for name in wide:
            value = settings.get(name)
            rows = [
                n_rows
                for path, n_rows in tables.items()
                if _source_of(name, path, table_settings) == source
            ]
            if isinstance(value, int) and rows and max(rows) < value:
                warnings.warn(
                    f"{name}={value} is above the {max(rows)} rows of the largest "
                    "table that it is for: every row owns a bucket there and nothing "
                    "is compressed",
                    stacklevel=2,
                )


def _pattern_of(path: str, table_settings: Settings) -> str | None:
    return next((p for p in table_settings if re.search(p, path)), None)


def _source_of(name: str, path: str, table_settings: Settings) -> str | None:
    """Where a size comes from: a pattern, None (the optimizer) or "" (neither)."""
    pattern = _pattern_of(path, table_settings)
    settings = table_settings.get(pattern, {})
    if name in settings:
        return pattern
    return "" if name == "num_buckets" and "compression_ratio" in settings else None


def warn_of_large_variables(
    variables: Sequence, min_rows: int, path_of: Callable[[Any], str]
) -> None:
    """Warns of variables that look like tables where `tables=None` goes by the name.

    Kernels are left out: those of wide one-hot inputs look the same.
    """
    missed = []
    for variable in variables:
        path, shape = path_of(variable), tuple(variable.shape)
        name = path.split("/")[-1]
        if len(shape) != 2 or None in shape or "kernel" in name or name == "embeddings":
            continue
        if shape[0] >= max(min_rows, _ROWS_PER_COLUMN * shape[1]):
            missed.append(f"'{path}' {shape}")
    if missed:
        warnings.warn(
            "tables=None compresses variables called 'embeddings' only, so these large "
            f"ones have the state of a dense variable: {', '.join(missed)}. Give "
            "tables= a pattern, paths or variables to compress them (tables=[] "
            "compresses nothing, without this warning)",
            stacklevel=2,
        )
