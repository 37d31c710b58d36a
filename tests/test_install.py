"""`tf-basis install-horovod`, all but the real build, which `make test` does."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import tarfile
import tempfile
from pathlib import Path

import horovod_helpers
import pytest
import tensorflow as tf
from helpers import run_python

from tf_basis import __main__ as cli
from tf_basis.distributed import horovod_build, horovod_state, install
from tf_basis.distributed.horovod_build import InstallError
from tf_basis.distributed.horovod_state import State

LISTS = """\
# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

# Create library
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
"""
HERE = tf.__version__
# Ends the build of our little source; the real one would take minutes.
SETUP = """
import sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    raise SystemExit("c++: fatal error: Killed signal terminated program cc1plus")
setup(name="horovod", version="0.28.1")
"""


def write(path: Path, text: str, executable: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_archive(path: Path, files: dict[str, str], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
        for member in more:
            tar.addfile(member)
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a package `horovod` of these files before any installed one."""

    def put(files: dict[str, str], version="0.27.0") -> None:
        root = tmp_path / "fake"
        write(root / "horovod" / "__init__.py", "")
        for name, text in files.items():
            write(root / "horovod" / name, text)
        told = f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n"
        write(root / f"horovod-{version}.dist-info" / "METADATA", told)
        monkeypatch.setenv("PYTHONPATH", str(root))

    return put


# ---- the source -----------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.19.0", "2.21.0", "2.22.0-rc1", "3.0.0"])
def test_the_xla_ops_are_left_out(version):
    edited = horovod_build.without_xla(LISTS, version)
    removed = [x for x in LISTS.splitlines() if x not in edited.splitlines()]
    assert len(removed) == 1 and "xla_mpi_ops.cc" in removed[0]
    assert "/mpi_ops.cc" in edited and "add_library" in edited


@pytest.mark.parametrize("version", ["2.16.2", "2.18.1"])
def test_older_tensorflow_keeps_the_xla_ops(version):
    assert horovod_build.without_xla(LISTS, version) == LISTS


@pytest.mark.parametrize(
    "text",
    ["", LISTS.replace("xla_mpi", "other"), LISTS + LISTS, LISTS + "# xla_mpi_ops.cc"],
)
def test_an_unexpected_source_is_refused(tmp_path, text):
    write(tmp_path / "horovod" / "tensorflow" / "CMakeLists.txt", text)
    with pytest.raises(InstallError, match=r"xla_mpi_ops.cc once.*another version"):
        horovod_build.edit(tmp_path, "2.21.0")
    with pytest.raises(InstallError, match="the source lacks"):
        horovod_build.edit(tmp_path / "horovod", "2.21.0")


def test_unpacking_gives_the_one_folder(tmp_path):
    name = "horovod-0.28.1/horovod/tensorflow/CMakeLists.txt"
    archive = make_archive(tmp_path / "h.tar.gz", {name: LISTS})
    folder = horovod_build.unpack(archive, tmp_path / "to")
    assert folder == tmp_path / "to" / "horovod-0.28.1"
    horovod_build.edit(folder, "2.21.0")
    assert "xla" not in (tmp_path / "to" / name).read_text()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    "files, more",
    [
        ({"a/../../outside": "x"}, []),
        ({"/outside": "x"}, []),
        ({"a/b": "x"}, [special("a/link", tarfile.SYMTYPE, "/etc")]),
        ({"a/b": "x"}, [special("a/link", tarfile.LNKTYPE, "../outside")]),
        ({"a/b": "x"}, [special("a/pipe", tarfile.FIFOTYPE)]),
    ],
)
def test_unsafe_archives_are_refused_whole(tmp_path, files, more):
    archive = make_archive(tmp_path / "h.tar.gz", files, *more)
    with pytest.raises(InstallError, match="files and folders inside one folder"):
        horovod_build.unpack(archive, tmp_path / "to")
    assert os.listdir(tmp_path) == ["h.tar.gz"]


def test_other_archives_are_refused(tmp_path):
    two = make_archive(tmp_path / "two.tar.gz", {"a/x": "", "b/x": ""})
    with pytest.raises(InstallError, match=r"one folder, received \['a', 'b'\]"):
        horovod_build.unpack(two, tmp_path / "to")
    with pytest.raises(InstallError, match="cannot be unpacked"):
        horovod_build.unpack(write(tmp_path / "no.tar.gz", "x"), tmp_path / "no")


# ---- variables and tools --------------------------------------------------------

DEFAULT = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}


@pytest.mark.parametrize(
    "given, instead",
    [
        ({}, {}),
        ({"HOROVOD_WITH_MPI": "1"}, {"HOROVOD_WITHOUT_MPI": None}),
        ({"HOROVOD_WITHOUT_MPI": "0"}, {"HOROVOD_WITHOUT_MPI": None}),
        ({"HOROVOD_WITH_MPI": ""}, {}),
        ({"HOROVOD_WITH_PYTORCH": "1"}, {"HOROVOD_WITHOUT_PYTORCH": None}),
        ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, {}),
        (
            {"HOROVOD_CPU_OPERATIONS": "MPI"},
            {"HOROVOD_WITHOUT_MPI": None, "HOROVOD_WITH_MPI": "1"},
        ),
        (
            {"HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_WITH_MPI": "1"},
            {"HOROVOD_WITH_GLOO": None, "HOROVOD_WITHOUT_MPI": None},
        ),
    ],
)
def test_variables_of_horovod_override_ours(given, instead):
    added = horovod_build.variables(given)
    wanted = {k: v for k, v in {**DEFAULT, **instead}.items() if v is not None}
    assert {k: v for k, v in added.items() if k.startswith("HOROVOD")} == wanted
    # Nothing that the user set is set again.
    assert not {k for k, v in given.items() if v} & added.keys()


@pytest.mark.parametrize(
    "given, words",
    [
        (["WITH_MPI", "WITHOUT_MPI"], "HOROVOD_WITH_MPI=1 and HOROVOD_WITHOUT_MPI=1"),
        (["WITHOUT_TENSORFLOW"], "HOROVOD_WITHOUT_TENSORFLOW=1 leaves out"),
        (["WITHOUT_GLOO"], "needs HOROVOD_WITH_MPI=1"),
    ],
)
def test_contradicting_variables_are_refused(given, words):
    with pytest.raises(InstallError, match=words):
        horovod_build.variables({f"HOROVOD_{name}": "1" for name in given})


def test_make_and_cmake_variables():
    added = horovod_build.variables({})
    assert added["MAKEFLAGS"] == f"-j{len(os.sched_getaffinity(0))}"
    assert added["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    own = {"MAKEFLAGS": "-j1", "CMAKE_POLICY_VERSION_MINIMUM": "3.10"}
    assert not own.keys() & horovod_build.variables(own).keys()
    # Under make the flags are those of that make.
    called = horovod_build.variables({"MAKEFLAGS": " -k", "MAKELEVEL": "1"})
    assert called["MAKEFLAGS"] == added["MAKEFLAGS"]


def test_missing_tools_are_named_with_what_to_type(tmp_path, monkeypatch):
    empty = {"PATH": str(tmp_path)}
    compiler, make = horovod_build.missing_tools(empty)
    assert "C++ compiler" in compiler and "apt-get install g++" in compiler
    assert "apt-get install make" in make
    (told,) = horovod_build.missing_tools(
        {**empty, "CXX": "mycxx -v", "CMAKE_GENERATOR": "Ninja"}
    )
    assert "CXX=mycxx -v is not found" in told
    for name in ("mycxx", "make"):
        write(tmp_path / name, "#!/bin/sh\n", executable=True)
    assert horovod_build.missing_tools({**empty, "CXX": "mycxx -v"}) == []
    monkeypatch.setattr(horovod_build.importlib.util, "find_spec", lambda name: None)
    lines = horovod_build.missing_tools({**empty, "CXX": "mycxx"})
    assert len(lines) == 4 and "ensurepip" in lines[0]
    assert "pip install setuptools" in lines[1]


@pytest.mark.parametrize(
    "version, good",
    [("3.12.4", False), ("3.13.0", True), ("4.1.2", True), ("?", 0)],
)
def test_cmake_must_be_new_enough(tmp_path, version, good):
    text = f"#!/bin/sh\necho cmake version {version}\n"
    cmake = str(write(tmp_path / "cmake", text, executable=True))
    found = horovod_build.find_cmake({"PATH": str(tmp_path)})
    assert found == (cmake if good else None)
    named = {"PATH": "", "HOROVOD_CMAKE": cmake}
    if good:
        assert horovod_build.find_cmake(named) == cmake
    else:
        with pytest.raises(InstallError, match=r"HOROVOD_CMAKE must name .*/cmake'"):
            horovod_build.find_cmake(named)
    assert horovod_build.find_cmake({"PATH": ""}) is None


def test_no_compiler_ends_the_command_with_a_message(fake, monkeypatch, capsys):
    fake({})
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert cli.main(["install-horovod", "--no-check"]) == 1
    told = capsys.readouterr()
    assert "apt-get install g++" in told.err and "Traceback" not in told.err
    assert "cannot be imported" in told.out


# ---- what is installed ----------------------------------------------------------


@pytest.mark.parametrize(
    "state, environ, reason",
    [
        (State(), {}, "it is not installed"),
        (State("0.28.1", HERE), {}, None),
        (
            State("0.28.1", "2.16.1"),
            {},
            rf"built for TensorFlow 2.16.1, this is {HERE}",
        ),
        (State("0.28.1", HERE, error="E: x"), {}, "cannot be imported (E: x)"),
        (
            State("0.28.1", HERE, {"gloo": True, "mpi": False}),
            {"HOROVOD_WITH_MPI": "1"},
            "lacks what HOROVOD_WITH_MPI=1",
        ),
        (
            State("0.28.1", HERE, {"nccl": True, "mpi": False}),
            {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_WITHOUT_MPI": "1"},
            None,
        ),
    ],
)
def test_what_must_be_built_again(state, environ, reason):
    told = state.reason_to_build(HERE, environ)
    assert told is None if reason is None else reason in told


def test_a_horovod_for_another_tensorflow_is_recognised(fake):
    fake({"metadata.json": json.dumps({"tensorflow": "2.15.0"})})
    state = horovod_state.find()
    assert (state.version, state.tensorflow) == ("0.27.0", "2.15.0")
    assert "built for TensorFlow 2.15.0" in state.reason_to_build(HERE, {})


def test_a_horovod_that_crashes_is_recognised(fake):
    fake({"tensorflow/__init__.py": "import os; os._exit(3)"})
    assert "it crashes" in horovod_state.find().error


# ---- the whole command ----------------------------------------------------------


def test_a_working_horovod_is_left_alone(monkeypatch, capsys):
    horovod_helpers.need_horovod()

    def refuse(*args):
        raise AssertionError("must not build")

    monkeypatch.setattr(install, "_build", refuse)
    assert cli.main(["install-horovod"]) == 0
    told = capsys.readouterr().out
    assert f"for TensorFlow {HERE} is installed" in told
    assert "gives the right sum" in told


def test_force_builds_in_place_of_a_working_one(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(horovod_state, "find", lambda: State("0.28.1", HERE))
    monkeypatch.setattr(install, "_build", lambda *args: calls.append(args))
    assert cli.main(["install-horovod", "--no-check"]) == 0 and calls == []
    assert cli.main(["install-horovod", "--no-check", "--force"]) == 0
    assert [tensorflow for tensorflow, *_ in calls] == [HERE]
    assert "asked for by --force" in capsys.readouterr().out


@pytest.fixture
def only_from(tmp_path, monkeypatch, fake):
    """pip finds what lies in one folder; temporary files go to another."""
    fake({})
    links, temporary = tmp_path / "links", tmp_path / "tmp"
    links.mkdir()
    temporary.mkdir()
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
        "HOROVOD_CMAKE": str(
            write(tmp_path / "cmake", "#!/bin/sh\necho cmake version 3.20.0", True)
        ),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return links, temporary


def test_no_source_to_be_found_is_explained(only_from, capsys):
    assert cli.main(["install-horovod", "--force"]) == 1
    told = capsys.readouterr().err
    assert "cannot download the source of horovod==0.28.1" in told
    assert "on no package index" in told and "pip config list" in told
    (log,) = only_from[1].rglob("*.*")
    assert str(log) in told and "No matching distribution" in log.read_text()


def test_a_failing_build_is_explained_and_changes_nothing(only_from, capsys):
    links, temporary = only_from
    files = {
        "setup.py": SETUP,
        "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        "horovod/tensorflow/CMakeLists.txt": LISTS,
    }
    name = "horovod-0.28.1"
    files = {f"{name}/{path}": text for path, text in files.items()}
    make_archive(links / f"{name}.tar.gz", files)
    assert cli.main(["install-horovod", "--force", "--verbose"]) == 1
    told = capsys.readouterr()
    assert "the build failed: the compiler ran out of memory" in told.err
    assert "    " in told.err and "cc1plus" in told.err
    assert "cc1plus" in told.out  # --verbose
    (log,) = temporary.rglob("*.*")
    assert f"The whole log: {log}" in told.err
    assert "pip wheel" in log.read_text() and "pip install" not in log.read_text()


@pytest.mark.parametrize(
    "launch, words",
    [
        ("print('rank 0 of 2: WRONG'); raise SystemExit(1)", "gives a wrong sum"),
        (
            "print('mpi_lib: oh'); raise SystemExit(5)",
            r"exit status 5(?s:.*)mpi_lib: oh",
        ),
        ("print('rank 0 of 2: right')", "fails with exit status 0"),
        (
            "import time; print('on', flush=True); time.sleep(60)",
            r"within 2 s(?s:.*)on",
        ),
    ],
)
def test_a_failing_check_is_explained(fake, launch, words):
    fake({"runner/__init__.py": "", "runner/launch.py": launch})
    with pytest.raises(InstallError, match=words) as error:
        horovod_state.check_two_ranks(State("0.28.1", HERE, {"gloo": True}), seconds=2)
    assert "install-horovod --force" in str(error.value)


@pytest.mark.parametrize(
    "log, words",
    [
        ("ERROR: No matching distribution found for horovod", "no package index"),
        ("error: externally-managed-environment", "virtual environment"),
        ("CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND)", "no MPI here"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("something else", None),
    ],
)
def test_likely_causes(log, words):
    cause = horovod_build.likely_cause(log)
    assert cause is None if words is None else words in cause


def test_the_command_needs_no_horovod_and_importing_loads_none():
    run_python(
        "import sys\n"
        "import tf_basis, tf_basis.__main__ as cli\n"
        "assert not [m for m in sys.modules if m.startswith('horovod')]\n"
        "sys.modules['horovod'] = None\n"
        "import tf_basis.distributed\n"
        "try:\n"
        "    cli.main(['install-horovod', '--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
    )


def test_help_and_usage(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["install-horovod", "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for word in ("--force", "--no-check", "--verbose", "HOROVOD_GPU_OPERATIONS=NCCL"):
        assert word in told
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_console_script_is_this_command():
    # An editable install made before the command existed has no script.
    script = Path(sys.executable).with_name("tf-basis")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    assert "from tf_basis.__main__ import main" in script.read_text()
