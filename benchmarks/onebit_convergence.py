"""What one bit per element costs in accuracy: AUC of a DLRM trained on four ranks.

    python benchmarks/onebit_convergence.py
    python benchmarks/onebit_convergence.py --data movielens --epochs 2

Same model, same seeds, same batches, real Horovod ranks. The table's optimizer is
BasisAdam throughout; the towers' is Adam with gradients in float32, OneBitAdam with
the frozen variance (the default), with the corrected moments, with normalisation
every 10 steps (the literal policy), and Adam with gradients in one bit and error
feedback.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import link
import measure
import movielens_data
import numpy as np
from onebit_convergence_ranks import ADAM, CORRECTED, FEEDBACK, FROZEN, LITERAL

RANKS = Path(__file__).with_name("onebit_convergence_ranks.py")
NAMES = (ADAM, FROZEN, LITERAL, CORRECTED, FEEDBACK)
CLAIM = 0.999  # of Adam's AUC
# Each optimizer has the best of these on a part of the training data; `--tune` repeats
# the choice. All took the largest.
CANDIDATES = (1e-3, 2e-3, 4e-3, 8e-3)
RATES = dict.fromkeys(NAMES, 8e-3)


def summarise(name: str, runs: list[dict], reference: list[dict]) -> dict[str, Any]:
    """Means over the seeds of one optimizer, with standard deviations."""

    def spread(values: list[float]) -> tuple[float, float]:
        return float(np.mean(values)), float(np.std(values, ddof=len(values) > 1))

    pairs = list(zip(runs, reference, strict=True))
    return {
        "optimizer": name,
        "rate": runs[0]["rate"],
        "auc": spread([run["auc"] for run in runs]),
        "log_loss": spread([run["log_loss"] for run in runs]),
        "gain": spread([a["auc"] - b["auc"] for a, b in pairs]),
        "share": float(np.mean([a["auc"] / b["auc"] for a, b in pairs])),
        "ms_per_step": float(np.median([run["ms_per_step"] for run in runs])),
    }


def print_lines(lines: list[dict]) -> None:
    """The table, as Markdown takes it too."""

    def spread(pair: tuple[float, float], sign: str = "") -> str:
        return f"{pair[0]:{sign}.4f} ± {pair[1]:.4f}"

    headers = [
        "towers",
        "rate",
        "AUC",
        "AUC - Adam",
        "of Adam's AUC",
        "log-loss",
        "ms/step",
    ]
    cells = [
        [
            line["optimizer"],
            f"{line['rate']:g}",
            spread(line["auc"]),
            spread(line["gain"], "+"),
            f"{line['share']:.3%}",
            spread(line["log_loss"]),
            measure.format_number(line["ms_per_step"]),
        ]
        for line in lines
    ]
    print("\n" + measure.format_table(headers, cells))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="'movielens' (100K, fetched) or ratings; default: synthetic")
    add("--examples", type=int, default=150_000, help="of synthetic data")
    add("--ranks", type=int, default=4)
    add("--seeds", type=int, default=3, help="runs of each optimizer")
    add("--epochs", type=int, default=1)
    add("--batch", type=int, default=32, help="examples a rank")
    add("--dim", type=int, default=16)
    add("--bottom", type=int, nargs="+", default=[256, 64])
    add("--top", type=int, nargs="+", default=[256, 128])
    add(
        "--tune",
        type=float,
        nargs="*",
        metavar="RATE",
        help="choose the learning rates again, of these",
    )
    add("--rate", type=float, help="one learning rate for all towers")
    add("--table-rate", type=float, default=3e-3)
    add("--optimizers", nargs="+", choices=NAMES, default=list(NAMES))
    add("--json", type=Path, default=measure.RESULTS / "onebit_convergence.json")
    args = parser.parse_args(argv)
    for name in ("examples", "ranks", "seeds", "epochs", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if ADAM not in args.optimizers:
        parser.error(f"--optimizers must hold {ADAM!r}: all are compared with it")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "rate")}
    settings["rates"] = {n: args.rate or RATES[n] for n in args.optimizers}
    settings["candidates"] = () if args.tune is None else args.tune or CANDIDATES
    try:
        if args.data == "movielens":
            settings["data"] = str(movielens_data.fetch_movielens())
        if settings["data"] is not None:
            movielens_data.load(settings["data"])
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = measure.machine()
    found = link.run_ranks(RANKS, args.ranks, settings, namespace=False, timeout=7200)
    by_name = {
        name: [run for run in found["runs"] if run["optimizer"] == name]
        for name in args.optimizers
    }
    lines = [summarise(n, runs, by_name[ADAM]) for n, runs in by_name.items()]
    print(
        f"{args.ranks} ranks, {by_name[ADAM][0]['steps']:,} steps, {args.seeds} seeds; "
        f"table of {found['table_rows']:,} rows; learning rates "
        + (
            "chosen on a part of the training data"
            if settings["candidates"]
            else "as given"
        )
    )
    print_lines(lines)
    for line in lines:
        if line["optimizer"] == FROZEN:
            verdict = "holds" if line["share"] >= CLAIM else "DOES NOT HOLD"
            print(
                f"\nAUC of OneBitAdam over that of Adam: {line['share']:.4%}, at least "
                f"{CLAIM:.1%} is claimed: {verdict}"
            )
    document = {"settings": settings, "optimizers": lines, **found, "machine": machine}
    measure.write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
