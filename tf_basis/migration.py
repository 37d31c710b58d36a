"""Adam's moments of a table folded into buckets, and unfolded again, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tf_basis.moments import (
    LARGEST_COUNT,
    MOMENTS,
    State,
    aged,
    bias_of,
    buckets_of,
    chunks,
    divide_rows,
    seen_part,
    to_format,
)
from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.tables import TableLayout
from tf_basis.transfer import view_of_rows

# (first row, last row) -> Adam's m and v of these rows, float32 [R, d] each.
ReadRows = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


def fold(
    layout: TableLayout,
    rule: BucketRule,
    specs: dict[str, tuple],
    read: ReadRows,
    betas: tuple[float, float],
    step: int,
) -> State:
    """The state of a table that goes on where Adam was after `step` steps.

    A row that owns its bucket has Adam's moments. A shared bucket has the mean of the
    moments of its rows; rows that Adam has not seen (both moments 0) do not count. A
    row's energy is the mean of its v / (1 - beta_2^step): Adam's v is biased, and
    without the correction the first steps would be too long. So a row's next step is
    as long as Adam's for the same gradient, while the energy scalar keeps within its
    range. Buckets count `step` steps, those without a row seen none.

    Args:
      layout, rule: of the table.
      specs: its slots, as `engine.slot_specs` lists them.
      read: reads Adam's moments.
      betas: Adam's beta_1 and beta_2.
      step: Adam's iterations.

    Returns:
      Arrays for all slots, in their formats.
    """
    owners, buckets = layout.mapping.owners, layout.mapping.num_buckets
    state = {
        name: np.full(shape, start, dtype.as_numpy_dtype)
        for name, (shape, dtype, start) in specs.items()
    }
    held = {"first_moment": layout.first_moment_rows, "second_moment": buckets}
    sums = {n: np.zeros((held[n] - owners, layout.dim)) for n in MOMENTS if n in specs}
    seen_rows = np.zeros(buckets, np.int64)
    # The same bias as Adam's, unless betas differ or there is no correction.
    adams = {n: float(seen_part(b, step)) for n, b in zip(MOMENTS, betas)}
    factor = {
        n: float(bias_of(rule, n, step)) / adams[n] if step else 0.0 for n in sums
    }
    for first, last in chunks(layout.mapping.n_rows, layout.dim):
        rows = np.arange(first, last)
        moments = dict(zip(MOMENTS, read(first, last)))
        seen = np.any([np.any(m != 0, axis=1) for m in moments.values()], axis=0)
        targets = buckets_of(layout.mapping, rows)
        own = targets[:, 0] < owners
        for name in sums:
            values = moments[name].astype(np.float64) * factor[name]
            at = targets[own, 0]
            state[name][at] = to_format(values[own], specs[name][1])
        for h in range(targets.shape[1]):
            counts = seen if h == 0 else seen & (targets[:, 1] != targets[:, 0])
            np.add.at(seen_rows, targets[counts, h], 1)
            shares = np.flatnonzero(counts & ~own)
            for name, total in sums.items():
                if len(total) and not (layout.led and name == "first_moment"):
                    order = shares[np.argsort(targets[shares, h], kind="stable")]
                    _add(total, targets[order, h] - owners, moments[name][order])
        if "row_energy" in state and step:
            hat = moments["second_moment"].astype(np.float64) / adams["second_moment"]
            energy = np.where(own, 0.0, hat.mean(axis=1))
            state["row_energy"][first:last] = to_format(energy, specs["row_energy"][1])
        if "row_steps" in state:
            state["row_steps"][first:last] = np.where(seen, _count(step), 0)
    for name, total in sums.items():
        mean = divide_rows(total, seen_rows[owners : held[name]]) * factor[name]
        state[name][owners:] = to_format(mean, specs[name][1])
    state["bucket_steps"][:] = np.where(seen_rows > 0, _count(step), 0)
    if "last_step" in state:
        state["last_step"][:] = _count(step)
    return state


def unfold(
    layout: TableLayout,
    rule: BucketRule,
    state: State,
    betas: tuple[float, float],
    step: int,
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """The moments that let Adam go on where a table is after `step` steps.

    Each row gets the moments of its bucket without their bias, V^ divided by the
    square of the row's scalar (so that its next step is as long as here), and the
    first moment only where the row follows it; then Adam's bias at `step`.

    Args:
      layout, rule: of the table.
      state: its arrays by slot name, moments and energies as float32.
      betas: Adam's beta_1 and beta_2.
      step: the optimizer's iterations.

    Yields:
      First row, last row, and m and v of these rows, float32.
    """
    now = aged(rule, state, step)
    for first, last in chunks(layout.mapping.n_rows, layout.dim):
        rows = np.arange(first, last)
        sources = buckets_of(layout.mapping, rows)
        view, _ = view_of_rows(layout, rule, now, rows, sources)
        if "scalar" in now and "second_moment" in view:
            view["second_moment"] /= np.square(now["scalar"][first:last])[:, None]
        none = np.zeros((len(rows), layout.dim))
        yield (
            first,
            last,
            *(
                (view.get(name, none) * seen_part(beta, step)).astype(np.float32)
                for name, beta in zip(MOMENTS, betas)
            ),
        )


def _count(step: int) -> int:
    return min(step, LARGEST_COUNT)


def _add(total: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    """Adds rows of values, ascending in `at`, to total[at]."""
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    if len(starts):
        total[at[starts]] += np.add.reduceat(values.astype(np.float64), starts)


def read_rows(variable: tf.Variable, first: int, last: int) -> np.ndarray:
    """Rows of a variable as float32."""
    return tf.cast(tf.convert_to_tensor(variable)[first:last], tf.float32).numpy()
