"""The benchmark of growing tables, at a tiny size."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from helpers import ROOT, active_flavor


@pytest.mark.skipif(active_flavor() != "keras3", reason="the click model is Keras 3's")
@pytest.mark.long
def test_growth(tmp_path, capsys):
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    benchmark = importlib.import_module("growth")
    rng = np.random.default_rng(0)
    ratings = tmp_path / "u.data"
    ratings.write_text(
        "".join(
            f"{rng.integers(30)}\t{rng.integers(40)}\t{rng.integers(1, 6)}\t{time}\n"
            for time in range(900)
        )
    )
    path = tmp_path / "out" / "growth.json"
    options = {"--seeds": "2", "--ratio": "20", "--batch-size": "90"}
    arguments = ["--data", str(ratings), "--json", str(path)]
    for pair in options.items():
        arguments += pair
    assert benchmark.main(arguments) == 0
    output = capsys.readouterr().out
    result = json.loads(path.read_text())
    buckets = -(-result["table_rows"] // 20)
    sizes = {line["line"]: line["buckets"] for line in result["lines"]}
    assert sizes == {
        "B fixed": [buckets, buckets],
        "B doubled at half": [buckets, 2 * buckets],
        "B times 1.5 at half": [buckets, round(1.5 * buckets)],
        "2B fixed": [2 * buckets, 2 * buckets],
    }
    for run in result["runs"]:
        changes = [] if "fixed" in run["line"] else [run["steps"] // 2]
        assert run["changed_at_step"] == changes and run["steps"] == 8
        assert 0 < run["auc"] < 1
    assert result["lines"][0]["auc_minus_fixed"] == [0, 0]
    assert "is claimed: holds" in output or "DOES NOT HOLD" in output
    assert benchmark.main(["--data", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err
