"""Quality against bytes of optimizer state: BASIS, Keras's optimizers and rivals.

    python benchmarks/quality.py --gowalla gowalla.npz --jobs 2
    python benchmarks/quality.py --tasks zipf --methods "lazy Adam" "BasisAdam 100:1"

Tasks: `gowalla` (Recall@20 and NDCG@20 of a matrix factorization), `movielens` and
`zipf` (AUC and log-loss of a DeepFM). Every optimizer gets its rate in the same way: a
walk on the grid 1e-3·2^k by one seed on held-out training data until the best rate is
between two worse ones. With that rate it runs on all training data, once for each seed.

Every finished run is a line of `--cache`: started again, the script goes on where it
was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the C++ op runs on the CPU

import measure
import numpy as np

PUBLISHED = 0.1291  # Recall@20 of matrix factorization on this split (arXiv 1905.08108)
NAMES = {"recall": "Recall@20", "ndcg": "NDCG@20", "auc": "AUC", "log_loss": "log-loss"}
METRICS = {
    "gowalla": ("recall", "ndcg"),
    "movielens": ("auc", "log_loss"),
    "zipf": ("auc", "log_loss"),
}
ZIPF_SIZES = (160_000, 90_000, 45_000, 20_000, 7_000, 2_000, 800, 200)
TUNING_SEED = 100  # none of those that are compared


def settings_of(task: str, args: argparse.Namespace) -> Any:
    """What all optimizers have in common, as a dataclass."""
    import quality_clicks
    import quality_gowalla

    if task == "gowalla":
        return quality_gowalla.Settings(epochs=args.epochs)
    return quality_clicks.Settings(batch={"movielens": 256, "zipf": 1024}[task])


def source_of(task: str, args: argparse.Namespace) -> str | None:
    """The file that a task's data come from, where one was named."""
    return {"gowalla": args.gowalla, "movielens": args.movielens}.get(task)


@functools.cache
def data(task: str, tuning: bool, source: str | None, examples: int) -> Any:
    """The examples of a task; for tuning without what is scored in the end."""
    import quality_clicks
    import quality_gowalla

    if task == "gowalla":
        pairs = quality_gowalla.load(Path(source))
        return pairs.tuning() if tuning else pairs
    if task == "movielens":
        return quality_clicks.movielens(source, tuning)
    return quality_clicks.zipf(examples, ZIPF_SIZES, tuning)


class Runs:
    """Runs that are done, in a file of JSON lines; several processes may add to it."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                run = json.loads(line)
                self.found[self.key(run)] = run

    @staticmethod
    def key(run: dict[str, Any]) -> str:
        names = ("task", "method", "rate", "seed", "tuning", "settings", "source")
        return json.dumps([run[name] for name in names], sort_keys=True)

    def get(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        return self.found.get(self.key(wanted))

    def add(self, run: dict[str, Any]) -> None:
        self.found[self.key(run)] = run
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")


def one_run(
    task: str,
    name: str,
    rate: float,
    seed: int,
    tuning: bool,
    args: argparse.Namespace,
    runs: Runs,
) -> dict[str, Any]:
    """A training and its scores, from the file where they are there."""
    import keras
    import quality_clicks
    import quality_gowalla
    from quality_methods import METHODS, state_bytes

    settings = settings_of(task, args)
    source = source_of(task, args)
    run = {
        "task": task,
        "method": name,
        "rate": rate,
        "seed": seed,
        "tuning": tuning,
        "settings": dataclasses.asdict(settings)
        | ({"examples": args.examples} if task == "zipf" else {}),
        "source": Path(source).name if source else None,
    }
    known = runs.get(run)
    if known:
        return known
    start = time.perf_counter()
    train = (quality_gowalla if task == "gowalla" else quality_clicks).train
    make = functools.partial(METHODS[name].make, rate=rate)
    scores, optimizer = train(
        data(task, tuning, source, args.examples), make, seed, settings
    )
    run["scores"] = scores
    run["state_bytes"] = state_bytes(optimizer)
    run["seconds"] = round(time.perf_counter() - start, 1)
    runs.add(run)
    numbers = ", ".join(f"{NAMES[k]} {v:.4f}" for k, v in scores.items())
    part = "tuning" if tuning else f"seed {seed}"
    print(
        f"{task}, {name}, rate {rate:.3g}, {part}: {numbers} ({run['seconds']:.0f} s)",
        flush=True,
    )
    keras.utils.clear_session()
    return run


def tune(score: Callable[[float], float], start: float) -> float:
    """The rate on the grid 1e-3·2^k that scores best, with worse neighbours.

    Walks from `start` towards higher scores; a score that is not a number is the worst.
    """
    found: dict[int, float] = {}

    def at(k: int) -> float:
        if k not in found:
            value = score(1e-3 * 2.0**k)
            found[k] = value if math.isfinite(value) else -math.inf
        return found[k]

    best = round(math.log2(start / 1e-3))
    while True:
        better = max((best, best + 1, best - 1), key=at)
        if better == best:
            return 1e-3 * 2.0**best
        best = better


def all_runs(unit: tuple[str, str, argparse.Namespace]) -> list[dict[str, Any]]:
    """One optimizer on one task: the choice of its rate, then all seeds."""
    task, name, args = unit
    from quality_methods import METHODS

    runs = Runs(args.cache)
    first = METRICS[task][0]

    def score(rate: float) -> float:
        run = one_run(task, name, rate, TUNING_SEED, True, args, runs)
        return run["scores"][first]

    rate = tune(score, METHODS[name].rates[task])
    return [
        one_run(task, name, rate, seed, False, args, runs) for seed in range(args.seeds)
    ]


def share_cores(jobs: int) -> None:
    """Called first in each of several processes."""
    import tensorflow as tf

    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each metric over the seeds."""
    line = {k: runs[0][k] for k in ("task", "method", "rate", "state_bytes")}
    for metric in METRICS[line["task"]]:
        values = [run["scores"][metric] for run in runs]
        deviation = np.std(values, ddof=len(values) > 1)
        line[metric] = (float(np.mean(values)), float(deviation))
    return line


def print_lines(lines: list[dict[str, Any]], rows: int) -> None:
    """The table of one task, as Markdown takes it too."""
    metrics = METRICS[lines[0]["task"]]
    headers = [
        "optimizer",
        "rate",
        *(NAMES[m] for m in metrics),
        "state bytes",
        "a row",
    ]
    cells = [
        [
            line["method"],
            f"{line['rate']:.2g}",
            *(f"{line[m][0]:.4f} ± {line[m][1]:.4f}" for m in metrics),
            f"{line['state_bytes']:,}",
            f"{line['state_bytes'] / rows:,.2f}",
        ]
        for line in lines
    ]
    print("\n" + measure.format_table(headers, cells))


def claims(lines: list[dict[str, Any]]) -> list[tuple[str, bool | None]]:
    """What is claimed of one task, and whether it holds; None: only to be read."""
    from quality_methods import ADAGRAD, BASE, LOW, METHODS, ROW_WISE, WIDE

    task = lines[0]["task"]
    metric = METRICS[task][0]
    by_name = {line["method"]: line[metric] for line in lines}
    title = NAMES[metric]
    found: list[tuple[str, bool | None]] = []
    exact = [name for name in by_name if METHODS[name].exact]
    if BASE in by_name:
        own = by_name[BASE][0]
        if task == "gowalla":
            text = f"{BASE}: {title} {own:.4f}, at least the published {PUBLISHED}"
            found.append((text, own >= PUBLISHED))
        if exact:
            best = max(exact, key=lambda name: by_name[name][0])
            mean, deviation = by_name[best]
            text = f"{BASE}: {title} {own:.4f}, at least that of the best exact "
            text += f"optimizer ({best}, {mean:.4f}) minus two standard deviations "
            found.append((text + f"({deviation:.4f})", own >= mean - 2 * deviation))
        if WIDE in by_name:
            wide = by_name[WIDE][0]
            text = f"{WIDE}: {title} {wide:.4f}, within 1 % of {own:.4f} at 100:1"
            found.append((text, wide >= 0.99 * own))
    if ROW_WISE in by_name:
        mean, deviation = by_name[ROW_WISE]
        for name in (LOW, ADAGRAD):
            if name in by_name:
                text = (
                    f"{name}: {title} {by_name[name][0]:.4f} ± {by_name[name][1]:.4f}"
                )
                text += f", {ROW_WISE} {mean:.4f} ± {deviation:.4f}"
                found.append((text, None))
    return found


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Metric against state bytes, a picture for each task; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(line["task"] for line in lines))
    methods = list(dict.fromkeys(line["method"] for line in lines))
    figure, axes = pyplot.subplots(
        len(tasks), 1, figsize=(11, 5 * len(tasks)), squeeze=False
    )
    for task, axis in zip(tasks, axes[:, 0]):
        metric = METRICS[task][0]
        for line in (x for x in lines if x["task"] == task):
            axis.errorbar(
                line["state_bytes"],
                *line[metric],
                fmt="o" if line["method"].startswith("Basis") else "s",
                color=pyplot.cm.tab20(methods.index(line["method"])),
                label=line["method"],
            )
        axis.set(
            xscale="log", xlabel="bytes of state", ylabel=NAMES[metric], title=task
        )
        axis.grid(alpha=0.3)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    from quality_methods import METHODS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tasks", nargs="+", choices=METRICS, default=list(METRICS))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--gowalla", help="folder with train.txt and test.txt, or their .npz")
    add("--movielens", help="ratings file; the default fetches MovieLens-100K")
    add("--examples", type=int, default=500_000, help="of the task zipf")
    add("--epochs", type=int, default=25, help="of the task gowalla")
    add("--seeds", type=int, default=3, help="runs of each optimizer")
    add("--jobs", type=int, default=1, help="optimizers at a time, in processes")
    add("--cache", type=Path, default=measure.RESULTS / "quality_runs.jsonl")
    add("--json", type=Path, default=measure.RESULTS / "quality.json")
    add("--plot", type=Path, help="where to draw metric against bytes (matplotlib)")
    args = parser.parse_args(argv)
    for name in ("examples", "epochs", "seeds", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if "gowalla" in args.tasks:
        if not args.gowalla:
            print("gowalla is left out: --gowalla names no file", file=sys.stderr)
            args.tasks = [task for task in args.tasks if task != "gowalla"]
        elif not Path(args.gowalla).exists():
            parser.error(f"--gowalla: no such file or folder {args.gowalla!r}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    units = [(task, name, args) for task in args.tasks for name in args.methods]
    if args.jobs > 1:
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(args.jobs, share_cores, (args.jobs,)) as pool:
            groups = pool.map(all_runs, units, chunksize=1)
    else:
        groups = [all_runs(unit) for unit in units]
    lines = [summarise(runs) for runs in groups]
    verdicts = []
    for task in args.tasks:
        of_task = [line for line in lines if line["task"] == task]
        examples = data(task, False, source_of(task, args), args.examples)
        if task == "gowalla":
            rows = examples.users + examples.items
            print(f"\n{task}: {rows:,} rows x 64, {len(examples.train):,} pairs")
        else:
            rows = examples.features.n_rows
            print(f"\n{task}: {rows:,} rows x 16, {examples.n_train:,} examples")
            if examples.bound:
                print(f"AUC of the teacher: {examples.bound:.4f}")
        print_lines(of_task, rows)
        print()
        for text, holds in claims(of_task):
            word = {True: ": holds", False: ": DOES NOT HOLD", None: ""}[holds]
            print(text + word)
            verdicts.append({"task": task, "claim": text, "holds": holds})
    measure.write_json(
        args.json,
        {
            "settings": {
                k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()
            },
            "lines": lines,
            "claims": verdicts,
            "machine": measure.machine(),
        },
    )
    if args.plot:
        plot(lines, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
