"""How many buckets each table gets: from a ratio or count, or from a byte budget.

Every byte here is read off the slots that the optimizers build their variables from;
there is no second formula.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tf_basis import hyperparameters
from tf_basis.optimizers import selection
from tf_basis.tables import TableLayout

_LEVEL_BITS = 32  # a level is counted in 2^-32 bytes for each number of a table

# Name -> (shape, dtype, start) of the state that goes with a layout.
SlotsOf = Callable[[TableLayout], Mapping[str, tuple]]


def layout_bytes(layout: TableLayout, slots_of: SlotsOf) -> int:
    """Bytes of the state that `slots_of(layout)` lists."""
    specs = slots_of(layout).values()
    return sum(math.prod(shape) * dtype.size for shape, dtype, _ in specs)


class Demand(NamedTuple):
    """What the state of one table costs as a function of its buckets B.

    From `least` buckets (one shared) to N - 1 each costs the same; B = N, where every
    row owns its bucket, may cost more at once.
    """

    n_rows: int
    numbers: int  # N * d
    least: int
    fixed: int  # bytes whatever B is
    each: int  # bytes of one shared bucket
    all: int  # bytes at B = N

    def bytes_at(self, buckets: int) -> int:
        """Bytes of the whole state with B = `buckets`."""
        if buckets == self.n_rows:
            return self.all
        return self.fixed + self.each * (buckets - self.least + 1)

    def buckets_at(self, level: int, most: int) -> int:
        """The most buckets that `level` pays for, in [least, most]."""
        share = (level * self.numbers) >> _LEVEL_BITS
        if most == self.n_rows and self.all - self.fixed <= share:
            return self.n_rows
        paid = self.least - 1 + share // max(self.each, 1)
        return max(self.least, min(paid, most, self.n_rows - 1))


def _keeps_its_size(path: str, table_settings: Mapping[str, Mapping]) -> bool:
    return any(
        {"num_buckets", "compression_ratio"} & set(settings)
        for pattern, settings in table_settings.items()
        if re.search(pattern, path)
    )


def _demand(layout_at: Callable[[int | None], TableLayout], bytes_of) -> Demand:
    """Measures a table; `layout_at(None)` is its layout with the fewest buckets."""
    layout = layout_at(None)
    n_rows, least = layout.mapping.n_rows, layout.mapping.num_buckets
    numbers = n_rows * layout.dim
    lowest = bytes_of(layout)
    if least == n_rows:
        return Demand(n_rows, numbers, n_rows, lowest, 0, lowest)
    each = bytes_of(layout_at(least + 1)) - lowest if least + 1 < n_rows else 0
    everything = bytes_of(layout_at(n_rows))
    return Demand(n_rows, numbers, least, lowest - each, each, everything)


def divide(demands: Sequence[Demand], budget: int) -> list[int]:
    """Buckets of each table, together worth at most `budget` bytes.

    Beyond what a table needs whatever B is, all get the same bytes for each of their
    numbers, rounded down to buckets, but one shared bucket at least and N at most;
    what a table cannot use raises the level of the others.
    """
    if not demands:
        return []
    most = [d.n_rows for d in demands]

    def at(level: int) -> list[int]:
        return [d.buckets_at(level, m) for d, m in zip(demands, most)]

    def fits(level: int) -> bool:
        return sum(d.bytes_at(b) for d, b in zip(demands, at(level))) <= budget

    while True:
        low = 0
        high = max(-(-(d.all << _LEVEL_BITS) // d.numbers) for d in demands)
        if fits(high):
            return at(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        # A table that would own all its buckets next, at a price that is not left,
        # stays one below; the others share what it leaves.
        stuck = [
            i
            for i, (b, following) in enumerate(zip(at(low), at(high)))
            if b < following == demands[i].n_rows
        ]
        if not stuck:
            return at(low)
        for i in stuck:
            most[i] = demands[i].n_rows - 1


def table_layouts(
    tables: Sequence[tuple[str, Any]],
    defaults: Mapping[str, Any],
    table_settings: Mapping[str, Mapping[str, Any]],
    state_budget: int | str | None,
    slots_of: SlotsOf,
) -> list[TableLayout]:
    """The layouts of all tables, given as pairs of path and variable.

    Tables whose settings name `num_buckets` or `compression_ratio` keep that; the
    others share the rest of the budget, where there is one.

    Raises:
      ValueError: the budget does not pay for one shared bucket in each table.
    """
    layouts = [selection.layout_of(p, v, defaults, table_settings) for p, v in tables]
    if state_budget is None or not tables:
        return layouts
    budget = hyperparameters.parse_bytes("state_budget", state_budget)

    def bytes_of(layout: TableLayout) -> int:
        return layout_bytes(layout, slots_of)

    def layout_at(path: str, variable: Any, buckets: int | None) -> TableLayout:
        sizes = {"num_buckets": buckets, "compression_ratio": math.inf}
        return selection.layout_of(
            path, variable, {**defaults, **sizes}, table_settings
        )

    shared = {
        i: _demand(lambda b, t=table: layout_at(*t, b), bytes_of)
        for i, table in enumerate(tables)
        if not _keeps_its_size(table[0], table_settings)
    }
    kept = sum(bytes_of(x) for i, x in enumerate(layouts) if i not in shared)
    least = kept + sum(d.bytes_at(d.least) for d in shared.values())
    if budget < least:
        where = f"each of the {len(tables)} tables" if len(tables) > 1 else "the table"
        raise ValueError(
            f"state_budget must be at least {least} bytes, which pay for one shared "
            f"bucket in {where}, received {state_budget!r}"
        )
    for i, buckets in zip(shared, divide(list(shared.values()), budget - kept)):
        layouts[i] = layout_at(*tables[i], buckets)
    return layouts


def check_sizes(arguments: Mapping[str, Any], function: Callable) -> None:
    """Raises where arguments of `function` give a budget and another size too.

    Warns where a ratio has no effect, since a count outranks it.
    """
    defaults = inspect.signature(function).parameters
    ratio = arguments["compression_ratio"]
    if arguments["state_budget"] is None:
        if arguments["num_buckets"] is not None and (
            ratio != defaults["compression_ratio"].default
        ):
            warnings.warn(
                f"num_buckets={arguments['num_buckets']!r} decides the buckets, so "
                f"compression_ratio={ratio!r} has no effect",
                stacklevel=2,
            )
        return
    for name in ("num_buckets", "compression_ratio"):
        if arguments[name] != defaults[name].default:
            raise ValueError(
                f"state_budget decides the buckets: {name} must keep its default of "
                f"{defaults[name].default!r} then (table_settings may give tables "
                f"sizes of their own), received {name}={arguments[name]!r}"
            )
