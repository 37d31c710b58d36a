"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of equal cells as text: the first column to the left, others to the right.

    >>> aligned([("table", "rows"), ("u", "1,000")])
    ['table   rows', 'u      1,000']
    """
    widths = [max(map(len, column)) for column in zip(*lines)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
