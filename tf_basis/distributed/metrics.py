"""Means of metrics over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_basis.distributed import watch
from tf_basis.distributed.world import World, unique_name


def average_metrics(
    metrics: Mapping[str, Any],
    weight: float = 1.0,
    *,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> dict[str, Any]:
    r"""The weighted mean of each metric over the ranks that have it::

        mean = Σ w_i·x_i / Σ w_i     over the ranks i with the metric and w_i > 0

    in float64 and in the order of the ranks: every rank gets the same bits. A metric
    that only some ranks have, such as that of a validation on rank 0 alone, is on all
    of them afterwards. One exchange, however many metrics; call it on all ranks.

    Args:
      metrics: names to numbers or arrays of numbers. Other values stay as they are.
      weight: what this rank counts, such as its number of examples. Default 1.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Returns:
      A new dict: this rank's metrics in their order, then others sorted by name.
      Numbers become floats.

    Raises:
      ValueError: on every rank, where shapes of a metric differ, or a weight is not a
        finite number of at least 0, or is 0 on all ranks with some metric.

    Example:

    >>> average_metrics({"loss": 0.25, "note": "as it is"})
    {'loss': 0.25, 'note': 'as it is'}
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"metrics must be a dict from names to numbers, received {metrics!r}"
        )
    world = World(process_set)
    mine = {}
    for name, value in metrics.items():
        number = _number(value)
        if number is not None:
            mine[name] = number
    collective = unique_name("metrics")
    with watch.watched(world, collective, timeout):
        everyone = world.objects((weight, mine), collective)
    for rank, (w, _) in enumerate(everyone):
        good = isinstance(w, (int, float)) and math.isfinite(w) and w >= 0
        if not good or isinstance(w, bool):
            raise ValueError(
                f"weight must be a finite number of at least 0, received {w!r} on rank "
                f"{rank}"
            )
    means = {}
    for name in sorted({name for _, values in everyone for name in values}):
        having = [(r, w, v[name]) for r, (w, v) in enumerate(everyone) if name in v]
        means[name] = _mean(name, having)
    kept = {name: means.pop(name, value) for name, value in metrics.items()}
    return {**kept, **means}


def _number(value: Any) -> np.ndarray | None:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    # bfloat16 is of kind V; text, objects and dates are no numbers to average.
    return array.astype(np.float64) if array.dtype.kind in "biufV" else None


def _mean(name: str, entries: list[tuple[int, float, np.ndarray]]) -> Any:
    shapes = {rank: value.shape for rank, _, value in entries}
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"metric '{name}' must have one shape on all ranks, received {shapes}"
        )
    total, weights = np.zeros(entries[0][2].shape), 0.0
    for _, weight, value in entries:
        if weight > 0:
            total = total + weight * value
            weights += weight
    if weights == 0:
        raise ValueError(
            f"weight must be above 0 on some rank that has metric '{name}', received 0 "
            f"on ranks {sorted(shapes)}"
        )
    mean = total / weights
    return mean if mean.shape else float(mean)
