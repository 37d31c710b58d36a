"""For which link, parameters and ranks 1 bit pays: measured here, and a model.

    python benchmarks/break_even.py

Two real ranks exchange buffers of several sizes over loopback and over 1 Gbit/s (see
`allreduce.py`). From loopback come the costs of this machine: a collective, a byte
sent, an element quantised, averaged and restored. An α–β model
(`break_even_model.py`) with these costs is then compared with what was measured on
both links, and says what it expects of other links and up to 256 ranks. What is printed
with the word MODEL was not measured.
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

import break_even_model as model
import link
import measure
from break_even_model import Costs, flat, two_level

RANKS = Path(__file__).with_name("allreduce_ranks.py")
MEASURED_RANKS = 2
LOOPBACK, SLOW = "loopback", "1 Gbit/s"
RATES = {LOOPBACK: None, SLOW: "1gbit"}
SPEEDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
NUMBERS = (2, 4, 8, 16, 64, 256)
CLAIMED_FACTOR = 2.0  # by which the model may be off, of 1M elements and more


def least(timed: dict) -> float:
    """Seconds of the fastest call: what other programs took is no cost of it."""
    return min(s for times in timed["seconds"] for s in times)


def fitted(measured: dict[int, dict], alpha: float, inner: float) -> Costs:
    """The costs, from loopback: of a collective from the smallest buffer.

    Of a byte and of an element they are geometric means over the other buffers, so
    that the model is off by as much above as below.

    Args:
      measured: by the number of elements, what `allreduce_ranks.py` found.
      alpha: assumed: here no message crosses a network.
      inner: assumed.
    """
    smallest, *sizes = sorted(measured)
    fixed = least(measured[smallest]["float32"])

    def beyond(way: str, n: int) -> float:
        return max(least(measured[n][way]) - fixed, 1e-12)

    def sent(way: str, n: int) -> float:
        return flat(way, n, MEASURED_RANKS).bytes

    mean = statistics.geometric_mean
    host = mean(beyond("float32", n) / sent("float32", n) for n in sizes)
    half = mean(beyond("float16", n) / n for n in sizes)
    one_bit = mean(least(measured[n]["1 bit, arithmetic"]) / n for n in sizes)
    return Costs(
        fixed=fixed,
        alpha=alpha,
        host=host,
        inner=inner,
        float16=max(half - sent("float16", 1) * host, 0.0),
        one_bit=one_bit,
    )


def compared(where: str, measured: dict[int, dict], costs: Costs) -> list[dict]:
    """What was measured beside what the model says of two ranks on one machine."""
    rows = []
    for n, found in sorted(measured.items()):
        for way in model.WAYS:
            load = flat(way, n, MEASURED_RANKS)._replace(messages=0)
            beta = 0.0
            if where == SLOW:  # one link, which carries what both ranks send
                beta = MEASURED_RANKS * model.beta_of(1.0)
            expected = model.seconds(way, n, load, beta, costs)
            rows.append(
                {
                    "link": where,
                    "elements": n,
                    "way": way,
                    "measured": least(found[way]),
                    "model": expected,
                    "fitted": where == LOOPBACK and way != "1 bit",
                }
            )
    return rows


def worst(rows: list[dict]) -> float:
    """By which factor the model is off at most, of what it was not fitted to."""
    factors = [
        max(r["model"] / r["measured"], r["measured"] / r["model"])
        for r in rows
        if not r["fitted"] and r["elements"] >= 10**6
    ]
    return max(factors, default=1.0)


def gbits(speed: float) -> str:
    """A link speed for a table."""
    if speed == float("inf"):
        return "any"
    return "never" if speed < 0.01 else f"{speed:.2g}"


def break_even_rows(costs: Costs, per_machine: int) -> list[list[str]]:
    """Below which speed 1 bit pays, by elements and ranks."""
    rows = []
    for n in SIZES:
        row = [f"{n:.0e}"]
        for w in NUMBERS:
            g = min(per_machine, w)
            if w == g > 1:
                row.append("-")
                continue
            ones = flat("1 bit", n, w, g)
            row.append(
                " / ".join(
                    gbits(model.break_even(n, ones, flat(way, n, w, g), way, costs))
                    for way in ("float32", "float16")
                )
            )
        rows.append(row)
    return rows


def gain_table(costs: Costs, ranks: int) -> str:
    """How many times faster 1 bit is, by elements and link."""
    heads = ["elements", *(f"{s:g} Gbit/s" for s in SPEEDS)]
    return measure.format_table(heads, gain_rows(costs, ranks))


def gain_rows(costs: Costs, ranks: int) -> list[list[str]]:
    """How many times faster 1 bit is than the better of the others."""
    rows = []
    for n in SIZES:
        row = [f"{n:.0e}"]
        for speed in SPEEDS:
            beta = model.beta_of(speed)
            times = {
                way: model.seconds(way, n, flat(way, n, ranks), beta, costs)
                for way in model.WAYS
            }
            ones = times.pop("1 bit")
            row.append(f"{min(times.values()) / ones:.2g}")
        rows.append(row)
    return rows


def level_rows(costs: Costs, n: int, speed: float, per_machine: int) -> list[list[str]]:
    """Seconds of flat and two-level exchanges of up to 256 ranks."""
    rows, beta = [], model.beta_of(speed)
    for w in (16, 64, 256):
        row = [str(w)]
        for loads in (
            {way: flat(way, n, w, per_machine) for way in model.WAYS},
            {
                way: two_level(way, n, w // per_machine, per_machine)
                for way in model.WAYS
            },
        ):
            row += [
                f"{1e3 * model.seconds(way, n, load, beta, costs):,.0f}"
                for way, load in loads.items()
            ]
        rows.append(row)
    return rows


def print_model(costs: Costs, per_machine: int) -> None:
    """What the model expects elsewhere."""
    heads = ["elements", *(f"{w} ranks" for w in NUMBERS)]
    better = "the time of the better of float32 and float16 over that of 1 bit"
    print(f"\nMODEL: {better}, 2 ranks that send no faster than here")
    print(gain_table(costs, 2))
    print("\nFrom here on ranks are taken to fill any link.")
    costs = costs._replace(host=0.0)
    print(
        "\nMODEL: 1 bit is faster below ... Gbit/s, than float32 / than float16; one "
        "rank on each machine"
    )
    print(measure.format_table(heads, break_even_rows(costs, 1)))
    print(
        f"\nMODEL: the same with {per_machine} ranks behind one link, flat; - where "
        "there is one machine"
    )
    print(measure.format_table(heads, break_even_rows(costs, per_machine)))
    for ranks in (2, 16, 256):
        print(f"\nMODEL: {better}, {ranks} ranks, one on each machine")
        print(gain_table(costs, ranks))
    for speed in (1.0, 10.0):
        print(
            f"\nMODEL: ms of an exchange of 1e8 elements, {per_machine} ranks on each "
            f"machine, {speed:g} Gbit/s between machines"
        )
        heads = ["ranks", *(f"flat, {way}" for way in model.WAYS)]
        heads += [f"two-level, {way}" for way in model.WAYS]
        rows = level_rows(costs, 10**8, speed, per_machine)
        print(measure.format_table(heads, rows))


def print_measured(costs: Costs, rows: list[dict], factor: float) -> None:
    """The costs, and the model beside the measurements."""
    print(f"\na collective: {1e3 * costs.fixed:.2f} ms")
    print(f"a rank sends at most {8e-9 / costs.host:.2g} Gbit/s (loopback)")
    print(f"1 bit, quantise + average + restore: {1e9 * costs.one_bit:.2f} ns/element")
    print(f"float16, cast + add: {1e9 * costs.float16:.2f} ns/element")
    print(
        f"assumed: {1e6 * costs.alpha:g} µs for a message between machines, "
        f"{8e-9 / costs.inner:g} Gbit/s within\n"
    )
    table = [
        [
            r["link"],
            f"{r['elements']:,}",
            r["way"],
            measure.format_number(1e3 * r["measured"]),
            measure.format_number(1e3 * r["model"]),
            "fitted" if r["fitted"] else f"{r['model'] / r['measured']:.2f}",
        ]
        for r in rows
    ]
    heads = [
        "link",
        "elements",
        "exchange",
        "least ms",
        "MODEL, ms",
        "MODEL / measured",
    ]
    print(measure.format_table(heads, table, left=(0, 2)))
    verdict = "holds" if factor <= CLAIMED_FACTOR else "DOES NOT HOLD"
    print(
        "\nof 1M elements and more, where it was not fitted, the model is off by a "
        f"factor of at most {CLAIMED_FACTOR:g}: {factor:.2f}: {verdict}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--elements", type=int, nargs="+", default=[10_000, 1_000_000, 16_000_000])
    add("--rounds", type=int, default=5, help="in which all take a turn")
    add("--latency", type=float, default=50.0, help="µs of a message, assumed")
    add("--inner", type=float, default=100.0, help="Gbit/s in a machine, assumed")
    add("--per-machine", type=int, default=8, help="ranks on a machine, in the model")
    add("--json", type=Path, default=measure.RESULTS / "break_even.json")
    args = parser.parse_args(argv)
    lowest = MEASURED_RANKS * model.BLOCK  # so that every rank owns a block
    if len(set(args.elements)) < 2 or min(args.elements) < lowest:
        parser.error(
            f"--elements must be two sizes or more of at least {lowest}, got "
            f"{args.elements}"
        )
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if not 0 <= args.latency < float("inf"):
        parser.error(f"--latency must be at least 0, got {args.latency}")
    if not 0 < args.inner < float("inf"):
        parser.error(f"--inner must be above 0, got {args.inner}")
    if args.per_machine not in (2, 4, 8, 16):
        parser.error(f"--per-machine must be 2, 4, 8 or 16, got {args.per_machine}")
    return args


def measured_on(where: str, args: argparse.Namespace) -> dict[int, dict]:
    """What `allreduce_ranks.py` finds, by the number of elements."""
    place = {"rate": RATES[where], "namespace": RATES[where] is not None}
    place["threads"] = len(os.sched_getaffinity(0))
    found = {}
    for elements in sorted(set(args.elements)):
        task = {"task": "exchange", "elements": elements, "rounds": args.rounds}
        task["calls"] = 5 if elements <= 2_000_000 else 1
        found[elements] = link.run_ranks(RANKS, MEASURED_RANKS, task, **place)
        print(f"{where}: {elements:,} elements done", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print(f"load average at the start: {os.getloadavg()[0]:.2f}", flush=True)
    measured: dict[str, Any] = {LOOPBACK: measured_on(LOOPBACK, args)}
    reason = link.why_no_namespace(RATES[SLOW])
    if reason is None:
        measured[SLOW] = measured_on(SLOW, args)
    else:
        print(f"left out: {SLOW}: {reason}")
    inner = model.beta_of(args.inner)
    costs = fitted(measured[LOOPBACK], args.latency * 1e-6, inner)
    rows = [
        r for where, found in measured.items() for r in compared(where, found, costs)
    ]
    factor = worst(rows)
    print_measured(costs, rows, factor)
    print_model(costs, args.per_machine)
    print(f"\nload average at the end: {os.getloadavg()[0]:.2f}")
    document = {"costs": costs._asdict(), "compared": rows, "factor": factor}
    document |= {"measured": measured, "machine": measure.machine()}
    measure.write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
