"""Contenders of benchmarks/ in processes of their own: FBGEMM, numbers of threads."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import pytest
from helpers import ROOT

SERVING = """
import sys, time
sys.path.append({folder!r})
import workers
from measure import Contender

def call(i):
    if i > 2:
        sys.exit("three were enough")
    print("noise", i)
    time.sleep(0.01)

workers.serve({{"sleep": Contender("sleep", call)}}, {{"pid": 1}})
"""
FBGEMM_PYTHON = os.environ.get("TF_BASIS_FBGEMM_PYTHON")


@pytest.fixture
def start(benchmark):
    """Starts a worker from its code; all are closed at the end."""
    started = []

    def begin(code: str):
        worker = benchmark("workers").Worker([sys.executable, "-c", code], "a worker")
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        worker.close()


def test_a_worker_takes_turns_until_it_dies(benchmark, start):
    worker = start(SERVING.format(folder=str(ROOT / "benchmarks")))
    assert worker.ready() == {"pid": 1}
    remote = benchmark("workers").Remote("sleep", None, worker=worker)
    remote.measure(5, calls=2, most_seconds=1.0)  # after one that is not timed
    assert len(remote.seconds[5]) == 2 and min(remote.samples()) >= 0.01
    assert remote.summary()["calls"] == 2
    for reason in ("has ended: three were enough", "has been closed"):
        with pytest.raises(RuntimeError, match=f"^a worker: the worker {reason}$"):
            remote.measure(6, calls=1, most_seconds=1.0)


@pytest.mark.parametrize(
    "code, message",
    [
        ("raise ValueError('no table')", "has ended: ValueError: no table"),
        ("", "has ended: no message, exit status 0"),
        ("print('hello')", "has answered b'hello'"),
        ("import time; time.sleep(600)", "has not answered for 0.5 s"),
    ],
)
def test_a_worker_that_fails_says_so_at_once(benchmark, start, code, message):
    begin = time.monotonic()
    with pytest.raises(benchmark("workers").WorkerError) as error:
        start(code).ready(seconds=0.5 if "sleep" in code else 100)
    assert message in str(error.value) and str(error.value).startswith("a worker: ")
    assert time.monotonic() - begin < 200


@pytest.mark.skipif(not FBGEMM_PYTHON, reason="TF_BASIS_FBGEMM_PYTHON is not set")
def test_fbgemm_takes_turns(benchmark):
    contenders, peer = benchmark("contenders"), benchmark("fbgemm_peer")
    table = contenders.make_table(contenders.make_variable(300, 4), batch=64, batches=3)
    gradients = [np.full([64, 4], 0.5, np.float32), np.ones([64, 4], np.float32)]
    peer.add(table, gradients, FBGEMM_PYTHON, threads=1)  # it checks its first step
    remote = table.contenders[contenders.FBGEMM]
    benchmark("measure").interleave([remote], range(2), calls=4)
    remote.release()
    assert [len(times) for times in remote.seconds.values()] == [4, 4]
    assert min(remote.samples()) > 0
    assert table.state_bytes[contenders.FBGEMM] == 4 * 300


# Its steps last as many milliseconds as a batch has ids, with two threads half of that;
# everything else lasts one.
SCALING = """
import sys
sys.path.append({folder!r})
import workers
from measure import Contender

threads = int(sys.argv[sys.argv.index("--threads") + 1])
batches = sys.argv[sys.argv.index("--batches") + 1 : sys.argv.index("--threads")]

class Exact(Contender):
    def measure(self, number, calls, most_seconds):
        batch, name = self.name.split(" ", 1)
        step = int(batch) / threads if "Basis" in name else 1
        self.seconds[number] = calls * [(1 + number) * 1e-3 * step]

names = [f"{{b}} {{n}}" for b in batches for n in {names!r}]
about = {{"machine": {{"cpu": "one", "load_average": [0.0]}}, "batches": batches}}
workers.serve({{name: Exact(name, None) for name in names}}, about)
"""


def test_scaling(benchmark, monkeypatch, tmp_path, capsys):
    scaling = benchmark("step_scaling")
    names = (*scaling.STEPS, scaling.COPY, scaling.EMPTY)
    script, path = tmp_path / "worker.py", tmp_path / "new" / "scaling.json"
    folder = str(ROOT / "benchmarks")
    script.write_text(SCALING.format(folder=folder, names=names))
    monkeypatch.setattr(scaling, "SCRIPT", script)
    sizes = ["--rows", "300", "--dim", "4", "--batches", "64", "16"]
    effort = ["--threads", "3", "--rounds", "2", "--steps", "5", "--json", str(path)]
    assert scaling.main([*sizes, *effort]) == 0

    document = json.loads(path.read_text())
    assert document["batches"] == ["16", "64"]
    found = {(x["batch"], x["contender"], x["threads"]): x for x in document["results"]}
    assert len(found) == len(document["results"]) == 2 * len(names) * 3
    for (batch, name, threads), x in found.items():
        step = batch / threads if name in scaling.STEPS else 1
        assert (x["calls"], x["min_ms"]) == (10, pytest.approx(step))
        assert x["us_per_id"] == pytest.approx(1.5e3 * step / batch)  # medians
        assert ("speed_up" in x) == (name in scaling.STEPS)
        if name in scaling.STEPS:
            assert x["speed_up"] == pytest.approx(threads)
            assert x["over_copy"] == pytest.approx(batch / threads)
            assert x["per_id_over_smallest"] == pytest.approx(1)
    output = capsys.readouterr().out
    for batch in (16, 64):
        lines = [x for x in output.splitlines() if x.split()[:1] == [str(batch)]]
        assert len(lines) == len(names) * 3

    script.write_text("raise MemoryError('too large a table')")
    assert scaling.main([*sizes, *effort]) == 1
    said = capsys.readouterr().err
    assert "steps with 1 threads: the worker has ended: MemoryError: too large" in said


def test_what_the_workers_of_scaling_serve(benchmark, monkeypatch):
    scaling, worker = benchmark("step_scaling"), benchmark("step_scaling_worker")
    monkeypatch.setattr(worker, "IDS", 64)
    members, (about,) = worker.prepare(300, 4, [8])
    assert (about["batch"], about["distinct_rows"]) == (8, 4)
    assert about["step_bytes"]["gradients_read"] == 4 * 8 * 4
    names = (*scaling.STEPS, scaling.COPY, scaling.EMPTY)
    assert members.keys() == {f"8 {name}" for name in names}
    for member in members.values():
        member.measure(0, calls=2, most_seconds=1.0)
        assert len(member.samples()) == 2 and min(member.samples()) > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--threads", "0"], "--threads must be at least 1, received 0"),
        (
            ["--batches", "1"],
            "--batches must be from 2 to --rows (2000000), received 1",
        ),
    ],
)
def test_bad_arguments_of_scaling(benchmark, capsys, arguments, message):
    with pytest.raises(SystemExit):
        benchmark("step_scaling").main(arguments)
    assert message in capsys.readouterr().err
