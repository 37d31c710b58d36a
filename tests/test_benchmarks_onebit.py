"""The benchmarks of the 1-bit exchange, at tiny sizes: what they count and print."""

from __future__ import annotations

import json

import pytest
from helpers import active_flavor
from horovod_helpers import need_horovod

keras3_only = pytest.mark.skipif(
    active_flavor() != "keras3", reason="the towers of the benchmarks are Keras 3's"
)


def timed(seconds: list[list[float]], sent: float = 0.0) -> dict:
    return {"seconds": seconds, "bytes": [sent] * len(seconds)}


def test_ratios_are_within_rounds(benchmark):
    allreduce = benchmark("allreduce")
    slow = timed([[2.0, 4.0, 9.0], [40.0], [6.0]])
    fast = timed([[1.0, 1.0, 5.0], [10.0], [1.0]])
    assert allreduce.ratio(slow, fast) == 4  # of 4/1, 40/10 and 6/1
    assert allreduce.milliseconds(slow) == (6000, 2000)


def test_claims_can_fail(benchmark):
    allreduce = benchmark("allreduce")
    for one_bit, sent, holds in [(0.1, 3.0, True), (0.2, 4.0, False)]:
        found = {
            "float32": timed([[1.6]], 100.0),
            "1 bit": timed([[one_bit]], sent),
        }
        entry = {"link": allreduce.SLOW, "elements": 9, "found": found}
        smaller = {**entry, "elements": 8, "found": None}  # nothing is claimed of it
        step = {
            allreduce.ADAM: timed([[8 * one_bit]]),
            allreduce.ONE_BIT: timed([[0.4]]),
        }
        steps = [{"link": allreduce.SLOW, "found": step}]
        made = allreduce.claims([smaller, entry], steps, counted=True)
        verdicts = [m["holds"] for m in made]
        assert verdicts == [holds, holds, not holds]
        assert made[0]["value"] == pytest.approx(sent / 100)
        assert made[1]["value"] == pytest.approx(1.6 / one_bit)


@pytest.mark.long
@keras3_only
@pytest.mark.parametrize("widths", [(), ("64", "32")])
def test_allreduce(benchmark, tmp_path, capsys, widths):
    need_horovod()
    allreduce, link = benchmark("allreduce"), benchmark("link")
    path = tmp_path / "allreduce.json"
    n = 400_000
    sizes = ["--elements", str(n), "--rounds", "3", "--widths", *widths]
    more = ["--batch", "8", "--links", allreduce.LOOPBACK, "--json", str(path)]
    assert allreduce.main([*sizes, *more]) == 0
    output, document = capsys.readouterr().out, json.loads(path.read_text())
    (entry,) = document["exchanges"]
    assert set(entry["found"]) == {*allreduce.WAYS, *allreduce.PARTS}
    everything = list(entry["found"].values())
    for steps in document["steps"]:
        assert set(steps["found"]) == {
            allreduce.ADAM,
            allreduce.ONE_BIT,
            allreduce.GRADIENTS,
        }
        everything += steps["found"].values()
    assert len(document["steps"]) == ("training step" in output) == bool(widths)
    for found in everything:
        assert len(found["seconds"]) == 3 and min(map(min, found["seconds"])) > 0
    assert "time of float32 over 1 bit" in output
    if link.why_no_namespace():
        assert "nothing is counted" in output
        return
    # Two ranks; each sends a ring's half twice.
    ring = {"float32": 4 * n, "float16": 2 * n, "1 bit": n / 8 + 4 * n / 2048}
    for name, expected in ring.items():
        sent = min(entry["found"][name]["bytes"]) / 2
        assert expected < sent < 1.02 * expected + 15_000, name  # and headers, and talk


def test_what_allreduce_refuses(benchmark, capsys):
    allreduce = benchmark("allreduce")
    for arguments, words in [
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--elements", "0"], "--elements must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ]:
        with pytest.raises(SystemExit):
            allreduce.main(arguments)
        assert words in capsys.readouterr().err


def test_without_commands_the_slow_link_is_left_out(benchmark, monkeypatch, capsys):
    allreduce, link = benchmark("allreduce"), benchmark("link")
    monkeypatch.setattr(link.shutil, "which", lambda name: None)
    reason = link.why_no_namespace("1gbit")
    assert "no command unshare and no command ip and no command tc" in reason
    ran = []
    monkeypatch.setattr(link, "run_ranks", lambda *a, **k: ran.append(k) or {})
    monkeypatch.setattr(allreduce, "print_results", lambda document: None)
    monkeypatch.setattr(allreduce, "claims", lambda *a: [])
    monkeypatch.setattr(allreduce.measure, "write_json", lambda *a: None)
    assert allreduce.main(["--elements", "10", "--widths"]) == 0
    (place,) = ran  # loopback alone
    assert place["namespace"] is False and place["rate"] is None
    output = capsys.readouterr().out
    assert "left out: 1 Gbit/s: no command" in output and "nothing is counted" in output


@pytest.mark.long
@keras3_only
def test_convergence(benchmark, tmp_path, capsys):
    need_horovod()
    convergence = benchmark("onebit_convergence")
    path = tmp_path / "convergence.json"
    sizes = ["--examples", "4000", "--ranks", "2", "--seeds", "2", "--batch", "32"]
    towers = ["--bottom", "64", "--top", "64", "--json", str(path)]
    assert convergence.main([*sizes, *towers]) == 0
    output, document = capsys.readouterr().out, json.loads(path.read_text())
    lines = {line["optimizer"]: line for line in document["optimizers"]}
    assert set(lines) == set(convergence.NAMES)
    assert len(document["runs"]) == 10
    for name, line in lines.items():
        assert f"\n{name} " in output and 0.4 < line["auc"][0] < 1
    adam = lines[convergence.ADAM]
    assert adam["share"] == 1 and adam["gain"] == [0, 0]
    # They are not the same run under other names.
    assert len({line["log_loss"][0] for line in lines.values()}) == len(lines)
    assert "at least 99.9% is claimed" in output


def test_what_convergence_refuses(benchmark, capsys):
    convergence = benchmark("onebit_convergence")
    assert convergence.main(["--data", "none.csv"]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convergence.main(["--optimizers", convergence.FROZEN])
    assert "must hold 'Adam, float32'" in capsys.readouterr().err
