"""`tf-basis install-horovod`, all but the real build, which `make test` does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import horovod_helpers
import install_helpers
import pytest
from helpers import run_python
from install_helpers import HERE, LISTS, make_archive, write

from tf_basis import __main__ as cli
from tf_basis.distributed import horovod_build, horovod_state, install
from tf_basis.distributed.horovod_build import InstallError
from tf_basis.distributed.horovod_state import State

fake = install_helpers.fake

# Ends the build of our little source; the real one would take minutes.
SETUP = """
import sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    raise SystemExit("c++: fatal error: Killed signal terminated program cc1plus")
setup(name="horovod", version="0.28.1")
"""


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
