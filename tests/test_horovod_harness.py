"""The harness: results by rank, failing, dying and hanging ranks."""

from __future__ import annotations

import time
from pathlib import Path

import horovod_helpers
import numpy as np
import pytest
from helpers import active_flavor
from horovod_helpers import RanksFailedError, launch_fixture, run_ranks

checks = launch_fixture("harness", ranks=2)

DIES = """
import os, horovod.tensorflow as hvd, tensorflow as tf
from horovod_rank import error_of, report
hvd.init()
hvd.allreduce(tf.ones([4]), name="first")
if hvd.rank() == 1:
    os._exit(7)
report(error_of(lambda: hvd.allreduce(tf.ones([4]), name="second")))
"""


def marked_processes() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if horovod_helpers._MARK.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_every_rank_returns_its_result(checks):
    for rank, result in enumerate(checks["sum_of_ranks"]):
        assert (result["rank"], result["size"]) == (rank, 2)
        np.testing.assert_array_equal(result["total"], np.full(3, 3.0, np.float32))
    assert checks["error_text"] == ["ValueError: rank 0", "ValueError: rank 1"]


def test_a_failing_check_is_told_and_the_next_ones_run(checks):
    with pytest.raises(AssertionError, match=r"rank 1(?s:.*)RuntimeError: only here"):
        checks["one_rank_fails"]
    with pytest.raises(AssertionError, match="no result of 'unknown'"):
        checks["unknown"]


def test_ranks_have_our_flavor_and_one_thread(checks):
    module = {"keras3": "keras", "tf_keras": "tf_keras"}[active_flavor()]
    for result in checks["flavor"]:
        assert result == {"module": module, "threads": 1, "cycle": "1"}


def test_survivors_of_a_dead_rank_report():
    first, second = run_ranks(DIES, 2, launcher="independent", check=False)
    assert (first.exit_code, second.exit_code) == (0, 7)
    assert second.value is None
    assert first.value.startswith("UnknownError: ")
    assert "HorovodAllreduce" in first.value


@pytest.mark.long
def test_a_hanging_rank_is_killed_and_shown():
    started = time.monotonic()
    code = "import time\nprint('still here', flush=True)\ntime.sleep(600)"
    with pytest.raises(RanksFailedError, match=r"was killed(?s:.*)still here") as error:
        run_ranks(code, 2, timeout=15, args=("hang-of-the-harness",))
    assert time.monotonic() - started < 60
    assert [result.exit_code for result in error.value.results] == [None, None]
    assert not [p for p in marked_processes() if "hang-of-the-harness" in p]
