"""A rank that dies, sleeps or leaves early: the others end, and say why."""

from __future__ import annotations

import time

import pytest
from horovod_helpers import run_ranks

from tf_basis.distributed.watch import EXIT_CODE

SCRIPT = """
import os, sys, time
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod_rank import error_of, report
from tf_basis.distributed import DistributedOptimizer, OneBitAdam

hvd.init()
what, timeout = sys.argv[1], float(sys.argv[2])
new = getattr(tf.keras, "Variable", tf.Variable)  # Keras 3, tf_keras
variable = new(np.ones((64, 64), np.float32), name="a_kernel")
if what == "onebit_adam":
    optimizer = OneBitAdam(0.1, warmup_steps=1, timeout=timeout)
else:
    inner = tf.keras.optimizers.SGD(0.1)
    optimizer = DistributedOptimizer(inner, "onebit", timeout=timeout)
if what == "builds" and hvd.rank() == 1:
    time.sleep(25)
optimizer.build([variable])

@tf.function
def apply(g):
    optimizer.apply_gradients([(g, variable)])

for step in range(5):
    if hvd.rank() == 1 and step == 3:
        if what == "dies":
            os._exit(9)
        if what == "leaves":
            sys.exit(0)
        time.sleep(25)  # longer than the others wait
    error = error_of(apply, tf.ones((64, 64)))
    if error:
        report(error)
        sys.exit(3)
"""


def run(what: str, timeout: float) -> list:
    return run_ranks(
        SCRIPT,
        2,
        args=(what, str(timeout)),
        launcher="independent",
        check=False,
        timeout=180,
    )


more = [pytest.param(w, marks=pytest.mark.long) for w in ("onebit_adam", "builds")]


@pytest.mark.parametrize("what", ["sleeps", *more])
def test_a_rank_that_does_not_come_is_named_and_the_job_ends(what):
    waiting, _ = run(what, 10.0)
    assert waiting.exit_code == EXIT_CODE
    assert "rank 0 has waited" in waiting.output
    if what == "builds":
        assert "exchange 1 of tf_basis_optimizer_0_agreement" in waiting.output
        return
    assert "exchange 7 of tf_basis_" in waiting.output  # two a step
    assert "missing: ranks [1]" in waiting.output


@pytest.mark.parametrize("what, code", [("dies", 9), ("leaves", 0)])
def test_a_rank_that_ends_is_an_error_on_the_others(what, code):
    start = time.monotonic()
    left, gone = run(what, 60.0)
    assert (left.exit_code, gone.exit_code) == (3, code)
    assert "Horovod" in left.value or "tf_basis_optimizer_0" in left.value
    assert time.monotonic() - start < 60
