"""The same batch gives the same bits: threads, eager or function, batch order."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    BACKENDS,
    TableRun,
    assert_same_bits,
    assert_within_ulps,
    random_batch,
    run_python,
    state_digest,
)

ROWS, DIM, BATCH = 30_000, 24, 12_000
MODES = {
    "default": {},
    "exclusive_rows": {"exclusive_rows": 64, "row_clipnorm": 5.0},
    "original": {
        "momentum": "shared",
        "invariant_scalar": "learned",
        "scalar_learning_rate": 0.1,
        "collision_reduce": "sequential",
        "bias_correction": False,
    },
    "shared_sum": {
        "momentum": "shared",
        "collision_reduce": "sum",
        "weight_decay": 0.1,
        "hashing": "murmur3",
    },
}

THREADS_SOURCE = """
import sys
import tensorflow as tf
threads = int(sys.argv[1])
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
import test_determinism
test_determinism.print_digests()
"""


def steps(seed: int = 3, count: int = 3):
    rng = np.random.default_rng(seed)
    return [random_batch(rng, ROWS, DIM, BATCH) for _ in range(count)]


def make_run(mode: str, function: bool = False) -> TableRun:
    theta = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    return TableRun(
        theta, function=function, num_buckets=300, learning_rate=0.02, **MODES[mode]
    )


def print_digests() -> None:
    """One line for each backend and mode: the hash of all state after some steps."""
    from tf_basis.ops import loader

    batches = steps()
    for backend, ops_mode in BACKENDS.items():
        with loader.use(ops_mode):
            for mode in MODES:
                run = make_run(mode)
                for indices, values in batches:
                    run.step(indices, values)
                print(backend, mode, state_digest(run.state()), flush=True)


@pytest.mark.parametrize(
    "threads", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_any_thread_count_gives_the_same_bits(threads):
    output, other = (run_python(THREADS_SOURCE, str(n)).stdout for n in (1, threads))
    lines = output.splitlines()
    assert len(lines) == len(BACKENDS) * len(MODES)
    assert len({line.split()[-1] for line in lines}) >= len(MODES)
    assert other == output, f"{threads} threads differ from one"


@pytest.mark.parametrize("mode", list(MODES))
def test_eager_equals_function(backend, mode):
    eager, traced = make_run(mode), make_run(mode, function=True)
    for indices, values in steps():
        eager.step(indices, values)
        traced.step(indices, values)
        assert_same_bits(eager.state(), traced.state())


@pytest.mark.parametrize("mode", list(MODES))
def test_repeated_runs_are_identical(backend, mode):
    first, second = make_run(mode), make_run(mode)
    for run in (first, second):
        for indices, values in steps(count=2):
            run.step(indices, values)
    assert_same_bits(first.state(), second.state())


@pytest.mark.parametrize("mode", list(MODES))
def test_permuting_the_batch_changes_at_most_the_last_bit(backend, mode):
    (indices, values), *_ = steps(count=1)
    shuffled = np.random.default_rng(1).permutation(len(indices))
    runs = make_run(mode), make_run(mode)
    runs[0].step(indices, values)
    runs[1].step(indices[shuffled], values[shuffled])
    assert_within_ulps(runs[0].state(), runs[1].state(), ulps=1)
    # Sums are accumulated in float64, so hardly any value may differ at all.
    different = np.mean(runs[0].theta != runs[1].theta)
    assert different < 1e-4


def test_duplicates_are_summed_not_applied_in_turn(backend):
    """k copies of one id count as one touch with the summed gradient."""
    theta = np.ones((50, 3), np.float32)
    runs = [TableRun(theta, num_buckets=5, learning_rate=0.1) for _ in range(2)]
    values = np.array([[0.5, -1.0, 2.0], [0.25, 0.5, -1.0], [1.0, 1.0, 1.0]])
    runs[0].step([7, 7, 9], values)
    runs[1].step([9, 7], np.stack([values[2], values[0] + values[1]]))
    assert_same_bits(runs[0].state(), runs[1].state())
