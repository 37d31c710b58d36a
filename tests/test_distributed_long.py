"""Many steps on several ranks: every weight and every shared state stays equal."""

from __future__ import annotations

import numpy as np
import pytest
from horovod_helpers import launch_fixture

pytestmark = pytest.mark.long

two = launch_fixture("thousand_steps", ranks=2, timeout=1500)
four = launch_fixture("thousand_steps", ranks=4, timeout=1500)


@pytest.mark.parametrize("ranks", ["two", "four"])
@pytest.mark.parametrize("name", ["basis_with_onebit_adam", "literal_policy"])
def test_ranks_stay_equal_to_the_bit(request, ranks, name):
    """Batches have duplicates, and another size on every rank."""
    results = request.getfixturevalue(ranks)[name]
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["state"] == results[0]["state"]
        assert result["iterations"] == {"literal_policy": 300}.get(name, 1000)
        assert 0 < result["residuals"] < result["variables"]
        assert np.isfinite(result["loss"])
