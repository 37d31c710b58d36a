"""Bytes and time of averaging gradients over ranks: float32, float16 and 1 bit.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --ranks 4 --elements 25000000

Real Horovod ranks on one machine, over loopback as it is and over loopback limited to
1 Gbit/s, each in a network namespace of its own, where the interface's counter counts
what they send. A second part times whole training steps of a tower of dense layers.
Without root, `ip` and `tc` the slow link is left out, and nothing is counted.
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

RANKS = Path(__file__).with_name("allreduce_ranks.py")
LOOPBACK, SLOW = "loopback", "1 Gbit/s"
RATES = {LOOPBACK: None, SLOW: "1gbit"}
WAYS = ("float32", "float16", "1 bit")
PARTS = ("float16 casts", "1 bit, wire", "1 bit, arithmetic")
ADAM, ONE_BIT, GRADIENTS = "Adam, float32", "OneBitAdam", "gradients only"

CLAIMED_BYTES = 0.033  # of the float32 allreduce
CLAIMED_FASTER = {LOOPBACK: 1.0, SLOW: 15.0}
CLAIMED_STEP = 3.0


def milliseconds(timed: dict) -> tuple[float, float]:
    """Median and least of all calls."""
    seconds = [s for times in timed["seconds"] for s in times]
    return 1e3 * statistics.median(seconds), 1e3 * min(seconds)


def ratio(above: dict, below: dict) -> float:
    """How many times longer: the median of the ratios within a round."""
    median = statistics.median
    return median(
        median(a) / median(b)
        for a, b in zip(above["seconds"], below["seconds"], strict=True)
    )


def share_of_bytes(timed: dict, reference: dict) -> float:
    """Of what the reference sends."""
    return statistics.median(timed["bytes"]) / statistics.median(reference["bytes"])


def exchange_rows(entry: dict, counted: bool, ranks: int) -> list[list[str]]:
    """The lines of one link and size."""
    found, rows = entry["found"], []
    for name in (*WAYS, *PARTS):
        median, least = milliseconds(found[name])
        sent = statistics.median(found[name]["bytes"]) / ranks
        with_bytes = counted and name in WAYS
        rows.append(
            [
                entry["link"],
                f"{entry['elements']:,}",
                name,
                measure.format_number(median),
                measure.format_number(least),
                f"{ratio(found['float32'], found[name]):.2f}" if name in WAYS else "",
                f"{sent:,.0f}" if with_bytes else "",
                f"{share_of_bytes(found[name], found['float32']):.2%}"
                if with_bytes
                else "",
            ]
        )
    return rows


def claims(exchanges: list[dict], steps: list[dict], counted: bool) -> list[dict]:
    """What is claimed, what was measured, whether it holds."""
    made = []

    def claim(text: str, value: float, bound: float, holds: bool) -> None:
        made.append({"claim": text, "value": value, "bound": bound, "holds": holds})

    largest = max(e["elements"] for e in exchanges)
    for entry in exchanges:
        if entry["elements"] != largest:
            continue
        where, found = f"{largest:,} elements, {entry['link']}", entry["found"]
        if counted:
            share = share_of_bytes(found["1 bit"], found["float32"])
            text = f"{where}: bytes of 1 bit over float32, at most"
            claim(text, share, CLAIMED_BYTES, share <= CLAIMED_BYTES)
        faster, bound = (
            ratio(found["float32"], found["1 bit"]),
            CLAIMED_FASTER[entry["link"]],
        )
        text = f"{where}: time of float32 over 1 bit, at least"
        claim(text, faster, bound, faster >= bound)
    for entry in steps:
        if entry["link"] == SLOW:
            faster = ratio(entry["found"][ADAM], entry["found"][ONE_BIT])
            text = f"training step, {SLOW}: Adam in float32 over OneBitAdam, at least"
            claim(text, faster, CLAIMED_STEP, faster >= CLAIMED_STEP)
    return made


def print_results(document: dict[str, Any]) -> None:
    """The tables, as Markdown takes them too."""
    counted, ranks = document["counted"], document["settings"]["ranks"]
    headers = ["link", "elements", "exchange", "ms", "least", "float32 / it"]
    headers += ["bytes a rank sends", "of float32"]
    rows = [r for e in document["exchanges"] for r in exchange_rows(e, counted, ranks)]
    print("\n" + measure.format_table(headers, rows, left=(0, 2)))
    if document["steps"]:
        rows = []
        for entry in document["steps"]:
            for name in (ADAM, ONE_BIT, GRADIENTS):
                median, least = milliseconds(entry["found"][name])
                faster = ratio(entry["found"][ADAM], entry["found"][name])
                numbers = [measure.format_number(x) for x in (median, least)]
                rows.append([entry["link"], name, *numbers, f"{faster:.2f}"])
        headers = ["link", "training step", "ms", "least", "Adam / it"]
        print("\n" + measure.format_table(headers, rows, left=(0, 1)))
    print()
    for made in document["claims"]:
        verdict = "holds" if made["holds"] else "DOES NOT HOLD"
        print(f"{made['claim']} {made['bound']:g}: {made['value']:.4g}: {verdict}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--elements", type=int, nargs="+", default=[1_000_000, 25_000_000])
    add("--links", nargs="+", choices=tuple(RATES), default=list(RATES))
    add("--rounds", type=int, default=9, help="in which all take a turn")
    add("--widths", type=int, nargs="*", default=[8192, 2048, 2048, 1024, 1024])
    add("--batch", type=int, default=256, help="examples a rank in a training step")
    add(
        "--huge-pages",
        action="store_true",
        help="let malloc ask for huge pages, in all ranks (glibc 2.35)",
    )
    add("--json", type=Path, default=measure.RESULTS / "allreduce.json")
    args = parser.parse_args(argv)
    for name in ("ranks", "rounds", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min(args.elements, default=0) < 1:
        parser.error(f"--elements must be at least 1 each, got {args.elements}")
    if args.ranks < 2:
        parser.error("--ranks must be at least 2: one rank exchanges nothing, got 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    counted = True
    links = list(args.links)
    for name in list(links):
        reason = link.why_no_namespace(RATES[name])
        if reason is None:
            continue
        if name == LOOPBACK:
            counted = False
            print(f"nothing is counted, there is no network namespace here: {reason}")
        else:
            links.remove(name)
            print(f"left out: {name}: {reason}")
    machine = measure.machine()
    print(f"load average at the start: {os.getloadavg()[0]:.2f}", flush=True)
    exchanges, steps = [], []
    for name in links:
        place = {"rate": RATES[name], "namespace": counted or name != LOOPBACK}
        place["huge_pages"] = args.huge_pages
        # What TensorFlow takes if nobody says anything: ranks wait by turns.
        place["threads"] = len(os.sched_getaffinity(0))
        for elements in sorted(args.elements):
            task = {"task": "exchange", "elements": elements, "rounds": args.rounds}
            task["calls"] = 5 if elements <= 2_000_000 else 1
            found = link.run_ranks(RANKS, args.ranks, task, **place)
            exchanges.append({"link": name, "elements": elements, "found": found})
            print(f"{name}: {elements:,} elements done", flush=True)
        if args.widths:
            task = {"task": "step", "widths": args.widths, "batch": args.batch}
            task |= {"rounds": args.rounds, "calls": 1}
            found = link.run_ranks(RANKS, args.ranks, task, **place)
            steps.append({"link": name, "found": found})
            print(f"{name}: training steps done", flush=True)
    document = {
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "counted": counted,
        "exchanges": exchanges,
        "steps": steps,
        "claims": claims(exchanges, steps, counted) if exchanges else [],
        "machine": machine,
    }
    print_results(document)
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    measure.write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
