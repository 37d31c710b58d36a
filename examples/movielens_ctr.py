"""Click model on MovieLens: Keras Adam against BasisAdam, same model, same seeds.

A DeepFM on crossed features predicts whether a rating is 4 or more. All features share
one embedding table; the last fifth of the ratings, by time, is the test part. One pass
is the default: on tables of rare rows every optimizer overfits in the second.

    python examples/movielens_ctr.py
    python examples/movielens_ctr.py --data ml-latest-small/ratings.csv --seeds 1

Each optimizer runs at its own learning rate, the best of CANDIDATES on the last tenth
of the training part; `--tune` repeats that choice.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
    print(
        "error: this example is for Keras 3: unset TF_USE_LEGACY_KERAS "
        "(examples/tfrs_two_tower.py is the one for tf_keras)",
        file=sys.stderr,
    )
    sys.exit(2)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import movielens_data
import numpy as np
from comparison import (
    auc,
    gains_of,
    log_loss,
    print_claim,
    print_table,
    summary,
    verbosity,
)
from movielens_features import Features, forget_users, make_features

import tf_basis

FACTORS = 15  # and one column of linear weights: d = 16
HIDDEN = (64, 32)
FORGOTTEN = 0.5  # share of training examples whose user is hidden
TOLERANCE = 0.002  # AUC that 100:1 may lose against Keras Adam
ORIGINAL = {
    "momentum": "shared",
    "invariant_scalar": "learned",
    "scalar_rule": "gradient",
    "collision_reduce": "sequential",
    "bias_correction": False,
}
CANDIDATES = (1e-4, 3e-4, 1e-3, 3e-3)
LEARNING_RATES = {
    "Keras Adam": 3e-4,
    "BasisAdam 10:1": 1e-3,
    "BasisAdam 100:1": 1e-3,
    "original rule 100:1": 1e-3,
}


def make_optimizer(name: str, rate: float) -> keras.optimizers.Optimizer:
    """The optimizer of one line of the table."""
    if name == "Keras Adam":
        return keras.optimizers.Adam(rate)
    ratio = float(name.split()[-1].partition(":")[0])
    rule = ORIGINAL if name.startswith("original") else {}
    return tf_basis.BasisAdam(
        rate, compression_ratio=ratio, tables="table/embeddings", **rule
    )


def make_model(features: Features, seed: int) -> keras.Model:
    """DeepFM that returns logits. Column 0 of the table holds the linear weights."""
    slots = len(features.slot_field)
    pool = np.eye(len(features.fields), dtype="float32")[features.slot_field]
    rows = keras.Input((slots,), dtype="int32", name="rows")
    weights = keras.Input((slots,), name="weights")
    looked_up = keras.layers.Embedding(
        features.n_rows,
        1 + FACTORS,
        embeddings_initializer=keras.initializers.RandomUniform(-0.01, 0.01, seed=seed),
        name="table",
    )(rows)
    weighted = looked_up * keras.ops.expand_dims(weights, -1)
    fields = keras.ops.einsum("bsd,sf->bfd", weighted, pool)
    linear = keras.ops.sum(fields[:, :, 0], axis=1, keepdims=True)
    factors = fields[:, :, 1:]
    total = keras.ops.sum(factors, axis=1)
    own = keras.ops.sum(factors * factors, axis=1)
    pairs = 0.5 * keras.ops.sum(total * total - own, axis=1, keepdims=True)
    deep = keras.layers.Flatten()(factors)
    for units in HIDDEN:
        deep = keras.layers.Dense(units, activation="relu")(deep)
    logits = linear + pairs + keras.layers.Dense(1)(deep)
    return keras.Model([rows, weights], logits, name="deepfm")


class Batches(keras.utils.PyDataset):
    """Shuffled batches whose order depends on the seed alone."""

    def __init__(self, arrays: tuple[np.ndarray, ...], batch_size: int, seed: int):
        super().__init__()
        self.arrays, self.batch_size = arrays, batch_size
        self.rng = np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // self.batch_size)

    def __getitem__(self, index: int) -> tuple:
        start = index * self.batch_size
        chosen = self.order[start : start + self.batch_size]
        rows, weights, label = (array[chosen] for array in self.arrays)
        return {"rows": rows, "weights": weights}, label

    def on_epoch_end(self) -> None:
        self.order = self.rng.permutation(len(self.arrays[0]))


class StepTimer(keras.callbacks.Callback):
    """Wall time of every training step."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)

    def median_ms(self) -> float:
        """Median, without the first steps (tracing)."""
        return 1e3 * float(np.median(self.seconds[min(10, len(self.seconds) // 2) :]))


def table_state_bytes(optimizer, table) -> int:
    """Bytes of the optimizer variables that belong to the table."""
    name = table.path.replace("/", "_")
    own = [v for v in optimizer.variables if name in v.path.replace("/", "_")]
    return sum(keras.ops.convert_to_numpy(v).nbytes for v in own)


def scores(model: keras.Model, features: Features, start: int, end: int) -> np.ndarray:
    """Logits of the examples from start to end."""
    parts = []
    for first in range(start, end, 4096):
        part = slice(first, min(first + 4096, end))
        logit = model([features.rows[part], features.weights[part]], training=False)
        parts.append(keras.ops.convert_to_numpy(logit)[:, 0])
    return np.concatenate(parts).astype(np.float64)


def train(name, rate, features, label, n_train, n_end, seed, args) -> dict:
    """Trains on the first n_train examples and scores those up to n_end."""
    keras.utils.set_random_seed(seed)
    model = make_model(features, seed)
    model.compile(
        make_optimizer(name, rate), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    rows = forget_users(features, FORGOTTEN, seed)
    arrays = (rows[:n_train], features.weights[:n_train], label[:n_train])
    timer = StepTimer()
    print(f"{name}, learning rate {rate:g}, seed {seed}", flush=True)
    model.fit(
        Batches(arrays, args.batch_size, seed),
        epochs=args.epochs,
        callbacks=[timer],
        verbose=verbosity(),
    )
    logit = scores(model, features, n_train, n_end)
    test = slice(n_train, n_end)
    return {
        "optimizer": name,
        "learning_rate": rate,
        "seed": seed,
        "auc": auc(label[test], logit),
        "log_loss": log_loss(label[test], logit),
        "state_bytes": table_state_bytes(
            model.optimizer, model.get_layer("table").embeddings
        ),
        "ms_per_step": timer.median_ms(),
    }


def tune(log: movielens_data.Log, args) -> dict[str, float]:
    """The best candidate of each optimizer on the last tenth of the training part."""
    n_train = int(log.n_train * 0.9)
    features = make_features(log, n_train)
    rates = {}
    for name in LEARNING_RATES:
        found = []
        for rate in CANDIDATES:
            data = (features, log.label, n_train, log.n_train)
            runs = [train(name, rate, *data, s, args) for s in range(args.seeds)]
            found.append(float(np.mean([run["auc"] for run in runs])))
        rates[name] = CANDIDATES[int(np.argmax(found))]
        listed = ", ".join(
            f"{r:g}: {s:.4f}" for r, s in zip(CANDIDATES, found, strict=True)
        )
        print(f"validation AUC of {name}: {listed}; takes {rates[name]:g}")
    return rates


def check_labels(log: movielens_data.Log, path, tuning: bool) -> None:
    """Every part must hold both labels; a ValueError names the one that does not."""
    parts = {"training": slice(log.n_train), "test": slice(log.n_train, None)}
    if tuning:
        parts["validation"] = slice(int(log.n_train * 0.9), log.n_train)
    for name, part in parts.items():
        label = log.label[part]
        if len(np.unique(label)) < 2:
            raise ValueError(
                f"{path}: the {name} part ({len(label)} of {len(log.label)} ratings) "
                f"must hold ratings below {movielens_data.LIKED:g} and others"
            )


def parse(argv: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
        return int(text)

    def rate(text: str) -> float:
        if not 0 < float(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
        return float(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="ratings.csv, u.data, ratings.dat or *.inter")
    parser.add_argument("--cache-dir", help="where MovieLens-100K is kept")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch-size", type=positive, default=256)
    parser.add_argument("--seeds", type=positive, default=3, help="runs per optimizer")
    parser.add_argument("--learning-rate", type=rate, help="one rate for all")
    parser.add_argument("--tune", action="store_true", help="choose the rates again")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    args = parser.parse_args(argv)
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder {str(args.json.parent)!r}")
    if args.json and args.json.is_dir():
        parser.error(f"--json: must be a file, got the folder {str(args.json)!r}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        path = args.data or movielens_data.fetch_movielens(args.cache_dir)
        log = movielens_data.load(path)
        check_labels(log, path, args.tune)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    features = make_features(log, log.n_train)
    counts = zip(features.fields, features.counts, strict=True)
    print(f"{len(log.label):,} ratings, the first {log.n_train:,} to train on")
    print("rows: " + ", ".join(f"{name} {count:,}" for name, count in counts))
    if features.left_out:
        print(f"no such information beside the ratings: {', '.join(features.left_out)}")
    print(f"one table of {features.n_rows:,} rows x {1 + FACTORS}", flush=True)
    rates = tune(log, args) if args.tune else dict(LEARNING_RATES)
    if args.learning_rate:
        rates = dict.fromkeys(rates, args.learning_rate)
    data = (features, log.label, log.n_train, len(log.label))
    runs = [
        train(name, rate, *data, seed, args)
        for seed in range(args.seeds)  # in turns: a busy machine slows all alike
        for name, rate in rates.items()
    ]
    by_name = {n: [run for run in runs if run["optimizer"] == n] for n in rates}
    lines = [summary(group) for group in by_name.values()]
    print_table(lines, args.seeds)
    gains = gains_of(by_name["BasisAdam 100:1"], by_name["Keras Adam"])
    holds = print_claim(gains, TOLERANCE)
    if args.json:
        result = {
            "data": str(path),
            "table_rows": features.n_rows,
            "fields": dict(zip(features.fields, features.counts, strict=True)),
            "left_out": features.left_out,
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "optimizers": lines,
            "runs": runs,
            "auc_gain_100": gains,
            "claim_holds": holds,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
