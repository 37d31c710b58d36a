"""Throughput of ranks of which one is slowed by half: even and balanced batches.

    python benchmarks/balanced_batch.py

Real Horovod ranks on one machine, each with one thread, training a tower of dense
layers. What a rank computes is made to last a fixed time for each example, as on a
device of its own, on the last rank twice that: two ranks on two cores that other
programs use too would else measure those. `--microseconds 0` lets it last as long as it
does, and the last rank sleep as long again. Pipeline, exchange and optimizer are real.

Even batches, those of `BalancedBatch` and every rank by itself, without any exchange,
take turns; the ideal is the sum of what the ranks do by themselves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import link
import measure

RANKS = Path(__file__).with_name("balanced_batch_ranks.py")
CLAIMED_SHARE = 0.8  # of the ideal throughput


def summary(found: dict[str, list]) -> dict[str, Any]:
    """Medians over the rounds, and of the shares within a round."""
    ideal = [sum(speeds) for speeds in found["alone"]]
    result: dict[str, Any] = {"ideal": statistics.median(ideal)}
    for name in ("even", "balanced"):
        # The step ends when the slowest rank's does.
        reached = [min(speeds) for speeds in found[name]]
        result[name] = statistics.median(reached)
        shares = [r / i for r, i in zip(reached, ideal, strict=True)]
        result[f"{name}_share"] = statistics.median(shares)
    result["speeds"] = [statistics.median(s) for s in zip(*found["alone"])]
    result["holds"] = result["balanced_share"] >= CLAIMED_SHARE
    return result


def print_results(found: dict[str, list], result: dict[str, Any]) -> None:
    """The table, as Markdown takes it too."""
    settled = found["sizes"][-1]
    even = [sum(settled) // len(settled)] * len(settled)
    rows = [
        ["even", str(even), f"{result['even']:,.0f}", f"{result['even_share']:.0%}"],
        [
            "balanced",
            str(settled),
            f"{result['balanced']:,.0f}",
            f"{result['balanced_share']:.0%}",
        ],
        ["ideal", "", f"{result['ideal']:,.0f}", ""],
    ]
    headers = ["batches", "examples of each rank", "examples/s", "of the ideal"]
    print("\n" + measure.format_table(headers, rows, left=(0, 1)))
    by_rank = ", ".join(f"{s:,.0f}" for s in result["speeds"])
    print(f"\nexamples/s of each rank by itself: {by_rank}")
    verdict = "holds" if result["holds"] else "DOES NOT HOLD"
    print(
        f"share of the ideal throughput, at least {CLAIMED_SHARE:.0%}: "
        f"{result['balanced_share']:.1%}: {verdict}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--global-batch", type=int, default=1024, help="examples of all ranks")
    add("--widths", type=int, nargs="+", default=[64, 256, 256])
    add(
        "--microseconds",
        type=float,
        default=200.0,
        help="that an example takes on all ranks but the last; 0: as long as it does",
    )
    add("--every", type=int, default=10, help="steps between changes of sizes")
    add("--settle", type=int, default=60, help="steps before it is measured")
    add("--rounds", type=int, default=7, help="in which all take a turn")
    add("--steps", type=int, default=20, help="in each turn")
    add("--json", type=Path, default=measure.RESULTS / "balanced_batch.json")
    args = parser.parse_args(argv)
    for name in ("global_batch", "every", "settle", "rounds", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.microseconds < float("inf"):
        parser.error(f"--microseconds must be at least 0, got {args.microseconds}")
    if not 2 <= args.ranks <= args.global_batch:
        parser.error(f"--ranks must be from 2 to the global batch, got {args.ranks}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "ranks")}
    print(f"load average at the start: {os.getloadavg()[0]:.2f}", flush=True)
    found = link.run_ranks(RANKS, args.ranks, settings, namespace=False, threads=1)
    result = summary(found)
    print_results(found, result)
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    document = {"settings": settings | {"ranks": args.ranks}, "found": found}
    document |= {"result": result, "machine": measure.machine()}
    measure.write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
