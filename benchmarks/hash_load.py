"""How evenly the hashes load buckets, and how many rows move when buckets are added.

Prints the tables of docs/hashing.md:

    python benchmarks/hash_load.py --json hash_load.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

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
    print(f"\n{title}")
    print(
        f"{'hash':<18}{'min':>6}{'mean':>8}{'max':>8}{'std':>9}{'empty':>7}{'same':>9}"
    )
    for load in loads:
        print(
            f"{load['hash']:<18}{load['min']:>6}{load['mean']:>8.2f}{load['max']:>8}"
            f"{load['std']:>9.2f}{load['empty']:>7}{load['same']:>9.2f}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="rows in use")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    args = parser.parse_args(argv)
    if args.rows <= max(GROWTH):
        parser.error(f"--rows must be above {max(GROWTH)}, received {args.rows}")
    result = {"rows": args.rows, "loads": {}, "moved": {}}
    for name, spacing, buckets in PATTERNS:
        loads = [
            load_of(method, args.rows, spacing, buckets)
            for method in (*METHODS, RANDOM)
        ]
        title = f"{name}: {args.rows:,} rows in {buckets:,} buckets"
        print_loads(
            f"{title} (rows per bucket; same: rows with the same buckets)", loads
        )
        result["loads"][name] = loads
    first, *later = GROWTH
    print(f"\nrows that move when {first:,} buckets for {args.rows:,} rows become")
    print(f"{'hash':<18}" + "".join(f"{b:>9,}" for b in later))
    for method in METHODS:
        shares = [moved(method, args.rows, first, b) for b in later]
        print(f"{method:<18}" + "".join(f"{s:>9.2%}" for s in shares))
        result["moved"][method] = dict(zip(map(str, later), shares))
    least = [1 - first / b for b in later]
    print(f"{'least possible':<18}" + "".join(f"{s:>9.2%}" for s in least))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
