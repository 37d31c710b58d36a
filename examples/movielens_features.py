"""Feature rows of the click model: every value of every field is a row of one table.

Row f is field f's "unknown"; the other rows follow by how often the training part uses
them, most frequent first, whatever their field. Nothing is learned from the test part;
a user's history at a rating counts strictly earlier ratings only.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from movielens_data import Log

AGES = (18, 25, 35, 45, 50, 56)  # first ages of the groups, as in MovieLens-1M
GENRE_SLOTS = 4  # an item's further genres are dropped
HISTORY_LEVELS = 10
HISTORY_PRIOR = 3.0  # ratings' worth of the mean share that an empty history stands for


@dataclasses.dataclass
class Features:
    """Rows and mixing weights of every example, one column per slot.

    `slot_field[s]` is the field that column s belongs to; the weights of a field's
    slots sum to 1 in every example, so a field is a weighted mean of rows. `counts[f]`
    is the number of rows of field f and `left_out` names what the data cannot give.
    """

    rows: np.ndarray
    weights: np.ndarray
    slot_field: np.ndarray
    fields: list[str]
    counts: list[int]
    left_out: list[str]

    @property
    def n_rows(self) -> int:
        return sum(self.counts)


def encode(values: list | np.ndarray) -> np.ndarray:
    """Whole numbers from 0 for distinct values; -1 for None."""
    numbers: dict = {None: -1}
    return np.array([numbers.setdefault(v, len(numbers) - 1) for v in values], np.int64)


def cross(*columns: np.ndarray) -> np.ndarray:
    """One code per combination of codes, -1 where any part is -1. Slots broadcast."""
    result = columns[0]
    for column in columns[1:]:
        width = column.max(initial=0) + 1
        known = (result >= 0) & (column >= 0)
        result = np.where(known, result * width + column, -1)
        # keep codes small, so that no chain of crosses can overflow
        result = np.unique(result, return_inverse=True)[1].reshape(result.shape) - (
            0 if known.all() else 1
        )
    return result


def earlier(group: np.ndarray, time: np.ndarray, liked: np.ndarray) -> np.ndarray:
    """[n, 2]: how many ratings of the group are strictly older, how many were liked."""
    order = np.lexsort((time, group))
    g, t = group[order], time[order]
    index = np.arange(len(g))
    total = np.concatenate([[0.0], np.cumsum(liked[order])])
    new_group = np.r_[True, g[1:] != g[:-1]]
    new_moment = new_group | np.r_[True, t[1:] != t[:-1]]
    first = np.maximum.accumulate(np.where(new_group, index, 0))
    moment = np.maximum.accumulate(np.where(new_moment, index, 0))
    result = np.empty((len(g), 2))
    result[order] = np.stack([moment - first, total[moment] - total[first]], 1)
    return result


def smoothed(past: np.ndarray, mean: float | np.ndarray) -> np.ndarray:
    """Share of liked ratings, drawn to `mean` where there are few."""
    return (past[:, 1] + HISTORY_PRIOR * mean) / (past[:, 0] + HISTORY_PRIOR)


def levels(share: np.ndarray, n_train: int) -> np.ndarray:
    """Quantile level of each share, with the edges of the training part."""
    quantiles = np.linspace(0, 1, HISTORY_LEVELS + 1)[1:-1]
    edges = np.unique(np.quantile(share[:n_train], quantiles))
    return np.searchsorted(edges, share).astype(np.int64)


def field_codes(log: Log, n_train: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Codes [n, slots] of each field that the data can give, names of the others."""
    user, item = encode(log.user), encode(log.item)
    liked = log.label
    past = earlier(user, log.time, liked)
    share = smoothed(past, liked[:n_train].mean())
    level = levels(share, n_train)
    amount = np.minimum(np.log2(past[:, 0] + 1), 6).astype(np.int64)
    codes = {
        "user": user,
        "item": item,
        "history": cross(level, amount),
        "item x history": cross(item, level),
    }
    left_out = []
    if log.users:
        people = [log.users.get(u, (None, None, None)) for u in log.user]
        years = np.array([-1 if p[0] is None else p[0] for p in people])
        age = np.where(years < 0, -1, np.searchsorted(AGES, years, "right"))
        gender = encode([p[1] for p in people])
        occupation = encode([p[2] for p in people])
        codes |= {"age": age, "gender": gender, "occupation": occupation}
        codes["item x age x gender"] = cross(item, age, gender)
        codes["item x occupation"] = cross(item, occupation)
    else:
        left_out += ["age", "gender", "occupation", "item x age x gender"]
        left_out += ["item x occupation"]
    if log.items:
        about = [log.items.get(i, ((), None)) for i in log.item]
        decade = encode([None if a[1] is None else a[1] // 10 for a in about])
        padded = [(a[0] + (None,) * GENRE_SLOTS)[:GENRE_SLOTS] for a in about]
        genre = encode([g for p in padded for g in p]).reshape(-1, GENRE_SLOTS)
        person = user[:, None]
        pair = cross(person, genre)
        # the user's history in the genres of this item; absent slots count nothing
        there = pair >= 0
        time = np.broadcast_to(log.time[:, None], pair.shape)
        yes = np.broadcast_to(liked[:, None], pair.shape)
        in_genre = np.zeros((*pair.shape, 2))
        in_genre[there] = earlier(pair[there], time[there], yes[there])
        taste = smoothed(in_genre.sum(1), share)
        codes |= {"decade": decade, "genre": genre, "user x genre": pair}
        codes["user x decade"] = cross(user, decade)
        codes["genre x history"] = cross(genre, level[:, None])
        codes["genre history"] = levels(taste, n_train)
        codes["item x genre history"] = cross(item, codes["genre history"])
    else:
        left_out += ["decade", "genre", "user x genre", "user x decade"]
        left_out += ["genre x history", "genre history", "item x genre history"]
    return {k: c if c.ndim == 2 else c[:, None] for k, c in codes.items()}, left_out


def make_features(log: Log, n_train: int) -> Features:
    """Numbers every value that the first `n_train` ratings use; others are unknown."""
    codes, left_out = field_codes(log, n_train)
    fields, blocks, uses = list(codes), [], []
    for column in codes.values():
        seen = column[:n_train]
        values, frequency = np.unique(seen[seen >= 0], return_counts=True)
        blocks.append(values)
        uses.append(frequency)
    counts = [1 + len(values) for values in blocks]
    rank = np.empty(sum(map(len, uses)), np.int64)
    order = np.argsort(-np.concatenate(uses), kind="stable")
    rank[order] = len(fields) + np.arange(len(rank))
    rows, weights, slot_field, start = [], [], [], 0
    for f, (column, values) in enumerate(zip(codes.values(), blocks, strict=True)):
        place = np.minimum(np.searchsorted(values, column), max(len(values) - 1, 0))
        known = (column >= 0) & (len(values) > 0)
        if len(values):
            known &= values[place] == column
            column_rows = np.where(known, rank[start + place], f)
        else:
            column_rows = np.full(column.shape, f)
        there = (column >= 0).astype(np.float32)
        there[there.sum(1) == 0, 0] = 1.0  # nothing there: the unknown row stands in
        rows.append(column_rows.astype(np.int32))
        weights.append(there / there.sum(1, keepdims=True))
        slot_field += [f] * column.shape[1]
        start += len(values)
    return Features(
        np.concatenate(rows, 1),
        np.concatenate(weights, 1),
        np.array(slot_field),
        fields,
        counts,
        left_out,
    )


def forget_users(features: Features, share: float, seed: int) -> np.ndarray:
    """Rows in which a random `share` of the examples come from an unknown user.

    Most users of the future are new: this trains the unknown rows that they will get.
    """
    forgotten = np.random.default_rng(seed).random(len(features.rows)) < share
    result = features.rows.copy()
    for slot, f in enumerate(features.slot_field):
        if "user" in features.fields[f].split(" x "):
            result[forgotten, slot] = f
    return result
