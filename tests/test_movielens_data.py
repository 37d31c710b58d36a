"""The examples' data: formats, and errors with line numbers."""

from __future__ import annotations

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import movielens_data as data
from movielens_helpers import FORMATS, RATINGS, write

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
