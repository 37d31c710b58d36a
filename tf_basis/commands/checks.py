"""The checks of `tf-basis doctor`: each says ok, note or failed, and never raises."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

from tf_basis._version import __version__

OLDEST_PYTHON, OLDEST_TENSORFLOW = (3, 10), (2, 16)


class Check(NamedTuple):
    """What one check has found.

    Attributes:
      name: of what was looked at.
      status: "ok", "note" (nothing is wrong, but it is worth knowing) or "failed".
      detail: what was found, and what to do.
    """

    name: str
    status: str
    detail: str


def run_all() -> list[Check]:
    """All checks, in an order in which the first failure explains later ones."""
    found = [_checked("tf_basis", lambda: ("ok", __version__))]
    found.append(_checked("python", _python))
    found.append(_checked("tensorflow", _tensorflow))
    if found[-1].status == "failed":  # all else needs it
        return found
    others = {
        "keras": lambda: _keras("keras", "keras3"),
        "tf_keras": lambda: _keras("tf_keras", "tf_keras"),
        "tf.keras": _active_keras,
        "ops": _ops,
        "horovod": _horovod,
        "self-test of steps": _steps,
        "self-test of one bit": _one_bit,
    }
    return found + [_checked(name, check) for name, check in others.items()]


def _checked(name: str, check: Callable[[], tuple[str, str]]) -> Check:
    try:
        return Check(name, *check())
    except Exception as error:  # whatever is wrong is what was asked for
        lines = str(error).strip().splitlines() or [""]
        return Check(name, "failed", f"{type(error).__name__}: {lines[0]}")


def _python() -> tuple[str, str]:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return "failed", f"{version}: tf_basis needs 3.10 or newer"
    return "ok", version


def _tensorflow() -> tuple[str, str]:
    import tensorflow as tf

    version = tf.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TENSORFLOW:
        return "failed", f"{version}: tf_basis needs 2.16 or newer"
    gpus = len(tf.config.list_physical_devices("GPU"))
    return "ok", f"{version}, {gpus or 'no'} GPU{'s' if gpus > 1 else ''}"


def _keras(package: str, flavor: str) -> tuple[str, str]:
    from tf_basis.adapters import flavor as flavors

    active = flavors.active() == flavor
    if importlib.util.find_spec(package) is None:
        if active:
            return "failed", "not installed, and tf.keras is this one here"
        return "note", "not installed"
    flavors.load_adapter(flavor)  # which fails on another backend
    return "ok", metadata.version(package)


def _active_keras() -> tuple[str, str]:
    from tf_basis.adapters import flavor as flavors

    value = os.environ.get("TF_USE_LEGACY_KERAS")
    active = {"keras3": "Keras 3", "tf_keras": "tf_keras"}[flavors.active()]
    return "ok", f"is {active} (TF_USE_LEGACY_KERAS is {value or 'not set'})"


def _ops() -> tuple[str, str]:
    from tf_basis.ops import loader

    status = loader.status()
    build = status["build_info"] or {}
    if status["loaded"] and status["mode"] != "off":
        compiler = build.get("compiler_version", "an unknown compiler")
        return (
            "ok",
            f"C++ ops, built for TensorFlow {build.get('tensorflow_version')} "
            f"with {compiler}",
        )
    there = os.path.exists(status["path"]) and status["mode"] != "off"
    if status["mode"] == "require" or there:
        return "failed", f"not used: {status['reason']}; {loader.REBUILD}"
    return "note", f"plain TensorFlow, which is slower: {status['reason']}"


def _horovod() -> tuple[str, str]:
    import tensorflow as tf

    from tf_basis.distributed import horovod_state

    try:
        metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return "note", "not installed, for several processes: tf-basis install-horovod"
    there = horovod_state.find()
    reason = there.reason_to_build(tf.__version__, os.environ)
    if reason is not None:
        return "failed", f"{reason}: tf-basis install-horovod --force"
    features = [name for name, has in there.features.items() if has]
    built = there.tensorflow or "an unknown version"
    return "ok", f"{there.version}, built for TensorFlow {built} with " + (
        ", ".join(features) or "neither Gloo nor MPI"
    )


# ---- self-tests -----------------------------------------------------------------

_ROWS, _DIM, _STEPS = 200, 8, 5


def _steps() -> tuple[str, str]:
    """BasisAdam on the C++ op and on plain TensorFlow must agree."""
    from tf_basis.ops import loader

    twin = _train("off")
    if loader.compiled() is None:
        return "ok", f"{_STEPS} steps of BasisAdam in plain TensorFlow are finite"
    op = _train("require")
    for name, values in twin.items():
        if not np.allclose(values, op[name], rtol=1e-5, atol=1e-7):
            worst = float(np.max(np.abs(values - op[name])))
            return "failed", (
                f"{name} of C++ op and plain TensorFlow differ by {worst:.3g} after "
                f"{_STEPS} steps of BasisAdam; {loader.REBUILD}"
            )
    return "ok", f"{_STEPS} steps of BasisAdam: C++ op and plain TensorFlow agree"


def _train(mode: str) -> dict[str, np.ndarray]:
    import tensorflow as tf

    from tf_basis.ops import loader
    from tf_basis.optimizers import BasisAdam

    rng = np.random.default_rng(7)
    with loader.use(mode), tf.device("CPU:0"):
        table = tf.Variable(tf.ones([_ROWS, _DIM]), name="table")
        optimizer = BasisAdam(0.1, tables=[table], num_buckets=10, exclusive_rows=3)
        optimizer.build([table])
        for _ in range(_STEPS):
            rows = tf.constant(rng.integers(0, _ROWS, 64))
            values = tf.constant(rng.normal(size=(64, _DIM)), tf.float32)
            gradient = tf.IndexedSlices(values, rows, [_ROWS, _DIM])
            optimizer.apply_gradients([(gradient, table)])
        found: dict[str, Any] = optimizer.table_state(table)
        found["table"] = table.numpy()
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise ArithmeticError(f"{name} is not finite after {_STEPS} steps")
    return found


def _one_bit() -> tuple[str, str]:
    """What the bits say and what is left over must make what was put in."""
    import tensorflow as tf

    from tf_basis.distributed import quantize
    from tf_basis.ops import loader

    values = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    messages = []
    modes = ["off"] if loader.compiled() is None else ["off", "require"]
    for mode in modes:
        with loader.use(mode), tf.device("CPU:0"):
            residual = tf.Variable(tf.zeros([len(values)]))
            how = {"bits": 1, "block": 2048}
            message, _ = quantize.quantize(residual, tf.constant(values), **how)
            said = quantize.dequantize(message, len(values), **how)
            off = float(tf.reduce_max(tf.abs(said + residual - values)))
        if off > 1e-6:
            return "failed", f"bits and residual miss the values by {off:.3g}"
        messages.append(message.numpy())
    if not all(np.array_equal(messages[0], other) for other in messages):
        return "failed", f"C++ op and plain TensorFlow differ; {loader.REBUILD}"
    share = messages[0].nbytes / values.nbytes
    return "ok", f"bits and residual make the values again, in {share:.1%} of the bytes"
