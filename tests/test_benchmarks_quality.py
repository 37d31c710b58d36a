"""benchmarks/quality.py: scores, the choice of rates, resuming, and a tiny run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from helpers import active_flavor

pytestmark = pytest.mark.skipif(
    active_flavor() != "keras3", reason="the benchmark is Keras 3's"
)


@pytest.fixture(scope="module")
def gowalla(benchmark):
    return benchmark("quality_gowalla")


@pytest.fixture(scope="module")
def quality(benchmark):
    return benchmark("quality")


def write_pairs(path):
    """An .npz of 40 users in two groups, each with items of its own."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 8)
    items = np.concatenate([rng.permutation(30)[:8] + 30 * (u % 2) for u in range(40)])
    test = np.arange(len(users)) % 4 == 0
    arrays = {"train_user": users[~test], "train_item": items[~test]}
    arrays |= {"test_user": users[test], "test_item": items[test]}
    np.savez(path, **arrays)
    return path


def test_scores_are_those_of_a_full_sort(gowalla):
    rng = np.random.default_rng(1)
    users, items = rng.normal(size=(9, 5)), rng.normal(size=(3000, 5))
    pairs = np.array([(u, i) for u in range(8) for i in rng.permutation(3000)[:70]])
    both = rng.random(len(pairs)) < 0.5
    data = gowalla.Pairs(9, 3000, pairs[both], pairs[~both])
    got = gowalla.score(data, users.astype(np.float32), items.astype(np.float32))
    recalls, gains = [], []
    for u in range(8):  # user 8 has nothing to be found
        had = {i for v, i in data.train if v == u}
        find = {i for v, i in data.test if v == u}
        order = [i for i in np.argsort(-(items @ users[u])) if i not in had][:20]
        hits = [i in find for i in order]
        recalls.append(sum(hits) / len(find))
        best = sum(1 / math.log2(k + 2) for k in range(min(20, len(find))))
        gains.append(sum(h / math.log2(k + 2) for k, h in enumerate(hits)) / best)
    assert got["recall"] == pytest.approx(np.mean(recalls)) and got["recall"] > 0
    assert got["ndcg"] == pytest.approx(np.mean(gains))


def test_tuning_holds_out_training_pairs(gowalla, tmp_path):
    pairs = gowalla.load(write_pairs(tmp_path / "pairs.npz"))
    part = pairs.tuning()
    assert (pairs.users, pairs.items) == (40, 60)
    together = np.concatenate([part.train, part.test])
    assert len(part.test) == len(pairs.train) // 10
    assert sorted(map(tuple, together)) == sorted(map(tuple, pairs.train))


def test_pairs_of_texts(gowalla, tmp_path):
    (tmp_path / "train.txt").write_text("0 5 2\n1\n2 0\n")
    (tmp_path / "test.txt").write_text("0 1\n3 4 5\n")
    pairs = gowalla.load(tmp_path)
    assert (pairs.users, pairs.items) == (4, 6)
    assert pairs.train.tolist() == [[0, 5], [0, 2], [2, 0]]
    assert pairs.test.tolist() == [[0, 1], [3, 4], [3, 5]]


def test_rate_is_the_best_with_worse_neighbours(quality):
    asked = []

    def score(rate):
        asked.append(rate)
        return math.nan if rate > 0.05 else -abs(math.log2(rate / 0.008))

    assert quality.tune(score, 1e-3) == pytest.approx(0.008)
    assert len(asked) == len(set(asked)) == 6  # from 0.0005 to 0.016
    assert quality.tune(score, 0.064) == pytest.approx(0.008)


def test_teacher_is_known_and_its_examples_differ(benchmark):
    clicks = benchmark("quality_clicks")
    test, tuning = (clicks.zipf(2000, (50, 20), tuning) for tuning in (False, True))
    assert test.features.n_rows == 70 and test.n_train == 1600
    assert test.features.rows[:, 1].min() >= 50
    assert 0.6 < test.bound < 1
    assert (test.features.rows != tuning.features.rows).any()


@pytest.mark.long
def test_tiny_run_resumes(quality, benchmark, tmp_path, capsys, monkeypatch):
    gowalla = benchmark("quality_gowalla")
    settings = gowalla.Settings(epochs=30, batch=40)
    monkeypatch.setattr(quality, "settings_of", lambda task, args: settings)
    names = ["lazy Adam", "row-wise Adagrad", "BasisAdam 100:1"]
    names += ["BasisAdam 100:1, equal bytes"]
    cache, path = tmp_path / "runs.jsonl", tmp_path / "out" / "quality.json"
    arguments = ["--tasks", "gowalla", "--seeds", "2", "--methods", *names]
    arguments += ["--gowalla", str(write_pairs(tmp_path / "pairs.npz"))]
    arguments += ["--cache", str(cache), "--json", str(path)]
    assert quality.main(arguments) == 0
    first, output = json.loads(path.read_text()), capsys.readouterr().out
    lines = {line["method"]: line for line in first["lines"]}
    assert list(lines) == names
    # 40 and 60 rows of 64: two moments; one sum; a bucket of 64 + 1 and 4 bytes a row.
    assert lines["lazy Adam"]["state_bytes"] == 2 * 4 * 64 * 100
    assert lines["row-wise Adagrad"]["state_bytes"] == 4 * 100
    assert lines["BasisAdam 100:1"]["state_bytes"] == 2 * 4 * 65 + 4 * 100
    assert lines["BasisAdam 100:1, equal bytes"]["state_bytes"] == 2 * 132 + 2 * 100
    # Items of the own group: 22 of them are left, of which 20 are named.
    assert all(line["recall"][0] > 0.7 for line in first["lines"])
    assert "at least the published 0.1291: holds" in output
    assert len(first["claims"]) == 3

    runs = [json.loads(line) for line in cache.read_text().splitlines()]
    for name in names:
        tuned = {
            r["rate"]: r["scores"]["recall"]
            for r in runs
            if r["tuning"] and r["method"] == name
        }
        rate = lines[name]["rate"]
        assert tuned[rate] == max(tuned.values())
        assert {rate / 2, rate * 2} <= set(tuned)
        seeds = [
            r["scores"]["recall"]
            for r in runs
            if not r["tuning"] and r["method"] == name
        ]
        assert lines[name]["recall"][0] == pytest.approx(np.mean(seeds))

    def forbidden(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(gowalla, "train", forbidden)
    assert quality.main(arguments) == 0
    assert json.loads(path.read_text())["lines"] == first["lines"]


def test_wrong_arguments(quality, tmp_path, capsys):
    for arguments, words in (
        (
            ["--tasks", "gowalla", "--gowalla", "none.npz"],
            "no such file or folder 'none.npz'",
        ),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--methods", "Lion"], "invalid choice: 'Lion'"),
    ):
        with pytest.raises(SystemExit):
            quality.parse(arguments)
        assert words in capsys.readouterr().err
    assert quality.parse(["--tasks", "gowalla", "zipf"]).tasks == ["zipf"]
    assert "gowalla is left out" in capsys.readouterr().err
