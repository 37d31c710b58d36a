"""benchmarks/step_time.py at tiny sizes: what it prints and writes, not how fast."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT

SCRIPT = ROOT / "benchmarks" / "step_time.py"
ROWS = (300, 2_000_000)
BATCH, DIM, ROUNDS, STEPS = 64, 2, 2, 3
CONTENDERS = {
    "Keras Adam",
    "Keras Adagrad",
    "lazy Adam, plain TF",
    "FBGEMM row-wise Adagrad",
    "BasisAdagrad, C++ op",
    "BasisAdam, pure TF",
    "BasisAdam, C++ op",
    "TF gather + scatter",
    "memory copy",
    "empty call",
}
# Over the dim floats of a row: Adam's two moments, Adagrad's one.
MOMENTS = {"Keras Adam": 2, "lazy Adam, plain TF": 2, "Keras Adagrad": 1}


def run_script(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def measure():
    sys.path.append(str(SCRIPT.parent))
    yield importlib.import_module("measure")
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a run prints, and what it writes. The limit leaves out one optimizer."""
    path = tmp_path_factory.mktemp("results") / "new" / "step_time.json"
    sizes = ("--rows", *reversed(ROWS), "--dim", DIM, "--batch", BATCH)
    effort = ("--steps", STEPS, "--rounds", ROUNDS, "--threads", 1)
    done = run_script(*sizes, *effort, "--memory-limit", 1.24, "--json", path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def by_key(entries: list[dict], name: str) -> dict[tuple[int, str], dict]:
    found = {(x["rows"], x[name]): x for x in entries}
    assert len(found) == len(entries)
    return found


def test_every_contender_on_every_table(outcome):
    output, document = outcome
    results = by_key(document["results"], "contender")
    assert results.keys() == {(n, c) for n in ROWS for c in CONTENDERS}
    for (rows, name), result in results.items():
        (line,) = [
            x for x in output.splitlines() if x.lstrip().startswith(f"{rows:,}  {name}")
        ]
        if "skipped" in result:
            assert result["skipped"] in line
            continue
        assert 0 < result["min_ms"] <= result["median_ms"] < math.inf
        assert result["calls"] >= ROUNDS
        if "state_bytes" in result:
            assert f"{result['state_bytes']:,}" in line


def test_what_needs_too_much_memory_is_left_out(outcome):
    _, document = outcome
    results = by_key(document["results"], "contender")
    skipped = {k: x["skipped"] for k, x in results.items() if "skipped" in x}
    assert skipped.pop((ROWS[1], "Keras Adam")).startswith("needs 1.")
    # And what was not asked for.
    fbgemm = "FBGEMM row-wise Adagrad"
    assert skipped == {(n, fbgemm): "needs --fbgemm-python" for n in ROWS}
    ratios = by_key(document["ratios"], "ratio")
    assert ratios[ROWS[1], "Keras Adam / op"]["value"] is None
    assert ratios[ROWS[0], "Keras Adam / op"]["value"] > 0


def test_state_bytes(outcome):
    _, document = outcome
    for x in document["results"]:
        rows, state = x["rows"], x.get("state_bytes")
        if x["contender"] in MOMENTS and "skipped" not in x:
            extra = state - 4 * DIM * rows * MOMENTS[x["contender"]]
            assert 0 <= extra <= 16  # step counter, learning rate
        elif x["contender"].startswith("Basis"):
            buckets = math.ceil(rows / 100)
            extra = state - 4 * (buckets * DIM + buckets + rows)
            assert 0 <= extra <= 200  # and the layouts of tables
            assert x["share_of_adam"] == pytest.approx(state / (8 * DIM * rows))


def test_batches(outcome):
    _, document = outcome
    for rows, batch in zip(ROWS, document["batches"], strict=True):
        assert batch["rows"] == rows
        assert batch["distinct_rows"] == BATCH // 2
        buckets = batch["touched_buckets"]
        assert 1 <= buckets <= min(BATCH // 2, math.ceil(rows / 100))
        assert batch["step_bytes"] == pytest.approx(
            {
                "indices_read": 8 * BATCH,
                "gradients_read": 4 * BATCH * DIM,
                "rows_read_and_written": 8 * BATCH // 2 * DIM,
                "second_moments_read_and_written": 8 * buckets * DIM,
                "energies_read_and_written": 8 * BATCH // 2,
                "counters_read_and_written": 8 * buckets,
            }
        )


def test_ratios(outcome):
    output, document = outcome
    ratios = by_key(document["ratios"], "ratio")
    growth = "op / op on the next smaller table"
    assert (ROWS[0], growth) not in ratios and ratios[ROWS[1], growth]["value"] > 0
    goals = {key: x for key, x in ratios.items() if "goal" in x}
    assert {name for _, name in goals} == {
        "pure TF / op",
        "state bytes: BasisAdam / Adam",
    }
    for (rows, name), x in goals.items():
        assert rows == ROWS[1]
        sense, bound = x["goal"].split()
        distance = x["value"] - float(bound)
        assert x["met"] == (distance >= 0 if sense == ">=" else distance <= 0)
        (line,) = [y for y in output.splitlines() if y.startswith(f"{name}  ")]
        assert line.endswith(
            f"{x['goal']} at {rows:,}: {'met' if x['met'] else 'MISSED'}"
        )


def test_document_names_no_machine(outcome):
    _, document = outcome
    assert document["settings"] == {
        "rows": list(ROWS),
        "dim": DIM,
        "batch": BATCH,
        "steps": STEPS,
        "rounds": ROUNDS,
        "threads": 1,
        "memory_limit": 1.24,
    }
    assert document["machine"].keys() == {
        "cpu",
        "cores",
        "memory_gib",
        "system",
        "load_average",
        "python",
        "numpy",
        "tensorflow",
        "keras",
        "tf_basis",
        "op_compiler",
        "op_flags",
    }
    assert document["peak_memory_bytes"] > 8 * DIM * ROWS[1]
    assert str(ROOT) not in json.dumps(document)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--rows", 10), "--rows must be at least --batch (4096), received 10"),
        (("--dim", 0), "--dim must be at least 1, received 0"),
        (("--batch", 1), "--batch must be at least 2, received 1"),
    ],
)
def test_bad_arguments(measure, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        importlib.import_module("step_time").main([str(a) for a in arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "python, message",
    [
        ("absent/python", "cannot be started"),
        (sys.executable, "No module named"),  # 'fbgemm_gpu'
    ],
)
def test_a_python_without_fbgemm(benchmark, capsys, python, message):
    if python == sys.executable and importlib.util.find_spec("fbgemm_gpu"):
        pytest.skip("fbgemm_gpu is installed here")
    with pytest.raises(SystemExit) as error:
        benchmark("step_time").main(["--fbgemm-python", python])
    assert error.value.code == 2
    said = capsys.readouterr().err
    rule = "--fbgemm-python must be a Python with torch and fbgemm_gpu, received"
    assert f"{rule} {python!r}: " in said and message in said


@pytest.mark.parametrize("rows", [200, 5000, 10**7])
def test_zipf_rows(measure, rows):
    zipf = measure.ZipfRows(rows, batch=128, distinct=64, seed=0)
    batches = np.stack([zipf.draw() for _ in range(200)])
    assert batches.shape == (200, 128)
    assert batches.min() >= 0 and batches.max() < rows
    assert all(len(np.unique(batch)) == 64 for batch in batches)
    # Rows come in the order of their frequency, and the tail comes too.
    counts = np.bincount(np.minimum(batches.ravel(), 20))
    assert np.all(counts[[0, 2, 8]] > counts[[2, 8, 19]])
    assert batches.max() > rows * 0.9


def test_zipf_rows_refuses_what_cannot_be(measure):
    with pytest.raises(ValueError, match=r"60 distinct rows.*batch of 64.*received 64"):
        measure.ZipfRows(64, batch=64, distinct=60, seed=0)


def test_ratio_compares_within_rounds(measure):
    # Round 1 is ten times slower for both: within each round the ratio is 2.
    slow = measure.Contender("slow", None, {0: [2.0, 2.0], 1: [20.0]})
    fast = measure.Contender("fast", None, {0: [1.0], 1: [10.0, 10.0, 10.0], 2: [9.0]})
    assert measure.ratio(slow, fast) == 2.0
    assert measure.ratio(slow, measure.Contender("other", None, {5: [1.0]})) is None


def test_interleave_takes_turns(measure):
    order: list[str] = []
    contenders = [
        measure.Contender(name, lambda i, name=name: order.append(f"{name}{i}"))
        for name in "ab"
    ]
    measure.interleave(contenders, rounds=range(2), calls=2)
    # One call that is not timed, then two that are.
    assert " ".join(order) == "a0 a1 a2 b0 b1 b2 b3 b4 b5 a3 a4 a5"
    assert [list(map(len, c.seconds.values())) for c in contenders] == [[2, 2], [2, 2]]


def test_format_table(measure):
    table = measure.format_table(["n", "name"], [["10", "a"], ["5", "bcd"]], left=[1])
    assert table.splitlines() == [" n  name", "--  ----", "10  a", " 5  bcd"]
    numbers = [measure.format_number(x) for x in (12345.6, 12.34, 0.01234, None)]
    assert numbers == ["12,346", "12.3", "0.0123", "-"]
