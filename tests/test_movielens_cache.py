"""The examples' cache of MovieLens: whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import movielens_data as data


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
