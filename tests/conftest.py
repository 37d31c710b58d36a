"""Fixtures: the op or its twin, the Keras flavour, and a seeded generator."""

from __future__ import annotations

import importlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import pytest
from helpers import BACKENDS, FLAVORS, ROOT, active_flavor
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


# Where the quick run tries tf_keras beside Keras 3 in one process too.
BOTH_IN_ONE_PROCESS = ("test_basis_adam.py", "test_errors.py")
# What has little or nothing to do with a flavour of Keras.
WITHOUT_KERAS = (
    "test_benchmarks",
    "test_build.py",
    "test_checksums.py",
    "test_command_line.py",
    "test_determinism.py",
    "test_diagnostics_",
    "test_docs.py",
    "test_examples_horovod.py",
    "test_formats.py",
    "test_hashing.py",
    "test_horovod_failures.py",
    "test_horovod_harness.py",
    "test_install",
    "test_movielens_",
    "test_onebit_exchange.py",
    "test_onebit_messages.py",
    "test_onebit_step.py",
    "test_policy.py",
    "test_properties.py",
    "test_quantize",
    "test_random_calls.py",
    "test_reference.py",
    "test_sizes.py",
)
# Sweeps over the options of the rules, and the contracts over all optimizers.
SWEEPS = ("test_family_", "test_parity.py", "test_contract.py")
# Whole models: what the twin does is what the op does, which the sweeps show.
OF_MODELS = (
    "test_basis_adam_fit.py",
    "test_basis_adam_indices.py",
    "test_ecosystem",
    "test_grow_",
    "test_migration_models.py",
    "test_reported_cases.py",
    "test_sparse_",
)
# Slow to start, and hardly another thing on tf_keras: long there.
STARTED_ON_KERAS3 = {
    "test_auto.py": "checks",
    "test_balanced.py": "checks",
    "test_debugging.py": "checks",
    "test_distributed_checkpoint.py": "nursery",
    "test_distributed_optimizer.py": "checks",
    "test_onebit_options.py": "checks",
    "test_sparse_replicas.py": "flavor",
}
SLOW_ON_TF_KERAS = (
    "test_eager_graph_and_xla_agree",
    "test_keras_file_resumes_in_a_new_process",
    "test_mirrored_replicas_grow_alike",
    "test_peak_memory_of_a_step_on_a_large_table",
    "test_rows_behind_int32_in_the_twin",
    "test_steps_that_the_optimizer_compiles_itself",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    """What both processes of `make test`, one for each flavour, need not run twice.

    Of tests of both flavours, that of tf_keras leaves out the Keras 3 half, and in
    that of Keras 3 the tf_keras half is long, but for a sample. Of sweeps all but every
    fifth are long, and in that of tf_keras tests without Keras and those that start
    much. Tests of whole models are long with the twin.
    """
    active, kept, done = active_flavor(), [], []
    sweep = 0
    for item in items:
        name = item.path.name
        call = getattr(item, "callspec", None)
        other = call is not None and call.params.get("flavor", active) != active
        twin = call is not None and call.params.get("backend") == "twin"
        if call is not None and name.startswith(SWEEPS):
            again = other or sweep % 5 > 0
            sweep += not other
        elif active == "keras3":
            again = other and not name.startswith(BOTH_IN_ONE_PROCESS)
        else:
            again = name.startswith(WITHOUT_KERAS)
            again |= STARTED_ON_KERAS3.get(name) in item.fixturenames
            again |= item.name.startswith(SLOW_ON_TF_KERAS)
        if again or (twin and name.startswith(OF_MODELS)):
            item.add_marker(pytest.mark.long)
        (done if other and active == "tf_keras" else kept).append(item)
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


@pytest.fixture(scope="module")
def benchmark():
    """Imports a script of benchmarks/."""
    folder = str(ROOT / "benchmarks")
    sys.path.append(folder)
    yield importlib.import_module
    sys.path.remove(folder)
