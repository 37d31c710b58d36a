"""FBGEMM's place among the contenders of step_time.py: `fbgemm_step.py` as a worker."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import workers
from contenders import FBGEMM, Table

SCRIPT = Path(__file__).with_name("fbgemm_step.py")
OPTION = "--fbgemm-python"
RUNTIME_BYTES = 0.4e9  # PyTorch and the batches


def _start(python: str, threads: int, *arguments: object) -> workers.Worker:
    command = [python, str(SCRIPT), "--threads", str(threads), *map(str, arguments)]
    # The packages of this environment are not for that one.
    environment = {"PYTHONPATH": None, "OMP_NUM_THREADS": str(threads)}
    # Threads that wait for one another sleep: they would spin for 50 ms at a time where
    # another program has taken a core, and into the turns of the others.
    environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    whose = f"{OPTION} must be a Python with torch and fbgemm_gpu, received {python!r}"
    return workers.Worker(command, whose, environment)


def versions(python: str) -> dict[str, Any]:
    """Of torch and fbgemm_gpu there; raises WorkerError where they are not."""
    worker = _start(python, 1)
    found = worker.ready()
    worker.close()
    return found


def add(table: Table, gradients: list, python: str, threads: int) -> None:
    """Enters FBGEMM with a table of its own, and the batches of this one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.npz"
        np.savez(path, indices=np.stack(table.indices), gradients=np.stack(gradients))
        arguments = ("--batches", path, "--rows", table.rows, "--name", FBGEMM)
        worker = _start(python, threads, *arguments)
        about = worker.ready()
    table.contenders[FBGEMM] = workers.Remote(FBGEMM, None, worker=worker)
    table.state_bytes[FBGEMM] = about["state_bytes"]
