"""Time of one optimizer step on an embedding table, side by side.

One step is `optimizer.apply_gradients` inside a `tf.function` on the gradient of a
batch of Zipf-distributed ids.  All contenders on all tables take turns, round after
round, in one process.  Beside the optimizers: an empty call, a memory copy of as
many bytes as a BasisAdam step must move, and TensorFlow's own gather and scatter of
the same random rows.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the C++ op runs on the CPU

import contenders
import fbgemm_peer
import measure
import numpy as np
import phases
import tensorflow as tf
import workers
from contenders import (
    ADAGRAD,
    ADAM,
    COPY,
    FBGEMM,
    GATHER,
    LAZY,
    OP,
    OP_ADAGRAD,
    ORDER,
    TWIN,
    Table,
)
from measure import format_number

from tf_basis.ops import loader

RATIOS = {
    "Keras Adam / op": (ADAM, OP),
    "Keras Adagrad / op": (ADAGRAD, OP),
    "lazy Adam / op": (LAZY, OP),
    "FBGEMM row-wise Adagrad / BasisAdam op": (FBGEMM, OP),
    "FBGEMM row-wise Adagrad / BasisAdagrad op": (FBGEMM, OP_ADAGRAD),
    "pure TF / op": (TWIN, OP),
    "op / TF gather + scatter": (OP, GATHER),
    "op / memory copy": (OP, COPY),
}
UNSAID = ("json", "fbgemm_python", "peer")  # paths here, and what has its own place
GROWTH = "op / op on the next smaller table"
STATE = "state bytes: BasisAdam / Adam"
# ratio: (rows it is for, at least or at most, value); for the default arguments
GOALS = {
    "Keras Adam / op": (2_000_000, ">=", 200),
    "pure TF / op": (2_000_000, ">=", 3),
    GROWTH: (10_000_000, "<=", 1.2),
    STATE: (2_000_000, "<=", 0.014),
}


def run(tables: list[Table], arguments: argparse.Namespace) -> None:
    """Times everybody, phase by phase."""
    gradients = [
        tf.random.normal([arguments.batch, arguments.dim], stddev=0.01, seed=i)
        for i in range(contenders.GRADIENTS)
    ]
    buffers = (
        np.ones(phases.COPY_BYTES, np.uint8),
        np.ones(phases.COPY_BYTES, np.uint8),
    )
    for table in tables:
        contenders.add_small(table, gradients, buffers)
        if arguments.fbgemm_python is None:
            table.skipped[FBGEMM] = f"needs {fbgemm_peer.OPTION}"
    small = [c for table in tables for c in table.contenders.values()]
    planned, expected = phases.plan(tables, arguments.memory_limit * 2**30)
    print(
        f"{len(planned)} phases of {arguments.rounds} rounds, "
        f"about {expected / 2**30:.1f} GiB of memory",
        flush=True,
    )
    for phase, members in enumerate(planned):
        for table, name in members:
            if name == FBGEMM:
                python, threads = arguments.fbgemm_python, arguments.threads
                fbgemm_peer.add(table, gradients, python, threads)
            else:
                optimizer = contenders.LARGE_OPTIMIZERS[name](table)
                table.add_optimizer(name, optimizer, gradients)
        large = [table.contenders[name] for table, name in members]
        first = phase * arguments.rounds
        rounds = range(first, first + arguments.rounds)
        measure.interleave([*small, *large], rounds, arguments.steps)
        for contender in large:
            contender.release()
        gc.collect()


def results(tables: list[Table]) -> list[dict[str, Any]]:
    """One entry for each contender on each table."""
    entries = []
    for table in tables:
        for name in ORDER:
            entry: dict[str, Any] = {"rows": table.rows, "contender": name}
            if name in table.contenders:
                entry |= table.contenders[name].summary()
                state = table.state_bytes.get(name, 0)
                if state:
                    entry["state_bytes"] = state
                    entry["share_of_adam"] = state / (2 * table.table_bytes)
            else:
                entry["skipped"] = table.skipped[name]
            entries.append(entry)
    return entries


def ratios(tables: list[Table]) -> list[dict[str, Any]]:
    """One entry for each ratio on each table, with its goal where it has one."""
    entries = []
    for i, table in enumerate(tables):
        pairs = {
            name: (table.contenders.get(above), table.contenders.get(below))
            for name, (above, below) in RATIOS.items()
        }
        if i > 0:
            pairs[GROWTH] = table.contenders[OP], tables[i - 1].contenders[OP]
        values = {
            name: measure.ratio(above, below) if above and below else None
            for name, (above, below) in pairs.items()
        }
        values[STATE] = table.state_bytes[OP] / (2 * table.table_bytes)
        for name, value in values.items():
            entry = {"rows": table.rows, "ratio": name, "value": value}
            rows, sense, bound = GOALS.get(name, (None, "", 0))
            if rows == table.rows and value is not None:
                entry["goal"] = f"{sense} {bound:g}"
                entry["met"] = value >= bound if sense == ">=" else value <= bound
            entries.append(entry)
    return entries


def print_report(document: dict[str, Any]) -> None:
    """The tables of the document."""
    machine, settings = document["machine"], document["settings"]
    print(
        f"\n{machine['cpu']}, {settings['threads']} threads, "
        f"load average {machine['load_average'][0]:.1f} at the start; "
        f"d = {settings['dim']}, {settings['batch']:,} ids a batch"
    )
    headers = ["rows", "exponent", "distinct rows", "buckets", "MB moved by BasisAdam"]
    lines = [
        [
            f"{x['rows']:,}",
            f"{x['zipf_exponent']:.2f}",
            f"{x['distinct_rows']:,.0f}",
            f"{x['touched_buckets']:,.0f}",
            f"{sum(x['step_bytes'].values()) / 1e6:.2f}",
        ]
        for x in document["batches"]
    ]
    print("\n" + measure.format_table(headers, lines))

    headers = ["rows", "step", "median ms", "min ms", "state bytes", "of Adam's"]
    lines = []
    for x in document["results"]:
        line = [f"{x['rows']:,}", x["contender"]]
        if "skipped" in x:
            lines.append([*line, x["skipped"], "", "", ""])
            continue
        share = x.get("share_of_adam")
        lines.append(
            [
                *line,
                format_number(x["median_ms"]),
                format_number(x["min_ms"]),
                f"{x['state_bytes']:,}" if share else "",
                f"{share:.2%}" if share else "",
            ]
        )
    print("\n" + measure.format_table(headers, lines, left=[1]))

    columns = [x["rows"] for x in document["batches"]]
    by_ratio: dict[str, dict[int, dict]] = {}
    for x in document["ratios"]:
        by_ratio.setdefault(x["ratio"], {})[x["rows"]] = x
    lines = []
    for name, entries in by_ratio.items():
        cells = [format_number(entries.get(n, {}).get("value")) for n in columns]
        goals = [
            f"{x['goal']} at {n:,}: {'met' if x['met'] else 'MISSED'}"
            for n, x in entries.items()
            if "goal" in x
        ]
        lines.append([name, *cells, *(goals or [""])])
    headers = ["ratio", *(f"{n:,}" for n in columns), "goal"]
    print("\n" + measure.format_table(headers, lines, left=[0, len(headers) - 1]))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[20_000, 200_000, 2_000_000, 10_000_000])
    add("--dim", type=int, default=64, help="columns of a table")
    add("--batch", type=int, default=4096, help="ids; half of them are distinct")
    add("--steps", type=int, default=40, help="timed steps of a round (1 s at most)")
    add("--rounds", type=int, default=8, help="of each phase")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add(
        "--memory-limit",
        type=float,
        default=12.0,
        help="GiB; what needs more is left out",
    )
    add(
        fbgemm_peer.OPTION,
        help="a Python with torch and fbgemm_gpu: measures FBGEMM too",
    )
    add("--json", type=Path, default=measure.RESULTS / "step_time.json")
    arguments = parser.parse_args(argv)
    for name in ("dim", "batch", "steps", "rounds", "threads"):
        value = getattr(arguments, name)
        least = 2 if name == "batch" else 1
        if value < least:
            parser.error(f"--{name} must be at least {least}, received {value}")
    for rows in arguments.rows:
        if rows < arguments.batch:
            parser.error(
                f"--rows must be at least --batch ({arguments.batch}), received {rows}"
            )
    arguments.rows = sorted(set(arguments.rows))
    arguments.peer = None
    if arguments.fbgemm_python is not None:
        try:
            arguments.peer = fbgemm_peer.versions(arguments.fbgemm_python)
        except workers.WorkerError as error:
            parser.error(str(error))
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    # Keras Adam makes the sparse gradient dense: that is what is measured.
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices")
    with loader.use("require"):
        loader.compiled()
    document: dict[str, Any] = {
        "benchmark": "step_time",
        "machine": measure.machine(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in UNSAID},
        "fbgemm": arguments.peer,
    }
    tables = [
        contenders.make_table(
            contenders.make_variable(n, arguments.dim), arguments.batch
        )
        for n in arguments.rows
    ]
    try:
        run(tables, arguments)
    except workers.WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    document["batches"] = [table.about_batches() for table in tables]
    document["results"] = results(tables)
    document["ratios"] = ratios(tables)
    document["peak_memory_bytes"] = measure.peak_memory_bytes()
    print_report(document)
    measure.write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
