"""Fixtures: the op or its twin, the Keras flavour, and a seeded generator."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import pytest
from helpers import BACKENDS, FLAVORS, active_flavor
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
settings.load_profile("suite")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: heavy sweeps, not in the quick run")
    config.addinivalue_line("markers", "any_flavor: run in one flavour's process only")


def pytest_collection_modifyitems(config, items):
    """Tests of both flavours in one process need not run twice on Keras 3.

    `make test` runs the suite in a process for each flavour; that of tf_keras leaves
    out the Keras 3 half of these tests, and those marked `any_flavor`, which the other
    process has run.
    """
    if active_flavor() == "keras3":
        return
    kept, done = [], []
    for item in items:
        call = getattr(item, "callspec", None)
        repeated = call is not None and call.params.get("flavor") == "keras3"
        repeated |= item.get_closest_marker("any_flavor") is not None
        (done if repeated else kept).append(item)
    config.hook.pytest_deselected(items=done)
    items[:] = kept


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    """Run the test with the C++ op, then with its pure-TF twin."""
    from tf_basis.ops import loader

    with loader.use(BACKENDS[request.param]):
        yield request.param


@pytest.fixture(params=list(FLAVORS))
def flavor(request):
    """Both Keras flavours in one process (for tests without models)."""
    return request.param


@pytest.fixture
def rng(request):
    """A generator seeded from the test's name."""
    return np.random.default_rng(list(request.node.name.encode()))
