"""What install-horovod builds: the source, the variables and the tools."""

from __future__ import annotations

import os
import tarfile

import install_helpers
import pytest
from install_helpers import LISTS, make_archive, write

from tf_basis import __main__ as cli
from tf_basis.distributed import horovod_build
from tf_basis.distributed.horovod_build import InstallError

fake = install_helpers.fake


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
