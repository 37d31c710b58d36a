"""What a report on a large table costs, and what exact shadow rows cost in a step.

    python benchmarks/diagnostics.py                  # 10M x 16, 4 rows a bucket

Prints the time of `tf_basis.diagnostics.report`, the peak of resident memory that it
adds, over the bytes of the state that it reads, and medians of the time of a step on a
table with and without 64 shadow rows, which take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def peak() -> int:
    """Bytes of resident memory that this process has had at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(rows: int, dim: int, ratio: float, batch: int, steps: int) -> dict:
    """The numbers, in this process."""
    import numpy as np
    import tensorflow as tf

    import tf_basis
    from tf_basis import diagnostics

    table = tf.Variable(tf.zeros([rows, dim]), name="table")
    optimizer = tf_basis.BasisAdam(tables=[table], compression_ratio=ratio)
    optimizer.build([table])
    rng = np.random.default_rng(0)
    ids = [tf.constant(rng.integers(0, rows, batch)) for _ in range(steps)]
    values = tf.constant(rng.normal(size=(batch, dim)), tf.float32)
    shadows = diagnostics.ShadowRows(optimizer, rows=64)

    def traced():
        def step(indices):
            slices = tf.IndexedSlices(values, indices, [rows, dim])
            optimizer.apply_gradients([(slices, table)])

        return tf.function(step).get_concrete_function(ids[0])

    plain = traced()
    with shadows.attached():
        watched = traced()
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    for indices in ids:
        for name, step in (("plain", plain), ("watched", watched)):
            start = time.perf_counter()
            step(indices)
            times[name].append(time.perf_counter() - start)
    before, start = peak(), time.perf_counter()
    found = diagnostics.report(optimizer, shadows)
    seconds, after = time.perf_counter() - start, peak()
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    return {
        "rows": rows,
        "dim": dim,
        "buckets": found.tables[0]["buckets"],
        "state_bytes": found.state_bytes,
        "report_seconds": seconds,
        "report_peak_bytes": after - before,
        "step_ms": 1e3 * medians["plain"],
        "step_with_shadows_ms": 1e3 * medians["watched"],
    }


def main(arguments: list[str] | None = None) -> dict:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ratio", type=float, default=4.0, help="rows a bucket")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", help="a file for the numbers")
    given = parser.parse_args(arguments)
    found = measure(given.rows, given.dim, given.ratio, given.batch, given.steps)
    share = found["report_peak_bytes"] / found["state_bytes"]
    print(
        f"{found['rows']:,} rows, {found['buckets']:,} buckets of {found['dim']}: "
        f"{found['state_bytes'] / 1e6:.0f} MB of state\n"
        f"report: {found['report_seconds']:.1f} s, peak {share:.2f} of the state\n"
        f"step: {found['step_ms']:.2f} ms, with 64 shadow rows "
        f"{found['step_with_shadows_ms']:.2f} ms"
    )
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return found


if __name__ == "__main__":
    main()
