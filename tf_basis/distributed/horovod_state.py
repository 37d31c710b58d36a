"""Which Horovod is installed here, and whether two processes can use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tf_basis.distributed.horovod_build import InstallError

# What a build can have, the variables that ask for it, and their value.
_FEATURES = {
    "gloo": (("HOROVOD_WITH_GLOO",), "1"),
    "mpi": (("HOROVOD_WITH_MPI",), "1"),
    "nccl": (("HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"), "NCCL"),
}

_LOOK = """
import importlib.util, json, os
from importlib import metadata
try:
    version = metadata.version("horovod")
except metadata.PackageNotFoundError:
    version = None
found = importlib.util.find_spec("horovod")
answer = {"version": version if found else None}
if found:
    root = os.path.dirname(found.origin)
    try:
        with open(os.path.join(root, "metadata.json")) as file:
            answer["tensorflow"] = json.load(file).get("tensorflow")
    except (OSError, ValueError):
        answer["tensorflow"] = None
    try:
        import horovod.tensorflow as hvd
        answer["features"] = {
            name: bool(getattr(hvd, name + "_built")()) for name in FEATURES
        }
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        answer["error"] = f"{type(error).__name__}: {lines[0]}"
print("\\n" + json.dumps(answer))
"""

_CHECK = """
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
mine = np.arange(1000, dtype=np.float32) * (hvd.rank() + 1)
with tf.device("CPU:0"):
    total = hvd.allreduce(tf.constant(mine), op=hvd.Sum).numpy()
right = hvd.size() == 2 and np.array_equal(total, np.arange(1000) * 3)
print(f"rank {hvd.rank()} of {hvd.size()}: {'right' if right else 'WRONG'}", flush=True)
raise SystemExit(not right)
"""


@dataclass(frozen=True)
class State:
    """The Horovod of this environment.

    Attributes:
      version: its version, None if there is none.
      tensorflow: the version of TensorFlow that it was built for, None if it
        does not say.
      features: whether it has "gloo", "mpi", "nccl".
      error: why it cannot be imported, None if it can.
    """

    version: str | None = None
    tensorflow: str | None = None
    features: Mapping[str, bool] = field(default_factory=dict)
    error: str | None = None

    def reason_to_build(
        self, tensorflow: str, environ: Mapping[str, str]
    ) -> str | None:
        """Why this Horovod will not do, None if it will.

        Args:
          tensorflow: the version of TensorFlow here.
          environ: the environment, in which Horovod's variables ask for features.
        """
        if self.version is None:
            return "it is not installed"
        if self.tensorflow not in (None, tensorflow):
            return (
                f"the installed one was built for TensorFlow {self.tensorflow}, this "
                f"is {tensorflow}"
            )
        if self.error is not None:
            return f"the installed one cannot be imported ({self.error})"
        for feature, (names, value) in _FEATURES.items():
            for name in names:
                if environ.get(name) == value and not self.features.get(feature):
                    return f"the installed one lacks what {name}={value} asks for"
        return None


def find() -> State:
    """Looks in a process of its own: a Horovod that does not fit may crash it."""
    child = subprocess.run(
        [sys.executable, "-c", f"FEATURES = {list(_FEATURES)!r}\n{_LOOK}"],
        env=_environment(),
        cwd=tempfile.gettempdir(),  # a folder called horovod here is not meant
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or ["no message"]
        # Only importing what is there can end that process.
        return State("of an unknown version", error=f"it crashes: {lines[-1]}")
    return State(**json.loads(child.stdout.strip().splitlines()[-1]))


def check_two_ranks(state: State, seconds: float = 180) -> None:
    """Adds numbers of two processes that Horovod's own launcher starts.

    Raises:
      InstallError: they hang, fail, or the sum is wrong; shows what they printed.
    """
    how = ["--gloo"] if state.features.get("gloo") else ["--mpi"]
    if sys.platform == "linux":
        how += ["--network-interfaces", "lo"]
    with tempfile.TemporaryDirectory(prefix="tf_basis_check_") as folder:
        script = Path(folder, "check.py")
        script.write_text(_CHECK, encoding="utf-8")
        launch = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", *how]
        try:
            done = subprocess.run(
                [*launch, sys.executable, str(script)],
                env=_environment(),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = _text(error.stdout), None
    if code == 0 and all(f"rank {rank} of 2: right" in output for rank in (0, 1)):
        return
    if "WRONG" in output:
        what = "gives a wrong sum"
    elif code is None:
        what = f"does not end within {seconds:g} seconds"
    else:
        what = f"fails with exit status {code}"
    lines = [f"    {line}" for line in output.strip().splitlines()[-15:]]
    raise InstallError(
        "\n".join(
            [
                f"Horovod {state.version} is installed, but an allreduce of two "
                f"processes {what}. What it printed at last:",
                *lines,
                "`tf-basis install-horovod --force` builds it again.",
            ]
        )
    )


def _environment() -> dict[str, str]:
    # The variables of a build, or of a job that we are part of, are not for the check.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


def _text(output: bytes | str | None) -> str:
    # What a time-out leaves is bytes even in text mode.
    if isinstance(output, bytes):
        return output.decode(errors="replace")
    return output or ""
