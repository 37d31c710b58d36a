"""The benchmark of ranks of unequal speed: what it claims."""

from __future__ import annotations

import json

import pytest
from helpers import active_flavor
from horovod_helpers import need_horovod


@pytest.mark.parametrize("reached, holds", [(24.0, True), (23.9, False)])
def test_the_claim_can_fail(benchmark, reached, holds):
    found = {
        "alone": [[20.0, 10.0], [40.0, 20.0], [2.0, 1.0]],
        "even": [[15.0, 16.0], [30.0, 31.0], [1.5, 1.5]],
        "balanced": [[reached, 25.0], [2 * reached, 60.0], [0.1, 0.1]],
    }
    result = benchmark("balanced_batch").summary(found)
    assert result["ideal"] == 30 and result["speeds"] == [20, 10]
    assert result["even_share"] == 0.5 and result["even"] == 15
    assert result["balanced_share"] == pytest.approx(reached / 30)
    assert result["holds"] == holds


@pytest.mark.long
@pytest.mark.skipif(active_flavor() != "keras3", reason="its model is Keras 3's")
def test_balanced_batch(benchmark, tmp_path, capsys):
    need_horovod()
    path = tmp_path / "balanced.json"
    small = ["--global-batch", "64", "--widths", "4", "8", "--microseconds", "1000"]
    small += ["--settle", "30", "--every", "5", "--rounds", "1", "--steps", "4"]
    assert benchmark("balanced_batch").main([*small, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["found"]
    assert sum(found["sizes"][-1]) == 64 and found["sizes"][-1][0] > 34
    assert "of the ideal throughput" in capsys.readouterr().out
