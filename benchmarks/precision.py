"""What low-precision optimizer state costs in accuracy, and what it saves.

Trains the click model of examples/movielens_ctr.py with BasisAdam at 100:1, the same
seeds for each format of the state:

    python benchmarks/precision.py
    python benchmarks/precision.py --data ml-latest-small/ratings.csv --seeds 5
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

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

RATIO = 100
LOWEST = "bfloat16 moments, log8 energy"
FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16 moments": {"moment_dtype": "bfloat16"},
    "float16 moments": {"moment_dtype": "float16"},
    "bfloat16 energy": {"energy_dtype": "bfloat16"},
    "log8 energy": {"energy_dtype": "log8"},
    LOWEST: {"moment_dtype": "bfloat16", "energy_dtype": "log8"},
}
TABLE = "table/embeddings"
WIDE = 64  # columns of the table that the claim is about
CLAIM = 0.0046  # of Adam's bytes, in the lowest format


def make_optimizer(name: str) -> keras.optimizers.Optimizer:
    """BasisAdam with its state in one of the formats."""
    return tf_basis.BasisAdam(
        movielens_ctr.LEARNING_RATES["BasisAdam 100:1"],
        compression_ratio=RATIO,
        tables=TABLE,
        **FORMATS[name],
    )


def share_of_adam(optimizer: keras.optimizers.Optimizer, table: Any) -> float:
    """Bytes of the table's optimizer variables over those of Adam's two moments."""
    prefix = table.path.replace("/", "_")
    own = [v for v in optimizer.variables if v.path.split("/")[-1].startswith(prefix)]
    held = sum(keras.ops.convert_to_numpy(v).nbytes for v in own)
    adam = keras.optimizers.Adam()
    adam.build([keras.Variable(np.zeros((1, table.shape[1]), np.float32), name="row")])
    row = sum(v.numpy().nbytes for v in adam.variables if len(v.shape) == 2)
    return held / (row * table.shape[0])


def wide_share(name: str, n_rows: int) -> float:
    """The share for a table of as many rows and `WIDE` columns."""
    layer = keras.layers.Embedding(n_rows, WIDE, name="table")
    layer.build()
    optimizer = make_optimizer(name)
    optimizer.build([layer.embeddings])
    return share_of_adam(optimizer, layer.embeddings)


def train(name: str, features: Features, log: movielens_data.Log, seed: int, args):
    """One run: scores on the last fifth of the ratings, and the share of bytes."""
    keras.utils.set_random_seed(seed)
    model = movielens_ctr.make_model(features, seed)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(make_optimizer(name), loss)
    train_part = slice(0, log.n_train)
    rows = forget_users(features, movielens_ctr.FORGOTTEN, seed)
    arrays = (rows[train_part], features.weights[train_part], log.label[train_part])
    batches = movielens_ctr.Batches(arrays, args.batch_size, seed)
    model.fit(batches, epochs=args.epochs, verbose=0)
    label = log.label[log.n_train :]
    logit = movielens_ctr.scores(model, features, log.n_train, len(log.label))
    table = model.get_layer("table").embeddings
    run = {
        "format": name,
        "seed": seed,
        "auc": auc(label, logit),
        "log_loss": log_loss(label, logit),
        "table_state_bytes": model.optimizer.state_bytes()[table.path],
        "share_of_adam": share_of_adam(model.optimizer, table),
    }
    print(f"{name}, seed {seed}: AUC {run['auc']:.4f}", flush=True)
    keras.utils.clear_session()
    return run


def summarise(runs: list[dict], reference: list[dict], n_rows: int) -> dict:
    """Means over the seeds of one format, with standard deviations."""

    def mean_and_spread(values: list[float]) -> tuple[float, float]:
        return float(np.mean(values)), float(np.std(values, ddof=len(values) > 1))

    gains = [a["auc"] - b["auc"] for a, b in zip(runs, reference, strict=True)]
    return {
        "format": runs[0]["format"],
        "auc": mean_and_spread([run["auc"] for run in runs]),
        "auc_minus_float32": mean_and_spread(gains),
        "log_loss": mean_and_spread([run["log_loss"] for run in runs]),
        "table_state_bytes": runs[0]["table_state_bytes"],
        "share_of_adam": runs[0]["share_of_adam"],
        "share_of_adam_wide": wide_share(runs[0]["format"], n_rows),
    }


def print_lines(lines: list[dict], dim: int) -> None:
    """The table, as Markdown takes it too."""

    def spread(pair: tuple[float, float], sign: str = "") -> str:
        return f"{pair[0]:{sign}.4f} ± {pair[1]:.4f}"

    headers = ["state", "AUC", "AUC - float32", "log-loss", "bytes"]
    headers += [f"of Adam, d={dim}", f"d={WIDE}"]
    cells = [
        [
            line["format"],
            spread(line["auc"]),
            spread(line["auc_minus_float32"], "+"),
            spread(line["log_loss"]),
            f"{line['table_state_bytes']:,}",
            f"{line['share_of_adam']:.3%}",
            f"{line['share_of_adam_wide']:.3%}",
        ]
        for line in lines
    ]
    print("\n" + measure.format_table(headers, cells))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="ratings.csv, u.data, ratings.dat or *.inter")
    add("--cache-dir", help="where MovieLens-100K is kept")
    add("--seeds", type=int, default=3, help="runs of each format")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=256)
    add("--json", type=Path, default=measure.RESULTS / "precision.json")
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
    dim = 1 + movielens_ctr.FACTORS
    print(f"one table of {features.n_rows:,} rows x {dim}, {RATIO}:1", flush=True)
    runs: dict[str, list[dict]] = {name: [] for name in FORMATS}
    for seed in range(args.seeds):
        for name, of_format in runs.items():
            of_format.append(train(name, features, log, seed, args))
    lines = [summarise(r, runs["float32"], features.n_rows) for r in runs.values()]
    print_lines(lines, dim)
    lowest = next(x for x in lines if x["format"] == LOWEST)["share_of_adam_wide"]
    print(
        f"\nstate with {LOWEST}, d={WIDE}: {lowest:.3%} of Adam's; at most {CLAIM:.2%} "
        f"is claimed: {'holds' if lowest <= CLAIM else 'DOES NOT HOLD'}"
    )
    measure.write_json(
        args.json,
        {
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "ratio": RATIO,
            "table_rows": features.n_rows,
            "dim": dim,
            "formats": lines,
            "runs": [run for of_format in runs.values() for run in of_format],
            "machine": measure.machine(),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
