"""What the retrieval examples share: arguments, ranks, and the claim they print."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import movielens_data
import numpy as np
from retrieval_data import UnfitError

KS = (1, 5, 10, 50, 100)


def positive(text: str) -> int:
    """An argument that must be a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def rate(text: str) -> float:
    """An argument that must be a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def make_parser(
    about: str, epochs: int, batch_size: int, learning_rate: float
) -> argparse.ArgumentParser:
    """The arguments that all retrieval examples have."""
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    made.add_argument("--data", help="ratings.csv, u.data, ratings.dat or *.inter")
    made.add_argument("--cache-dir", help="where MovieLens-100K is kept")
    made.add_argument("--epochs", type=positive, default=epochs)
    made.add_argument("--batch-size", type=positive, default=batch_size)
    made.add_argument("--learning-rate", type=rate, default=learning_rate)
    made.add_argument("--seed", type=int, default=0)
    return made


def run(
    parser: argparse.ArgumentParser,
    train: Callable[[movielens_data.Log, argparse.Namespace], bool],
    argv: list[str] | None,
) -> int:
    """Reads the ratings and trains; 2 and one line where they will not do."""
    args = parser.parse_args(argv)
    try:
        path = args.data or movielens_data.fetch_movielens(args.cache_dir)
        log = movielens_data.load(path)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        train(log, args)
    except UnfitError as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 2
    return 0


def ranks(score, seen, row: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Rank of each wanted item among those that its row has not seen; from 1 on.

    Args:
        score: [rows, items]; of equal scores each half counts as better.
        seen: rows and items that are left out.
        row: of each wanted item.
        item: what is wanted; -1 is not among the items, and ranks last.
    """
    score = np.array(score, np.float64)
    if not np.isfinite(score).all():
        raise UnfitError("scores are not finite: try a lower --learning-rate")
    score[seen] = -np.inf
    rank = np.full(len(item), np.inf)
    for n in np.flatnonzero(item >= 0):
        others, own = score[row[n]], score[row[n], item[n]]
        rank[n] = 1 + np.sum(others > own) + (np.sum(others == own) - 1) / 2
    return rank


def hit(rank: np.ndarray, k: int) -> float:
    """Share of wanted items among the first k."""
    return float(np.mean(rank <= k))


def ndcg(rank: np.ndarray, k: int) -> float:
    """Mean of 1/log2(1 + rank), 0 beyond rank k: one item is wanted each time."""
    return float(np.mean(np.where(rank <= k, 1 / np.log2(1 + rank), 0.0)))


def compare(name: str, score, seen, wanted, margin: float) -> bool:
    """Prints hits beside those of popularity, and whether hit@10 keeps the margin.

    Args:
      name: of the model.
      score: [rows, items]; `seen`, `wanted`: rows and items, as `ranks` takes them.
      margin: how many times popularity's hit@10 is claimed.
    """
    count = np.bincount(seen[1], minlength=score.shape[1])
    popular = ranks(np.broadcast_to(count, score.shape), seen, *wanted)
    found = ranks(score, seen, *wanted)
    print(f"\n{'hit@k among new items, k =':<30}" + "".join(f"{k:>8}" for k in KS))
    for label, rank in (("popularity", popular), (name, found)):
        print(f"{label:<30}" + "".join(f"{hit(rank, k):>8.4f}" for k in KS))
    print(f"NDCG@10: popularity {ndcg(popular, 10):.4f}, {name} {ndcg(found, 10):.4f}")
    base, ours = hit(popular, 10), hit(found, 10)
    holds = ours > base and ours >= margin * base
    print(
        f"hit@10 of {name} is {ours / base if base else math.inf:.2f} times that of "
        f"popularity; at least {margin:g} times is claimed: "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    return holds
