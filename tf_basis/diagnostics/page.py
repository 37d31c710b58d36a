"""A report as one HTML page: tables, advice, plots, no other file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from tf_basis._version import __version__
from tf_basis.diagnostics import charts
from tf_basis.diagnostics.advice import Advice
from tf_basis.diagnostics.measures import Measures

_STYLE = """
body { font: 14px/1.5 sans-serif; margin: 2em auto; max-width: 900px; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border: 1px solid #ccc; padding: 2px 8px; text-align: left }
td + td { text-align: right }
.advice { background: #fff3d6; border-left: 4px solid #dd9922; padding: 4px 12px }
.well { background: #e6f4e6; border-left: 4px solid #449944; padding: 4px 12px }
svg { margin: 4px }
"""


def render(
    measured: Sequence[Measures],
    advice: Sequence[Advice],
    step: int | None,
    why_none: str = "",
) -> str:
    """The text of the page."""
    when = "" if step is None else f" after {step:,} steps"
    body = [f"<h1>Compressed tables{when}</h1>"]
    if not measured:
        body.append(f'<p class="advice">{_text(without_tables(why_none))}.</p>')
    elif not advice:
        body.append('<p class="well">Nothing to do.</p>')
    for each in advice:
        body.append(
            f'<p class="advice"><b>{_text(each.code)}</b>, '
            f"<code>{_text(each.path)}</code>: {_text(each.message)}.</p>"
        )
    for each in measured:
        body += _section(each)
    text = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>tf_basis report</title><style>{_STYLE}</style></head>\n<body>\n{text}"
        f"\n<p>tf_basis {__version__}</p></body></html>\n"
    )


def without_tables(why: str) -> str:
    """What a report says that has no table."""
    return f"no table is compressed{why and f': {why}'}"


def _section(measured: Measures) -> list[str]:
    numbers = measured.numbers
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(_short(value))}</td></tr>"
        for name, value in flat(numbers)
    )
    return [
        f"<h2><code>{_text(numbers['path'])}</code></h2>",
        f"<div>{''.join(_plots(measured))}</div>",
        f"<details open><summary>Numbers</summary><table>{rows}</table></details>",
    ]


def _plots(measured: Measures) -> list[str]:
    spreads = measured.distributions

    def bins(name: str) -> tuple[str, list]:
        return name.replace("_", " "), spreads[name].buckets()

    plots = [
        charts.histogram("rows of a bucket", [bins("bucket_load")]),
        charts.histogram("steps of a bucket", [bins("bucket_steps")]),
    ]
    if "scalars" in spreads:
        names = ("scalars", "scalars_crowded", "scalars_touched")
        plots.append(charts.histogram("scalars", [bins(n) for n in names], log=True))
    if "second_moment" in spreads:
        plots.append(
            charts.histogram("second moment", [bins("second_moment")], log=True)
        )
    if "first_moment" in spreads:
        plots.append(charts.histogram("first moment", [bins("first_moment")]))
    by_row = measured.numbers.get("shadows", {}).get("by_row")
    if by_row:
        pairs = zip(by_row["steps"], by_row["update_error"])
        points = [(s, e) for s, e in pairs if e is not None]
        plots.append(
            charts.scatter("error of updates by row", points, "steps of the row")
        )
    return plots


def flat(numbers: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Names, joined by dots, and values that are no dicts or lists of rows."""
    found = []
    for name, value in numbers.items():
        if isinstance(value, dict):
            if name != "by_row":
                found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    return html.escape(str(value))
