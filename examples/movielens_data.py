"""MovieLens for the examples: fetch it once, read its four formats in time order.

Ratings come from MovieLens-100K (which ships inside a wheel on the package index) or
from a file of the user's own; files beside it may describe users and items.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator

import numpy as np

WHEEL = "recbole==1.2.1"
INSIDE = "recbole/dataset_example/ml-100k/"
FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")

RATING_RANGE = (0.5, 5.0)
LIKED = 4.0  # label 1 is a rating of at least this
TRAIN_SHARE = 0.8

# suffix -> separator, whether line 1 is a header, columns (in order where no header)
RATINGS = {
    ".csv": (",", True, ("userId", "movieId", "rating", "timestamp")),
    ".inter": ("\t", True, ("user_id", "item_id", "rating", "timestamp")),
    ".data": ("\t", False, ("user", "item", "rating", "timestamp")),
    ".dat": ("::", False, ("user", "item", "rating", "timestamp")),
}
FLAGS = tuple(f"genre {i}" for i in range(19))
# suffix of the ratings -> file beside it ({} is its stem), separator, header, columns
USERS = {
    ".inter": ("{}.user", "\t", True, ("user_id", "age", "gender", "occupation")),
    ".data": ("{}.user", "|", False, ("user", "age", "gender", "occupation", "zip")),
    ".dat": ("users.dat", "::", False, ("user", "gender", "age", "occupation", "zip")),
}
ITEMS = {
    ".csv": ("movies.csv", ",", True, ("movieId", "title", "genres")),
    ".inter": ("{}.item", "\t", True, ("item_id", "release_year", "class|genre")),
    ".data": ("{}.item", "|", False, ("id", "title", "year", "video", "url", *FLAGS)),
    ".dat": ("movies.dat", "::", False, ("id", "title", "genres")),
}
YEAR = re.compile(r"\((\d{4})\)\s*$|^(?:\d\d-\w{3}-)?(\d{4})$")


@dataclasses.dataclass
class Log:
    """Ratings in time order (ties in file order) and what is known beside them.

    `users` maps an id to (age or None, gender, occupation), `items` an id to (genres,
    year or None); either is empty where there is no such file.
    """

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    users: dict[str, tuple]
    items: dict[str, tuple]

    @property
    def label(self) -> np.ndarray:
        return (self.rating >= LIKED).astype(np.float32)

    @property
    def n_train(self) -> int:
        return int(len(self.rating) * TRAIN_SHARE)


def default_cache_dir() -> pathlib.Path:
    """TF_BASIS_CACHE, or tf_basis in the user's cache directory."""
    if os.environ.get("TF_BASIS_CACHE"):
        return pathlib.Path(os.environ["TF_BASIS_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tf_basis"


def download_wheel(target: pathlib.Path) -> None:
    """Lets pip put the wheel that carries MovieLens-100K into `target`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, WHEEL, "-d", str(target)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"MovieLens-100K could not be fetched: `pip download {WHEEL}` said "
            f"{(done.stderr or done.stdout).strip()!r}; --data takes a file of your own"
        )


def fetch_movielens(
    cache_dir: str | os.PathLike | None = None,
    download: Callable[[pathlib.Path], None] = download_wheel,
) -> pathlib.Path:
    """Path of MovieLens-100K's ratings, downloaded if the cache does not hold them.

    The files are unpacked elsewhere and the finished folder is renamed into place, so
    an interrupted download leaves no half cache.
    """
    cache = pathlib.Path(cache_dir or default_cache_dir()).expanduser()
    folder = cache / "ml-100k"

    def complete() -> bool:
        return all((folder / name).is_file() for name in FILES)

    if complete():
        return folder / FILES[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as work_dir:
        work = pathlib.Path(work_dir)
        print(f"fetching MovieLens-100K into {folder}", flush=True)
        download(work)
        wheels = list(work.glob("*.whl"))
        if len(wheels) != 1:
            raise RuntimeError(f"{WHEEL}: expected one wheel, got {len(wheels)}")
        (work / "new").mkdir()
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                for name in FILES:
                    (work / "new" / name).write_bytes(wheel.read(INSIDE + name))
        except (KeyError, zipfile.BadZipFile) as error:
            message = f"{wheels[0].name}: not the expected wheel: {error}"
            raise RuntimeError(message) from error
        if folder.exists() and not complete():
            folder.rename(work / "old")
        try:
            (work / "new").rename(folder)
        except OSError:
            if not complete():  # unless another process was quicker
                raise
    return folder / FILES[0]


def read_lines(path: pathlib.Path) -> list[str]:
    """Lines without their ends; UTF-8 with or without BOM, else Latin-1 (u.item)."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name the ratings file inside it")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def read_table(
    path: pathlib.Path, separator: str, header: bool, columns: tuple[str, ...]
) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and the values of `columns`; blank lines are skipped."""
    lines = enumerate(read_lines(path), 1)
    filled = ((number, line) for number, line in lines if line.strip())

    def split(number: int, line: str) -> list[str]:
        if separator != ",":
            return line.split(separator)
        try:
            return next(csv.reader([line]))
        except csv.Error as error:
            raise ValueError(f"{path}:{number}: {error}") from None

    width, picked = len(columns), list(range(len(columns)))
    if header:
        number, line = next(filled, (1, ""))
        names = [name.strip().split(":")[0] for name in split(number, line or " ")]
        wanted = [next((n for n in c.split("|") if n in names), c) for c in columns]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ValueError(
                f"{path}:{number}: the header must name {', '.join(columns)}; "
                f"{', '.join(missing)} missing in {line[:80]!r}"
            )
        width, picked = len(names), [names.index(name) for name in wanted]
    for number, line in filled:
        values = split(number, line)
        if len(values) != width:
            raise ValueError(
                f"{path}:{number}: expected {width} fields separated by "
                f"{separator!r}, got {len(values)} in {line[:80]!r}"
            )
        yield number, [values[i].strip() for i in picked]


def read_number(where: str, name: str, text: str, low: float, high: float) -> float:
    """`text` as a number in [low, high], or a ValueError that says where."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{where}: {name} must be a number, got {text!r}") from None
    if not low <= value <= high:
        raise ValueError(f"{where}: {name} must lie in [{low:g}, {high:g}], got {text}")
    return value


def read_users(path: pathlib.Path, suffix: str) -> dict[str, tuple]:
    """User id -> (age or None, gender, occupation) from the file beside `path`."""
    users = {}
    for where, row in _beside(path, USERS.get(suffix)):
        age = read_number(where, "age", row["age"], 0, 150) if row["age"] else None
        users[next(iter(row.values()))] = (age, row["gender"], row["occupation"])
    return users


def read_items(path: pathlib.Path, suffix: str) -> dict[str, tuple]:
    """Item id -> (genres, year or None) from the file beside `path`."""
    items = {}
    for _, row in _beside(path, ITEMS.get(suffix)):
        text = row.get("release_year") or row.get("year") or row.get("title", "")
        year = YEAR.search(text)
        if suffix == ".data":
            genres = [flag for flag in FLAGS if row[flag] == "1"]
        elif suffix == ".inter":
            genres = row["class|genre"].split()
        else:
            genres = [g for g in row["genres"].split("|") if g[:1] not in ("", "(")]
        items[next(iter(row.values()))] = (
            tuple(genres),
            int(year[1] or year[2]) if year else None,
        )
    return items


def _beside(path: pathlib.Path, layout: tuple | None) -> Iterator[tuple[str, dict]]:
    if layout is None:
        return
    side = path.with_name(layout[0].format(path.stem))
    if side.exists():
        for number, values in read_table(side, *layout[1:]):
            yield f"{side}:{number}", dict(zip(layout[3], values, strict=True))


def load(path: str | os.PathLike) -> Log:
    """Reads ratings (`ratings.csv`, `u.data`, `ratings.dat`, `*.inter`) in time order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: unknown format or bad line, with file name and line number.
    """
    path = pathlib.Path(path).expanduser()
    if path.is_file() and path.suffix not in RATINGS:
        raise ValueError(
            f"{path}: unknown format {path.suffix!r}; known are ratings.csv, u.data "
            f"(.data), ratings.dat (.dat) and RecBole's .inter"
        )
    columns: tuple[list, ...] = ([], [], [], [])
    layout = RATINGS.get(path.suffix, RATINGS[".csv"])
    for number, (user, item, rating, time) in read_table(path, *layout):
        where = f"{path}:{number}"
        if not user or not item:
            raise ValueError(f"{where}: user and item must not be empty")
        columns[0].append(user)
        columns[1].append(item)
        columns[2].append(read_number(where, "rating", rating, *RATING_RANGE))
        columns[3].append(read_number(where, "timestamp", time, 0, 1e18))
    if not columns[0]:
        raise ValueError(f"{path}: holds no ratings")
    order = np.argsort(np.asarray(columns[3], np.float64), kind="stable")
    user, item, rating, time = (np.asarray(column)[order] for column in columns)
    users, items = read_users(path, path.suffix), read_items(path, path.suffix)
    return Log(user, item, rating.astype(np.float32), time, users, items)
