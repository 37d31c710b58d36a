"""Which variables are compressed tables, and with which settings each."""

from __future__ import annotations

import numbers
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.tables import TableLayout, table_layout

# What `table_settings` may set for the tables whose path matches a pattern: the layout
# of its state, and how its scalars are found.
LAYOUT_SETTINGS = (
    "compression_ratio",
    "num_buckets",
    "exclusive_rows",
    "row_frequencies",
    "momentum",
    "hashing",
    "seed",
    "moment_dtype",
    "energy_dtype",
)
SCALAR_SETTINGS = (
    "invariant_scalar",
    "scalar_decay",
    "scalar_range",
    "scalar_rule",
    "scalar_learning_rate",
    "scalar_frequency_power",
)
SETTINGS = LAYOUT_SETTINGS + SCALAR_SETTINGS

# Where a layer leaves the settings of its table, on the variable.
OWN_SETTINGS = "_tf_basis_settings"

_TABLE_DTYPES = (tf.float32, tf.bfloat16, tf.float16)


def parse_tables(selector: Any, path_of: Callable[[Any], str]) -> Any:
    """The argument `tables` as None, a pattern, or a tuple of paths."""
    if selector is None:
        return None
    if isinstance(selector, str):
        _check_pattern("tables", selector)
        return selector
    if isinstance(selector, (list, tuple)) and all(
        isinstance(v, str) or (hasattr(v, "shape") and hasattr(v, "name"))
        for v in selector
    ):
        return tuple(v if isinstance(v, str) else path_of(v) for v in selector)
    raise ValueError(
        "tables must be None, a regular expression on the variable path, or a "
        f"list of variables or paths, received {selector!r}"
    )


def parse_settings(
    table_settings: Any,
    allowed: Sequence[str],
    rules: Mapping[str, hyperparameters.Rule] | None = None,
) -> dict[str, dict[str, Any]]:
    """The argument `table_settings`, checked; exclusive rows as numbers or lists.

    `rules` come before those of `hyperparameters`.
    """
    if table_settings is None:
        return {}
    if not isinstance(table_settings, Mapping):
        raise ValueError(
            "table_settings must be a dict from patterns on the variable path to "
            f"dicts of settings, received {table_settings!r}"
        )
    parsed = {}
    for pattern, settings in table_settings.items():
        _check_pattern("table_settings", pattern)
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"table_settings[{pattern!r}] must be a dict, received {settings!r}"
            )
        unknown = sorted(set(settings) - set(allowed))
        if unknown:
            raise ValueError(
                f"table_settings[{pattern!r}] may hold {', '.join(allowed)}, "
                f"received {', '.join(map(repr, unknown))}"
            )
        settings = dict(settings)
        hyperparameters.check_all(settings, rules)
        if "scalar_range" in settings:
            settings["scalar_range"] = tuple(settings["scalar_range"])
        if settings.get("num_buckets") is not None and "compression_ratio" in settings:
            warnings.warn(
                f"table_settings[{pattern!r}]: num_buckets decides the buckets, so "
                f"compression_ratio={settings['compression_ratio']!r} has no effect",
                stacklevel=2,
            )
        parsed[pattern] = own_exclusive_rows(settings)
    return parsed


def own_exclusive_rows(settings: dict[str, Any]) -> dict[str, Any]:
    """Turns `row_frequencies` into the list of the most frequent rows."""
    frequencies = settings.pop("row_frequencies", None)
    rows = settings.get("exclusive_rows", 0)
    if isinstance(rows, numbers.Integral):
        rows = int(rows)
    if frequencies is not None:
        frequencies = np.asarray(frequencies)
        hyperparameters.check("row_frequencies", frequencies)
        if isinstance(rows, str) and rows == "auto":
            raise ValueError(
                "row_frequencies must be None with exclusive_rows='auto', which finds "
                "the frequent rows during training; or exclusive_rows a number, of the "
                f"most frequent rows, received {len(frequencies)} frequencies"
            )
        if not isinstance(rows, int) or rows > len(frequencies):
            raise ValueError(
                "exclusive_rows must be the number of rows to take from "
                f"row_frequencies, at most {len(frequencies)}, received {rows!r}"
            )
        # Stable: of equally frequent rows the first.
        rows = np.argsort(-frequencies, kind="stable")[:rows]
    if not isinstance(rows, (int, str)):
        rows = [int(r) for r in rows]
    if frequencies is not None or "exclusive_rows" in settings:
        settings["exclusive_rows"] = rows
    return settings


def select_tables(
    tables: Any, min_rows: int, variables: Sequence, path_of: Callable[[Any], str]
) -> list:
    """The variables that `tables` selects.

    Raises:
      ValueError: it names or matches nothing.
    """
    if tables is None:
        return [
            v
            for v in variables
            if path_of(v).split("/")[-1] == "embeddings"
            and len(v.shape) == 2
            and (v.shape[0] >= min_rows or hasattr(v, OWN_SETTINGS))
        ]
    known = f"the variables are {[path_of(v) for v in variables]}"
    if isinstance(tables, str):
        found = [v for v in variables if re.search(tables, path_of(v))]
        if not found:
            raise ValueError(
                "tables must match the path of at least one variable, received "
                f"{tables!r}; {known}"
            )
        return found
    missing = set(tables) - {path_of(v) for v in variables}
    if missing:
        raise ValueError(
            "tables must hold paths of trainable variables, received "
            f"{sorted(missing)}; {known}"
        )
    return [v for v in variables if path_of(v) in tables]


def with_own_settings(
    table_settings: Mapping[str, Mapping[str, Any]],
    variables: Sequence,
    path_of: Callable[[Any], str],
    allowed: Sequence[str],
    rules: Mapping[str, hyperparameters.Rule] | None = None,
) -> dict[str, Mapping[str, Any]]:
    """`table_settings`; for tables that no pattern matches, what their layers say."""
    settings = dict(table_settings)
    for variable in variables:
        path, own = path_of(variable), getattr(variable, OWN_SETTINGS, None)
        if own and not any(re.search(p, path) for p in table_settings):
            pattern = f"^{re.escape(path)}$"
            settings |= parse_settings({pattern: own}, allowed, rules)
    return settings


def layout_of(
    path: str,
    variable: Any,
    defaults: Mapping[str, Any],
    table_settings: Mapping[str, Mapping[str, Any]],
    overrides: Mapping[str, Any] | None = None,
) -> TableLayout:
    """The layout of one table under the settings that its path matches.

    `overrides` outrank them.

    Raises:
      ValueError: two patterns match, or the settings do not fit the table.
    """
    dtype = tf.as_dtype(variable.dtype)
    if dtype not in _TABLE_DTYPES:
        raise ValueError(
            "tables must be float32, bfloat16 or float16 variables, but "
            f"'{path}' is {dtype.name}"
        )
    settings = settings_of(path, defaults, table_settings)
    scalar = {k: settings.pop(k) for k in SCALAR_SETTINGS if k in settings}
    settings |= overrides or {}
    return table_layout(path, tuple(variable.shape), scalar=scalar, **settings)


def settings_of(
    path: str,
    defaults: Mapping[str, Any],
    table_settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The defaults, but for what `table_settings` has for this path.

    Raises:
      ValueError: two patterns match.
    """
    matching = [p for p in table_settings if re.search(p, path)]
    if len(matching) > 1:
        raise ValueError(
            f"table_settings must match '{path}' by one pattern, received {matching}"
        )
    settings = dict(defaults)
    if matching:
        settings.update(table_settings[matching[0]])
        # A ratio for this table outranks a count for all, and the reverse.
        if "num_buckets" not in table_settings[matching[0]] and (
            "compression_ratio" in table_settings[matching[0]]
        ):
            settings["num_buckets"] = None
    return settings


def _check_pattern(argument: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{argument} must be a valid regular expression ({error}), received "
            f"{pattern!r}"
        ) from error
