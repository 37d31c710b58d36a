"""Ranks join, leave and are killed, and training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from helpers import TESTS, active_flavor
from horovod_helpers import _environment, _kill_marked, need_horovod
from horovod_nursery import Nursery

STEPS = 300
FIRST, SECOND = "localhost", "127.0.0.1"  # one machine, but hosts to Horovod


class Job:
    """An elastic job whose hosts are lines of a file."""

    def __init__(self, folder: Path, what: str, steps: int, pace: float, **env) -> None:
        need_horovod()
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.hosts(FIRST, SECOND)
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
        script.chmod(0o755)
        environment = _environment(active_flavor(), folder, 900, self.mark)
        # Ranks that train wait for those that start, and TensorFlow starts slowly.
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "200"
        environment.update(TF_BASIS_PACE=str(pace), **env)
        command = [
            *(sys.executable, "-m", "horovod.runner.launch", "--gloo"),
            *("-np", "2", "--min-np", "1", "--max-np", "3"),
            *("--network-interfaces", "lo"),
            *("--host-discovery-script", str(script)),
            *(sys.executable, str(TESTS / "elastic_training.py"), what),
            *(str(folder), str(steps)),
        ]
        self._output = open(folder / "output", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        _kill_marked(self.mark)

    def hosts(self, *names: str) -> None:
        scratch = self.folder / "hosts.part"
        scratch.write_text("".join(f"{name}:1\n" for name in names))
        scratch.replace(self.folder / "hosts")  # seen whole

    def log(self) -> list[dict]:
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what, seconds: float = 240) -> dict:
        """The first line that `what` accepts, from now on."""
        deadline, seen = time.monotonic() + seconds, len(self.log())
        while time.monotonic() < deadline:
            for line in self.log()[seen:]:
                if what(line):
                    return line
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"waited in vain\n{self.told()}")

    def told(self) -> str:
        text = (self.folder / "output").read_text(errors="replace")
        return "\n".join([*map(json.dumps, self.log()[-10:]), text[-6000:]])

    def kill(self, host: str) -> None:
        started = [line for line in self.log() if line.get("host") == host]
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[-1]["pid"], signal.SIGKILL)

    def finish(self, seconds: float = 240) -> list[dict]:
        """What ranks wrote at the end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        assert self._process.poll() == 0, self.told()
        return [line for line in self.log() if "done" in line]


def of_size(ranks: int):
    return lambda line: line.get("size") == ranks and "rank" not in line


def changing(folder: Path, what: str, kill: bool, **env) -> list[dict]:
    """2 ranks, then 1, then all that this machine has names for, which end it."""
    with Job(folder, what, steps=STEPS, pace=0.1, **env) as job:
        before = job.wait_for(of_size(2))
        third = socket.gethostname()
        if kill:  # Horovod wants no more of that host
            job.kill(SECOND)
            others = [third]
        else:
            job.hosts(FIRST)
            others = [SECOND, third]
        alone = job.wait_for(of_size(1))
        job.hosts(FIRST, *others)
        more = job.wait_for(of_size(1 + len(others)))
        ends = job.finish()
        steps = [line["step"] for line in (before, alone, more)]
        assert steps == sorted(steps)
        assert ("are gone: their residuals are lost" in job.told()) == kill
    assert [end["done"] for end in ends] == [1 + len(others)] * (1 + len(others))
    for field in ("weights", "state", "loss"):
        assert len({end[field] for end in ends}) == 1
    return ends


@pytest.mark.long
@pytest.mark.parametrize("what", ["loop", "fit"])
def test_ranks_leave_and_join_and_the_model_is_as_good(tmp_path, what):
    nursery = Nursery("elastic", tmp_path / "nursery")
    try:
        losses = [nursery.run("plain", 2, steps=STEPS, seed=s)[0] for s in range(5)]
    finally:
        nursery.close()
    median = str(int(np.argsort(losses)[2]))  # neither a lucky seed nor a bad one
    ends = changing(tmp_path, what, kill=False, TF_BASIS_SEED=median)
    assert abs(ends[0]["loss"] - np.mean(losses)) <= 2 * np.std(losses, ddof=1)


@pytest.mark.long
@pytest.mark.parametrize("what", ["loop", "fit"])
def test_a_rank_is_killed_and_another_one_joins(tmp_path, what):
    changing(tmp_path, what, kill=True)
