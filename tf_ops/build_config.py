"""What the op library is built with: the TensorFlow, the compiler and the flags.

Used by setup.py only.  Nothing here imports TensorFlow into the build process:
a child process is asked, so that its start-up messages stay out of the build log.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MINIMUM_TENSORFLOW = (2, 16)

SOURCE_DIRECTORY = Path("tf_ops") / "cc"
LIBRARY_NAME = "_tf_basis_ops.so"
BUILD_INFO_NAME = "build_info.json"

# -ffp-contract=off: a fused multiply-add rounds once where two operations round
# twice, so without it the bits would depend on the machine and on the compiler.
# -fno-math-errno: nobody reads errno after a square root, and having to set it keeps
# the compiler from taking several roots at once. The roots are the same.
OWN_FLAGS = (
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-DEIGEN_USE_THREADS",
    "-Wall",
    "-Wextra",
    "-Werror",
    # What a newer TensorFlow calls deprecated still works there.
    "-Wno-error=deprecated-declarations",
)

# -z defs: a symbol that libtensorflow_framework lacks fails here, at the link,
# instead of in the user's process.
OWN_LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs")

HOW_TO_BUILD = (
    "To compile the C++ ops against the TensorFlow of this environment, type\n"
    '    pip install "tensorflow>=2.16" wheel && pip install --no-build-isolation .\n'
    "To install without them (slower, same results), type\n"
    "    TF_BASIS_SKIP_OPS=1 pip install ."
)

_ASK_TENSORFLOW = """
import json, sys
import tensorflow as tf
json.dump({"version": tf.__version__,
           "compile_flags": tf.sysconfig.get_compile_flags(),
           "link_flags": tf.sysconfig.get_link_flags()}, sys.stdout)
"""


class BuildError(Exception):
    """The library cannot be built here; the message says what to type."""


@dataclass(frozen=True)
class TensorFlow:
    """The TensorFlow that the library is compiled against."""

    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def cxx11_abi_flag(self) -> int | None:
        """Value of _GLIBCXX_USE_CXX11_ABI, None if this TensorFlow sets none."""
        for flag in self.compile_flags:
            if flag.startswith("-D_GLIBCXX_USE_CXX11_ABI="):
                return int(flag.partition("=")[2])
        return None


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler: `$CXX`, else g++."""

    command: tuple[str, ...]
    version: str


def find_tensorflow() -> TensorFlow:
    """Asks the TensorFlow of this interpreter for its flags."""
    child = subprocess.run(
        [sys.executable, "-c", _ASK_TENSORFLOW],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or ["no message"]
        raise BuildError(
            "the build cannot import TensorFlow (pip's isolated build environment "
            f"has none):\n    {lines[-1]}\n{HOW_TO_BUILD}"
        )
    answer = json.loads(child.stdout[child.stdout.index("{") :])
    found = re.match(r"(\d+)\.(\d+)", answer["version"])
    if found is None or tuple(map(int, found.groups())) < MINIMUM_TENSORFLOW:
        raise BuildError(
            f"TensorFlow must be 2.16 or newer, found {answer['version']}.\n"
            f"{HOW_TO_BUILD}"
        )
    return TensorFlow(
        version=answer["version"],
        compile_flags=tuple(answer["compile_flags"]),
        link_flags=tuple(answer["link_flags"]),
    )


def find_compiler() -> Compiler:
    """The compiler and the first line of its `--version`."""
    command = tuple(shlex.split(os.environ.get("CXX", "g++")))
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"no C++ compiler: `{shlex.join(command)} --version` failed ({error}).\n"
            "Install one (Debian: apt-get install g++) or name one in CXX.\n"
            f"{HOW_TO_BUILD}"
        ) from error
    return Compiler(command, answer.stdout.splitlines()[0].strip())


def extra_flags() -> list[str]:
    """Flags from `$TF_BASIS_CXXFLAGS`, last on every command (e.g. a sanitizer)."""
    return shlex.split(os.environ.get("TF_BASIS_CXXFLAGS", ""))


def portable_flags(tensorflow: TensorFlow) -> list[str]:
    """All compile flags that name no directory, as build_info.json records them."""
    theirs = [f for f in tensorflow.compile_flags if not f.startswith("-I")]
    return [*theirs, *OWN_FLAGS, *extra_flags()]


def compile_flags(tensorflow: TensorFlow) -> list[str]:
    """All compile flags; TensorFlow's headers become system headers.

    Warnings in system headers are silent, so ours can be errors.
    """
    includes = ["-I", str(SOURCE_DIRECTORY)]
    for flag in tensorflow.compile_flags:
        if flag.startswith("-I"):
            includes += ["-isystem", flag[2:]]
    return [*includes, *portable_flags(tensorflow)]


def link_flags(tensorflow: TensorFlow) -> list[str]:
    """All link flags; they go after the object files."""
    return [*OWN_LINK_FLAGS, *extra_flags(), *tensorflow.link_flags]


def sources(root: Path) -> list[Path]:
    """Every C++ source of the library, relative to `root`, in a fixed order."""
    return sorted(p.relative_to(root) for p in (root / SOURCE_DIRECTORY).rglob("*.cc"))


def registered_ops(files: list[Path]) -> list[str]:
    """Names in `REGISTER_OP("Scope>Name")` calls of the sources, no comments."""
    names: set[str] = set()
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        names.update(re.findall(r'\bREGISTER_OP\(\s*"([\w>]+)"\s*\)', text))
    return sorted(names)
