"""The benchmarks of number formats and of hashes, at tiny sizes."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from helpers import ROOT, active_flavor


def load_benchmark(name: str):
    """The module of a script in benchmarks/."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


@pytest.mark.long
@pytest.mark.skipif(active_flavor() != "keras3", reason="the click model is Keras 3's")
def test_precision(tmp_path, capsys):
    rng = np.random.default_rng(0)
    ratings = tmp_path / "u.data"
    ratings.write_text(
        "".join(
            f"{rng.integers(30)}\t{rng.integers(40)}\t{rng.integers(1, 6)}\t{time}\n"
            for time in range(900)
        )
    )
    path = tmp_path / "out" / "precision.json"
    benchmark = load_benchmark("precision")
    arguments = ["--data", str(ratings), "--seeds", "1", "--json", str(path)]
    assert benchmark.main(arguments) == 0
    output = capsys.readouterr().out
    result = json.loads(path.read_text())
    formats = {line["format"]: line for line in result["formats"]}
    assert len(formats) == 6 and len(result["runs"]) == 6
    rows, dim = result["table_rows"], result["dim"]
    for name, line in formats.items():
        assert f"\n{name} " in output
        assert 0 < line["auc"][0] < 1
        # Read off the variables by name there, off the slots here.
        bytes_of_adam = 8 * rows * dim
        assert line["table_state_bytes"] == round(line["share_of_adam"] * bytes_of_adam)
    assert formats["float32"]["auc_minus_float32"] == [0, 0]
    wide = [line["share_of_adam_wide"] for line in formats.values()]
    assert wide[0] == max(wide) and wide[-1] == min(wide)
    assert benchmark.main(["--data", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err


def test_hash_load(tmp_path, capsys):
    path = tmp_path / "hash_load.json"
    benchmark = load_benchmark("hash_load")
    assert benchmark.main(["--rows", "20000", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("balanced") == 4
    result = json.loads(path.read_text())
    consecutive, strided, powers = result["loads"].values()
    by_hash = {load["hash"]: load for load in consecutive}
    assert by_hash["balanced"]["min"] == by_hash["balanced"]["max"] == 10
    for loads in (strided, powers):
        random = loads[-1]
        for load in loads[1:-1]:  # every hash is like a random choice there
            mean_ratio = load["mean"] / random["mean"]
            assert load["std"] == pytest.approx(
                random["std"] * mean_ratio**0.5, rel=0.15
            )
        assert loads[0]["std"] > 10 * random["std"]  # a remainder is not
    moves, least = result["moved"], result["moved"]["least possible"]
    np.testing.assert_allclose(moves["consistent"], least, atol=0.01)
    for name in ("row mod B", "murmur3", "balanced"):
        assert moves[name][-1] == pytest.approx(0.5, abs=0.02)
    with pytest.raises(SystemExit):
        benchmark.main(["--rows", "10"])
    assert "--rows must be above" in capsys.readouterr().err
