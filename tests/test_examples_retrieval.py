"""The retrieval examples on a generated ring of items, and their error messages."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, active_flavor

sys.path.insert(0, str(ROOT / "examples"))

import retrieval_data as data
import retrieval_scores as scores

KERAS3 = active_flavor() == "keras3"
# Those of the other flavour run in the suite's other process.
EXAMPLES = ("sasrec", "keras_rs_retrieval") if KERAS3 else ("tfrs_two_tower",)
NEEDS = {
    "keras_rs_retrieval": "keras_rs",
    "tfrs_two_tower": "tensorflow_recommenders",
}
SETTINGS = {
    "sasrec": "--length 10 --blocks 1 --epochs 12 --batch-size 32",
    "keras_rs_retrieval": "--min-rows 50 --epochs 6 --batch-size 128 --recent 3",
    "tfrs_two_tower": "--min-rows 50 --epochs 6 --batch-size 128",
}
MARGINS = {"sasrec": 3.0, "keras_rs_retrieval": 3.0, "tfrs_two_tower": 1.5}


def load(name):
    library = NEEDS.get(name)
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """u.data of 90 users who walk along a ring of 100 items, 20 ratings each.

    All items are about as popular; what a user likes next lies just ahead.
    """
    path = tmp_path_factory.mktemp("ring") / "u.data"
    rng = np.random.default_rng(0)
    lines = []
    for user in range(90):
        items = (rng.integers(100) + np.cumsum(rng.integers(1, 3, 20))) % 100
        lines += [f"{user}\t{item}\t5\t{t}" for t, item in enumerate(items)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", EXAMPLES)
def test_beats_popularity_by_the_margin(name, ring, capsys):
    example = load(name)
    assert example.main(["--data", str(ring), *SETTINGS[name].split()]) == 0
    out = capsys.readouterr().out
    assert f"at least {example.MARGIN:g} times is claimed: holds" in out
    rows = {
        line[:30].strip(): [float(v) for v in line[30:].split()]
        for line in out.splitlines()
        if re.fullmatch(r"\S.{29}( +\d\.\d{4}){5}", line)
    }
    (ours,) = [r for n, r in rows.items() if n != "popularity" and "TFRS" not in n]
    popular = rows["popularity"]
    for row in rows.values():
        assert row == sorted(row) and row[0] >= 0 and row[-1] == 1.0
    ten = scores.KS.index(10)
    assert ours[ten] > MARGINS[name] * popular[ten] > 0
    assert f"is {ours[ten] / popular[ten]:.1f}" in out
    # A compressed table: less state than one number for each of its values.
    for size in re.findall(r"state, \S*embeddings: ([\d,]+) bytes", out):
        assert 0 < int(size.replace(",", "")) < 90 * 32 * 4
    if name == "tfrs_two_tower":
        assert rows["TFRS top-k, before training"] != rows["TFRS top-k, after training"]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "text, said",
    [
        (None, "no such file"),
        ("1\t1\t9\t1\n", "rating must lie in"),
        ("1\t1\t5\t1\n2\t1\t5\t1\n", "no user has"),
    ],
)
def test_bad_data_exits_with_2_and_one_line(name, text, said, tmp_path, capsys):
    path = tmp_path / "u.data"
    if text is not None:
        path.write_text(text)
    assert load(name).main(["--data", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {path}:") and said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "arguments", ["--epochs 0", "--batch-size many", "--learning-rate nan"]
)
def test_bad_arguments_exit_with_2(name, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        load(name).main(arguments.split())
    assert stop.value.code == 2
    assert f"{arguments.split()[0]}: must be" in capsys.readouterr().err


@pytest.mark.skipif(not KERAS3, reason="on tf_keras it is the other examples that run")
@pytest.mark.parametrize("name", ["sasrec", "keras_rs_retrieval"])
def test_says_that_it_wants_keras_3(name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={"TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: for Keras 3: unset TF_USE_LEGACY_KERAS\n"


# ---- what they share ----------------------------------------------------------


def test_ranks_leave_out_what_was_seen():
    score = np.array([[5.0, 4.0, 3.0, 2.0], [1.0, 1.0, 1.0, 0.0]])
    seen = np.array([0, 0, 1]), np.array([0, 2, 3])
    row, item = np.array([0, 0, 1, 1]), np.array([1, 3, 2, -1])
    rank = scores.ranks(score, seen, row, item)
    # Of three that are equal one is better than the middle one, one is worse.
    np.testing.assert_array_equal(rank, [1.0, 2.0, 2.0, np.inf])
    assert scores.hit(rank, 1) == 0.25 and scores.hit(rank, 2) == 0.75
    assert scores.ndcg(rank, 2) == pytest.approx((1 + 2 / np.log2(3)) / 4)
    with pytest.raises(data.UnfitError, match="not finite"):
        scores.ranks(score * np.nan, seen, row, item)


@pytest.mark.parametrize("margin, holds", [(1.9, True), (2.1, False)])
def test_claim_is_about_hits_at_ten(margin, holds, capsys):
    """Popularity finds 1 of 4, the scores 2 of 4."""
    items = 40
    wanted = np.arange(4), np.array([0, 20, 30, 39])
    seen = np.full(50, 3), np.repeat(np.arange(1, 11), 5)
    seen = np.append(seen[0], [2] * 6), np.append(seen[1], [0] * 6)
    score = np.zeros((4, items))
    score[:2, [0, 20]] = 1.0
    score[2:, 1:12] = 1.0
    assert scores.compare("ours", score, seen, wanted, margin) is holds
    out = capsys.readouterr().out
    assert "is 2.00 times that of popularity" in out
    assert ("DOES NOT HOLD" in out) is not holds


def test_sessions_keep_the_last_item(tmp_path):
    import movielens_data

    path = tmp_path / "u.data"
    walks = {"a": "xyz", "b": "yxw", "c": "y"}  # "w" is nowhere but at an end
    lines = [
        f"{u}\t{i}\t3\t{t}" for u, items in walks.items() for t, i in enumerate(items)
    ]
    path.write_text("\n".join(lines))
    sessions = data.leave_last_out(movielens_data.load(path))
    assert sessions.items.tolist() == ["x", "y"]
    assert [s.tolist() for s in sessions.before] == [[0, 1], [1, 0], []]
    assert sessions.last.tolist() == [-1, -1, 1]
    padded = data.padded(sessions.before, 3)
    assert padded.tolist() == [[-1, 0, 1], [-1, 1, 0], [-1, -1, -1]]
    assert data.padded(sessions.before, 1).tolist() == [[1], [0], [-1]]
