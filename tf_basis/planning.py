"""A plan of optimizer state: rows, buckets and bytes before anything is built."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tf_basis import budget, columns, engine, hyperparameters
from tf_basis.optimizers import selection, setting_checks
from tf_basis.rules import adagrad, adam, sgd
from tf_basis.tables import TableLayout

# Of a rule only the modes matter here, not the numbers.
_RULES = {
    "BasisAdam": adam.bucket_rule(0.0, 0.0, 0.0),
    "BasisAdagrad": adagrad.bucket_rule(),
    "BasisSGD": sgd.bucket_rule(0.0),
}

ADAM_BYTES = 8  # of two float32 moments, for each number of a table


@dataclass(frozen=True)
class PlannedTable:
    """One line of a plan.

    Attributes:
      path: of the table's variable.
      n_rows: N.
      dim: d.
      buckets: B.
      bytes: of the state of the table.
    """

    path: str
    n_rows: int
    dim: int
    buckets: int
    bytes: int

    @property
    def adam_bytes(self) -> int:
        """What Adam keeps for the table, two float32 moments for each number."""
        return ADAM_BYTES * self.n_rows * self.dim

    @property
    def ratio(self) -> float:
        """Bytes as a share of Adam's."""
        return self.bytes / self.adam_bytes


@dataclass(frozen=True)
class Plan:
    """What `plan` returns; `str` makes a table of it.

    Attributes:
      tables: the tables that would be compressed, in the order of the model.
      state_budget: the budget in bytes, or None.
    """

    tables: tuple[PlannedTable, ...]
    state_budget: int | None = None

    @property
    def total(self) -> int:
        """Bytes of the state of all tables."""
        return sum(t.bytes for t in self.tables)

    @property
    def ratio(self) -> float:
        """Bytes of all tables as a share of Adam's; 0 where there is no table."""
        return self.total / max(sum(t.adam_bytes for t in self.tables), 1)

    def as_dict(self) -> dict[str, Any]:
        """The plan in numbers, ready for JSON."""
        tables = [{**asdict(t), "ratio": t.ratio} for t in self.tables]
        return {
            "tables": tables,
            "total": self.total,
            "ratio": self.ratio,
            "state_budget": self.state_budget,
        }

    def __str__(self) -> str:
        if not self.tables:
            return "no table would be compressed"
        lines = [("table", "rows", "dim", "buckets", "state bytes", "of Adam")]
        for t in self.tables:
            counts = (f"{n:,}" for n in (t.n_rows, t.dim, t.buckets, t.bytes))
            lines.append((t.path, *counts, f"{t.ratio:.2%}"))
        lines.append(("total", "", "", "", f"{self.total:,}", f"{self.ratio:.2%}"))
        text = columns.aligned(lines)
        if self.state_budget is not None:
            text.append(f"budget: {self.state_budget:,} bytes")
        return "\n".join(text)


def plan(
    model_or_shapes: Any,
    *,
    state_budget: int | str | None = None,
    compression_ratio: float = 100.0,
    num_buckets: int | None = None,
    exclusive_rows: Any = 0,
    tables: Any = None,
    table_settings: Mapping[str, Mapping[str, Any]] | None = None,
    min_rows: int = 10_000,
    momentum: str = "exclusive",
    invariant_scalar: str | None = "energy",
    scalar_frequency_power: float = 0.0,
    moment_dtype: str = "float32",
    energy_dtype: str = "float32",
    stale_decay: bool = False,
    optimizer: str = "BasisAdam",
) -> Plan:
    """The buckets and bytes that an optimizer would have, without building anything.

    Args:
      model_or_shapes: a built model of either Keras; or a list of variables or
        shapes; or a dict from names to shapes. Shapes stand for float32 tables:
        with `tables=None` all of rank 2 with at least `min_rows` rows count, whatever
        they are called.
      state_budget, compression_ratio, num_buckets: as in `BasisAdam`.
      exclusive_rows, tables, table_settings, min_rows: as in `BasisAdam`.
      momentum, invariant_scalar, scalar_frequency_power: as in `BasisAdam`.
      moment_dtype, energy_dtype, stale_decay: as in `BasisAdam`. Its other arguments
        do not change a byte.
      optimizer: `"BasisAdam"` (default), `"BasisAdagrad"` (no momentum), or
        `"BasisSGD"`: `momentum` is its `momentum_mode` then (`"none"` for a momentum
        of 0), and of the scalars it has only the learned one.

    Returns:
      A `Plan`; print it, or read `tables`, `total` and `as_dict()`.

    Raises:
      ValueError: what `BasisAdam` would refuse, a budget that is too small included.

    Example:

    >>> print(plan({"user": (2_000_000, 64)}, state_budget="64MB"))
    table       rows  dim  buckets  state bytes  of Adam
    user   2,000,000   64  215,384   63,999,840    6.25%
    total                            63,999,840    6.25%
    budget: 64,000,000 bytes
    """
    arguments = dict(locals())
    kind = arguments.pop("optimizer")
    hyperparameters.check("optimizer", kind, hyperparameters.choice(*_RULES))
    if kind == "BasisAdagrad":
        arguments["momentum"] = "none"
    items = _items(arguments.pop("model_or_shapes"))
    hyperparameters.check_all(arguments)
    budget.check_sizes(arguments, plan)
    arguments = selection.own_exclusive_rows(arguments)
    modes = ("invariant_scalar", "scalar_frequency_power", "stale_decay")
    fields = {k: arguments[k] for k in modes}
    if kind == "BasisSGD" and invariant_scalar == "energy":  # the others' default
        fields["invariant_scalar"] = None
    rule = replace(_RULES[kind], **fields)
    defaults = {"hashing": "balanced", "seed": 0}
    defaults |= {k: v for k, v in arguments.items() if k in selection.LAYOUT_SETTINGS}
    settings = selection.parse_settings(table_settings, selection.SETTINGS)
    chosen = selection.select_tables(
        selection.parse_tables(tables, _path_of),
        min_rows,
        items,
        lambda item: item.title if tables is None else item.path,
    )

    def slots_of(layout: TableLayout) -> dict[str, tuple]:
        return engine.slot_specs(layout, rule)

    settings = selection.with_own_settings(
        settings, chosen, lambda item: item.path, selection.SETTINGS
    )
    rows = setting_checks.rows_of(chosen, lambda item: item.path)
    setting_checks.check_patterns(settings, list(rows))
    setting_checks.check_frequencies(
        setting_checks.frequency_lengths(None, table_settings), settings, rows
    )
    owners = arguments["exclusive_rows"]
    setting_checks.warn_of_sizes(num_buckets, owners, settings, rows)
    layouts = budget.table_layouts(
        [(x.path, x) for x in chosen], defaults, settings, state_budget, slots_of
    )
    planned = [
        PlannedTable(
            path=x.path,
            n_rows=x.mapping.n_rows,
            dim=x.dim,
            buckets=x.mapping.num_buckets,
            bytes=budget.layout_bytes(x, slots_of),
        )
        for x in layouts
    ]
    limit = state_budget
    if limit is not None:
        limit = hyperparameters.parse_bytes("state_budget", limit)
    return Plan(tuple(planned), limit)


@dataclass
class _Item:
    """A variable or what stands for one; `tables=None` goes by `title`."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    title: str


def _path_of(variable: Any) -> str:
    # As the adapters of both flavours do it, which cannot both be imported always.
    return (getattr(variable, "path", None) or variable.name).split(":")[0]


def _items(source: Any) -> list[_Item]:
    if hasattr(source, "apply_gradients"):
        raise ValueError(
            "model_or_shapes must be a model, variables or shapes; the settings of an "
            f"optimizer are arguments of plan, received the optimizer {source!r}"
        )
    if not getattr(source, "built", True):
        raise ValueError(f"model_or_shapes must be a built model, received {source!r}")
    if hasattr(source, "trainable_variables"):
        source = list(source.trainable_variables)
    if isinstance(source, Mapping):
        return [_from_shape(name, shape) for name, shape in source.items()]
    if not isinstance(source, (list, tuple)):
        raise ValueError(
            "model_or_shapes must be a model, a dict from names to shapes, or a list "
            f"of variables or shapes, received {source!r}"
        )
    return [
        _from_variable(x) if hasattr(x, "shape") else _from_shape(f"table_{i}", x)
        for i, x in enumerate(source)
    ]


def _from_variable(variable: Any) -> _Item:
    path = _path_of(variable)
    item = _Item(path, tuple(variable.shape), variable.dtype, path)
    own = getattr(variable, selection.OWN_SETTINGS, None)
    if own:
        setattr(item, selection.OWN_SETTINGS, own)
    return item


def _from_shape(name: Any, shape: Any) -> _Item:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        sizes = (-1,)
    if not isinstance(name, str) or min(sizes, default=0) < 0:
        raise ValueError(
            "model_or_shapes must hold names and shapes such as (1_000_000, 64), "
            f"received {shape!r} for {name!r}"
        )
    return _Item(name, sizes, "float32", f"{name}/embeddings")
