"""What it costs to change the number of buckets in the middle of training.

Trains the click model of examples/movielens_ctr.py, the same seeds for each line: with
a fixed number of buckets, and with `GrowBuckets` doubling (which splits buckets) or
growing by half (which hashes rows anew) after half of the steps.

    python benchmarks/growth.py
    python benchmarks/growth.py --data ml-latest-small/ratings.csv --ratio 1000
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the C++ op runs on the CPU
sys.path.append(str(Path(__file__).parent.parent / "examples"))

import keras
import measure
import movielens_ctr
import movielens_data
import numpy as np
from comparison import auc, log_loss
from movielens_features import Features, forget_users, make_features

import tf_basis

FIXED, DOUBLED = "B fixed", "B doubled at half"
# Name -> (buckets at first over B, factor at half of the steps)
LINES = {
    FIXED: (1, None),
    DOUBLED: (1, 2.0),
    "B times 1.5 at half": (1, 1.5),
    "2B fixed": (2, None),
}
DEVIATIONS = 2  # of the AUC over the seeds: what doubling may change at most


def train(name: str, features: Features, log, seed: int, args) -> dict:
    """One run: scores on the last fifth of the ratings."""
    keras.utils.set_random_seed(seed)
    times, factor = LINES[name]
    buckets = times * -(-features.n_rows // args.ratio)
    model = movielens_ctr.make_model(features, seed)
    rate = movielens_ctr.LEARNING_RATES["BasisAdam 100:1"]
    model.compile(
        tf_basis.BasisAdam(rate, num_buckets=buckets, tables="table/embeddings"),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    part = slice(0, log.n_train)
    rows = forget_users(features, movielens_ctr.FORGOTTEN, seed)
    arrays = (rows[part], features.weights[part], log.label[part])
    batches = movielens_ctr.Batches(arrays, args.batch_size, seed)
    half = len(batches) * args.epochs // 2
    schedule = {half: factor} if factor else {}
    grow = tf_basis.GrowBuckets(schedule, every="step")
    model.fit(batches, epochs=args.epochs, verbose=0, callbacks=[grow])
    label = log.label[log.n_train :]
    logit = movielens_ctr.scores(model, features, log.n_train, len(log.label))
    state = model.optimizer.table_state("table/embeddings")
    run = {
        "line": name,
        "seed": seed,
        "auc": auc(label, logit),
        "log_loss": log_loss(label, logit),
        "buckets": [buckets, len(state["bucket_steps"])],
        "changed_at_step": [change[0] for change in grow.changes],
        "steps": len(batches) * args.epochs,
    }
    print(f"{name}, seed {seed}: AUC {run['auc']:.4f}", flush=True)
    keras.utils.clear_session()
    return run


def summarise(runs: list[dict], reference: list[dict]) -> dict:
    """Means over the seeds of one line, with standard deviations."""

    def mean_and_spread(values: list[float]) -> tuple[float, float]:
        return float(np.mean(values)), float(np.std(values, ddof=len(values) > 1))

    change = [a["auc"] - b["auc"] for a, b in zip(runs, reference, strict=True)]
    return {
        "line": runs[0]["line"],
        "buckets": runs[0]["buckets"],
        "auc": mean_and_spread([run["auc"] for run in runs]),
        "auc_minus_fixed": mean_and_spread(change),
        "log_loss": mean_and_spread([run["log_loss"] for run in runs]),
    }


def print_lines(lines: list[dict]) -> None:
    """The table, as Markdown takes it too."""

    def spread(pair: tuple[float, float], sign: str = "") -> str:
        return f"{pair[0]:{sign}.5f} ± {pair[1]:.5f}"

    headers = ["", "buckets", "AUC", f"AUC - {FIXED}", "log-loss"]
    cells = [
        [
            line["line"],
            " → ".join(map(str, dict.fromkeys(line["buckets"]))),
            spread(line["auc"]),
            spread(line["auc_minus_fixed"], "+"),
            spread(line["log_loss"]),
        ]
        for line in lines
    ]
    print("\n" + measure.format_table(headers, cells))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="ratings.csv, u.data, ratings.dat or *.inter")
    add("--cache-dir", help="where MovieLens-100K is kept")
    add("--seeds", type=int, default=5, help="runs of each line")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=256)
    add("--ratio", type=int, default=200, help="rows per bucket at first")
    add("--json", type=Path, default=measure.RESULTS / "growth.json")
    args = parser.parse_args(argv)
    for name in ("seeds", "epochs", "batch_size", "ratio"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        path = args.data or movielens_data.fetch_movielens(args.cache_dir)
        log = movielens_data.load(path)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    features = make_features(log, log.n_train)
    print(f"one table of {features.n_rows:,} rows, {args.ratio}:1 at first", flush=True)
    runs: dict[str, list[dict]] = {name: [] for name in LINES}
    for seed in range(args.seeds):
        for name, of_line in runs.items():
            of_line.append(train(name, features, log, seed, args))
    lines = [summarise(of_line, runs[FIXED]) for of_line in runs.values()]
    print_lines(lines)
    changed = abs(lines[1]["auc_minus_fixed"][0])
    allowed = DEVIATIONS * lines[0]["auc"][1]
    print(
        f"\n{DOUBLED}: the mean AUC over {args.seeds} seeds changes by {changed:.5f}; "
        f"less than {DEVIATIONS} standard deviations, {allowed:.5f}, is claimed: "
        f"{'holds' if changed < allowed else 'DOES NOT HOLD'}"
    )
    measure.write_json(
        args.json,
        {
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "table_rows": features.n_rows,
            "lines": lines,
            "runs": [run for of_line in runs.values() for run in of_line],
            "machine": measure.machine(),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
