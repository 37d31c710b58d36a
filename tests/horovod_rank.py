"""What runs inside a rank: named checks, their results, and a watch on the time.

A worker module `horovod_workers/<name>.py` marks functions with `@check`. Every rank
runs them all, in the order of the file, and what they return goes to the tests.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = "TF_BASIS_RANK_RESULTS"
SECONDS = "TF_BASIS_RANK_SECONDS"

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a check; its result (numpy, numbers, text, dicts) is pickled."""
    _checks.append(function)
    return function


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """`"TypeOfError: message"` of what a call raises, None if it does not."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def report(value: Any, name: str = "value") -> None:
    """Hands a result of this rank to the test that started it."""
    _write(name, {"value": value, "error": None})


def _rank() -> int:
    return int(os.environ.get("HOROVOD_RANK", "0"))


def _path(name: str, rank: int | None = None) -> Path:
    number = _rank() if rank is None else rank
    return Path(os.environ[RESULTS]) / f"{number}.{name}.pickle"


def _write(name: str, result: dict[str, Any]) -> None:
    path = _path(name)
    scratch = path.with_suffix(".part")
    scratch.write_bytes(pickle.dumps(result))
    scratch.replace(path)  # whoever waits for it sees it whole


def _await_others(name: str, size: int, deadline: float) -> None:
    # By files: it works when Horovod does not, and keeps a rank that failed early
    # from meeting the others in the collectives of different checks.
    while not all(_path(name, rank).exists() for rank in range(size)):
        if time.monotonic() > deadline:
            raise SystemExit(f"rank {_rank()} waited in vain for the others: {name}")
        time.sleep(0.002)


def watch(seconds: float) -> None:
    """From now on a rank may take `seconds`, then prints all its stacks and ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def main(module: str) -> None:
    seconds = float(os.environ[SECONDS])
    deadline = time.monotonic() + seconds
    watch(seconds)
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    importlib.import_module(f"horovod_workers.{module}")
    hvd.init()
    for function in _checks:
        name = function.__name__
        try:
            result = {"value": function(), "error": None}
        except Exception:
            result = {"value": None, "error": traceback.format_exc()}
        _write(name, result)
        _await_others(name, hvd.size(), deadline)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    # One module, not two: the worker imports `horovod_rank`, not `__main__`.
    import horovod_rank

    horovod_rank.main(sys.argv[1])
