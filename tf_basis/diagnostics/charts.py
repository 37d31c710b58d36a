"""Small plots as SVG, written by hand: a page with them needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 190, 46, 34, 24
_COLORS = ("#3366aa", "#dd7722", "#449944")

Bins = Sequence[tuple[float, float, int]]


def histogram(title: str, series: Sequence[tuple[str, Bins]], log: bool = False) -> str:
    """Shares of a few distributions over one axis, as outlines.

    Args:
      title: above it.
      series: pairs of a name and (left, right, count) bins, ascending.
      log: whether the axis is logarithmic; numbers of at most 0 are left out then.
    """
    drawn = [(name, _positive(bins) if log else list(bins)) for name, bins in series]
    drawn = [(name, bins) for name, bins in drawn if bins]
    if not drawn:
        return _frame(title, '<text x="60" y="90">no numbers</text>')
    low = min(bins[0][0] for _, bins in drawn)
    high = max(bins[-1][1] for _, bins in drawn)
    at = _axis(low, high, log)
    tops = []
    for _, bins in drawn:
        total = sum(count for _, _, count in bins)
        tops.append([count / total for _, _, count in bins])
    top = max(map(max, tops))
    parts = []
    for number, ((name, bins), shares) in enumerate(zip(drawn, tops)):
        color, points = _COLORS[number % len(_COLORS)], []
        for (left, right, _), share in zip(bins, shares):
            y = _y(share / top)
            x, end = at(left), max(at(right), at(left) + 1.5)
            points += [f"{x:.1f},{_y(0):.1f}", f"{x:.1f},{y:.1f}"]
            points += [f"{end:.1f},{y:.1f}", f"{end:.1f},{_y(0):.1f}"]
        shape = " ".join(points)
        parts.append(
            f'<polygon points="{shape}" fill="{color}" fill-opacity="0.3" '
            f'stroke="{color}"/>'
        )
        if len(drawn) > 1:
            y = _TOP + 12 + 13 * number
            label = html.escape(name)
            parts.append(
                f'<text x="{_WIDTH - 6}" y="{y}" text-anchor="end" '
                f'fill="{color}">{label}</text>'
            )
    parts.append(_ticks(low, high, at, log))
    parts.append(
        f'<text x="{_LEFT - 5}" y="{_TOP + 4}" text-anchor="end">{top:.0%}</text>'
    )
    return _frame(title, "".join(parts))


def scatter(title: str, points: Sequence[tuple[float, float]], x_name: str) -> str:
    """Points over a logarithmic axis; the other one starts at 0.

    Args:
      title: above it.
      points: (x, y) with x above 0 and y of at least 0.
      x_name: of the axis.
    """
    if not points:
        return _frame(title, '<text x="60" y="90">no numbers</text>')
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(max(y for _, y in points), 1e-12)
    at = _axis(low, high, True)
    dots = "".join(
        f'<circle cx="{at(x):.1f}" cy="{_y(y / top):.1f}" r="2.5" fill="{_COLORS[0]}" '
        'fill-opacity="0.6"/>'
        for x, y in points
    )
    name = html.escape(x_name)
    more = (
        f'<text x="{_LEFT - 5}" y="{_TOP + 4}" text-anchor="end">{top:.2g}</text>'
        f'<text x="{_WIDTH - 6}" y="{_HEIGHT - 4}" text-anchor="end">{name}</text>'
    )
    return _frame(title, dots + more + _ticks(low, high, at, True))


def _positive(bins: Bins) -> list[tuple[float, float, int]]:
    return [(left, right, count) for left, right, count in bins if left > 0]


def _axis(low: float, high: float, log: bool):
    f = math.log10 if log else float
    start, width = f(low), f(high) - f(low)
    room = _WIDTH - _LEFT - 10

    def at(value: float) -> float:
        part = (f(value) - start) / width if width > 0 else 0.5
        return _LEFT + room * part

    return at


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _ticks(low: float, high: float, at, log: bool) -> str:
    middle = math.sqrt(low) * math.sqrt(high) if log else (low + high) / 2
    values = [low, middle, high] if high > low else [low]
    anchors = ("start", "middle", "end") if len(values) == 3 else ("middle",)
    y = _HEIGHT - _BOTTOM
    line = f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 10}" y2="{y}" stroke="#888"/>'
    return line + "".join(
        f'<text x="{at(value):.1f}" y="{y + 14}" text-anchor="{anchor}">{value:.3g}'
        "</text>"
        for value, anchor in zip(values, anchors)
    )


def _frame(title: str, inside: str) -> str:
    name = html.escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="11" '
        f'font-family="sans-serif"><title>{name}</title>'
        f'<text x="{_LEFT}" y="13" font-weight="bold">{name}</text>{inside}</svg>'
    )
