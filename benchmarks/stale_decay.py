"""What `stale_decay` changes: buckets that forget in the steps that missed them.

Trains the click model of examples/movielens_ctr.py with BasisAdam, the same seeds with
and without the option: at two ratios, with shared buckets only, and with half of the
buckets owned by the most frequent rows (whose first moments go stale too):

    python benchmarks/stale_decay.py
    python benchmarks/stale_decay.py --data ml-latest-small/ratings.csv --seeds 5
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

# Name -> (ratio, share of the buckets that one row each owns)
LINES = {
    "10:1, all shared": (10, 0.0),
    "10:1, half exclusive": (10, 0.5),
    "100:1, all shared": (100, 0.0),
    "100:1, half exclusive": (100, 0.5),
}


def make_optimizer(
    name: str, stale_decay: bool, frequencies: np.ndarray
) -> keras.optimizers.Optimizer:
    """BasisAdam of one line; `frequencies`: how often each row is trained on."""
    ratio, share = LINES[name]
    buckets = -(-len(frequencies) // ratio)
    return tf_basis.BasisAdam(
        movielens_ctr.LEARNING_RATES[f"BasisAdam {ratio}:1"],
        compression_ratio=ratio,
        exclusive_rows=int(share * buckets),
        row_frequencies=frequencies,
        stale_decay=stale_decay,
        tables="table/embeddings",
    )


def train(name, stale_decay: bool, features: Features, log, seed: int, args) -> dict:
    """One run: scores on the last fifth of the ratings."""
    keras.utils.set_random_seed(seed)
    part = slice(0, log.n_train)
    used = features.rows[part][features.weights[part] > 0]
    frequencies = np.bincount(used, minlength=features.n_rows)
    model = movielens_ctr.make_model(features, seed)
    optimizer = make_optimizer(name, stale_decay, frequencies)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    rows = forget_users(features, movielens_ctr.FORGOTTEN, seed)
    arrays = (rows[part], features.weights[part], log.label[part])
    batches = movielens_ctr.Batches(arrays, args.batch_size, seed)
    model.fit(batches, epochs=args.epochs, verbose=0)
    label = log.label[log.n_train :]
    logit = movielens_ctr.scores(model, features, log.n_train, len(log.label))
    state = optimizer.table_state("table/embeddings")
    counters = [slot for slot in ("bucket_steps", "last_step") if slot in state]
    run = {
        "line": name,
        "stale_decay": stale_decay,
        "seed": seed,
        "auc": auc(label, logit),
        "log_loss": log_loss(label, logit),
        "buckets": len(state["bucket_steps"]),
        "exclusive_rows": len(state["first_moment"]),
        "counter_bytes": sum(state[slot].nbytes for slot in counters),
    }
    word = "on" if stale_decay else "off"
    print(f"{name}, stale_decay {word}, seed {seed}: AUC {run['auc']:.4f}", flush=True)
    keras.utils.clear_session()
    return run


def summarise(off: list[dict], on: list[dict]) -> dict:
    """Means over the seeds of one line, with standard deviations."""

    def mean_and_spread(values: list[float]) -> tuple[float, float]:
        return float(np.mean(values)), float(np.std(values, ddof=len(values) > 1))

    gains = [b["auc"] - a["auc"] for a, b in zip(off, on, strict=True)]
    return {
        "line": off[0]["line"],
        "buckets": off[0]["buckets"],
        "exclusive_rows": off[0]["exclusive_rows"],
        "auc_off": mean_and_spread([run["auc"] for run in off]),
        "auc_on": mean_and_spread([run["auc"] for run in on]),
        "auc_gain": mean_and_spread(gains),
        "log_loss_off": mean_and_spread([run["log_loss"] for run in off]),
        "log_loss_on": mean_and_spread([run["log_loss"] for run in on]),
        "more_bytes": on[0]["counter_bytes"] - off[0]["counter_bytes"],
    }


def print_lines(lines: list[dict]) -> None:
    """The table, as Markdown takes it too."""

    def spread(pair: tuple[float, float], sign: str = "") -> str:
        return f"{pair[0]:{sign}.4f} ± {pair[1]:.4f}"

    headers = ["", "B", "K", "AUC off", "AUC on", "on - off", "more bytes"]
    cells = [
        [
            line["line"],
            f"{line['buckets']:,}",
            f"{line['exclusive_rows']:,}",
            spread(line["auc_off"]),
            spread(line["auc_on"]),
            spread(line["auc_gain"], "+"),
            f"{line['more_bytes']:,}",
        ]
        for line in lines
    ]
    print("\n" + measure.format_table(headers, cells))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="ratings.csv, u.data, ratings.dat or *.inter")
    add("--cache-dir", help="where MovieLens-100K is kept")
    add("--seeds", type=int, default=3, help="runs of each line, on and off")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=256)
    add("--json", type=Path, default=measure.RESULTS / "stale_decay.json")
    args = parser.parse_args(argv)
    for name in ("seeds", "epochs", "batch_size"):
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
    print(f"one table of {features.n_rows:,} rows", flush=True)
    runs: dict[str, dict[bool, list[dict]]] = {n: {False: [], True: []} for n in LINES}
    for seed in range(args.seeds):
        for name, of_line in runs.items():
            for stale_decay, group in of_line.items():
                group.append(train(name, stale_decay, features, log, seed, args))
    lines = [summarise(of_line[False], of_line[True]) for of_line in runs.values()]
    print_lines(lines)
    measure.write_json(
        args.json,
        {
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "table_rows": features.n_rows,
            "lines": lines,
            "runs": [run for both in runs.values() for g in both.values() for run in g],
            "machine": measure.machine(),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
