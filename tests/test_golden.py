"""Golden values through the public optimizer: both flavours, op and twin."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    TOLERANCE,
    TableRun,
    assert_state,
    energy_scalar,
    golden_cases,
    golden_hyper,
)
from reference.basis_adam import BasisAdamTable, Hyper


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("case", golden_cases())
@pytest.mark.filterwarnings("ignore:.*scalar.*:UserWarning")
def test_golden(flavor, backend, case, function):
    hyper = Hyper(**golden_hyper(case))
    # Only the owners and the users of first moments come from the reference.
    layout = BasisAdamTable(case["theta0"], hyper, case["bucket_of_row"])
    run = TableRun(case["theta0"], flavor, function, **golden_hyper(case))
    buckets = np.asarray(run.optimizer.buckets(run.variable))
    np.testing.assert_array_equal(buckets, case["bucket_of_row"])
    for step in case["steps"]:
        run.step(step["indices"], step["values"])
        state = run.state()
        assert_state(state, step, hyper, layout.buckets_with_first_moment())
        if hyper.invariant_scalar == "energy":
            _compare_energy_scalar(state, step, layout)


def _compare_energy_scalar(state, step, layout: BasisAdamTable):
    """In energy mode s is no state: recompute it for the rows just touched."""
    touched = np.unique(np.asarray(step["indices"], np.int64))
    scalar = energy_scalar(state, layout.bucket, layout.owners, layout.hyper)
    np.testing.assert_allclose(
        scalar[touched], np.array(step["scalar"])[touched], **TOLERANCE
    )
