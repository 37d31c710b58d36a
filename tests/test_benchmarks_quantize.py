"""benchmarks/quantize.py at a tiny size: what it prints and writes, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

SCRIPT = ROOT / "benchmarks" / "quantize.py"
ELEMENTS, BLOCK, WORKERS, THREADS = 5_000, 64, 3, 2


def run_script(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a run prints, and what it writes."""
    path = tmp_path_factory.mktemp("results") / "new" / "quantize.json"
    sizes = ("--elements", ELEMENTS, "--block", BLOCK, "--workers", WORKERS)
    effort = ("--repeats", 2, "--threads", THREADS)
    done = run_script(*sizes, *effort, "--json", path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_report(outcome):
    output, document = outcome
    results = {(x["op"], x["bits"]): x for x in document["results"]}
    assert len(results) == len(document["results"]) == 6
    floats, blocks = 4 * ELEMENTS, -(-ELEMENTS // BLOCK)
    for (name, bits), x in results.items():
        message = 4 * bits * blocks + ELEMENTS * bits // 8
        assert (
            x["bytes"]
            == {
                "quantize": 3 * floats + message,
                "average": 2 * floats + (WORKERS + 1) * message,
                "dequantize": floats + message,
            }[name]
        )
        assert x["op_ms"] > 0 and x["copy_ms"] > 0 and x["speed"] > 0
        (line,) = [
            line
            for line in output.splitlines()
            if line.split()[:2] == [name, str(bits)]
        ]
        assert ("goal" in x) == ((name, bits) == ("quantize", 1)) == (">= 0.5" in line)
    goal = results["quantize", 1]
    assert goal["met"] == (goal["speed"] >= 0.5)
    assert document["settings"]["threads"] == THREADS
    assert "2 threads" in output and "5,000 elements" in output


@pytest.mark.parametrize(
    "argument, value", [("elements", 0), ("block", 12), ("repeats", 0), ("workers", -1)]
)
def test_bad_arguments(argument, value, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import quantize

    with pytest.raises(SystemExit):
        quantize.parse_arguments([f"--{argument}", str(value)])
    message = capsys.readouterr().err
    assert f"--{argument} must be" in message and f"received {value}" in message
