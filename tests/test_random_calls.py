"""Ops called with arguments at random: an error or a result, never a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import random_calls
import tensorflow as tf
from helpers import BACKENDS, ROOT, TESTS

from tf_basis.distributed.quantize import quantize, statistics
from tf_basis.hashing import bucket_of_rows
from tf_basis.ops import loader


def in_a_process(calls: int, seed: int, tmp_path, timeout: int) -> dict:
    """`random_calls.call_at_random` where a crash ends only that process."""
    progress = tmp_path / "progress"
    paths = os.pathsep.join([str(TESTS), str(ROOT)])
    done = subprocess.run(
        [sys.executable, TESTS / "random_calls.py", str(calls), str(seed), progress],
        env={**os.environ, "PYTHONPATH": paths, "TF_BASIS_OPS": "require"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    at = progress.read_text() if progress.exists() else "none"
    assert done.returncode == 0, f"call {at} of seed {seed}: {done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check(counts: dict, ops: int = 14) -> None:
    """Every op was reached both ways, or this would test nothing."""
    assert len(counts) == ops
    for op, (done, refused) in counts.items():
        assert done > 0 and refused > 0, op


def test_some_random_calls(tmp_path):
    """In this process, which a crash would end: another takes seconds to start."""
    with loader.use("require"):
        check(random_calls.call_at_random(420, 1, str(tmp_path / "progress")))


@pytest.mark.long
def test_100_000_random_calls(tmp_path):
    counts = in_a_process(100_000, 2, tmp_path, timeout=7200)
    check(counts)
    assert sum(map(sum, counts.values())) == 100_000


# ---- what such calls and the fuzzers found -----------------------------------------


def test_a_list_of_handles_is_refused():
    first, second = tf.Variable(tf.ones(8)), tf.Variable(tf.ones(8))
    both = tf.stack([first.handle, second.handle])
    message = tf.zeros(5, tf.uint8)
    with (
        loader.use("require"),
        pytest.raises(
            tf.errors.InvalidArgumentError, match=r"must be one variable.*\[2\]"
        ),
    ):
        loader.compiled().tf_basis_dequantize_into(both, message, bits=1, block=8)
    np.testing.assert_array_equal(first.numpy(), 1)


def test_a_block_may_be_longer_than_memory():
    """In the op; the twin fills up the last block."""
    residual, values = tf.Variable(tf.zeros(9)), np.arange(9, dtype=np.float32)
    sums = []
    for block in (16, 2**50):
        residual.assign(tf.zeros(9))
        with loader.use("require"):
            message, _ = quantize(residual, values, bits=1, block=block)
            sums.append(statistics(residual, message, bits=1, block=block).numpy())
    np.testing.assert_array_equal(*sums)
    assert sums[0][0] == 36


def test_consistent_hash_of_the_longest_tables():
    """Jumps past int64 end the search, where they once never did."""
    rows, sizes = np.arange(20), (2**62, 2**62 - 1, 0, "consistent", 3)
    found = []
    for mode in BACKENDS.values():
        with loader.use(mode):
            found.append(bucket_of_rows(rows, *sizes))
    np.testing.assert_array_equal(*found)
    assert found[0].min() >= 0 and found[0].max() > 2**55
