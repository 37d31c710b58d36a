"""Peak memory of building, training and saving one large table.

    python benchmarks/large_table.py                      # 10M x 64, Keras 3
    TF_USE_LEGACY_KERAS=1 python benchmarks/large_table.py --formats export checkpoint

A model of one `EmbeddingCollection` table and a dense layer is built, compiled with
`BasisAdam`, trained for some steps and saved; each format in a process of its own, so
that its peak is its own. Printed are peaks of resident memory over the bytes of the
table: of the whole process after each phase, and of all phases without what Python and
TensorFlow took before them.

Claimed: the latter is at most 1.3 for 10M x 64 with `tf.train.Checkpoint` and
`export_saved_model`. Keras's own files take copies of what they write.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

CLAIM = 1.3
CLAIMED = ("checkpoint", "export")
FORMATS = (*CLAIMED, "weights.h5", "keras")


def peak() -> int:
    """Bytes of resident memory that this process has had at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(rows: int, dim: int, steps: int, target: str) -> dict[str, int]:
    """Phase -> peak in bytes until its end, in this process."""
    import numpy as np
    import tensorflow as tf

    import tf_basis
    from tf_basis.layers import EmbeddingCollection, FeatureConfig, TableConfig

    tf.zeros(1).numpy()
    peaks = {"imported": peak()}
    ids = tf.keras.Input((), dtype="int64", name="item")
    feature = FeatureConfig("item", TableConfig("item", rows, dim))
    vector = EmbeddingCollection([feature], name="tables")({"item": ids})["item"]
    model = tf.keras.Model({"item": ids}, tf.keras.layers.Dense(1)(vector))
    peaks["built"] = peak()
    model.compile(tf_basis.BasisAdam(), "mse")
    items = np.random.default_rng(0).integers(0, rows, 256 * steps)
    label = np.ones((len(items), 1), np.float32)
    model.fit({"item": items}, label, batch_size=256, verbose=0)
    peaks["trained"] = peak()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "saved")
        if target == "checkpoint":
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        elif target == "export":
            tf_basis.export_saved_model(model, path)
        elif target == "weights.h5":
            model.save_weights(f"{path}.weights.h5")
        else:
            model.save(f"{path}.keras")
    peaks["saved"] = peak()
    return peaks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=CLAIMED)
    parser.add_argument("--one", choices=FORMATS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.rows, args.dim, args.steps, args.one)))
        return 0
    table, held = 4 * args.rows * args.dim, True
    print(f"table of {args.rows:,} x {args.dim}: {table:,} bytes")
    columns = ("imported", "built", "trained", "saved", "without imports")
    print(f"{'peak / table':<14}" + "".join(f"{c:>17}" for c in columns))
    sizes = ["--rows", str(args.rows), "--dim", str(args.dim)]
    for target in args.formats:
        command = [sys.executable, __file__, *sizes, "--steps", str(args.steps)]
        done = subprocess.run(
            [*command, "--one", target], stdout=subprocess.PIPE, text=True, check=True
        )
        peaks = json.loads(done.stdout.splitlines()[-1])
        ratios = [value / table for value in peaks.values()]
        ratios.append(ratios[-1] - ratios[0])
        print(f"{target:<14}" + "".join(f"{r:>17.3f}" for r in ratios), flush=True)
        held &= ratios[-1] <= CLAIM or target not in CLAIMED
    print(f"within {CLAIM} where it is claimed: {'holds' if held else 'DOES NOT HOLD'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
