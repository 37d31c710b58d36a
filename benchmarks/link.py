"""Ranks of a real Horovod on a network of their own: counted, and slowed on request.

The network is the loopback interface of a new Linux network namespace: nobody else
sends there, so its counters count the ranks alone; `tc` limits its rate. That needs
root, or unprivileged user namespaces, and the commands `unshare`, `ip` and `tc`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A token bucket; the bucket holds several packets of loopback's 64 KiB.
_SLOW = 'tc qdisc add dev lo root tbf rate "$0" burst 256kb latency 50ms && '
_UP = 'ip link set lo up && exec "$@"'


def namespace_command(rate: str | None) -> list[str]:
    """What to put before a command so that it runs on a network of its own.

    Args:
      rate: of the network as `tc` writes it, such as "1gbit"; None: unlimited.
    """
    # All processes in it end when `unshare` does.
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        command.append("--map-root-user")
    script = _UP if rate is None else _SLOW + _UP
    return [*command, "sh", "-c", script, rate or "unlimited"]


def why_no_namespace(rate: str | None = None) -> str | None:
    """Why there can be no such network here; None where there can."""
    needed = ["unshare", "ip"] + (["tc"] if rate else [])
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"no command {' and no command '.join(missing)} (util-linux, iproute2)"
    done = subprocess.run(
        [*namespace_command(rate), "true"], capture_output=True, text=True
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["refused"])[-1] + " (root is needed)"


def sent_bytes() -> int:
    """Bytes that all ranks have sent so far: loopback's counter, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("/proc/net/dev has no interface lo")


def run_ranks(
    script: Path,
    ranks: int,
    settings: dict[str, Any],
    *,
    rate: str | None = None,
    namespace: bool = True,
    threads: int | None = None,
    huge_pages: bool = False,
    timeout: float = 1800,
) -> Any:
    """Runs a script on several ranks and returns what rank 0 handed to `report`.

    Args:
      script: gets the settings from `settings()`.
      ranks: how many processes.
      settings: anything JSON can hold.
      rate: of the network, see `namespace_command`.
      namespace: whether the ranks get a network of their own; `rate` needs it.
      threads: of TensorFlow in each rank. Default: the cores, shared out.
      huge_pages: whether all large blocks of memory ask for huge pages (glibc).
      timeout: seconds until the ranks are ended.

    Raises:
      RuntimeError: a rank failed, or time is over; with what they printed.
    """
    threads = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        told = {**settings, "_result": str(result), "_threads": threads}
        command = [sys.executable, "-m", "horovod.runner.launch"]
        command += ["-np", str(ranks), "--gloo", "--network-interfaces", "lo"]
        command += [sys.executable, str(script), "--rank-settings", json.dumps(told)]
        if namespace:
            command = [*namespace_command(rate), *command]
        environment = {k: v for k, v in os.environ.items() if "HOROVOD_" not in k}
        paths = [str(ROOT), environment.get("PYTHONPATH")]
        environment |= {
            "CUDA_VISIBLE_DEVICES": "-1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if huge_pages:
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = _end(process)
            raise RuntimeError(f"no end after {timeout} s:\n{output[-4000:]}") from None
        finally:
            _end(process)
        if process.returncode or not result.exists():
            raise RuntimeError(f"the ranks failed:\n{output[-4000:]}")
        return json.loads(result.read_text())


def _end(process: subprocess.Popen) -> str:
    """Ends the launcher, if it still runs; what was printed since."""
    if process.poll() is not None:
        return ""
    os.killpg(process.pid, signal.SIGTERM)  # told so, it ends its ranks
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def start(text: str) -> tuple[dict[str, Any], Any]:
    """In a rank: the settings, and Horovod, ready; TensorFlow has its threads."""
    settings = json.loads(text)
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(settings["_threads"])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    return settings, hvd


def report(settings: dict[str, Any], result: Any) -> None:
    """In rank 0: hands the result to `run_ranks`."""
    path = Path(settings["_result"])
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(result))
    scratch.replace(path)
