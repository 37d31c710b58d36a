"""A worker of step_scaling.py: steps on one table with a fixed number of threads."""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the C++ op runs on the CPU

import contenders
import measure
import numpy as np
import tensorflow as tf
import workers

from tf_basis.ops import loader

COPY_BYTES = 2**27  # each of the two buffers that the memory copy walks through
IDS = 128 * 4096  # of all batches of one size, so that caches help all sizes alike


def prepare(
    rows: int, dim: int, batches: list[int]
) -> tuple[dict[str, measure.Contender], list[dict]]:
    """The contenders, by batch and name, and what the batches are like."""
    with loader.use("require"):
        loader.compiled()
    variable = contenders.make_variable(rows, dim)
    buffers = tuple(np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    members, about = {}, []
    for batch in batches:
        count = min(max(IDS // batch, 8), 2048)
        table = contenders.make_table(variable, batch, count)
        gradients = [
            tf.random.normal([batch, dim], stddev=0.01, seed=i)
            for i in range(contenders.GRADIENTS)
        ]
        contenders.add_basis(contenders.OP, table, gradients)
        contenders.add_basis(contenders.OP_ADAGRAD, table, gradients)
        contenders.add_copy(table, buffers)
        contenders.add_empty(table, gradients)
        for name, contender in table.contenders.items():
            members[f"{batch} {name}"] = contender
        about.append({"batch": batch, **table.about_batches()})
    return members, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--rows", "--dim", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    machine = measure.machine()  # its load before this benchmark's own
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    members, batches = prepare(arguments.rows, arguments.dim, arguments.batches)
    workers.serve(members, {"machine": machine, "batches": batches})


if __name__ == "__main__":
    main()
