"""How the time of an optimizer step grows with threads and with the batch.

Steps of BasisAdam and BasisAdagrad in C++ on one table, with 1, 2, 4, ... threads, for
batches of several sizes. A process's threads of TensorFlow are fixed, so each number of
threads has a process of its own; all of them take turns, round after round, and wait in
between. Beside them: a memory copy, in one thread, of as many bytes as a BasisAdam step
must move, and an empty call.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import measure
import workers
from measure import format_number

SCRIPT = Path(__file__).with_name("step_scaling_worker.py")
# Contenders by the names that contenders.py gives them: it imports TensorFlow.
STEPS = ("BasisAdam, C++ op", "BasisAdagrad, C++ op")
COPY, EMPTY = "memory copy", "empty call"
Members = dict[tuple[int, str, int], workers.Remote]  # by batch, name, threads


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def start(arguments: argparse.Namespace) -> dict[int, workers.Worker]:
    """One worker for each number of threads."""
    sizes = ["--rows", arguments.rows, "--dim", arguments.dim]
    sizes += ["--batches", *arguments.batches]
    started: dict[int, workers.Worker] = {}
    for threads in thread_counts(arguments.threads):
        command = [sys.executable, SCRIPT, *sizes, "--threads", threads]
        whose = f"steps with {threads} threads"
        started[threads] = workers.Worker([str(x) for x in command], whose)
    return started


def results(members: Members) -> list[dict[str, Any]]:
    """One entry for each batch, contender and number of threads, with its ratios."""
    smallest = min(batch for batch, _, _ in members)
    entries = []
    for (batch, name, threads), member in members.items():
        entry: dict[str, Any] = {"batch": batch, "contender": name, "threads": threads}
        entry |= member.summary()
        entry["us_per_id"] = 1e3 * entry["median_ms"] / batch
        if name in STEPS:
            alone = members[batch, name, 1]
            copy = members[batch, COPY, threads]
            small = members[smallest, name, threads]
            entry["speed_up"] = measure.ratio(alone, member)
            entry["over_copy"] = measure.ratio(member, copy)
            per_call = measure.ratio(member, small)
            entry["per_id_over_smallest"] = per_call * smallest / batch
        entries.append(entry)
    return entries


def print_report(document: dict[str, Any]) -> None:
    """The table of the document."""
    machine, settings = document["machine"], document["settings"]
    print(
        f"\n{machine['cpu']}, load average {machine['load_average'][0]:.1f} at the "
        f"start; {settings['rows']:,} rows, d = {settings['dim']}"
    )
    smallest = settings["batches"][0]
    headers = ["ids", "step", "threads", "median ms", "min ms", "us per id"]
    headers += ["1 thread / it", "it / memory copy", f"us per id / at {smallest:,}"]
    keys = ("median_ms", "min_ms", "us_per_id")
    ratios = ("speed_up", "over_copy", "per_id_over_smallest")
    lines = [
        [
            f"{x['batch']:,}",
            x["contender"],
            str(x["threads"]),
            *(format_number(x[key]) for key in keys),
            *(format_number(x[key]) if key in x else "" for key in ratios),
        ]
        for x in document["results"]
    ]
    print("\n" + measure.format_table(headers, lines, left=[1]))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=2_000_000)
    add("--dim", type=int, default=64, help="columns of the table")
    batches = [256, 1024, 4096, 16384, 65536]
    add("--batches", type=int, nargs="+", default=batches, help="ids; half distinct")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="at most")
    add("--steps", type=int, default=40, help="timed steps of a round (1 s at most)")
    add("--rounds", type=int, default=8)
    add("--json", type=Path, default=measure.RESULTS / "step_scaling.json")
    arguments = parser.parse_args(argv)
    arguments.batches = sorted(set(arguments.batches))
    for name in ("dim", "threads", "steps", "rounds"):
        value = getattr(arguments, name)
        if value < 1:
            parser.error(f"--{name} must be at least 1, received {value}")
    for batch in arguments.batches:
        if not 2 <= batch <= arguments.rows:
            parser.error(
                f"--batches must be from 2 to --rows ({arguments.rows}), "
                f"received {batch}"
            )
    return arguments


def run(started: dict[int, workers.Worker], arguments: argparse.Namespace) -> dict:
    """The document."""
    about = {threads: worker.ready() for threads, worker in started.items()}
    # The numbers of threads are neighbours: what is compared is close in time.
    members = {
        (batch, name, threads): workers.Remote(f"{batch} {name}", None, worker=worker)
        for batch in arguments.batches
        for name in (*STEPS, COPY, EMPTY)
        for threads, worker in started.items()
    }
    rounds = range(arguments.rounds)
    measure.interleave(list(members.values()), rounds, arguments.steps)
    return {
        "benchmark": "step_scaling",
        "machine": about[1]["machine"],
        "settings": {k: v for k, v in vars(arguments).items() if k != "json"},
        "batches": about[1]["batches"],
        "results": results(members),
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    started = start(arguments)
    try:
        document = run(started, arguments)
    except workers.WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in started.values():
            worker.close()
    print_report(document)
    measure.write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
