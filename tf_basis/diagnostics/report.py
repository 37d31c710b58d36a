"""`report`: the state of the compressed tables of an optimizer, and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis import columns
from tf_basis.diagnostics import page, summaries
from tf_basis.diagnostics.advice import Advice, advise
from tf_basis.diagnostics.collisions import compare
from tf_basis.diagnostics.measures import Measures, measure
from tf_basis.diagnostics.shadows import ShadowRows
from tf_basis.diagnostics.tables import Table, parts_of, tables_of


class Report:
    """What `report` returns; `str` makes a table of it.

    Attributes:
      step: the optimizer's steps so far, None where they are not known.
      advice: what to do, as a list of `Advice` (code, path, message).
      why_none: why no table is compressed; empty where one is, or it is not known.
    """

    def __init__(
        self,
        measured: Sequence[Measures],
        advice: Sequence[Advice],
        step: int | None,
        why_none: str = "",
    ) -> None:
        self._measured, self.advice, self.step = list(measured), list(advice), step
        self.why_none = why_none

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The numbers of each table, see `docs/diagnostics.md`."""
        return [each.numbers for each in self._measured]

    @property
    def state_bytes(self) -> int:
        """Of the state of all tables."""
        return sum(table["state_bytes"] for table in self.tables)

    def as_dict(self) -> dict[str, Any]:
        """The report in numbers, ready for JSON."""
        return {
            "step": self.step,
            "state_bytes": self.state_bytes,
            "tables": self.tables,
            "why_none": self.why_none,
            "advice": [each._asdict() for each in self.advice],
        }

    def __str__(self) -> str:
        if not self._measured:
            return page.without_tables(self.why_none)
        text = []
        for head, line in ((_SIZES, _sizes_of), (_NUMBERS, _numbers_of)):
            text += columns.aligned([head, *map(line, self.tables)])
        for each in self.advice:
            text.append(f"{each.code}: '{each.path}': {each.message}")
        if not self.advice:
            text.append("nothing to do")
        return "\n".join(text)

    def __repr__(self) -> str:
        codes = [each.code for each in self.advice]
        return f"<Report of {len(self._measured)} tables, advice {codes}>"

    def to_tensorboard(self, log_dir: str | os.PathLike, step: int) -> None:
        """Adds histograms and scalars `tables/<path>/…` for TensorBoard.

        Args:
          log_dir: a folder; TensorBoard need not be installed to write there.
          step: where on the axis of steps.
        """
        writer = tf.summary.create_file_writer(str(log_dir))
        self.write_summaries(writer, step)
        writer.close()

    def write_summaries(self, writer: Any, step: int) -> None:
        """Adds the same through a writer of `tf.summary`."""
        for measured in self._measured:
            summaries.write(writer, step, measured)

    def to_html(self, path: str | os.PathLike) -> None:
        """Writes one page with plots that needs no other file and no network.

        Args:
          path: of the file, replaced if it is there.
        """
        text = page.render(self._measured, self.advice, self.step, self.why_none)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def report(optimizer: Any, shadows: Any = None) -> Report:
    """Looks into the compressed tables of an optimizer.

    Reads all of their state, in blocks: call it between steps, and not at each. What
    the numbers mean is in `docs/diagnostics.md`.

    Args:
      optimizer: BasisAdam, BasisSGD or BasisAdagrad, built; or one that contains them:
        LossScaleOptimizer, DistributedOptimizer, MultiOptimizer.
      shadows: `ShadowRows` of this optimizer, or a `CollisionReport` that was with it
        in `fit`, to compare exact rows with. Default None: what is attached now, if
        anything is.

    Returns:
      A `Report`: print it, or read `tables`, `advice` and `as_dict()`.

    Raises:
      ValueError: an argument breaks its rule, or the optimizer is not built.

    Example:

    >>> table = tf.Variable(tf.zeros([1000, 4]), name="table")
    >>> optimizer = BasisAdam(tables=[table], num_buckets=10)
    >>> optimizer.build([table])
    >>> report(optimizer).tables[0]["load"]["max"]
    100
    """
    tables = tables_of(optimizer)
    shadows = getattr(shadows, "shadows", shadows)
    if shadows is not None and not isinstance(shadows, ShadowRows):
        raise ValueError(
            "shadows must be None, ShadowRows or a CollisionReport that was in a fit, "
            f"received {shadows!r}"
        )
    parts = parts_of(optimizer)
    step = max(int(tf.convert_to_tensor(p.iterations)) for p in parts)
    found = report_of(tables, step, shadows)
    if not tables:
        found.why_none = _why_none(parts)
    return found


def _why_none(parts: Sequence[Any]) -> str:
    small = [
        (int(variable.shape[0]), part._basis.paths[key], part.min_rows)
        for part in parts
        for key, variable in part._basis.variables.items()
        if len(variable.shape) == 2
        and part._basis.paths[key].split("/")[-1] == "embeddings"
    ]
    if not small:
        return "no variable with two dimensions is called embeddings; see tables="
    rows, path, least = max(small)
    if rows >= least:
        return ""
    return (
        f"the largest table, '{path}', has {rows:,} rows, and min_rows of the "
        f"optimizer is {least:,}"
    )


def report_of(
    tables: Sequence[Table], step: int | None, shadows: ShadowRows | None = None
) -> Report:
    """The report of tables from wherever."""
    measured, advice = [], []
    for table in tables:
        each = measure(table)
        known = _known(table, shadows)
        if known is not None:
            each.numbers["shadows"] = compare(table, known)
        measured.append(each)
        advice += advise(table, each.numbers)
    return Report(measured, advice, step)


def _known(table: Table, shadows: ShadowRows | None) -> dict | None:
    found = [shadows] if shadows is not None else []
    found += [w.shadows for w in table.watchers if hasattr(w, "shadows")]
    for each in found:
        known = each.known_of(table)
        if known is not None:
            return known
    return None


_SIZES = (
    "table",
    "rows",
    "buckets",
    "N/B",
    "load min/mean/max",
    "touched",
    "state bytes",
)
_NUMBERS = (
    "table",
    "scalars p10/p50/p90",
    "of crowded buckets",
    "at limits",
    "first moment min/max",
    "second moment min/max",
    "collision error",
)


def _sizes_of(t: dict[str, Any]) -> tuple[str, ...]:
    load = t["load"]
    return (
        t["path"],
        f"{t['rows']:,}",
        f"{t['buckets']:,}",
        f"{t['compression']:.1f}",
        f"{load['min']}/{load['mean']:.1f}/{load['max']}",
        f"{t['touched']['share']:.1%}",
        f"{t['state_bytes']:,}",
    )


def _numbers_of(t: dict[str, Any]) -> tuple[str, ...]:
    clipped = error = "-"
    if (t.get("scalars") or {}).get("count"):
        clipped = f"{t['scalars']['at_low'] + t['scalars']['at_high']:.1%}"
    shadows = t.get("shadows")
    if shadows and shadows["rows"] and shadows["update_error"]["median"] is not None:
        error = f"{shadows['update_error']['median']:.1%}"
    return (
        t["path"],
        _some(t.get("scalars"), "p10", "p50", "p90"),
        _some(t.get("scalars_crowded"), "p10", "p50", "p90"),
        clipped,
        _some(t.get("first_moment"), "min", "max"),
        _some(t.get("second_moment"), "min", "max"),
        error,
    )


def _some(spread: dict[str, Any] | None, *names: str) -> str:
    """Numbers of a distribution; a dash where there is none, or it is empty."""
    if not spread or not spread["count"]:
        return "-"
    return "/".join(f"{spread[name]:.3g}" for name in names)
