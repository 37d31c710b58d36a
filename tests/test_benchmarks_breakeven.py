"""The model of benchmarks/break_even.py against cases computed by hand."""

from __future__ import annotations

import json

import pytest
from helpers import active_flavor
from horovod_helpers import need_horovod

N = 16384  # elements; in bits 2048 bytes and 8 scales of 4


def test_loads(benchmark):
    model = benchmark("break_even_model")
    assert model.flat("float32", 1000, 4) == (1, 6, 6000, 0, 0)
    assert model.flat("float16", 1000, 2) == (1, 2, 2000, 0, 0)
    assert model.flat("1 bit", N, 4) == (2, 6, 2 * 3 / 4 * 2080, 0, 0)
    # Two ranks on a machine send half of their messages out of it, the ring goes once.
    assert model.flat("1 bit", N, 4, 2) == (2, 6, 2080 + 1560, 0, 0)
    assert model.flat("float32", 1000, 4, 2) == (1, 6, 6000, 0, 0)
    assert model.flat("1 bit", N, 4, 4) == (2, 0, 0, 6, 3120)
    assert model.two_level("float32", 1000, 2, 2) == (3, 2, 4000, 2, 4000)
    within = 0.75 * (4 * N + 2080)
    assert model.two_level("1 bit", N, 2, 4) == (4, 2, 2080, 6, within)
    assert model.two_level("float16", 1000, 1, 2) == (2, 0, 0, 2, 3000)
    assert model.two_level("float32", 1000, 4, 1) == model.flat("float32", 1000, 4)


def test_seconds(benchmark):
    model = benchmark("break_even_model")
    costs = model.Costs(1e-3, 1e-4, 1e-9, inner=2e-9, float16=2e-9, one_bit=3e-9)
    load = model.Load(2, 6, 1e6, 2, 5e5)
    beta = model.beta_of(1.0)
    assert beta == 8e-9
    exact = 2e-3 + 6e-4 + 8e-3 + 1e-3
    assert model.seconds("float32", 1e6, load, beta, costs) == pytest.approx(exact)
    assert model.seconds("1 bit", 1e6, load, beta, costs) == pytest.approx(exact + 3e-3)
    fast = model.seconds("float16", 1e6, load, 1e-12, costs)  # no faster than the host
    assert fast == pytest.approx(exact - 7e-3 + 2e-3)


def test_break_even(benchmark):
    model = benchmark("break_even_model")
    costs = model.Costs(0.0, 0.0, 0.0, inner=0.0, float16=0.0, one_bit=1e-9)

    def speed(n, costs, ranks=2, machine=1, against="float32"):
        loads = [model.flat(w, n, ranks, machine) for w in ("1 bit", against)]
        return model.break_even(n, *loads, against, costs)

    # A byte less of 3.873 for each nanosecond: 31 Gbit/s.
    assert speed(N, costs) == pytest.approx(8 * (4 - 2080 / N))
    assert speed(N, costs, against="float16") == pytest.approx(8 * (2 - 2080 / N))
    assert speed(N, costs._replace(host=1e-9)) == float("inf")
    # A second collective costs more than 64 KB save, but for slow links.
    slow = speed(N, costs._replace(fixed=1e-3, one_bit=0.0))
    assert slow == pytest.approx(8e-9 * (4 * N - 2080) / 1e-3)
    assert speed(N, costs, 256, 64, "float16") == 0  # more bytes out of a machine
    times = [
        model.seconds(w, N, model.flat(w, N, 2), model.beta_of(31 - 0.0156), costs)
        for w in ("1 bit", "float32")
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-3)


def test_costs_are_recovered_from_what_they_cause(benchmark):
    model, script = benchmark("break_even_model"), benchmark("break_even")
    costs = model.Costs(1e-3, 5e-5, 2e-9, inner=1e-9, float16=7e-9, one_bit=3e-9)
    measured = {}
    for n in (0, 10**6, 10**7):
        found = {
            w: model.seconds(w, n, model.flat(w, n, 2)._replace(messages=0), 0.0, costs)
            for w in model.WAYS
        }
        found["1 bit, arithmetic"] = n * costs.one_bit
        measured[n] = {k: {"seconds": [[s, s, 9.0]]} for k, s in found.items()}
    assert script.fitted(measured, 5e-5, 1e-9) == pytest.approx(costs)
    rows = script.compared(script.LOOPBACK, measured, costs)
    assert script.worst(rows) == pytest.approx(1.0)
    assert {r["way"] for r in rows if not r["fitted"]} == {"1 bit"}
    rows[-1]["measured"] *= 3  # 1 bit, not fitted
    assert script.worst(rows) == pytest.approx(3.0)
    assert script.gbits(float("inf")) == "any" and script.gbits(1e-3) == "never"


@pytest.mark.long
@pytest.mark.skipif(active_flavor() != "keras3", reason="nothing of Keras in it")
def test_break_even_prints_what_it_says(benchmark, tmp_path, capsys, monkeypatch):
    need_horovod()
    script = benchmark("break_even")
    monkeypatch.setattr(benchmark("link"), "why_no_namespace", lambda rate: "no root")
    path = tmp_path / "break_even.json"
    small = ["--elements", "5000", "200000", "--rounds", "1", "--json", str(path)]
    assert script.main(small) == 0
    output, document = capsys.readouterr().out, json.loads(path.read_text())
    assert document["costs"]["one_bit"] > 0 and len(document["compared"]) == 6
    assert "left out: 1 Gbit/s: no root" in output and output.count("MODEL:") == 8
