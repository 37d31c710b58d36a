"""Ratings in every format that the examples read, and logs made at random."""

from __future__ import annotations

import sys

import numpy as np
from helpers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import movielens_data as data

# user, item, rating, time: not in time order, with a tie
RATINGS = [
    ("7", "300", 5, 60),
    ("7", "20", 3, 20),
    ("11", "300", 4, 40),
    ("7", "1000", 1, 40),
    ("11", "20", 2, 10),
]

FORMATS = {
    "u.data": ("", "{}\t{}\t{}\t{}"),
    "ratings.dat": ("", "{}::{}::{}::{}"),
    "ratings.csv": ("userId,movieId,rating,timestamp", "{},{},{},{}"),
    "mine.inter": (
        "user_id:token\titem_id:token\trating:float\ttimestamp:float",
        "{}\t{}\t{}\t{}",
    ),
}

NO_GENRE = "|".join("0" * 19)

SIDE = {
    "u.data": {
        "u.user": "7|24|M|writer|85711\n11|53|F|other|94043\n",
        "u.item": "300|Seven (1995)|01-Jan-1995||http://x|"
        + "|".join("1" if i in (6, 16) else "0" for i in range(19))
        + "\n20|Café (1971)|||http://x|"
        + NO_GENRE
        + "\n1000|None|||u|"
        + NO_GENRE
        + "\n",
    },
    "ratings.dat": {
        "users.dat": "7::M::24::writer::85711\n11::F::53::other::94043\n",
        "movies.dat": "300::Seven (1995)::Crime|Thriller\n"
        "20::Café (1971)::\n1000::None::\n",
    },
    "ratings.csv": {
        "movies.csv": "movieId,title,genres\n"
        '300,"Se7en, or Seven (1995)",Crime|Thriller\n'
        "20,Café (1971),(no genres listed)\n1000,None,(no genres listed)\n",
    },
    "mine.inter": {
        "mine.user": "user_id:token\tage:token\tgender:token\toccupation:token\n"
        "7\t24\tM\twriter\n11\t53\tF\tother\n",
        "mine.item": "item_id:token\ttitle:token_seq\trelease_year:token\t"
        "class:token_seq\n300\tSeven\t1995\tCrime Thriller\n20\tCafé\t1971\t\n"
        "1000\tNone\t\t\n",
    },
}


def write(folder, name, ratings=RATINGS, side=True, encoding="utf-8"):
    """A ratings file with its side files; returns its path."""
    header, line = FORMATS[name]
    lines = [header] if header else []
    lines += [line.format(*rating) for rating in ratings]
    (folder / name).write_text("\n".join(lines) + "\n", encoding=encoding)
    for other, text in SIDE[name].items() if side else ():
        (folder / other).write_text(text, encoding=encoding)
    return folder / name


def make_log(ratings, users=None, items=None):
    """A log from tuples that are in time order already."""
    user, item, rating, time = zip(*ratings, strict=True)
    return data.Log(
        np.array(user),
        np.array(item),
        np.array(rating, np.float32),
        np.array(time, np.float64),
        users or {},
        items or {},
    )


def random_log(rng, size=400):
    """A log with side information, ties in time and gaps in what is known."""
    time = np.sort(rng.integers(0, size // 2, size))
    ratings = [
        (f"u{rng.integers(30)}", f"i{rng.integers(40)}", rng.integers(1, 6), t)
        for t in time
    ]
    users = {
        f"u{k}": (rng.integers(10, 70) if k % 7 else None, "MF"[k % 2], f"o{k % 5}")
        for k in range(28)
    }
    items = {
        f"i{k}": (
            tuple(f"g{g}" for g in rng.permutation(8)[: k % 7]),
            1950 + k if k % 5 else None,
        )
        for k in range(38)
    }
    return make_log(ratings, users, items)
