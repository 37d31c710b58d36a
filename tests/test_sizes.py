"""Numbers of bytes as arguments."""

from __future__ import annotations

import numpy as np
import pytest

import tf_basis
from tf_basis import hyperparameters, optimizers


def test_sizes():
    sizes = {7: 7, np.int64(9): 9, "12": 12, "3B": 3, "1 kb": 1000, "1.0001kB": 1000}
    sizes |= {
        " 2KiB ": 2048,
        "256MB": 256_000_000,
        "1.5GiB": 3 * 2**29,
        "2TB": 2 * 10**12,
    }
    for value, size in sizes.items():
        assert hyperparameters.parse_bytes("state_budget", value) == size


@pytest.mark.parametrize(
    "size", [0, -1, 1.5, True, "", "MB", "-1MB", "1 QB", "1e6", "0.1B", "1M", [1], ()]
)
def test_what_is_no_size(size, flavor):
    words = "state_budget must be None or a number of bytes above 0"
    with pytest.raises(ValueError, match=words):
        optimizers.for_flavor(flavor).BasisAdam(state_budget=size)
    with pytest.raises(ValueError, match=words):
        tf_basis.plan([(20, 2)], state_budget=size)
