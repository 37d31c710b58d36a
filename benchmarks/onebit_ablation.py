"""What each option of the 1-bit exchange does to quality, bytes and time of a step.

    python benchmarks/onebit_ablation.py
    python benchmarks/onebit_ablation.py --options OneBitAdam delay=1 --seeds 1

Two parts, on real Horovod ranks. Quality: AUC of the DLRM of `onebit_convergence.py`
after one epoch, all options with one learning rate. Cost: bytes and time of training
steps of a tower of dense layers over a link of 1 Gbit/s (loopback in a network
namespace, limited by `tc`, its bytes counted by the interface). Without root, `ip` and
`tc` the second part is left out.

What `BalancedBatch` does to a step of ranks that are equally fast is the line of uneven
batches; what it gains where one is slower, `balanced_batch.py` measures.
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
import numpy as np
from onebit_ablation_ranks import ADAM, NAMES, ONE_BIT

RANKS = Path(__file__).with_name("onebit_ablation_ranks.py")


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return float(np.mean(values)), float(np.std(values, ddof=len(values) > 1))


def quality_of(name: str, runs: list[dict]) -> dict[str, Any]:
    """AUC over the seeds, and its distance to that of Adam with the same seed."""
    mine = {r["seed"]: r["auc"] for r in runs if r["optimizer"] == name}
    adam = {r["seed"]: r["auc"] for r in runs if r["optimizer"] == ADAM}
    gains = [mine[seed] - adam[seed] for seed in mine]
    return {"auc": spread(list(mine.values())), "gain": spread(gains)}


def cost_of(name: str, cost: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Mean seconds of a step, of the slowest rank in a round, and bytes of a rank."""

    def seconds(entry: dict) -> float:
        by_rank = np.mean(entry["seconds"], axis=2)  # [ranks, rounds]
        return float(np.median(np.max(by_rank, axis=0)))

    mine, adam = cost[name], cost[ADAM]
    sent = statistics.median(mine["bytes"]) / ranks
    return {
        "ms": 1e3 * seconds(mine),
        "faster": seconds(adam) / seconds(mine),
        "bytes": sent,
        "share": sent * ranks / statistics.median(adam["bytes"]),
    }


def print_lines(lines: list[dict[str, Any]]) -> None:
    """The table, as Markdown takes it too."""
    headers = ["towers", "AUC", "AUC - Adam", "ms/step", "Adam / it"]
    headers += ["bytes a rank sends", "of float32"]
    cells = []
    for line in lines:
        quality, cost = line["quality"], line["cost"]
        cell = [line["option"], "", ""] + [""] * 4
        if quality:
            cell[1] = f"{quality['auc'][0]:.4f} ± {quality['auc'][1]:.4f}"
            cell[2] = f"{quality['gain'][0]:+.4f} ± {quality['gain'][1]:.4f}"
        if cost:
            cell[3] = measure.format_number(cost["ms"])
            cell[4] = f"{cost['faster']:.2f}"
            cell[5] = f"{cost['bytes']:,.0f}"
            cell[6] = f"{cost['share']:.2%}"
        cells.append(cell)
    print("\n" + measure.format_table(headers, cells))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--options", nargs="+", choices=NAMES, default=list(NAMES), metavar="OPTION")
    add("--parts", nargs="+", choices=("quality", "cost"), default=["quality", "cost"])
    add("--ranks", type=int, default=2)
    add("--seeds", type=int, default=3, help="runs of each option")
    add("--examples", type=int, default=150_000, help="of synthetic data")
    add("--rate", type=float, default=8e-3, help="of the towers")
    add("--widths", type=int, nargs="+", default=[256, 3072, 3072, 3072, 1024])
    add("--calls", type=int, default=16, help="steps of a round")
    add("--rounds", type=int, default=2)
    add("--link", default="1gbit", help="its speed, in the words of tc")
    add("--before", type=int, default=20, help="steps before the first round")
    add("--json", type=Path, default=measure.RESULTS / "onebit_ablation.json")
    args = parser.parse_args(argv)
    for name in ("ranks", "seeds", "examples", "calls", "rounds", "before"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if ADAM not in args.options:
        args.options = [ADAM, *args.options]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    shared = {"options": args.options}
    found: dict[str, Any] = {"quality": None, "cost": None}
    if "quality" in args.parts:
        settings = {
            "task": "quality",
            "data": None,
            "epochs": 1,
            "batch": 32,
            "dim": 16,
            "bottom": [256, 64],
            "top": [256, 128],
            "table_rate": 3e-3,
            **{k: getattr(args, k) for k in ("seeds", "examples", "rate")},
            **shared,
        }
        found["quality"] = link.run_ranks(
            RANKS, args.ranks, settings, namespace=False, timeout=7200
        )
    if "cost" in args.parts:
        why = link.why_no_namespace(args.link)
        if why:
            print(f"no link of {args.link} here: {why}", file=sys.stderr)
        else:
            settings = {
                "task": "cost",
                "batch": 64,
                **{
                    k: getattr(args, k) for k in ("widths", "calls", "rounds", "before")
                },
                **shared,
            }
            found["cost"] = link.run_ranks(
                RANKS, args.ranks, settings, rate=args.link, timeout=7200
            )
    lines = [
        {
            "option": name,
            "quality": quality_of(name, found["quality"]["runs"])
            if found["quality"]
            else None,
            "cost": cost_of(name, found["cost"], args.ranks) if found["cost"] else None,
        }
        for name in args.options
    ]
    print(f"{args.ranks} ranks; quality: {args.seeds} seeds; cost: {args.link}")
    print_lines(lines)
    by_name = {line["option"]: line for line in lines}
    if ONE_BIT in by_name and found["quality"]:
        worst = min(lines, key=lambda line: line["quality"]["auc"][0])
        print(f"\nLowest AUC: {worst['option']}, {worst['quality']['auc'][0]:.4f}")
    for run in (found["quality"] or {"runs": []})["runs"]:
        for group, numbers in run["quantization"].items():
            print(
                f"{run['optimizer']}, seed {run['seed']}, {group} at the end: "
                f"relative error {numbers['relative_error']:.3f}, "
                f"{numbers['bits']:.0f} bits"
            )
    for name, each in (found["cost"] or {}).items():
        sent, plain = each["scales"]
        if plain:
            print(
                f"{name}: scales deflated to {sent / plain:.1%} of their bytes, "
                f"{plain / sent:.2f} to 1"
            )
    document = {
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "options": lines,
        **found,
        "machine": measure.machine(),
    }
    measure.write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
