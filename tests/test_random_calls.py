"""Ops called with arguments at random: an error or a result, never a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, TESTS


def call_at_random(calls: int, seed: int, tmp_path, timeout: int) -> dict:
    """Per op, how many calls gave a result and how many an error."""
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
    check(call_at_random(420, 1, tmp_path, timeout=120))


@pytest.mark.long
def test_100_000_random_calls(tmp_path):
    counts = call_at_random(100_000, 2, tmp_path, timeout=7200)
    check(counts)
    assert sum(map(sum, counts.values())) == 100_000
