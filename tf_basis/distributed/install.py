"""Builds and installs Horovod for the TensorFlow of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from tf_basis.distributed import horovod_build, horovod_state
from tf_basis.distributed.horovod_build import HOROVOD, InstallError


def install(force: bool = False, check: bool = True, verbose: bool = False) -> None:
    """Makes sure that a Horovod for this TensorFlow is installed and works.

    Args:
      force: build even if there is one. Default False.
      check: run an allreduce on two processes at the end. Default True.
      verbose: show what pip and the compiler print. Default False: it goes to a log.

    Raises:
      InstallError: it cannot be built or does not work; the message says why.
    """
    import tensorflow as tf

    wanted = horovod_build.variables(os.environ)
    there = horovod_state.find()
    reason = there.reason_to_build(tf.__version__, os.environ)
    if reason is None and not force:
        _say(f"Horovod {there.version} for TensorFlow {tf.__version__} is installed")
    else:
        _say(f"building {HOROVOD}: {reason or 'asked for by --force'}")
        _build(tf.__version__, wanted, verbose)
        there = horovod_state.find()
        reason = there.reason_to_build(tf.__version__, os.environ)
        if reason is not None:
            raise InstallError(f"Horovod was built, but {reason}")
    if check:
        horovod_state.check_two_ranks(there)
        _say("an allreduce of two processes gives the right sum")


def _build(tensorflow: str, wanted: Mapping[str, str], verbose: bool) -> None:
    missing = horovod_build.missing_tools(os.environ)
    if missing:
        raise InstallError("building Horovod needs\n  " + "\n  ".join(missing))
    folder = Path(tempfile.mkdtemp(prefix="tf_basis_horovod_"))
    path = folder / "build.log"
    _say(f"for TensorFlow {tensorflow}; takes some minutes; log: {path}")
    done = False
    try:
        with open(path, "w", encoding="utf-8") as file:
            _build_in(folder, tensorflow, wanted, Log(file, verbose))
        done = True
    finally:
        for entry in folder.iterdir():
            if done or entry != path:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if done:
            folder.rmdir()


def _build_in(
    folder: Path, tensorflow: str, wanted: Mapping[str, str], log: Log
) -> None:
    environment = {**os.environ, **wanted}
    for name in ("MAKELEVEL", "MFLAGS"):  # of a make that called us
        environment.pop(name, None)
    environment["HOROVOD_CMAKE"] = _cmake(folder, log)
    source = _source(folder, log, environment)
    horovod_build.edit(source, tensorflow)
    pip = ["wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
    wheels = folder / "wheels"
    target = ["--wheel-dir", str(wheels), str(source)]
    log.pip("the build failed", *pip, *target, env=environment)
    (wheel,) = wheels.glob("*.whl")
    # Twice: pip replaces an equal version only by force, and force would reinstall
    # the requirements too.
    force = ["--force-reinstall", "--no-deps"]
    log.pip("installing the built wheel failed", "install", *force, str(wheel))
    log.pip("installing Horovod's requirements failed", "install", str(wheel))


def _cmake(folder: Path, log: Log) -> str:
    found = horovod_build.find_cmake(os.environ)
    if found is not None:
        return found
    _say("no CMake 3.13 or newer here: using pip's for this build")
    target = folder / "cmake"
    log.pip(
        "there is no CMake 3.13 or newer (Debian: apt-get install cmake), and pip "
        "cannot fetch one",
        *["install", "--only-binary", "cmake", "--no-deps", "--target", str(target)],
        "cmake>=3.18",
    )
    return str(target / "cmake" / "data" / "bin" / "cmake")


def _source(folder: Path, log: Log, environment: Mapping[str, str]) -> Path:
    downloads = folder / "downloads"
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    log.pip(
        f"pip cannot download the source of {HOROVOD}",
        *["download", *options, "--dest", str(downloads), HOROVOD],
        env=environment,
    )
    archives = list(downloads.iterdir())
    if len(archives) != 1:
        raise InstallError(
            f"pip must download one archive of {HOROVOD}, received "
            f"{[a.name for a in archives]}"
        )
    return horovod_build.unpack(archives[0], folder / "source")


class Log:
    """Runs pip; all it prints goes to a file, and to the terminal if `verbose`."""

    def __init__(self, file: TextIO, verbose: bool) -> None:
        self._file, self._verbose = file, verbose

    def pip(
        self, failure: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Runs pip with these arguments.

        Raises:
          InstallError: it fails; says `failure`, a likely cause and the log's end.
        """
        command = [sys.executable, "-m", "pip", *arguments]
        self._write(f"$ {' '.join(command)}\n")
        lines = []
        with subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout:
                lines.append(line)
                self._write(line)
        if process.returncode != 0:
            hint = horovod_build.likely_cause("".join(lines))
            parts = [failure + (f": {hint}" if hint else "")]
            parts.append("The last lines of the log:")
            parts += [f"    {line.rstrip()}" for line in lines[-15:]]
            parts.append(f"The whole log: {self._file.name}")
            raise InstallError("\n".join(parts))

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
        if self._verbose:
            print(text, end="", flush=True)


def _say(text: str) -> None:
    print(f"tf-basis: {text}", flush=True)
