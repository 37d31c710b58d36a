"""The build (setup.py, tf_ops/build_config.py) and the loader of what it made."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import tensorflow as tf

from tf_basis._version import __version__
from tf_basis.ops import loader

ROOT = Path(__file__).resolve().parents[1]
BUILT = Path(loader.__file__).parent


@pytest.fixture
def build_config():
    path = ROOT / "tf_ops" / "build_config.py"
    spec = importlib.util.spec_from_file_location("build_config_under_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def built_copy(tmp_path):
    """A copy of the library; call it with fields of build_info.json to change."""

    def copy(**changes) -> Path:
        info = json.loads((BUILT / loader.BUILD_INFO_NAME).read_text())
        shutil.copy(BUILT / loader.LIBRARY_NAME, tmp_path)
        text = json.dumps({**info, **changes})
        (tmp_path / loader.BUILD_INFO_NAME).write_text(text)
        return tmp_path

    return copy


@pytest.fixture
def no_loading(monkeypatch):
    def refuse(path):
        raise AssertionError(f"{path} must not be loaded")

    monkeypatch.setattr(tf, "load_op_library", refuse)


def assert_falls_back(monkeypatch, directory: Path, *words: str) -> None:
    """auto: None and one warning; require: an error; both say `words`."""
    monkeypatch.setattr(loader, "_library", loader.OpLibrary(directory))
    with loader.use("auto"):
        with pytest.warns(RuntimeWarning) as caught:
            assert loader.compiled() is None
            assert loader.compiled() is None
        assert len(caught) == 1
        said = [str(caught[0].message), loader.status()["reason"]]
        assert not loader.status()["loaded"]
    with loader.use("require"), pytest.raises(RuntimeError) as error:
        loader.compiled()
    said.append(str(error.value))
    for word in words:
        assert all(word in text for text in said)
    for text in (said[0], said[2]):
        command = "pip install --no-build-isolation --force-reinstall --no-deps ."
        assert command in text


# ---- modes ----------------------------------------------------------------------


def test_modes_choose_the_library():
    with loader.use("require"):
        module = loader.compiled()
        assert module is not None
        assert loader.status()["loaded"]
        assert loader.status()["reason"] is None
    with loader.use("auto"):
        assert loader.compiled() is module
    with loader.use("off"):
        assert loader.compiled() is None
        assert loader.status()["reason"] == "the mode is off"


def test_use_restores_the_mode_after_an_error():
    before = loader.get_mode()
    with pytest.raises(KeyError), loader.use("off"):
        assert loader.get_mode() == "off"
        raise KeyError
    assert loader.get_mode() == before


@pytest.mark.parametrize("bad", ["on", "OFF", "", None, 1])
def test_bad_mode_is_refused(bad):
    before = loader.get_mode()
    with pytest.raises(ValueError, match="mode must be one of auto, off, require"):
        loader.set_mode(bad)
    with pytest.raises(ValueError, match="got " + repr(bad)), loader.use(bad):
        pass
    assert loader.get_mode() == before


@pytest.mark.parametrize("value, mode", [(None, "auto"), ("", "auto"), ("off", "off")])
def test_mode_starts_from_the_environment(monkeypatch, value, mode):
    monkeypatch.setattr(loader, "_mode", None)
    monkeypatch.delenv("TF_BASIS_OPS", raising=False)
    if value is not None:
        monkeypatch.setenv("TF_BASIS_OPS", value)
    assert loader.get_mode() == mode


def test_bad_mode_in_the_environment_is_named(monkeypatch):
    monkeypatch.setattr(loader, "_mode", None)
    monkeypatch.setenv("TF_BASIS_OPS", "always")
    with pytest.raises(
        ValueError, match=r"TF_BASIS_OPS .*auto, off, require.*'always'"
    ):
        loader.compiled()


# ---- a library that does not fit ------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tensorflow_version": "2.16.2"}, ("2.16.2", tf.__version__)),
        ({"tensorflow_version": None}, ("None", tf.__version__)),
        ({"cxx11_abi_flag": 7}, ("ABI flag 7",)),
        ({"package_version": "0.0.1"}, ("0.0.1", __version__)),
    ],
)
def test_mismatch_is_not_loaded(monkeypatch, built_copy, no_loading, changes, words):
    assert_falls_back(monkeypatch, built_copy(**changes), *words)


def test_other_patch_release_is_a_mismatch(monkeypatch, built_copy, no_loading):
    major, minor, patch = tf.__version__.split("-")[0].split(".")
    other = f"{major}.{minor}.{int(patch) + 1}"
    directory = built_copy(tensorflow_version=other)
    assert_falls_back(monkeypatch, directory, other, tf.__version__)


@pytest.mark.parametrize("text", ["", "{", "[]", None])
def test_unreadable_build_info_is_a_mismatch(monkeypatch, built_copy, no_loading, text):
    info = built_copy() / loader.BUILD_INFO_NAME
    info.unlink()
    if text is not None:
        info.write_text(text)
    assert_falls_back(monkeypatch, info.parent, str(info))


def test_damaged_library_is_not_loaded(monkeypatch, built_copy, no_loading):
    library = built_copy() / loader.LIBRARY_NAME
    library.write_bytes(library.read_bytes()[:1000])
    assert_falls_back(monkeypatch, library.parent, str(library), "is not the file")


def test_unloadable_library_falls_back(monkeypatch, built_copy):
    text = b"not a library"
    directory = built_copy(library_sha256=hashlib.sha256(text).hexdigest())
    (directory / loader.LIBRARY_NAME).write_bytes(text)
    assert_falls_back(monkeypatch, directory, "cannot be loaded")


def test_missing_library_falls_back_silently(monkeypatch, tmp_path, no_loading):
    monkeypatch.setattr(loader, "_library", loader.OpLibrary(tmp_path))
    with warnings.catch_warnings(), loader.use("auto"):
        warnings.simplefilter("error")
        assert loader.compiled() is None
    assert "does not exist" in loader.status()["reason"]
    with (
        loader.use("require"),
        pytest.raises(RuntimeError, match=r"does not exist.*pip install"),
    ):
        loader.compiled()


# ---- what the build wrote -------------------------------------------------------


def test_build_info_lists_the_ops_of_the_library():
    with loader.use("require"):
        module = loader.compiled()
    ops = loader.status()["build_info"]["ops"]
    # A wrapper module names op "TfBasis>Name" "TfBasis_Name".
    registered = {name for name in dir(module) if name.startswith("TfBasis")}
    assert len(ops) > 0
    assert {name.replace(">", "_") for name in ops} == registered


def test_build_info_describes_this_build(build_config):
    info = json.loads((BUILT / loader.BUILD_INFO_NAME).read_text())
    assert info["tensorflow_version"] == tf.__version__
    assert info["package_version"] == __version__
    assert set(build_config.OWN_FLAGS) <= set(info["compile_flags"])
    assert info["compiler"] and info["compiler_version"]


def test_registered_ops_ignores_comments_and_macros(build_config, tmp_path):
    source = tmp_path / "ops.cc"
    source.write_text(
        '// REGISTER_OP("A")\n/* REGISTER_OP("B")\n*/ REGISTER_OP(NAME)\n'
        'REGISTER_OP("Scope>C")\n    .Doc("x");\nREGISTER_OP(\n    "D")\n'
    )
    assert build_config.registered_ops([source]) == ["D", "Scope>C"]


# ---- building -------------------------------------------------------------------


def fake_tensorflow(directory: Path, monkeypatch, version: str | None) -> None:
    """A module that the build takes for TensorFlow; None cannot be imported."""
    text = "raise ImportError('none here')"
    if version is not None:
        text = (
            "import types\n"
            f"__version__ = {version!r}\n"
            "sysconfig = types.SimpleNamespace(\n"
            "    get_compile_flags=lambda: ['-I/usr/include', '--std=c++17',\n"
            "                               '-D_GLIBCXX_USE_CXX11_ABI=1'],\n"
            "    get_link_flags=lambda: [])\n"
        )
    directory.mkdir(exist_ok=True)
    (directory / "tensorflow.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))


@pytest.mark.parametrize("version", [None, "2.15.1"])
def test_unfit_tensorflow_says_what_to_type(
    build_config, tmp_path, monkeypatch, version
):
    fake_tensorflow(tmp_path, monkeypatch, version)
    with pytest.raises(build_config.BuildError) as error:
        build_config.find_tensorflow()
    assert (version or "none here") in str(error.value)
    assert "pip install --no-build-isolation ." in str(error.value)
    assert "TF_BASIS_SKIP_OPS=1" in str(error.value)


def test_missing_compiler_is_named(build_config, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build_config.BuildError, match="no-such-compiler"):
        build_config.find_compiler()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project with our setup.py; returns (directory, run)."""
    root = tmp_path / "project"
    for name in ("setup.py", "pyproject.toml", "tf_ops/build_config.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "README.md").write_text("# project\n")
    ignore = shutil.ignore_patterns("*.so", "build_info.json", "__pycache__")
    shutil.copytree(ROOT / "tf_basis", root / "tf_basis", ignore=ignore)
    fake_tensorflow(tmp_path / "fake", monkeypatch, "2.99.0")

    def run(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=root,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return root, run


def compiled(output: str) -> set[str]:
    """Names of the files that a build compiled, "link" if it linked."""
    names = set()
    for words in map(str.split, output.splitlines()):
        if "-shared" in words:
            names.add("link")
        elif "-c" in words:
            names.add(Path(words[words.index("-c") + 1]).stem)
    return names


def test_only_what_changed_is_compiled(project):
    root, run = project
    source = root / "tf_ops" / "cc"
    (source / "core").mkdir(parents=True)
    header = source / "core" / "shared.h"
    header.write_text("inline int Answer() { return 41; }\n")
    (source / "one.cc").write_text('#include "core/shared.h"\nint One();\n')
    (source / "two.cc").write_text("int Two() { return 2; }\n")
    command = ("setup.py", "build_ext", "--inplace")
    assert compiled(run(*command)) == {"one", "two", "link"}
    ops = root / "tf_basis" / "ops"
    assert (ops / loader.LIBRARY_NAME).exists()
    assert (
        json.loads((ops / loader.BUILD_INFO_NAME).read_text())["tensorflow_version"]
        == "2.99.0"
    )
    assert compiled(run(*command)) == set()
    header.write_text("inline int Answer() { return 42; }\n")
    assert compiled(run(*command)) == {"one", "link"}
    (source / "two.cc").unlink()
    assert compiled(run(*command)) == {"link"}
    flags = {"TF_BASIS_CXXFLAGS": "-DOTHER"}
    assert compiled(run(*command, **flags)) == {"one", "link"}


def test_wheel_without_ops_is_pure_and_works(project, tmp_path):
    root, run = project
    # What an editable install leaves in the tree must stay out of the wheel.
    (root / "tf_basis" / "ops" / loader.LIBRARY_NAME).write_bytes(b"stale")
    command = "-m pip wheel -q --no-deps --no-index --no-build-isolation -w out ."
    run(*command.split(), TF_BASIS_SKIP_OPS="1")
    (wheel,) = (root / "out").iterdir()
    assert wheel.name == f"tf_basis-{__version__}-py3-none-any.whl"
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    files = {p.name for p in site.rglob("*") if p.is_file()}
    assert "py.typed" in files
    assert not files & {loader.LIBRARY_NAME, loader.BUILD_INFO_NAME}
    out = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import tf_basis\n"
        "from tf_basis.ops import loader\n"
        "assert loader.compiled() is None\n"
        "print('at', tf_basis.__file__)",
        PYTHONPATH="",
        TF_BASIS_OPS="auto",
    )
    assert f"at {site}" in out


@pytest.mark.parametrize("command", ["bdist_wheel", "dist_info", "editable_wheel"])
def test_missing_wheel_is_named(project, command):
    _, run = project
    source = (
        "import importlib.util as util, runpy, sys\n"
        "real = util.find_spec\n"
        "missing = ('wheel', 'setuptools.command.bdist_wheel')\n"
        "util.find_spec = lambda n, *p: None if n in missing else real(n, *p)\n"
        f"sys.argv = ['setup.py', {command!r}]\n"
        "try:\n"
        "    runpy.run_path('setup.py', run_name='__main__')\n"
        "except SystemExit as error:\n"
        "    print('said:', error)\n"
    )
    out = run("-c", source, TF_BASIS_SKIP_OPS="1")
    assert "pip install wheel" in out.split("said:")[1]
