"""What building Horovod takes: its variables, tools, and the edit of its source."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tf_basis._version import HOROVOD as HOROVOD

# From here on TensorFlow's headers lack what Horovod's XLA ops need.
_WITHOUT_XLA = (2, 19)
_XLA_SOURCE = "xla_mpi_ops.cc"
_CMAKE_LISTS = Path("horovod", "tensorflow", "CMakeLists.txt")
_OLDEST_CMAKE = (3, 13)

_PARTS = {"GLOO": True, "MPI": False, "TENSORFLOW": True, "PYTORCH": False}
_PARTS["MXNET"] = False

_CAUSES = (
    (
        r"No matching distribution|Could not find a version|Failed to establish"
        r"|Max retries|Temporary failure in name resolution|ReadTimeout",
        "pip finds it on no package index; see `pip config list` for what it asks",
    ),
    (r"externally-managed-environment", "use a virtual environment"),
    (
        r"Killed signal terminated program|virtual memory exhausted",
        "the compiler ran out of memory; MAKEFLAGS=-j1 needs less",
    ),
    (r"No space left on device", "the disk is full; TMPDIR names another place"),
    (r"Could NOT find MPI", "no MPI here, which HOROVOD_WITH_MPI=1 asks for"),
    (r"Could NOT find NCCL", "no NCCL here; HOROVOD_NCCL_HOME says where it is"),
    (r"No CMAKE_CXX_COMPILER|CMAKE_CXX_COMPILER-NOTFOUND", "no C++ compiler works"),
)


class InstallError(Exception):
    """Horovod cannot be installed here or does not work; the message says why."""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to build with: Horovod's own as given, our choice elsewhere.

    Args:
      environ: the environment, in which Horovod's documented variables count.

    Returns:
      What to add to the environment.

    Raises:
      InstallError: the given ones contradict each other.
    """
    added = {}
    for part, default in _PARTS.items():
        names = (f"HOROVOD_WITH_{part}", f"HOROVOD_WITHOUT_{part}")
        given = [environ.get(name, "") for name in names]
        if given == ["1", "1"]:
            raise InstallError(f"{names[0]}=1 and {names[1]}=1 exclude each other")
        if part == "MPI":
            # These ask for it without saying so.
            operations = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_GPU_OPERATIONS")
            default = any(environ.get(name) == "MPI" for name in operations)
        if not any(given):
            added[names[0] if default else names[1]] = "1"
    everything = {**environ, **added}
    if everything.get("HOROVOD_WITHOUT_TENSORFLOW") == "1":
        raise InstallError(
            "HOROVOD_WITHOUT_TENSORFLOW=1 leaves out what tf_basis needs; unset it"
        )
    without = [everything.get(f"HOROVOD_WITHOUT_{part}") for part in ("GLOO", "MPI")]
    if without == ["1", "1"]:
        raise InstallError(
            "HOROVOD_WITHOUT_GLOO=1 needs HOROVOD_WITH_MPI=1: one of them must be there"
        )
    # CMake 4 refuses the old policy version of the bundled Gloo without it.
    if not environ.get("CMAKE_POLICY_VERSION_MINIMUM"):
        added["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    # Under make, MAKEFLAGS is that make's and not the user's choice for this build.
    if not environ.get("MAKEFLAGS") or "MAKELEVEL" in environ:
        added["MAKEFLAGS"] = f"-j{len(os.sched_getaffinity(0))}"
    return added


def missing_tools(environ: Mapping[str, str]) -> list[str]:
    """A line for each tool that the build needs and does not find."""
    path = environ.get("PATH", "")
    missing = []
    named = shlex.split(environ.get("CXX", ""))[:1]
    if not any(shutil.which(c, path=path) for c in named or ("c++", "g++", "clang++")):
        told = f"CXX={environ['CXX']} is not found; " if named else ""
        missing.append(
            f"a C++ compiler ({told}Debian: apt-get install g++; or name one in CXX)"
        )
    if not environ.get("CMAKE_GENERATOR") and not shutil.which("make", path=path):
        missing.append("make (Debian: apt-get install make)")
    for module in ("pip", "setuptools", "wheel", "packaging"):
        if importlib.util.find_spec(module) is None:
            how = "python -m ensurepip" if module == "pip" else f"pip install {module}"
            missing.append(f"the Python package {module} ({how})")
    return missing


def find_cmake(environ: Mapping[str, str]) -> str | None:
    """A CMake that is new enough; None if there is none.

    Raises:
      InstallError: HOROVOD_CMAKE names one that is not.
    """
    named = environ.get("HOROVOD_CMAKE")
    found = named or shutil.which("cmake", path=environ.get("PATH", ""))
    if not found:
        return None
    try:
        command = [found, "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        version = re.search(r"version (\d+)\.(\d+)", answer.stdout)
    except (OSError, subprocess.CalledProcessError):
        version = None
    if version and tuple(map(int, version.groups())) >= _OLDEST_CMAKE:
        return found
    if named:
        raise InstallError(
            f"HOROVOD_CMAKE must name a CMake 3.13 or newer, received {named!r}"
        )
    return None


def unpack(archive: Path, target: Path) -> Path:
    """Unpacks a source distribution; the one folder in it.

    Raises:
      InstallError: it is no tar file, or holds anything but files and folders inside
        one folder.
    """
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            for member in members:
                parts = Path(member.name).parts
                inside = parts and not os.path.isabs(member.name) and ".." not in parts
                if not inside or not (member.isfile() or member.isdir()):
                    raise InstallError(
                        f"{archive.name} must hold files and folders inside one "
                        f"folder, received {member.name!r}"
                    )
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(target, members, **safe)
    except (OSError, tarfile.TarError) as error:
        raise InstallError(f"{archive.name} cannot be unpacked: {error}") from error
    folders = list(target.iterdir())
    if len(folders) != 1:
        raise InstallError(
            f"{archive.name} must hold one folder, received "
            f"{sorted(f.name for f in folders)}"
        )
    return folders[0]


def edit(source: Path, tensorflow: str) -> None:
    """Makes the unpacked source fit a version of TensorFlow.

    Raises:
      InstallError: the source is not as expected.
    """
    path = source / _CMAKE_LISTS
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InstallError(f"the source lacks {_CMAKE_LISTS}: {error}") from error
    path.write_text(without_xla(text, tensorflow), encoding="utf-8")


def without_xla(text: str, tensorflow: str) -> str:
    """The CMakeLists.txt of Horovod's TensorFlow part, without the XLA ops if need be.

    Args:
      text: the file.
      tensorflow: the version to build for; below 2.19 the text stays as it is.

    Raises:
      InstallError: the file does not name the XLA ops in a line of their own.
    """
    numbers = re.match(r"(\d+)\.(\d+)", tensorflow)
    if numbers and tuple(map(int, numbers.groups())) < _WITHOUT_XLA:
        return text
    line = rf"^[ \t]*list\(APPEND TF_SOURCES [^)\n]*/{re.escape(_XLA_SOURCE)}\"?\)\n"
    edited, count = re.subn(line, "", text, flags=re.MULTILINE)
    if count != 1 or _XLA_SOURCE in edited:
        raise InstallError(
            f"{_CMAKE_LISTS} must add {_XLA_SOURCE} once, in a line of its own; this "
            "source is another version of Horovod"
        )
    return edited


def likely_cause(log: str) -> str | None:
    """What a failed step of pip most likely died of, None if it says nothing known."""
    for pattern, cause in _CAUSES:
        if re.search(pattern, log):
            return cause
    return None
