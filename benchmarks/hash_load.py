"""How evenly the hashes load buckets, and how many rows move when buckets are added.

Prints the tables of docs/hashing.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import measure
import numpy as np

from tf_basis import hashing

METHODS = ("row mod B", "murmur3", "balanced", "double", "consistent")
RANDOM = "random assignment"
# Which rows of the table are in use: name, spacing, buckets.
PATTERNS = (
    ("consecutive rows", 1, 2000),
    ("every 100th row", 100, 2000),
    ("every 1024th row", 1024, 2048),
)
GROWTH = (2000, 2001, 2200, 4000)
SEED = 0


def buckets_of(method: str, rows: np.ndarray, n_rows: int, buckets: int) -> np.ndarray:
    """[rows, 1], or with two buckets a row [rows, 2]."""
    if method == "row mod B":
        found = rows % buckets
    elif method == RANDOM:
        found = np.random.default_rng(SEED).integers(0, buckets, len(rows))
    else:
        found = hashing.bucket_of_rows(rows, n_rows, buckets, 0, method, SEED)
    return found.reshape(len(rows), -1)


def company(found: np.ndarray, buckets: int) -> float:
    """How many other rows have exactly the buckets of a row, on average."""
    pair = np.sort(found, axis=1) @ np.array([1, buckets])[: found.shape[1]]
    _, counts = np.unique(pair, return_counts=True)
    return float((counts * (counts - 1)).sum() / len(found))


def load_of(method: str, used: int, spacing: int, buckets: int) -> dict:
    """Load of `buckets` where `used` rows of a table, so far apart, are in use."""
    rows = np.arange(used, dtype=np.int64) * spacing
    found = buckets_of(method, rows, used * spacing, buckets)
    statistics = hashing.load_statistics(found, buckets)
    return {"hash": method, **statistics, "same": company(found, buckets)}


def moved(method: str, n_rows: int, before: int, after: int) -> float:
    """Share of rows of which a bucket changes when B grows."""
    rows = np.arange(n_rows, dtype=np.int64)
    old, new = (buckets_of(method, rows, n_rows, b) for b in (before, after))
    return float(np.mean((old != new).any(axis=1)))


def print_loads(title: str, loads: list[dict]) -> None:
    headers = ["hash", "min", "mean", "max", "std", "empty", "same"]
    cells = [
        [
            load["hash"],
            f"{load['min']}",
            f"{load['mean']:.2f}",
            f"{load['max']}",
            f"{load['std']:.2f}",
            f"{load['empty']}",
            f"{load['same']:.2f}",
        ]
        for load in loads
    ]
    print(f"\n{title}\n{measure.format_table(headers, cells)}")


def print_moves(shares: dict[str, list[float]]) -> None:
    first, *later = GROWTH
    cells = [[name, *(f"{s:.2%}" for s in row)] for name, row in shares.items()]
    print(f"\nrows of which a bucket changes from B = {first:,} on")
    print(measure.format_table(["hash", *(f"to {b:,}" for b in later)], cells))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="rows in use")
    default = measure.RESULTS / "hash_load.json"
    parser.add_argument("--json", type=Path, default=default)
    args = parser.parse_args(argv)
    if args.rows <= max(GROWTH):
        parser.error(f"--rows must be above {max(GROWTH)}, received {args.rows}")
    print("rows per bucket; same: other rows with exactly the buckets of a row")
    loads = {}
    for name, spacing, buckets in PATTERNS:
        loads[name] = [
            load_of(method, args.rows, spacing, buckets)
            for method in (*METHODS, RANDOM)
        ]
        title = f"{name}: {args.rows:,} rows in {buckets:,} buckets"
        print_loads(title, loads[name])
    first, *later = GROWTH
    moves = {m: [moved(m, args.rows, first, b) for b in later] for m in METHODS}
    moves["least possible"] = [1 - first / b for b in later]
    print_moves(moves)
    result = {"rows": args.rows, "buckets": GROWTH, "loads": loads, "moved": moves}
    measure.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
