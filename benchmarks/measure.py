"""What the benchmarks share: inputs, timing in rounds, tables, JSON, the machine."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


class ZipfRows:
    """Batches of ids with P(row r) ~ (r + 1)^-exponent, rows in frequency order.

    The exponent is tuned so that a batch has about `distinct` different rows; every
    batch then gets exactly as many.  (Beyond the first rows, neighbours share one
    probability, so that nothing here grows with N.)
    """

    def __init__(self, rows: int, batch: int, distinct: int, seed: int) -> None:
        self.batch, self.distinct = batch, distinct
        self._rng = np.random.default_rng(seed)
        self._edges = np.unique(np.geomspace(1, rows + 1, 4000).round().astype(int))
        self._counts = np.diff(self._edges)
        if self._expected(0.0) < distinct:
            raise ValueError(
                f"--rows must allow {distinct} distinct rows in a batch of {batch}, "
                f"received {rows}"
            )
        low, high = 0.0, 8.0
        for _ in range(50):
            middle = (low + high) / 2
            more = self._expected(middle) > distinct
            low, high = (middle, high) if more else (low, middle)
        self.exponent = low
        self._cumulative = np.cumsum(self._masses(low))

    def _masses(self, exponent: float) -> np.ndarray:
        middles = np.sqrt(self._edges[:-1] * (self._edges[1:] - 1.0))
        masses = self._counts * middles**-exponent
        return masses / masses.sum()

    def _expected(self, exponent: float) -> float:
        p = self._masses(exponent) / self._counts
        return float(np.sum(self._counts * -np.expm1(self.batch * np.log1p(-p))))

    def draw(self) -> np.ndarray:
        """int64 ids: the first distinct rows of a stream, and their repetitions."""
        length = 4 * self.batch
        while True:
            piece = np.searchsorted(self._cumulative, self._rng.random(length))
            piece = np.minimum(piece, len(self._counts) - 1)
            offset = self._rng.integers(0, self._counts[piece])
            stream = self._edges[piece] - 1 + offset
            first = np.sort(np.unique(stream, return_index=True)[1])[: self.distinct]
            again = np.isin(stream, stream[first])
            again[first] = False
            again = np.flatnonzero(again)[: self.batch - self.distinct]
            if len(first) + len(again) == self.batch:
                return stream[np.sort(np.concatenate([first, again]))]
            length *= 2


@dataclass
class Contender:
    """Something to be timed beside others.

    Attributes:
      name: what the tables call it.
      call: does it once; receives the number of the call, to choose an input by.
      seconds: duration of each timed call, by round.
    """

    name: str
    call: Callable[[int], Any]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    _calls: int = 0

    def run(self) -> float:
        """Calls once; returns the seconds it took, with all call overhead."""
        start = time.perf_counter()
        self.call(self._calls)
        seconds = time.perf_counter() - start
        self._calls += 1
        return seconds

    def measure(self, round_number: int, calls: int, most_seconds: float) -> None:
        """Times up to `calls` calls, fewer (at least one) if they take too long.

        One call before them is not timed: the others have emptied the caches. What
        fills the caches by itself many times over goes without.
        """
        before = self.samples()
        if not before or before[-1] < most_seconds / 10:
            self.run()
        times: list[float] = []
        while len(times) < calls and sum(times) < most_seconds:
            times.append(self.run())
        self.seconds[round_number] = times

    def release(self) -> None:
        """Lets go of what the call holds; the times stay."""
        self.call = _released

    def samples(self) -> list[float]:
        """All timed calls."""
        return [s for times in self.seconds.values() for s in times]

    def summary(self) -> dict[str, float | int]:
        """Median and minimum in milliseconds, and of how many calls."""
        samples = self.samples()
        return {
            "median_ms": 1e3 * statistics.median(samples),
            "min_ms": 1e3 * min(samples),
            "calls": len(samples),
        }


def _released(i: int) -> None:
    raise RuntimeError("this contender has been released")


def interleave(
    contenders: Sequence[Contender],
    rounds: Sequence[int],
    calls: int,
    most_seconds: float = 1.0,
) -> None:
    """Measures everybody in every round, so that noise hits all alike.

    Args:
      contenders: each has been called before (nothing is left to compile).
      rounds: numbers of the rounds; the order changes from round to round.
      calls: timed calls of one contender in one round.
      most_seconds: a contender stops for this round once it has used them.
    """
    for number in rounds:
        start = number % max(len(contenders), 1)
        for contender in [*contenders[start:], *contenders[:start]]:
            contender.measure(number, calls, most_seconds)


def ratio(above: Contender, below: Contender) -> float | None:
    """How many times longer `above` takes: the median over their common rounds.

    Each round compares medians of calls made close together in time. None if the
    two were never in one round.
    """
    common = above.seconds.keys() & below.seconds.keys()
    if not common:
        return None
    median = statistics.median
    return median(median(above.seconds[r]) / median(below.seconds[r]) for r in common)


def format_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """Columns as wide as needed, to the right but for those numbered in `left`."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(headers), rule, *map(line, rows)])


def format_number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, thousands separated; "-" for None."""
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names this machine."""
    import keras
    import tensorflow

    from tf_basis import __version__
    from tf_basis.ops import loader

    build = loader.status()["build_info"] or {}
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "system": f"{platform.system()} {platform.machine()}",
        # More than the cores have been wanted: other programs disturb the figures.
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tensorflow": tensorflow.__version__,
        "keras": keras.__version__,
        "tf_basis": __version__,
        "op_compiler": build.get("compiler_version"),
        "op_flags": build.get("compile_flags"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes the results of a benchmark, and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
