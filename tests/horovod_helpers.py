"""Runs code on several ranks of a real Horovod and brings back what they return.

Starting ranks takes seconds, so the tests of a file share one launch:

    checks = launch_fixture("callbacks", ranks=2)

    def test_weights_are_equal(checks):
        first, second = checks["weights_after_broadcast"]

where `horovod_workers/callbacks.py` has a function `weights_after_broadcast` marked
`@check` (see `horovod_rank`). `run_ranks` runs any code or script.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod_rank
import pytest
from helpers import ROOT, TESTS, active_flavor

_MARK = "TF_BASIS_RANKS_OF"


@dataclass
class RankResult:
    """One rank: what it reported, how it ended (None: ended by us), what it said."""

    rank: int
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    exit_code: int | None = None
    output: str = ""

    @property
    def value(self) -> Any:
        """What the script gave to `horovod_rank.report`, None if nothing."""
        return self.values.get("value", {}).get("value")


class RanksFailedError(AssertionError):
    """A rank ended with an error or not at all; `results` holds what there is."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


def need_horovod() -> None:
    """Skips the test without Horovod, fails it where TF_BASIS_HOROVOD=require."""
    spec = importlib.util.find_spec("horovod")
    places = spec.submodule_search_locations if spec else []
    if any(list(Path(p).glob("tensorflow/mpi_lib*.so")) for p in places):
        return
    reason = "Horovod is not installed for TensorFlow: tf-basis install-horovod"
    if os.environ.get("TF_BASIS_HOROVOD") == "require":
        pytest.fail(reason)
    pytest.skip(reason)


def run_ranks(
    code_or_script: str | Path,
    ranks: int,
    *,
    flavor: str | None = None,
    args: tuple[str, ...] = (),
    timeout: float = 300,
    env: dict[str, str] | None = None,
    launcher: str = "horovodrun",
    check: bool = True,
) -> list[RankResult]:
    """Runs Python code, or a script by its Path, on `ranks` processes.

    The code gives its result to `horovod_rank.report(value)`.

    Args:
      code_or_script: source text, or the Path of a file.
      ranks: how many processes.
      flavor: "keras3" or "tf_keras"; default: that of this process.
      args: the script's arguments.
      timeout: seconds until all that was started is killed.
      env: further environment variables.
      launcher: "horovodrun", which ends all ranks when one fails; or "independent":
        each rank lives until its own end, so that a test can see what the survivors
        of a killed rank do.
      check: whether a rank that fails or hangs is an error here.

    Returns:
      One `RankResult` for each rank.

    Raises:
      RanksFailedError: with the ranks' output, when `check`.
    """
    need_horovod()
    with tempfile.TemporaryDirectory(prefix="tf_basis_ranks_") as scratch:
        folder = Path(scratch)
        script = code_or_script
        if isinstance(code_or_script, str):
            script = folder / "script.py"
            script.write_text(code_or_script, encoding="utf-8")
        command = [sys.executable, str(script), *args]
        mark = uuid.uuid4().hex
        environment = _environment(flavor or active_flavor(), folder, timeout, mark)
        environment.update(env or {})
        start = {"horovodrun": _horovodrun, "independent": _independent}[launcher]
        try:
            codes = start(command, ranks, environment, folder, timeout)
        finally:
            _kill_marked(mark)
        results = [_result(folder, rank, codes.get(rank)) for rank in range(ranks)]
        launched = (folder / "output").read_text(errors="replace")
    if launched:
        for result in results:
            result.output = launched
    if check and any(result.exit_code != 0 for result in results):
        raise RanksFailedError(_failure(command, results, timeout), results)
    return results


def _environment(flavor: str, folder: Path, timeout: float, mark: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    environment.update(
        {
            "CUDA_VISIBLE_DEVICES": "-1",
            "HOROVOD_CYCLE_TIME": "1",
            "KERAS_BACKEND": "tensorflow",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTEROP_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_USE_LEGACY_KERAS": "1" if flavor == "tf_keras" else "0",
            horovod_rank.RESULTS: str(folder),
            # Less than the time limit: a rank that hangs can print where.
            horovod_rank.SECONDS: str(max(timeout - 10, timeout / 2)),
            _MARK: mark,
        }
    )
    return environment


def _horovodrun(command, ranks, environment, folder, timeout) -> dict[int, int]:
    arguments = ["-np", str(ranks), "--gloo", "--network-interfaces", "lo", *command]
    launch = [sys.executable, "-m", "horovod.runner.launch", *arguments]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            launch,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {}
        finally:
            process.kill()
            process.wait()
    codes = dict.fromkeys(range(ranks), process.returncode)
    for line in (folder / "output").read_text(errors="replace").splitlines():
        # "Process 1 exit with status code 137."
        words = line.split()
        if words[:1] == ["Process"] and "status code" in line:
            codes[int(words[1])] = int(words[-1].rstrip("."))
    return codes


def _independent(command, ranks, environment, folder, timeout) -> dict[int, int]:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    (folder / "output").touch()
    server = RendezvousServer()
    port = server.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server.init(slots)
    shared = create_run_env_vars("127.0.0.1", ["lo"], port)
    deadline = time.monotonic() + timeout
    processes = {}
    try:
        for slot in slots:
            own = {**shared, **create_slot_env_vars(slot)}
            with open(folder / f"{slot.rank}.output", "wb") as output:
                processes[slot.rank] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**environment, **{k: str(v) for k, v in own.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        codes = {}
        for rank, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[rank] = process.wait(max(0, deadline - time.monotonic()))
        return codes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        server.stop()


def _kill_marked(mark: str) -> None:
    """Kills what carries our mark: the ranks are in sessions of their own."""
    wanted = f"{_MARK}={mark}".encode()
    while True:
        found = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.05)


def _result(folder: Path, rank: int, exit_code: int | None) -> RankResult:
    result = RankResult(rank, exit_code=exit_code)
    for path in sorted(folder.glob(f"{rank}.*.pickle")):
        # Written by our own ranks, moments ago.
        result.values[path.name.split(".")[1]] = pickle.loads(path.read_bytes())
    output = folder / f"{rank}.output"
    if output.exists():
        result.output = output.read_text(errors="replace")
    return result


def _failure(command, results: list[RankResult], timeout: float) -> str:
    lines = [f"{' '.join(command)} failed on some rank (time limit {timeout} s)"]
    for result in results:
        ended = "was killed" if result.exit_code is None else result.exit_code
        lines.append(f"rank {result.rank}: exit code {ended}")
    for text in dict.fromkeys(result.output for result in results):
        lines.append(text[-6000:])
    return "\n".join(lines)


class Launch:
    """The results of a worker module; `launch["check"]` lists them by rank."""

    def __init__(self, results: list[RankResult], failure: str | None) -> None:
        self.results, self.failure = results, failure

    def __getitem__(self, name: str) -> list[Any]:
        values = []
        for result in self.results:
            found = result.values.get(name)
            if found is None:
                raise AssertionError(
                    f"rank {result.rank} has no result of '{name}'\n{self.failure}"
                )
            if found["error"] is not None:
                raise AssertionError(f"rank {result.rank}: {name}\n{found['error']}")
            values.append(found["value"])
        return values


def launch(module: str, ranks: int, **options: Any) -> Launch:
    """Runs `horovod_workers/<module>.py` on `ranks` ranks; see `run_ranks`."""
    try:
        script = TESTS / "horovod_rank.py"
        results = run_ranks(script, ranks, args=(module,), **options)
        return Launch(results, None)
    except RanksFailedError as error:
        return Launch(error.results, str(error))


def launch_fixture(module: str, ranks: int, **options: Any):
    """A fixture that gives a `Launch`, made once however many tests ask for it.

    pytest-xdist runs tests of one file in several processes; the first that needs the
    launch makes it, the others read what it left.
    """

    @pytest.fixture(scope="session")
    def results(tmp_path_factory) -> Launch:
        need_horovod()
        folder = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = folder.parent
        stem = f"ranks_{module}_{ranks}_{active_flavor()}"
        with open(folder / f"{stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder / f"{stem}.pickle"
            if not done.exists():
                made = launch(module, ranks, **options)
                done.write_bytes(pickle.dumps((made.results, made.failure)))
            return Launch(*pickle.loads(done.read_bytes()))

    return results
