"""The benchmark of stale decay, at a tiny size."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from helpers import ROOT, active_flavor


@pytest.mark.long
@pytest.mark.skipif(active_flavor() != "keras3", reason="the click model is Keras 3's")
def test_stale_decay(tmp_path, capsys, monkeypatch):
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    benchmark = importlib.import_module("stale_decay")
    assert len(benchmark.LINES) == 4
    names = ("10:1, half exclusive", "100:1, all shared")
    some = {name: benchmark.LINES[name] for name in names}
    monkeypatch.setattr(benchmark, "LINES", some)
    rng = np.random.default_rng(0)
    ratings = tmp_path / "u.data"
    ratings.write_text(
        "".join(
            f"{rng.integers(30)}\t{rng.integers(40)}\t{rng.integers(1, 6)}\t{time}\n"
            for time in range(900)
        )
    )
    path = tmp_path / "out" / "stale_decay.json"
    arguments = ["--data", str(ratings), "--seeds", "1", "--json", str(path)]
    arguments += ["--batch-size", "60"]
    assert benchmark.main(arguments) == 0
    output = capsys.readouterr().out
    result = json.loads(path.read_text())
    rows = result["table_rows"]
    assert [line["line"] for line in result["lines"]] == list(names)
    for line in result["lines"]:
        ratio = int(line["line"].partition(":")[0])
        buckets = -(-rows // ratio)
        owned = buckets // 2 if "half exclusive" in line["line"] else 0
        assert line["buckets"] == buckets and line["exclusive_rows"] == owned
        assert line["more_bytes"] == 4 * buckets  # one int32 a bucket
        on, off = line["auc_on"][0], line["auc_off"][0]
        assert line["auc_gain"][0] == pytest.approx(on - off)
        assert f"\n{line['line']} " in output
    # The option does something: buckets wait for their rows.
    first = result["lines"][0]
    assert first["log_loss_on"][0] != first["log_loss_off"][0]
    assert len(result["runs"]) == 4
    assert benchmark.main(["--data", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err
