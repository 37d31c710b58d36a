"""examples/horovod_dlrm.py as a user starts it: on two ranks, and in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT
from horovod_helpers import run_ranks

EXAMPLE = ROOT / "examples" / "horovod_dlrm.py"
STEPS = 12
SMALL = ("--data", "synthetic", "--examples", "6000", "--batch-size", "64")
SMALL += ("--steps", str(STEPS))


def figures(output: str) -> dict[str, float]:
    """What rank 0 printed."""
    found = {}
    for name, sent in re.findall(
        r"(warm-up|step): [\d.]+ ms per step, ([\d,]+) bytes", output
    ):
        found[name] = float(sent.replace(",", ""))
    (found["auc"],) = map(float, re.findall(r"AUC of 1,200 test.*: ([\d.]+)", output))
    return found


def on_two_ranks(*arguments: str) -> dict[str, float]:
    output = run_ranks(EXAMPLE, 2, args=(*SMALL, *arguments), timeout=240)[0].output
    assert f"2 ranks, 4,800 examples to train on, {STEPS} steps" in output
    return figures(output)


@pytest.mark.long
def test_one_bit_sends_less_than_float32():
    one_bit = on_two_ranks("--compression", "onebit", "--warmup-steps", "6")
    plain = on_two_ranks("--compression", "none")
    assert 0.4 < one_bit["auc"] < 1 and 0.4 < plain["auc"] < 1
    # In the warm-up the towers travel in float32: about what plain sends.
    assert one_bit["warm-up"] == pytest.approx(plain["step"], rel=0.1)
    # The towers have 69,073 parameters; of a ring each of two ranks sends them once.
    saved = plain["step"] - one_bit["step"]
    assert 0.85 < saved / (4 * 69_073) < 1.0


def test_one_process():
    environment = {k: v for k, v in os.environ.items() if "HOROVOD" not in k}
    environment |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *SMALL, "--compression", "fp16"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "1 ranks, 4,800 examples" in done.stdout
    assert 0.4 < figures(done.stdout)["auc"] < 1
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--data", "none.csv"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2 and "none.csv: no such file" in done.stderr


def test_what_synthetic_clicks_are():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import dlrm_data
    finally:
        sys.path.pop(0)
    first, again = dlrm_data.synthetic(5000, seed=3), dlrm_data.synthetic(5000, seed=3)
    np.testing.assert_array_equal(first.rows, again.rows)
    np.testing.assert_array_equal(first.label, again.label)
    assert first.n_train == 4000 and 0.15 < first.label.mean() < 0.5
    assert first.rows.max() < first.n_rows == sum(dlrm_data.SYNTHETIC_SIZES)
    # Each field's rows are its own, the most frequent first.
    starts = np.cumsum((0, *dlrm_data.SYNTHETIC_SIZES))
    for field, column in enumerate(first.rows.T):
        assert starts[field] <= column.min() < starts[field] + 5
        assert column.max() < starts[field + 1]
