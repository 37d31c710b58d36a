"""Ratings as the retrieval examples want them: split by user, coded, as sessions."""

from __future__ import annotations

import dataclasses

import movielens_data
import numpy as np

PADDING = -1


class UnfitError(ValueError):
    """The data or the arguments are such that there is nothing to show."""


def split_by_user(log: movielens_data.Log) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the liked ratings: each user's first four fifths, and the rest.

    Split by the clock alone, most users of the test part would be unknown.
    """
    liked = np.flatnonzero(log.label)
    _, user, count = np.unique(log.user[liked], return_inverse=True, return_counts=True)
    order = np.argsort(user, kind="stable")  # by user, each in time order
    place = np.empty(len(liked), np.int64)
    place[order] = np.arange(len(liked)) - (np.cumsum(count) - count)[user[order]]
    early = place < np.ceil(count[user] * movielens_data.TRAIN_SHARE)
    if early.all():
        raise UnfitError("no user has enough ratings of 4 or more for a test part")
    return liked[early], liked[~early]


def by_frequency(names: np.ndarray) -> np.ndarray:
    """The different names, the most frequent first: then leading rows can be owners."""
    found, count = np.unique(names, return_counts=True)
    return found[np.argsort(-count, kind="stable")]


def codes(names: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Places of the names in `known`, -1 where they are not in it."""
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known, names, sorter=order), len(known) - 1)
    return np.where(known[order[place]] == names, order[place], -1).astype(np.int32)


@dataclasses.dataclass
class Sessions:
    """What each user rated, in time order, the last item kept for the test.

    Attributes:
      items: names, the most frequent first; their places are the codes below.
      before: codes of a user's items but for the last, one array each; may be empty.
      last: code of each user's last item, -1 where nobody rated it before.
    """

    items: np.ndarray
    before: list[np.ndarray]
    last: np.ndarray


def leave_last_out(log: movielens_data.Log) -> Sessions:
    """Each user's ratings as a session."""
    _, user, count = np.unique(log.user, return_inverse=True, return_counts=True)
    if count.max() < 3:
        raise UnfitError("no user has the three ratings that a session needs")
    order = np.argsort(user, kind="stable")  # by user, each in time order
    ends = np.cumsum(count) - 1
    before = log.item[np.delete(order, ends)]
    items = by_frequency(before)
    parts = np.split(codes(before, items), np.cumsum(count - 1)[:-1])
    return Sessions(items, parts, codes(log.item[order[ends]], items))


def padded(parts: list[np.ndarray], length: int) -> np.ndarray:
    """The last `length` of each, padded on the left; [parts, length]."""
    rows = np.full((len(parts), length), PADDING, np.int32)
    for row, part in zip(rows, parts):
        row[length - len(part[-length:]) :] = part[-length:]
    return rows
