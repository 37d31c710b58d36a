"""The numbers of a report for TensorBoard, which need not be installed for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_basis.diagnostics.measures import Measures
from tf_basis.summaries import write_value

_BINS = 30


def write(writer: Any, step: int, measured: Measures) -> None:
    """Adds histograms and scalars `tables/<path>/…` of one table."""
    numbers, prefix = measured.numbers, f"tables/{measured.numbers['path']}"
    with writer.as_default():
        for name, spread in measured.distributions.items():
            bins = np.asarray(spread.buckets(_BINS), np.float64).reshape(-1, 3)
            write_value(f"{prefix}/{name}", bins, step, "histograms")
        for name, value in scalars_of(numbers).items():
            write_value(f"{prefix}/{name}", np.float32(value), step, "scalars")
    writer.flush()


def scalars_of(numbers: dict[str, Any]) -> dict[str, float]:
    """The numbers that are worth a curve."""
    scalars, shadows = numbers.get("scalars", {}), numbers.get("shadows", {})
    found = {
        "touched_share": numbers["touched"]["share"],
        "scalars_at_low": scalars.get("at_low"),
        "scalars_at_high": scalars.get("at_high"),
        "update_error": shadows.get("update_error", {}).get("median"),
        "second_moment_error": shadows.get("second_moment_error", {}).get("median"),
    }
    return {name: value for name, value in found.items() if value is not None}
