"""Many short runs on several ranks for the price of one start of TensorFlow.

`Nursery` keeps a process that has imported everything and forks the ranks of each run
from it, which then initialise Horovod as any rank does. It can kill them, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Nursery:
    """Runs functions of `horovod_workers/<module>.py` on ranks forked from a process.

    Args:
      module: which module.
      folder: for results and output.
    """

    def __init__(self, module: str, folder: Path) -> None:
        from helpers import active_flavor
        from horovod_helpers import _environment

        self.folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, module],
            env=_environment(active_flavor(), folder, 3600, "nursery"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        function: str,
        ranks: int,
        *,
        kill: list[int] | None = None,
        after: float = 0.0,
        timeout: float = 120,
        **arguments: Any,
    ) -> list[Any]:
        """What the function returns on every rank.

        Args:
          function: its name; called with `arguments`.
          ranks: how many.
          kill: ranks to kill with SIGKILL, `after` seconds after all have called
            `started`; results are then None, whatever the others do.
          after: see `kill`.
          timeout: seconds until all are killed.
          **arguments: ready for JSON.
        """
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer

        self._count += 1
        folder = self.folder / f"run-{self._count}"
        folder.mkdir(parents=True)
        server = RendezvousServer()
        port = server.start()
        try:
            slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
            server.init(slots)
            shared = create_run_env_vars("127.0.0.1", ["lo"], port)
            environments = [
                {k: str(v) for k, v in {**shared, **create_slot_env_vars(s)}.items()}
                for s in slots
            ]
            job = {
                "function": function,
                "arguments": arguments,
                "folder": str(folder),
                "environments": environments,
                "kill": kill or [],
                "after": after,
                "timeout": timeout,
            }
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            codes = json.loads(self._process.stdout.readline() or "null")
        finally:
            server.stop()
        if codes is None:
            raise AssertionError("the nursery has ended")
        if kill:
            return [None] * ranks
        results = []
        for rank, code in enumerate(codes):
            output = (folder / f"{rank}.output").read_text(errors="replace")
            path = folder / f"{rank}.pickle"
            if code != 0 or not path.exists():
                raise AssertionError(
                    f"{function}: rank {rank} ended with {code}\n{output[-6000:]}"
                )
            results.append(pickle.loads(path.read_bytes()))  # of our own rank
        return results

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---- inside the process -----------------------------------------------------------

_here: dict[str, Any] = {}


def started() -> None:
    """A rank tells that what may be interrupted begins."""
    Path(_here["folder"], f"{_here['rank']}.started").touch()


def _rank(module: Any, job: dict, rank: int) -> None:
    code = 1
    try:
        output = os.open(
            Path(job["folder"], f"{rank}.output"), os.O_WRONLY | os.O_CREAT
        )
        for stream in (1, 2):
            os.dup2(output, stream)
        faulthandler.dump_traceback_later(job["timeout"] * 0.9)  # says where it hangs
        os.environ.update(job["environments"][rank])
        _here.update(folder=job["folder"], rank=rank)
        import horovod.tensorflow as hvd

        hvd.init()
        result = getattr(module, job["function"])(**job["arguments"])
        path = Path(job["folder"], f"{rank}.pickle")
        path.with_suffix(".part").write_bytes(pickle.dumps(result))
        path.with_suffix(".part").replace(path)
        hvd.shutdown()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(module: Any, job: dict) -> list[int]:
    children = []
    for rank in range(len(job["environments"])):
        pid = os.fork()
        if pid == 0:
            _rank(module, job, rank)
        children.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job["timeout"]
    kill_at = None
    while len(codes) < len(children):
        for rank, pid in enumerate(children):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        marks = [Path(job["folder"], f"{r}.started") for r in range(len(children))]
        if job["kill"] and kill_at is None and all(m.exists() for m in marks):
            kill_at = now + job["after"]
        if kill_at is not None and now >= kill_at:
            doomed, kill_at = job["kill"], float("inf")
            deadline = min(deadline, now + 20)  # the others find out by themselves
        else:
            doomed = range(len(children)) if now > deadline else []
        for rank in doomed:
            if rank not in codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(children[rank], signal.SIGKILL)
        time.sleep(0.002)
    return [codes[rank] for rank in range(len(children))]


def main(name: str) -> None:
    import horovod.tensorflow  # noqa: F401  so that its children need not
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    module = importlib.import_module(f"horovod_workers.{name}")
    for line in sys.stdin:
        print(json.dumps(_run(module, json.loads(line))), flush=True)


if __name__ == "__main__":
    # One module, not two: workers import `horovod_nursery`, not `__main__`.
    import horovod_nursery

    horovod_nursery.main(sys.argv[1])
