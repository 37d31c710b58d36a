"""The examples' data: formats, errors with line numbers, order, features, cache."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import movielens_data as data
import movielens_features as features

# user, item, rating, time: not in time order, with a tie
RATINGS = [
    ("7", "300", 5, 60),
    ("7", "20", 3, 20),
    ("11", "300", 4, 40),
    ("7", "1000", 1, 40),
    ("11", "20", 2, 10),
]
FORMATS = {
    "u.data": ("", "{}\t{}\t{}\t{}"),
    "ratings.dat": ("", "{}::{}::{}::{}"),
    "ratings.csv": ("userId,movieId,rating,timestamp", "{},{},{},{}"),
    "mine.inter": (
        "user_id:token\titem_id:token\trating:float\ttimestamp:float",
        "{}\t{}\t{}\t{}",
    ),
}
NO_GENRE = "|".join("0" * 19)
SIDE = {
    "u.data": {
        "u.user": "7|24|M|writer|85711\n11|53|F|other|94043\n",
        "u.item": "300|Seven (1995)|01-Jan-1995||http://x|"
        + "|".join("1" if i in (6, 16) else "0" for i in range(19))
        + "\n20|Café (1971)|||http://x|"
        + NO_GENRE
        + "\n1000|None|||u|"
        + NO_GENRE
        + "\n",
    },
    "ratings.dat": {
        "users.dat": "7::M::24::writer::85711\n11::F::53::other::94043\n",
        "movies.dat": "300::Seven (1995)::Crime|Thriller\n"
        "20::Café (1971)::\n1000::None::\n",
    },
    "ratings.csv": {
        "movies.csv": "movieId,title,genres\n"
        '300,"Se7en, or Seven (1995)",Crime|Thriller\n'
        "20,Café (1971),(no genres listed)\n1000,None,(no genres listed)\n",
    },
    "mine.inter": {
        "mine.user": "user_id:token\tage:token\tgender:token\toccupation:token\n"
        "7\t24\tM\twriter\n11\t53\tF\tother\n",
        "mine.item": "item_id:token\ttitle:token_seq\trelease_year:token\t"
        "class:token_seq\n300\tSeven\t1995\tCrime Thriller\n20\tCafé\t1971\t\n"
        "1000\tNone\t\t\n",
    },
}


def write(folder, name, ratings=RATINGS, side=True, encoding="utf-8"):
    """A ratings file with its side files; returns its path."""
    header, line = FORMATS[name]
    lines = [header] if header else []
    lines += [line.format(*rating) for rating in ratings]
    (folder / name).write_text("\n".join(lines) + "\n", encoding=encoding)
    for other, text in SIDE[name].items() if side else ():
        (folder / other).write_text(text, encoding=encoding)
    return folder / name


def make_log(ratings, users=None, items=None):
    """A log from tuples that are in time order already."""
    user, item, rating, time = zip(*ratings, strict=True)
    return data.Log(
        np.array(user),
        np.array(item),
        np.array(rating, np.float32),
        np.array(time, np.float64),
        users or {},
        items or {},
    )


def random_log(rng, size=400):
    """A log with side information, ties in time and gaps in what is known."""
    time = np.sort(rng.integers(0, size // 2, size))
    ratings = [
        (f"u{rng.integers(30)}", f"i{rng.integers(40)}", rng.integers(1, 6), t)
        for t in time
    ]
    users = {
        f"u{k}": (rng.integers(10, 70) if k % 7 else None, "MF"[k % 2], f"o{k % 5}")
        for k in range(28)
    }
    items = {
        f"i{k}": (
            tuple(f"g{g}" for g in rng.permutation(8)[: k % 7]),
            1950 + k if k % 5 else None,
        )
        for k in range(38)
    }
    return make_log(ratings, users, items)


# ---- formats ------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_same_log(tmp_path, name, encoding):
    log = data.load(write(tmp_path, name, encoding=encoding))
    assert log.user.tolist() == ["11", "7", "11", "7", "7"]
    assert log.item.tolist() == ["20", "20", "300", "1000", "300"]
    assert log.rating.tolist() == [2, 3, 4, 1, 5]
    assert log.time.tolist() == [10, 20, 40, 40, 60]
    assert log.label.tolist() == [0, 0, 1, 0, 1]
    if name == "ratings.csv":
        assert log.users == {}
    else:
        assert log.users == {"7": (24, "M", "writer"), "11": (53, "F", "other")}
    assert {k: (len(g), year) for k, (g, year) in log.items.items()} == {
        "300": (2, 1995),
        "20": (0, 1971),
        "1000": (0, None),
    }


@pytest.mark.parametrize("name", FORMATS)
def test_without_side_files(tmp_path, name):
    log = data.load(write(tmp_path, name, side=False))
    assert log.users == {} and log.items == {}
    assert len(log.rating) == len(RATINGS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("end", ["\r\n", "\r", "\n\n", "\n   \n"])
def test_byte_order_mark_line_ends_and_blank_lines(tmp_path, name, end):
    path = write(tmp_path, name)
    expected = data.load(path)
    text = path.read_text().replace("\n", end)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    log = data.load(path)
    assert log.user.tolist() == expected.user.tolist()
    assert log.rating.tolist() == expected.rating.tolist()


def test_ids_are_any_strings_and_floats_are_numbers(tmp_path):
    ratings = [("anna", "tt-07", 3.5, "1e9"), ("Anna", "07", 4.5, 5.5)]
    log = data.load(write(tmp_path, "ratings.csv", ratings, side=False))
    assert log.user.tolist() == ["Anna", "anna"]
    assert log.item.tolist() == ["07", "tt-07"]
    assert log.time.tolist() == [5.5, 1e9]


def test_header_decides_the_columns(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text('rating,x,timestamp,movieId,userId\n4,"a,b",9,m,u\n')
    log = data.load(path)
    assert (log.user[0], log.item[0], log.rating[0], log.time[0]) == ("u", "m", 4, 9)


def test_genre_is_another_name_of_class(tmp_path):
    path = write(tmp_path, "mine.inter")
    side = tmp_path / "mine.item"
    side.write_text(side.read_text().replace("class:", "genre:"))
    assert data.load(path).items["300"] == (("Crime", "Thriller"), 1995)


# ---- errors -------------------------------------------------------------------


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.csv: no such file"):
        data.load(tmp_path / "no.csv")
    with pytest.raises(FileNotFoundError, match=r"no\.parquet: no such file"):
        data.load(tmp_path / "no.parquet")
    with pytest.raises(ValueError, match="is a folder; name the ratings file"):
        data.load(tmp_path)


def test_unknown_format_names_the_known_ones(tmp_path):
    path = tmp_path / "ratings.json"
    path.write_text("{}")
    with pytest.raises(ValueError) as error:
        data.load(path)
    for part in (str(path), "'.json'", "ratings.csv", "u.data", ".dat", ".inter"):
        assert part in str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_empty_file(tmp_path, name):
    path = tmp_path / name
    header = FORMATS[name][0]
    path.write_text(header + "\n")
    with pytest.raises(ValueError, match=f"{name}: holds no ratings"):
        data.load(path)
    if header:
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=f"{name}:1: the header must name"):
            data.load(path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (("7", "300", "five", 1), "rating must be a number, got 'five'"),
        (("7", "300", "nan", 1), r"rating must lie in \[0.5, 5\], got nan"),
        (("7", "300", 5.5, 1), r"rating must lie in \[0.5, 5\], got 5.5"),
        (("7", "300", 0, 1), r"rating must lie in \[0.5, 5\], got 0"),
        (("7", "300", 4, "noon"), "timestamp must be a number, got 'noon'"),
        (("7", "300", 4, -1), "timestamp must lie in .*got -1"),
        (("", "300", 4, 1), "user and item must not be empty"),
        (("7", " ", 4, 1), "user and item must not be empty"),
    ],
)
def test_bad_value_names_file_and_line(tmp_path, name, bad, said):
    path = write(tmp_path, name, [*RATINGS[:2], bad, *RATINGS[2:]])
    line = 4 if FORMATS[name][0] else 3
    with pytest.raises(ValueError, match=rf"{name}:{line}: {said}"):
        data.load(path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("change", ["short", "long"])
def test_wrong_number_of_fields(tmp_path, name, change):
    path = write(tmp_path, name)
    lines = path.read_text().split("\n")
    separator = data.RATINGS[path.suffix][0]
    lines[3] = (
        lines[3].rpartition(separator)[0]
        if change == "short"
        else lines[3] + separator + "1"
    )
    path.write_text("\n\n".join(lines))  # blank lines count as lines
    got = 3 if change == "short" else 5
    with pytest.raises(ValueError, match=rf"{name}:7: expected 4 fields .* got {got}"):
        data.load(path)


@pytest.mark.parametrize("name", ["ratings.csv", "mine.inter"])
def test_header_must_name_the_columns(tmp_path, name):
    path = write(tmp_path, name)
    path.write_text(path.read_text().replace("timestamp", "when"))
    with pytest.raises(ValueError, match=rf"{name}:1: .*; timestamp missing in"):
        data.load(path)


@pytest.mark.parametrize(
    ("name", "side", "old", "new", "said"),
    [
        ("u.data", "u.user", "53", "old", "u.user:2: age must be a number"),
        ("u.data", "u.user", "|F|", "|", "u.user:2: expected 5 fields"),
        ("u.data", "u.item", "||u|", "|", "u.item:3: expected 24 fields"),
        ("ratings.dat", "users.dat", "53", "999", r"users.dat:2: age must lie in \[0"),
        ("ratings.csv", "movies.csv", "Café", "Café,", "movies.csv:3: expected 3"),
        ("mine.inter", "mine.user", "age", "years", "mine.user:1: .*age missing"),
    ],
)
def test_bad_line_beside_the_ratings(tmp_path, name, side, old, new, said):
    path = write(tmp_path, name)
    text = (tmp_path / side).read_text()
    assert old in text
    (tmp_path / side).write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=said):
        data.load(path)


# ---- features -----------------------------------------------------------------


def test_split_is_by_time_and_ties_keep_their_order(tmp_path):
    ratings = [(str(i), "1", 3, (i * 7) % 10) for i in range(50)]
    log = data.load(write(tmp_path, "u.data", ratings))
    wanted = sorted(range(50), key=lambda i: (i * 7) % 10)  # sorted is stable
    assert log.user.tolist() == [str(i) for i in wanted]
    assert log.n_train == 40
    assert log.time[:40].max() <= log.time[40:].min()


def test_rows_are_in_frequency_order_of_the_training_part():
    items = ["a"] * 2 + ["b"] * 5 + ["c"] * 3 + ["d"] * 9
    log = make_log([(f"u{i}", item, 4, i) for i, item in enumerate(items)])
    made = features.make_features(log, 10)
    column = made.rows[:, made.fields.index("item")]
    # in training: b 5, c 3, a 2; d is unknown, although it is frequent later
    assert column[2] < column[7] < column[0]
    unknown = made.fields.index("item")
    assert set(column[10:]) == {unknown}


def test_every_row_is_used_and_order_follows_the_counts(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    there = made.weights[: log.n_train] > 0
    used = np.bincount(made.rows[: log.n_train][there], minlength=made.n_rows)
    assert len(used) == made.n_rows == sum(made.counts)
    known = used[len(made.fields) :]
    assert (known > 0).all()
    assert (np.diff(known) <= 0).all()
    assert made.rows.min() >= 0 and made.rows.max() < made.n_rows
    assert made.left_out == []


def test_weights_of_a_field_sum_to_one(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    for f in range(len(made.fields)):
        total = made.weights[:, made.slot_field == f].sum(1)
        np.testing.assert_allclose(total, 1, rtol=1e-6)
    genre = made.slot_field == made.fields.index("genre")
    for row, item in zip(made.weights, log.item, strict=True):
        genres = log.items.get(item, ((), None))[0]
        kept = min(len(genres), features.GENRE_SLOTS)
        assert np.count_nonzero(row[genre]) == max(kept, 1)


def test_same_row_means_same_value(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    field = made.fields.index("item x occupation")
    column = made.rows[:, made.slot_field == field][:, 0]
    jobs = [log.users.get(u, (None,) * 3)[2] for u in log.user]
    pairs = [f"{i}/{j}" if j else None for i, j in zip(log.item, jobs, strict=True)]
    seen = set(pairs[: log.n_train]) - {None}
    assert None in pairs and set(pairs) - seen
    rows = {p: {r for r, q in zip(column, pairs, strict=True) if q == p} for p in seen}
    assert all(len(r) == 1 and r != {field} for r in rows.values())
    assert len(set().union(*rows.values())) == len(seen)
    assert {r for r, p in zip(column, pairs, strict=True) if p not in seen} == {field}


def test_crosses_need_their_parts(rng):
    log = random_log(rng)
    without_users = make_log(
        zip(log.user, log.item, log.rating, log.time, strict=True), {}, log.items
    )
    made = features.make_features(without_users, log.n_train)
    assert "item x occupation" in made.left_out and "user x genre" in made.fields
    without_items = make_log(
        zip(log.user, log.item, log.rating, log.time, strict=True), log.users
    )
    other = features.make_features(without_items, log.n_train)
    assert "user x genre" in other.left_out and "item x occupation" in other.fields
    everything = features.make_features(log, log.n_train)
    for part in (made, other):
        assert set(part.fields) | set(part.left_out) == set(everything.fields)
        assert not set(part.fields) & set(part.left_out)


def test_history_counts_strictly_earlier_ratings(rng):
    size = 300
    group, liked = rng.integers(0, 9, size), rng.integers(0, 2, size).astype(float)
    time = rng.integers(0, 60, size)
    found = features.earlier(group, time, liked)
    for i in range(size):
        before = (group == group[i]) & (time < time[i])
        assert found[i].tolist() == [before.sum(), liked[before].sum()]


def test_features_see_no_future(rng):
    log = random_log(rng)
    n_train = log.n_train
    before = features.make_features(log, n_train)
    log.rating[n_train:] = 6 - log.rating[n_train:]
    log.user[n_train:] = "stranger"
    after = features.make_features(log, n_train)
    np.testing.assert_array_equal(before.rows[:n_train], after.rows[:n_train])
    assert before.counts == after.counts


def test_cross_is_one_code_per_combination(rng):
    columns = [rng.integers(-1, 6, 500) for _ in range(3)]
    found = features.cross(*columns)
    combinations = list(zip(*columns, strict=True))
    codes = {}
    for combination, code in zip(combinations, found, strict=True):
        if -1 in combination:
            assert code == -1
        else:
            assert codes.setdefault(combination, code) == code >= 0
    assert len(set(codes.values())) == len(codes)


def test_forget_users_changes_their_fields_only(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    hidden = features.forget_users(made, 0.5, seed=3)
    np.testing.assert_array_equal(hidden, features.forget_users(made, 0.5, seed=3))
    assert (hidden != features.forget_users(made, 0.5, seed=4)).any()
    of_user = np.array(["user" in made.fields[f] for f in made.slot_field])
    np.testing.assert_array_equal(hidden[:, ~of_user], made.rows[:, ~of_user])
    forgotten = (hidden[:, of_user] == made.slot_field[of_user]).all(1)
    assert 0.4 < forgotten.mean() < 0.65
    np.testing.assert_array_equal(hidden[~forgotten], made.rows[~forgotten])


# ---- cache --------------------------------------------------------------------


def fake_wheel(folder, leave_out=()):
    """What pip would leave in `folder`."""
    with zipfile.ZipFile(folder / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        for name in set(data.FILES) - set(leave_out):
            wheel.writestr(data.INSIDE + name, f"content of {name}")
        wheel.writestr("recbole/__init__.py", "")


def no_download(folder):
    raise AssertionError("nothing may be downloaded")


def test_download_once(tmp_path):
    cache = tmp_path / "new" / "cache"
    path = data.fetch_movielens(cache, fake_wheel)
    assert path == cache / "ml-100k" / "ml-100k.inter"
    for name in data.FILES:
        assert path.with_name(name).read_text() == f"content of {name}"
    assert os.listdir(cache) == ["ml-100k"]
    assert data.fetch_movielens(cache, no_download) == path


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_interrupted_download_leaves_nothing(tmp_path, error):
    def interrupted(folder):
        fake_wheel(folder)
        raise error("stopped")

    with pytest.raises(error):
        data.fetch_movielens(tmp_path, interrupted)
    assert os.listdir(tmp_path) == []
    assert data.fetch_movielens(tmp_path, fake_wheel).is_file()


def test_killed_download_leaves_no_half_cache(tmp_path):
    source = (
        "import os, sys, movielens_data as data\n"
        "data.fetch_movielens(sys.argv[1], lambda folder: os._exit(9))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
    )
    assert done.returncode == 9
    assert not (tmp_path / "ml-100k").exists()
    assert data.fetch_movielens(tmp_path, fake_wheel).is_file()


def test_incomplete_cache_is_replaced(tmp_path):
    path = data.fetch_movielens(tmp_path, fake_wheel)
    path.with_name("ml-100k.item").unlink()
    path.write_text("old")
    assert data.fetch_movielens(tmp_path, fake_wheel) == path
    assert path.read_text() == "content of ml-100k.inter"
    assert path.with_name("ml-100k.item").is_file()
    assert os.listdir(tmp_path) == ["ml-100k"]


def test_another_process_was_quicker(tmp_path):
    def slow(folder):
        fake_wheel(folder)
        data.fetch_movielens(tmp_path, fake_wheel)

    path = data.fetch_movielens(tmp_path, slow)
    assert path.read_text() == "content of ml-100k.inter"
    assert os.listdir(tmp_path) == ["ml-100k"]


def test_wrong_wheel(tmp_path):
    def lacks_a_file(folder):
        fake_wheel(folder, leave_out=["ml-100k.user"])

    def broken(folder):
        (folder / "recbole-1.2.1-py3-none-any.whl").write_bytes(b"half a wheel")

    for download in (lacks_a_file, broken):
        with pytest.raises(RuntimeError, match=r"recbole.*: not the expected"):
            data.fetch_movielens(tmp_path, download)
    with pytest.raises(RuntimeError, match="expected one wheel, got 0"):
        data.fetch_movielens(tmp_path, lambda folder: None)
    assert os.listdir(tmp_path) == []


def test_failed_pip_is_told_with_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip may look nowhere
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RuntimeError, match=r"could not be fetched.*--data takes"):
        data.fetch_movielens(tmp_path)
    assert os.listdir(tmp_path) == []


def test_cache_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TF_BASIS_CACHE", raising=False)
    assert data.default_cache_dir() == tmp_path / "home" / ".cache" / "tf_basis"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data.default_cache_dir() == tmp_path / "xdg" / "tf_basis"
    monkeypatch.setenv("TF_BASIS_CACHE", str(tmp_path / "own"))
    assert data.default_cache_dir() == tmp_path / "own"
    assert data.fetch_movielens(download=fake_wheel).is_relative_to(tmp_path / "own")
