"""Time of quantising, averaging and restoring, beside memory copies of the same bytes.

    python benchmarks/quantize.py
    python benchmarks/quantize.py --elements 1000000 --repeats 5

Each op takes turns with a copy that reads and writes as many bytes together as the op
has to read and write: half of them read, half written, by as many threads. A speed of 1
is that of the copy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the C++ ops run on the CPU

import measure
import numpy as np
import tensorflow as tf
from measure import Contender, format_number

from tf_basis.distributed import quantize
from tf_basis.ops import loader

GOAL = 0.5  # of the speed of a copy; for quantising to 1 bit in two threads
OPS = ("quantize", "average", "dequantize")


def make_op(
    name: str, bits: int, arguments: argparse.Namespace
) -> tuple[Callable, int]:
    """A call of the op that can be repeated, and the bytes it reads and writes."""
    elements, workers = arguments.elements, arguments.workers
    sizes = {"bits": bits, "block": arguments.block}
    floats = 4 * elements
    length = quantize.message_bytes(elements, **sizes)
    residual = tf.Variable(tf.zeros([elements]))
    values = tf.random.stateless_normal([elements], [bits, elements])
    message, _ = quantize.quantize(residual, values, **sizes)
    if name == "quantize":
        return (
            lambda: quantize.quantize(residual, values, **sizes),
            3 * floats + length,  # values, the residual twice, the message
        )
    if name == "average":
        messages = tf.tile(message, [workers])
        return (
            lambda: quantize.average(residual, messages, workers=workers, **sizes),
            2 * floats + (workers + 1) * length,
        )
    return lambda: quantize.dequantize(message, elements, **sizes), floats + length


class Copy:
    """Copies of any size between two long buffers, shared out to threads."""

    def __init__(self, most_bytes: int, threads: int) -> None:
        self._from = np.ones(most_bytes // 2 + 1, np.uint8)
        self._to = np.zeros_like(self._from)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self, touched: int) -> None:
        """Reads half as many bytes as are to be touched, and writes as many."""
        ends = [touched // 2 * i // self._threads for i in range(self._threads + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        if len(parts) == 1:
            self._part(parts[0])
        else:
            list(self._pool.map(self._part, parts))

    def _part(self, part: slice) -> None:
        np.copyto(self._to[part], self._from[part])  # without the interpreter's lock


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for each op and width."""
    sizes = {"bits": max(quantize.WIDTHS), "block": arguments.block}
    length = quantize.message_bytes(arguments.elements, **sizes)
    copy = Copy(
        12 * arguments.elements + (arguments.workers + 1) * length, arguments.threads
    )
    entries = []
    for bits in quantize.WIDTHS:
        for name in OPS:
            call, touched = make_op(name, bits, arguments)
            op = Contender(name, lambda i, call=call: call())
            memory = Contender("copy", lambda i, touched=touched: copy(touched))
            rounds = range(arguments.repeats)
            measure.interleave([op, memory], rounds, calls=5, most_seconds=0.5)
            entry = {
                "op": name,
                "bits": bits,
                "bytes": touched,
                "op_ms": op.summary()["median_ms"],
                "copy_ms": memory.summary()["median_ms"],
                "speed": measure.ratio(memory, op),
            }
            if name == "quantize" and bits == 1:
                entry["goal"], entry["met"] = GOAL, entry["speed"] >= GOAL
            entries.append(entry)
            op.release()
    return entries


def print_report(document: dict[str, Any]) -> None:
    """The table of the document."""
    machine, settings = document["machine"], document["settings"]
    print(
        f"{machine['cpu']}, {settings['threads']} threads, "
        f"load average {machine['load_average'][0]:.1f} at the start; "
        f"{settings['elements']:,} elements, blocks of {settings['block']:,}, "
        f"{settings['workers']} workers\n"
    )
    headers = ["op", "bits", "MB touched", "ms", "copy ms", "speed / copy's", "goal"]
    lines = []
    for x in document["results"]:
        goal = (
            f">= {x['goal']}: {'met' if x['met'] else 'MISSED'}" if "goal" in x else ""
        )
        numbers = (x["op_ms"], x["copy_ms"], x["speed"])
        lines.append(
            [
                x["op"],
                str(x["bits"]),
                f"{x['bytes'] / 1e6:,.1f}",
                *map(format_number, numbers),
                goal,
            ]
        )
    print(measure.format_table(headers, lines, left=[0, len(headers) - 1]))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--elements", type=int, default=25_000_000, help="of the vector")
    add("--block", type=int, default=2048, help="elements that share their scales")
    add("--workers", type=int, default=2, help="whose messages are averaged")
    add("--repeats", type=int, default=15, help="rounds of up to 5 calls each")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--json", type=Path, default=measure.RESULTS / "quantize.json")
    arguments = parser.parse_args(argv)
    for name in ("elements", "workers", "repeats", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(
                f"--{name} must be at least 1, received {getattr(arguments, name)}"
            )
    if arguments.block < 8 or arguments.block % 8:
        parser.error(f"--block must be a multiple of 8, received {arguments.block}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    document: dict[str, Any] = {
        "benchmark": "quantize",
        "machine": measure.machine(),
        "settings": {k: v for k, v in vars(arguments).items() if k != "json"},
    }
    with loader.use("require"):
        document["results"] = run(arguments)
    print_report(document)
    measure.write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
