"""Exact state of a few rows, beside the state that they share.

A shadow row has the moments that the optimizer would keep for it if each row had a
bucket of its own, in float64, from the same gradients: as the table is given them,
after ranks have exchanged, gradients have been accumulated and clipped.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import tracking
from tf_basis.diagnostics.tables import Table, parts_of, tables_of
from tf_basis.moments import bias_of, buckets_of
from tf_basis.ops import hash_ops
from tf_basis.rules.arithmetic import power, saturated
from tf_basis.rules.bucket import clip_rows
from tf_basis.transfer import view_of_rows

ROWS_RULE = hyperparameters.integer("of at least 1", lambda v: v >= 1)


class ShadowRows:
    """Tracks the exact state of a few rows of every compressed table.

    The rows are the first that are seen. Of a step with more rows than are wanted they
    are drawn, by a hash, with chances as their occurrences in it, each row once: so
    there are frequent rows among them, and the same seed gives the same rows. Where the
    optimizer has taken steps before, a row starts from what it sees in its bucket when
    it is chosen, and what counts is how the two part from there.

    A `tf.function` that was traced before `attach` or `detach` must be traced again:
    `tf_basis.retrace(model)` for `fit`.

    Args:
      optimizer: a built optimizer of this package, or one that contains some.
      rows: for each table. Default 64.
      seed: an integer in [0, 2**32). Default 0.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> table = tf.Variable(tf.zeros([100, 4]), name="table")
    >>> optimizer = BasisAdam(tables=[table], num_buckets=10)
    >>> optimizer.build([table])
    >>> with ShadowRows(optimizer, rows=8).attached() as shadows:
    ...     gradient = tf.IndexedSlices(tf.ones([3, 4]), tf.constant([5, 7, 5]))
    ...     _ = optimizer.apply_gradients([(gradient, table)])
    >>> sorted(shadows.rows_of("table").tolist())
    [5, 7]
    """

    def __init__(self, optimizer: Any, rows: int = 64, seed: int = 0) -> None:
        hyperparameters.check("rows", rows, ROWS_RULE)
        hyperparameters.check("seed", seed)
        tables_of(optimizer)  # which checks it
        self.optimizer, self.rows, self.seed = optimizer, int(rows), int(seed)
        self._states: dict[tuple[int, int], _State] = {}
        self._watchers: list[tuple[Any, Any]] = []
        self._fresh = [
            int(tf.convert_to_tensor(p.iterations)) == 0 for p in parts_of(optimizer)
        ]

    # ---- in the step -----------------------------------------------------------

    def attach(self) -> None:
        """Looks at all gradients from now on."""
        if self._watchers:
            return
        for place, part in enumerate(parts_of(self.optimizer)):
            watcher = functools.partial(self._look, place, part)
            watcher.shadows = self  # type: ignore[attr-defined]
            part._basis.watchers.append(watcher)
            tracking.forget_traces(part)
            self._watchers.append((part, watcher))

    def detach(self) -> None:
        """Looks no more; the rows stay as they are."""
        for part, watcher in self._watchers:
            part._basis.watchers.remove(watcher)
            tracking.forget_traces(part)
        self._watchers = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[ShadowRows]:
        """For a `with` block around a loop of your own."""
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    def _look(self, place: int, part: Any, key: str, gradient: Any, step: Any) -> None:
        layout = part._basis.layouts[key]
        number = list(part._basis.layouts).index(key)
        rule = part._rule_of(layout)
        state = self._states.get((place, number))
        if state is None:
            slot = part._basis.slots[key]["bucket_steps"]
            start = getattr(part, "initial_accumulator_value", 0.0)
            fresh = self._fresh[place]
            state = _State(self.rows, layout.dim, start, fresh, slot.device)
            self._states[place, number] = state
        state.step(rule, layout, gradient, step, self.seed)

    # ---- between steps ---------------------------------------------------------

    def adopt(self) -> bool:
        """Starts rows that have a past; whether some table may still choose rows.

        Does nothing where the optimizer was new. `CollisionReport` calls it after each
        batch; a loop of your own that goes on from a checkpoint calls it after a step.
        """
        more = False
        for table in tables_of(self.optimizer):
            state = self._states.get(table.place)
            if state is None:
                more = True
            elif not state.fresh:
                state.adopt(table)
                more |= int(state.filled) < self.rows
        return more

    def rows_of(self, path: str) -> np.ndarray:
        """The rows of the table with this path that are tracked, in order of choice.

        Raises:
          ValueError: there is no such table.
        """
        tables = {table.path: table for table in tables_of(self.optimizer)}
        if path not in tables:
            raise ValueError(f"path must be one of {sorted(tables)}, received {path!r}")
        state = self._states.get(tables[path].place)
        return np.zeros(0, np.int64) if state is None else state.known()["rows"]

    def known_of(self, table: Table) -> dict[str, np.ndarray] | None:
        """The exact state of the rows of a table that have had a gradient."""
        state = self._states.get(table.place)
        return None if state is None else state.known()


class _State:
    """The shadow rows of one table: variables that belong to nobody's checkpoint."""

    def __init__(self, rows, dim, start, fresh, device) -> None:
        self.fresh, self.adopted = fresh, 0
        with tf.init_scope(), tf.device(device):
            make = functools.partial(tf.Variable, trainable=False)
            self.rows = make(tf.fill([rows], tf.constant(-1, tf.int64)))
            self.filled = make(tf.constant(0, tf.int32))
            self.counts = make(tf.zeros([rows], tf.int32))
            self.last = make(tf.zeros([rows], tf.int64))
            self.gradient = make(tf.zeros([rows, dim], tf.float32))
            self.first = make(tf.zeros([rows, dim], tf.float64))
            self.second = make(tf.fill([rows, dim], tf.constant(start, tf.float64)))

    def step(self, rule, layout, gradient, step, seed) -> None:
        """One step of the rows that the gradient touches."""
        n_rows = layout.mapping.n_rows
        if isinstance(gradient, tf.IndexedSlices):
            indices = tf.cast(gradient.indices, tf.int64)
        else:
            indices = tf.range(n_rows, dtype=tf.int64)
        size = self.rows.shape[0]
        full = self.filled >= size
        rows, filled = tf.cond(
            full,
            lambda: (tf.identity(self.rows), tf.identity(self.filled)),
            lambda: self._chosen(indices, n_rows, seed),
        )
        self.rows.assign(rows)
        self.filled.assign(filled)
        step = tf.cast(step, tf.int64)
        g, touched = _gradients_of(rows, gradient, indices, layout.dim)
        if rule.row_clipnorm is not None:
            g = clip_rows(g, rule.row_clipnorm)
        wide, column = tf.cast(g, tf.float64), touched[:, None]
        missed = tf.zeros_like(self.counts)
        if rule.stale_decay:
            gap = tf.maximum(step - self.last - 1, 0)
            missed = tf.where(self.counts > 0, tf.cast(gap, tf.int32), 0)
        moments = [(self.first, rule.first, wide)]
        if rule.second is not None:
            moments.append((self.second, rule.second, saturated(tf.square(wide))))
        for variable, (keep, take), x in moments:
            old = tf.convert_to_tensor(variable)
            aged = old * power(keep, missed)[:, None] if rule.stale_decay else old
            variable.assign(tf.where(column, keep * aged + take * x, old))
        self.counts.assign(tf.where(touched, self.counts + missed + 1, self.counts))
        self.last.assign(tf.where(touched, step, self.last))
        self.gradient.assign(tf.where(column, g, self.gradient))

    def _chosen(self, indices, n_rows, seed) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows with new ones of this step behind them, and how many there are."""
        size = self.rows.shape[0]
        padding = tf.fill([size], tf.constant(-1, tf.int64))
        ordered = tf.sort(tf.concat([indices, padding], axis=0))
        first = tf.concat([[True], ordered[1:] != ordered[:-1]], axis=0)
        known = tf.sort(self.rows)
        place = tf.minimum(tf.searchsorted(known, ordered), size - 1)
        is_known = tf.gather(known, place) == ordered
        usable = first & ~is_known & (ordered >= 0) & (ordered < n_rows)
        runs = tf.cumsum(tf.cast(first, tf.int32)) - 1
        times = tf.math.unsorted_segment_sum(
            tf.ones_like(runs), runs, tf.shape(runs)[0]
        )
        # The first of a race in which each occurrence of a row runs once.
        hashes = hash_ops.murmur3_twin(tf.maximum(ordered, 0), seed)
        chance = (tf.cast(hashes, tf.float64) + 0.5) * 2.0**-32
        finish = -tf.math.log(chance) / tf.cast(tf.gather(times, runs), tf.float64)
        finish = tf.where(usable, finish, tf.constant(math.inf, tf.float64))
        order = tf.argsort(finish, stable=True)[:size]
        candidates, finish = tf.gather(ordered, order), tf.gather(finish, order)
        number = tf.range(size) - self.filled  # of the candidate for each place
        at = tf.clip_by_value(number, 0, size - 1)
        taken = (number >= 0) & tf.math.is_finite(tf.gather(finish, at))
        rows = tf.where(taken, tf.gather(candidates, at), self.rows)
        return rows, self.filled + tf.reduce_sum(tf.cast(taken, tf.int32))

    def known(self) -> dict[str, np.ndarray]:
        """Arrays of the rows that have been chosen and seen."""
        counts = self.counts.numpy()
        some = np.flatnonzero(counts > 0)
        names = ("rows", "counts", "gradient", "first", "second")
        return {name: getattr(self, name).numpy()[some] for name in names}

    def adopt(self, table: Table) -> None:
        """Gives rows that were chosen since the last call what they see now."""
        last = int(self.filled)
        if last <= self.adopted:
            return
        at = np.arange(self.adopted, last)
        rows = self.rows.numpy()[at]
        sources = buckets_of(table.layout.mapping, rows)
        view, steps = view_of_rows(table.layout, table.rule, table.slots, rows, sources)
        steps = np.maximum(steps, 1).astype(np.int32)
        for name, variable in (
            ("first_moment", self.first),
            ("second_moment", self.second),
        ):
            if name in view:
                bias = bias_of(table.rule, name, steps)[:, None]
                _write(variable, at, view[name] * bias)
        _write(self.counts, at, steps)
        self.adopted = last


def _write(variable: tf.Variable, at: np.ndarray, values: np.ndarray) -> None:
    whole = variable.numpy()
    whole[at] = values
    variable.assign(whole)


def _gradients_of(rows, gradient, indices, dim) -> tuple[tf.Tensor, tf.Tensor]:
    """[K, d] float32 sums of a gradient's values by row, and whether it has the row."""
    if not isinstance(gradient, tf.IndexedSlices):
        there = rows >= 0
        values = tf.gather(tf.convert_to_tensor(gradient), tf.maximum(rows, 0))
        return tf.cast(values, tf.float32), there
    size = rows.shape[0]
    order = tf.argsort(rows)
    place = tf.searchsorted(tf.gather(rows, order), indices)
    place = tf.gather(order, tf.minimum(place, size - 1))
    hit = (tf.gather(rows, place) == indices) & (indices >= 0)
    values = tf.reshape(tf.cast(gradient.values, tf.float32), [-1, dim])
    place = tf.where(hit, place, size)
    sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), place, size + 1)
    counts = tf.math.unsorted_segment_sum(tf.cast(hit, tf.int32), place, size + 1)
    return tf.cast(sums[:size], tf.float32), counts[:size] > 0
