"""Builds the package; the C++ ops go into one library, tf_basis/ops/_tf_basis_ops.so.

Everything static is in pyproject.toml.  Environment variables:

TF_BASIS_SKIP_OPS=1  no C++: a pure-Python wheel
CXX                  the C++ compiler (default g++)
TF_BASIS_CXXFLAGS    further flags for compiling and linking
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
EXTENSION = "tf_basis.ops._tf_basis_ops"


def _load_build_config():
    # By path: under pip the project's directory is not on sys.path.
    path = ROOT / "tf_ops" / "build_config.py"
    spec = importlib.util.spec_from_file_location("tf_basis_build_config", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


config = _load_build_config()


def require_wheel() -> None:
    """Without `wheel` older setuptools ends with "invalid command 'bdist_wheel'"."""
    names = {"bdist_wheel", "dist_info", "editable_wheel"}
    if not names & set(sys.argv):
        return
    for module in ("setuptools.command.bdist_wheel", "wheel"):
        if importlib.util.find_spec(module) is not None:
            return
    raise SystemExit(
        "\ntf_basis: building without isolation needs the package `wheel` (or "
        "setuptools>=70.1) in this environment: pip install wheel\n"
    )


def skip_ops() -> bool:
    value = os.environ.get("TF_BASIS_SKIP_OPS", "0")
    if value not in ("", "0", "1"):
        raise SystemExit(f"TF_BASIS_SKIP_OPS must be 0 or 1, got {value!r}")
    return value == "1"


def package_version() -> str:
    text = (ROOT / "tf_basis" / "_version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE).group(1)


def replace_file(source: Path, target: Path) -> None:
    """Copies by rename: a process that has the old library mapped keeps it whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, scratch)
    scratch.chmod(0o755 if target.suffix == ".so" else 0o644)
    scratch.replace(target)


class Recipe:
    """Compiles what changed since the last build and links the library."""

    def __init__(self) -> None:
        self.tensorflow = config.find_tensorflow()
        self.compiler = config.find_compiler()
        self.sources = config.sources(ROOT)
        if not self.sources:
            raise config.BuildError(f"no C++ source under {config.SOURCE_DIRECTORY}")
        self.directory = ROOT / "build" / "tf_ops"
        # Part of every command's key: system headers are in no dependency file.
        self.key = f"{self.compiler.version} / TensorFlow {self.tensorflow.version}"

    def build(self) -> None:
        flags = config.compile_flags(self.tensorflow)
        objects = [
            self.directory / s.relative_to(config.SOURCE_DIRECTORY).with_suffix(".o")
            for s in self.sources
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(self._compile, source, obj, flags)
                for source, obj in zip(self.sources, objects)
            ]
        for job in jobs:
            job.result()
        library = self.directory / config.LIBRARY_NAME
        names = [str(o.relative_to(ROOT)) for o in objects]
        link = [*names, "-o", str(library.relative_to(ROOT))]
        link += config.link_flags(self.tensorflow)
        self._run_if_needed(link, library, objects)
        self._write_info(hashlib.sha256(library.read_bytes()).hexdigest())

    def _compile(self, source: Path, obj: Path, flags: list[str]) -> None:
        depends = obj.with_suffix(".d")
        inputs = [ROOT / source, depends]
        if depends.exists():
            # "x.o: a.cc b.h \ ..." and then one "b.h:" line for each header.
            rule = depends.read_text().replace("\\\n", " ").split("\n", 1)[0]
            inputs += [ROOT / name for name in shlex.split(rule)[1:]]
        out = str(obj.relative_to(ROOT))
        command = ["-MMD", "-MP", *flags, "-c", str(source), "-o", out]
        self._run_if_needed(command, obj, inputs)

    def _run_if_needed(self, arguments: list[str], out: Path, inputs: list[Path]):
        command = [*self.compiler.command, *arguments]
        stamp = out.with_name(out.name + ".cmd")
        key = f"{self.key}\n{shlex.join(command)}\n"
        if out.exists() and stamp.exists() and stamp.read_text() == key:
            made = out.stat().st_mtime_ns
            if all(i.exists() and i.stat().st_mtime_ns <= made for i in inputs):
                return
        sys.stdout.write(shlex.join(command) + "\n")  # one write: threads
        out.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise config.BuildError(f"{shlex.join(command)}\n{done.stdout}")
        sys.stdout.write(done.stdout)
        stamp.write_text(key)

    def _write_info(self, checksum: str) -> None:
        info = {
            "library_sha256": checksum,
            "package_version": package_version(),
            "tensorflow_version": self.tensorflow.version,
            "cxx11_abi_flag": self.tensorflow.cxx11_abi_flag,
            "compiler": shlex.join(self.compiler.command),
            "compiler_version": self.compiler.version,
            "compile_flags": config.portable_flags(self.tensorflow),
            "ops": config.registered_ops([ROOT / s for s in self.sources]),
        }
        path = self.directory / config.BUILD_INFO_NAME
        path.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


class BuildOps(build_ext):
    """setuptools' place for compiled modules, with our recipe inside."""

    def get_ext_filename(self, fullname: str) -> str:
        # No Python ABI in the name: the library does not use Python's C API.
        return fullname.replace(".", os.sep) + ".so"

    def run(self) -> None:
        if not self.extensions:
            return
        try:
            recipe = Recipe()
            recipe.build()
        except config.BuildError as error:
            raise SystemExit(f"\ntf_basis: {error}\n") from error
        target = Path(self.get_ext_fullpath(EXTENSION))
        # The library first: the description is valid for what lies beside it.
        for name in (config.LIBRARY_NAME, config.BUILD_INFO_NAME):
            replace_file(recipe.directory / name, target.with_name(name))


class Build(build):
    """Starts clean and fails early."""

    def run(self) -> None:
        # Modules removed from the tree must not reach a wheel from an old build.
        shutil.rmtree(Path(self.build_lib) / "tf_basis", ignore_errors=True)
        if self.distribution.ext_modules:
            try:
                config.find_tensorflow()
            except config.BuildError as error:
                raise SystemExit(f"\ntf_basis: {error}\n") from error
        super().run()


require_wheel()
setup(
    license="Apache-2.0",
    ext_modules=[]
    if skip_ops()
    else [Extension(EXTENSION, [str(s) for s in config.sources(ROOT)])],
    cmdclass={"build": Build, "build_ext": BuildOps},
)
