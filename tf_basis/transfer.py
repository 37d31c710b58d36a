"""Moves the state of a table's buckets from one layout to another, in numpy.

Rows are mapped in chunks, and those with the same old and new bucket count as one
entry: splitting buckets costs what the buckets cost, other changes at most N * d
additions. Beside the old and the new state, a re-hash needs about 16 bytes for each
number of the new shared moments, and 100 MB.
"""

from __future__ import annotations

import numpy as np

from tf_basis.moments import (
    MOMENTS,
    State,
    aged,
    bias_of,
    bucket_pairs,
    buckets_of,
    chunks,
    divide_rows,
    rows_that_own,
)
from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.rules.leaders import VOTES_TO_OWN
from tf_basis.tables import TableLayout


def move_buckets(
    old: TableLayout,
    new: TableLayout,
    rule: BucketRule,
    state: State,
    fresh: State,
    step: int,
) -> tuple[State, tuple[np.ndarray, np.ndarray]]:
    """The state of the buckets of `new`, from that of `old`.

    A bucket whose rows all come from one old bucket inherits its state to the bit.
    Where rows of several meet, a moment without its bias is the mean over the rows,
    each weighing what its old bucket has seen: with C the old steps,

        M^' = sum M / sum (1 - beta_1^C)      V^' = sum V / sum (1 - beta_2^C)

    The new steps C' are the rounded mean, and M^' (1 - beta_1^C') is stored, V^'
    alike: the size of the next update does not depend on how the counters differed.
    Without bias correction these are plain means.

    A row that comes to own its bucket takes V^ with it, divided by the square of its
    energy scalar, which owners do not have; one that ceases to own it leaves the mean
    of its V^ as its energy. So both go on with steps of the same size.

    Args:
      old, new: layouts of the same rows.
      rule: of the optimizer.
      state: arrays of the old layout by slot name, moments and energies as float32.
      fresh: arrays of the buckets of the new one as they start; filled in place.
      step: the optimizer's steps so far.

    Returns:
      `fresh`, and the rows whose energy changes with their new energies.
    """
    now = aged(rule, state, step)
    _move_owners(old, new, rule, state, now, fresh, step)
    splits = _splits(old, new)
    if splits:
        _split(old, new, state, fresh)
    elif new.mapping.owners < new.mapping.num_buckets:
        _mix(old, new, rule, state, now, fresh, step)
    if new.led and old.led:
        _move_leaders(new, state if splits else now, fresh, mixed=not splits)
    return fresh, _energies_of_former_owners(old, new, rule, now)


def _splits(old: TableLayout, new: TableLayout) -> bool:
    """Whether each new shared bucket is part of an old one, as h mod mS of h mod S."""
    a, b = old.mapping, new.mapping
    before, after = a.num_buckets - a.owners, b.num_buckets - b.owners
    return (
        b.hashing != "consistent"
        and 0 < before <= after
        and after % before == 0
        and (a.owners, a.owner_rows) == (b.owners, b.owner_rows)
        and (a.domains, a.hashing, a.seed) == (b.domains, b.hashing, b.seed)
    )


def _split(old: TableLayout, new: TableLayout, state: State, fresh: State) -> None:
    owners = old.mapping.owners
    for name, array in fresh.items():
        # The first moment and the votes of a leader go where the leader goes.
        if name.startswith("leader") or (new.led and name == "first_moment"):
            continue
        inherited = state[name][owners:]
        if len(inherited):
            parts = (len(array) - owners) // len(inherited)
            array[owners:] = np.tile(inherited, (parts,) + (1,) * (array.ndim - 1))


def _move_owners(old, new, rule, state, now, fresh, step) -> None:
    for first, last in chunks(new.mapping.owners, new.dim):
        rows = rows_that_own(new.mapping, first, last)
        sources = buckets_of(old.mapping, rows)
        owned = sources[:, 0] < old.mapping.owners
        for name, array in fresh.items():
            if len(state.get(name, ())):
                array[first:last][owned] = state[name][sources[owned, 0]]
        if owned.all():
            continue
        view, steps = view_of_rows(old, rule, now, rows[~owned], sources[~owned])
        view |= {"bucket_steps": steps, "last_step": step}
        for name in fresh.keys() & view.keys():
            if name in MOMENTS:
                view[name] *= bias_of(rule, name, steps)[:, None]
            fresh[name][first:last][~owned] = view[name]


def view_of_rows(
    layout: TableLayout,
    rule: BucketRule,
    state: State,
    rows: np.ndarray,
    sources: np.ndarray,
) -> tuple[State, np.ndarray]:
    """What rows see of their buckets: moments as if these were theirs alone.

    Args:
      layout, rule: of the table.
      state: its arrays by slot name, moments and energies as float32.
      rows: [R] rows.
      sources: [R, H] their buckets.

    Returns:
      Moments [R, d] without their bias, V^ divided by the square of the row's energy
      scalar; no first moment where no row has one. And the rows' steps.
    """
    steps = state["bucket_steps"][sources].astype(np.float64)  # [R, H]
    leads = owns = np.zeros(len(rows), bool)
    if layout.led:
        votes = state["leader_votes"][sources[:, 0]]
        leads = (state["leader"][sources[:, 0]] == rows) & (votes > 0)
        owns = leads & (votes >= VOTES_TO_OWN)

    def hats(name: str, at: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        bias = bias_of(rule, name, counts)
        moments = state[name][at].astype(np.float64)  # [R, H, d]
        return [divide_rows(moments[:, h], bias[:, h]) for h in range(at.shape[1])]

    view = {}
    kept = layout.first_moment_rows
    if kept:
        has = (leads if layout.led else sources[:, 0] < kept).astype(np.float64)
        counts = state["leader_steps"][sources] if layout.led else steps
        held = np.minimum(sources, kept - 1)
        moment = np.mean(hats("first_moment", held, counts), axis=0)
        view["first_moment"] = moment * has[:, None]
    if rule.second is not None:
        moment = np.min(hats("second_moment", sources, steps), axis=0)
        if rule.invariant_scalar == "energy":
            energy = state["row_energy"][rows].astype(np.float64)
            plain = (energy == 0) | owns | (sources[:, 0] < layout.mapping.owners)
            scalar = np.sqrt(moment.mean(axis=1) / np.where(plain, 1.0, energy))
            scalar = np.clip(scalar, *rule.scalar_range)
            moment /= np.square(np.where(plain | (scalar == 0), 1.0, scalar))[:, None]
        view["second_moment"] = moment
    return view, np.rint(steps.mean(axis=1))


def _mix(old, new, rule, state, now, fresh, step) -> None:
    """Fills the shared buckets where rows of several old ones may meet."""
    owners = new.mapping.owners
    shared = new.mapping.num_buckets - owners
    names = [n for n in MOMENTS if len(fresh.get(n, ())) > owners and n in now]
    if new.led and "first_moment" in names:
        names.remove("first_moment")
    sums = {n: np.zeros((shared, new.dim)) for n in names}
    seen = {n: np.zeros(shared) for n in names}
    weight, steps = np.zeros(shared), np.zeros(shared)
    lowest = np.full(shared, old.mapping.num_buckets)
    highest = np.full(shared, -1)
    for target, origin, rows in bucket_pairs(old.mapping, new.mapping, new.dim):
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        at = target[starts]
        lowest[at] = np.minimum(lowest[at], np.minimum.reduceat(origin, starts))
        highest[at] = np.maximum(highest[at], np.maximum.reduceat(origin, starts))
        counts = now["bucket_steps"][origin].astype(np.float64)
        weight[at] += np.add.reduceat(rows, starts)
        steps[at] += np.add.reduceat(rows * counts, starts)
        for name in names:
            values = now[name][origin] * rows[:, None]
            sums[name][at] += np.add.reduceat(values, starts)
            bias = bias_of(rule, name, counts)
            seen[name][at] += np.add.reduceat(rows * bias, starts)

    filled = weight > 0  # a hash may leave buckets without rows
    touched = steps > 0
    steps = np.maximum(np.rint(divide_rows(steps[:, None], weight)[:, 0]), touched)
    values = {n: divide_rows(sums[n], seen[n]) for n in names}
    for name in names:
        values[name] *= bias_of(rule, name, steps)[:, None]
    values["bucket_steps"] = steps
    if "last_step" in fresh:
        values["last_step"] = np.full(shared, step)
    inherits = lowest == highest
    whole = now if new.led else state  # leaders bring moments of this step
    for name, mixed in values.items():
        array = fresh[name][owners:]
        array[filled] = mixed[filled]
        array[inherits] = whole[name][lowest[inherits]]


def _move_leaders(new, state, fresh, mixed: bool) -> None:
    """Each leader goes on in its new bucket; of several the one with most votes."""
    sources = np.flatnonzero(state["leader_votes"] > 0)
    if not len(sources):
        return
    leaders, votes = state["leader"][sources], state["leader_votes"][sources]
    targets = buckets_of(new.mapping, leaders)[:, 0]
    order = np.lexsort((leaders, -votes, targets))
    first = order[np.diff(targets[order], prepend=-1) != 0]
    at, source = targets[first], sources[first]
    for name in ("leader", "leader_votes", "leader_steps", "first_moment"):
        if name in fresh:
            fresh[name][at] = state[name][source]
    if mixed:  # the second moment of an owned bucket is its leader's
        owned = votes[first] >= VOTES_TO_OWN
        for name in ("second_moment", "bucket_steps", "last_step"):
            if name in fresh:
                fresh[name][at[owned]] = state[name][source[owned]]


def _energies_of_former_owners(old, new, rule, now) -> tuple[np.ndarray, np.ndarray]:
    found = [(np.zeros(0, np.int64), np.zeros(0, np.float32))]
    if rule.invariant_scalar == "energy":
        for first, last in chunks(old.mapping.owners, old.dim):
            rows = rows_that_own(old.mapping, first, last)
            shares = buckets_of(new.mapping, rows)[:, 0] >= new.mapping.owners
            at = np.arange(first, last)[shares]
            bias = bias_of(rule, "second_moment", now["bucket_steps"][at])
            hat = divide_rows(now["second_moment"][at].astype(np.float64), bias)
            found.append((rows[shares], hat.mean(axis=1).astype(np.float32)))
    rows, energies = map(np.concatenate, zip(*found))
    return rows, energies
