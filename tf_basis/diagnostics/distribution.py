"""How numbers are distributed, found block by block in little memory."""

from __future__ import annotations

from typing import Any

import numpy as np

# A float32 without its sign, cut off after some bits of its mantissa, is the number of
# a bin: each octave has 2^k bins of equal width, without a logarithm.
_MANTISSA = 23
_INFINITE = 255  # the exponent of what is not finite
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Distribution:
    """Count, extremes, moments and quantiles of float32 numbers.

    All exact but the quantiles, which are middles of bins of a width of 2^-k of their
    octave, so that they are off by at most 2^-(k+1) of their value.

    Args:
      bits: k. Default 6: quantiles to 0.8 %.
    """

    def __init__(self, bits: int = 6) -> None:
        self._shift = _MANTISSA - bits
        self._bins = np.zeros((2, (_INFINITE + 1) << bits), np.int64)  # +, -
        self.count = self.zeros = self.non_finite = 0
        self.min, self.max = np.inf, -np.inf
        self._total = self._squares = 0.0

    def add(self, values: np.ndarray) -> None:
        """Counts numbers of any shape."""
        values = np.asarray(values, np.float32).ravel()
        finite = np.isfinite(values)
        if not finite.all():
            self.non_finite += int(values.size - finite.sum())
            values = values[finite]
        if not values.size:
            return
        self.count += values.size
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))
        wide = values.astype(np.float64)
        self._total += float(wide.sum())
        self._squares += float(np.square(wide).sum())
        zero = values == 0
        self.zeros += int(zero.sum())
        bits = values[~zero].view(np.uint32)
        places = (bits & np.uint32(0x7FFFFFFF)) >> np.uint32(self._shift)
        below = bits >> np.uint32(31) == 1
        for sign, chosen in enumerate((places[~below], places[below])):
            self._bins[sign] += np.bincount(chosen, minlength=self._bins.shape[1])

    @property
    def mean(self) -> float:
        """The mean of the finite numbers; NaN without any."""
        return self._total / self.count if self.count else float("nan")

    @property
    def std(self) -> float:
        """The standard deviation of the finite numbers."""
        if not self.count:
            return float("nan")
        return max(self._squares / self.count - self.mean**2, 0.0) ** 0.5

    def quantile(self, q: float) -> float:
        """The number below which a share q of all is."""
        if not self.count:
            return float("nan")
        wanted = q * (self.count - 1)
        for left, right, count in self._ascending():
            wanted -= count
            if wanted < 0:
                return float(np.clip(0.5 * (left + right), self.min, self.max))
        return self.max

    def buckets(self, most: int = 60) -> list[tuple[float, float, int]]:
        """(left, right, count) of neighbouring bins, at most about so many."""
        found = self._ascending()
        size = max(-(-len(found) // most), 1)
        groups = [found[i : i + size] for i in range(0, len(found), size)]
        merged = [(g[0][0], g[-1][1], sum(c for _, _, c in g)) for g in groups]
        return [
            (max(left, self.min), min(right, self.max), count)
            for left, right, count in merged
        ]

    def _ascending(self) -> list[tuple[float, float, int]]:
        edges = self._edges
        negative = np.flatnonzero(self._bins[1])[::-1]
        positive = np.flatnonzero(self._bins[0])
        found = [(-edges(i + 1), -edges(i), int(self._bins[1, i])) for i in negative]
        if self.zeros:
            found.append((0.0, 0.0, self.zeros))
        found += [(edges(i), edges(i + 1), int(self._bins[0, i])) for i in positive]
        return found

    def _edges(self, place: int) -> float:
        bits = min(int(place) << self._shift, 0x7F7FFFFF)
        return float(np.uint32(bits).view(np.float32))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: None where there are no numbers."""
        some = self.count > 0

        def plain(value: float) -> float | None:
            return float(value) if some else None

        return {
            "count": self.count,
            "non_finite": self.non_finite,
            "zeros": self.zeros / self.count if some else None,
            "mean": plain(self.mean),
            "std": plain(self.std),
            "min": plain(self.min),
            "max": plain(self.max),
            **{f"p{round(q * 100):02d}": plain(self.quantile(q)) for q in QUANTILES},
        }
