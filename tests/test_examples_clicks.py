"""The examples on Criteo's format and on multi-hot features, on generated data."""

from __future__ import annotations

import gzip
import pathlib
import re
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, active_flavor

sys.path.insert(0, str(ROOT / "examples"))

import criteo_data

pytestmark = pytest.mark.skipif(
    active_flavor() != "keras3",
    reason="Keras 3 examples: they run in the suite's Keras 3 process",
)


@pytest.fixture
def log(tmp_path):
    """Lines of which what is in them is known."""
    numbers = [["3", "", "-2", *["0"] * 10], ["", "7", *["1"] * 11]]
    codes = [["68fd1e64", "", *["0a"] * 24], ["", "68fd1e64", *["0a"] * 24]]
    path = tmp_path / "log.tsv"
    path.write_text(
        "".join(
            "\t".join([label, *n, *c]) + "\n"
            for label, n, c in zip("10", numbers, codes)
        )
    )
    return path


def test_lines_are_read_as_the_format_says(log, tmp_path):
    packed = tmp_path / "log.tsv.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    for path in (log, packed):
        ((inputs, label),) = criteo_data.stream([str(path)], 10**9, 5)
        np.testing.assert_array_equal(label, [[1.0], [0.0]])
        wanted = np.log1p([[3, 0, 0, *[0] * 10], [0, 7, *[1] * 11]])
        np.testing.assert_allclose(inputs["numbers"], wanted, rtol=1e-6)
        rows = inputs["rows"].numpy()
        assert rows.shape == (2, 26) and rows.min() >= 0 and rows.max() < 10**9
        # A code is another category in another column; missing ones are categories.
        assert len(np.unique(rows)) == 2 + 2 + 24
        np.testing.assert_array_equal(rows[0, 2:], rows[1, 2:])
        np.testing.assert_array_equal(
            rows[:, 0], tf.strings.to_hash_bucket_fast(["0=68fd1e64", "0="], 10**9)
        )


def test_parts_are_apart_and_whole(tmp_path):
    path = str(tmp_path / "g.tsv")
    criteo_data.generate(path, 1000, seed=3)
    lines = pathlib.Path(path).read_text().splitlines()
    assert len(lines) == 1000 and {line.count("\t") for line in lines} == {39}
    found = []
    for test in (False, True):
        data = criteo_data.stream([path], 1 << 40, 32, test=test)
        found.append(np.concatenate([x["rows"] for x, _ in data]))
    assert [len(f) for f in found] == [1000 - 3 * 32, 3 * 32]
    whole = criteo_data.parse(tf.constant(lines), 1 << 40)[0]["rows"].numpy()
    assert sorted(map(tuple, np.concatenate(found))) == sorted(map(tuple, whole))


def run(module, capsys, *arguments):
    """An example in this process: exit code, what it printed, its errors."""
    code = module.main([str(a) for a in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_deepfm_beats_the_constant(capsys, tmp_path):
    import criteo_deepfm

    path = tmp_path / "g.tsv.gz"
    criteo_data.generate(str(path), 12_000)
    code, out, err = run(
        criteo_deepfm, capsys, "--data", path, "--rows", 50_000,
        "--batch-size", 128, "--learning-rate", 0.005,
    )  # fmt: skip
    assert code == 0, err
    assert "at least 5% less is claimed: True" in out
    (share,) = re.findall(r"([\d.]+)% less\n", out)
    assert float(share) > 5


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda text: text.replace("\t68fd1e64", "", 1), "40 fields"),
        (lambda text: "2" + text[1:], "labels must be 0 or 1"),
        (lambda text: text.replace("\t7\t", "\tseven\t"), "seven"),
    ],
    ids=["missing field", "label", "integer"],
)
def test_wrong_lines_are_errors(log, change, words):
    log.write_text(change(log.read_text()))
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        list(criteo_data.stream([str(log)], 100, 5))


def test_deepfm_says_what_is_wrong_with_a_line(log, capsys):
    import criteo_deepfm

    log.write_text("2" + log.read_text()[1:])
    code, _, err = run(criteo_deepfm, capsys, "--data", log, "--rows", 100)
    assert code == 2 and err.startswith("error: ") and "labels must be" in err


def test_deepfm_finds_no_file(capsys, tmp_path):
    import criteo_deepfm

    code, _, err = run(criteo_deepfm, capsys, "--data", tmp_path / "none*")
    assert code == 2 and "data must name files that exist" in err
    for name in ("a.tsv", "a.tsv.gz"):
        (tmp_path / name).touch()
    code, _, err = run(criteo_deepfm, capsys, "--data", tmp_path / "a*")
    assert code == 2 and "all gzip or all plain" in err


@pytest.mark.long
def test_a_stream_of_a_million_trains_with_flat_memory(capsys):
    """From a quarter of the epoch on memory grows by less than a twentieth."""
    import criteo_deepfm

    code, out, err = run(
        criteo_deepfm, capsys, "--generate", 1_000_000, "--batch-size", 2048
    )
    assert code == 0, err
    before, after = re.search(
        r"memory: ([\d,]+) MB, at the end ([\d,]+) MB", out
    ).groups()
    before, after = (float(x.replace(",", "")) for x in (before, after))
    assert after < 1.05 * before
    assert "at least 5% less is claimed: True" in out


@pytest.fixture
def ratings(tmp_path):
    """u.data and u.item: each user likes the films of some genres."""
    rng = np.random.default_rng(0)
    genres = [sorted(rng.choice(12, 2, replace=False)) for _ in range(80)]
    liked = rng.random((50, 12)) < 0.4
    lines = []
    for second in range(6000):
        user, film = rng.integers(50), rng.integers(80)
        good = liked[user, genres[film]].any() != (rng.random() < 0.1)
        lines.append(f"{user + 1}\t{film + 1}\t{5 if good else 2}\t{second}")
    (tmp_path / "u.data").write_text("\n".join(lines) + "\n")
    films = []
    for number, its in enumerate(genres):
        flags = "|".join("1" if g in its else "0" for g in range(19))
        films.append(f"{number + 1}|Film {number}|01-Jan-1990||url|{flags}")
    (tmp_path / "u.item").write_text("\n".join(films) + "\n")
    return tmp_path / "u.data"


def test_dlrm_with_ragged_features_beats_popularity(capsys, ratings):
    import dlrm_ragged

    code, out, err = run(
        dlrm_ragged, capsys, "--data", ratings, "--epochs", 8,
        "--batch-size", 64, "--learning-rate", 0.005,
    )  # fmt: skip
    assert code == 0, err
    assert "+0.05 is claimed: True" in out
    (ratings.parent / "u.item").unlink()
    code, _, err = run(dlrm_ragged, capsys, "--data", ratings)
    assert code == 2 and "no file of films with genres" in err
