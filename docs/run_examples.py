"""Runs the examples of docstrings and guides: `python docs/run_examples.py [page ...]`.

In a guide each fence ```python is run, in the order of the page, in one namespace and
an empty folder; where it begins with `>>>` its output is compared too. Three HTML
comments that a reader does not see:

    <!-- setup                      what the examples behind it take for granted
    model = ...
    -->
    <!-- not run: the reason -->    the next fence is compiled, and no more
    <!-- file: onebit.yaml -->      the next fence is written to that file
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import linecache
import os
import pkgutil
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tf_basis  # noqa: E402

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
PIECES = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>[^\n]+) -->\n+```python\n(?P<skipped>.*?)^```$"
    r"|^<!-- file: (?P<path>\S+) -->\n+```\w*\n(?P<content>.*?)^```$"
    r"|^```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@contextlib.contextmanager
def empty_folder() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def modules() -> Iterator[ModuleType]:
    """All modules of the package, but for the library of C++ ops and adapters.

    There is an adapter for each Keras, and only one Keras need be installed.
    """
    for found in pkgutil.walk_packages(tf_basis.__path__, "tf_basis."):
        if found.name.endswith(("._tf_basis_ops", ".__main__")):
            continue
        if not found.name.startswith("tf_basis.adapters."):
            yield importlib.import_module(found.name)


def names_of_users() -> dict[str, Any]:
    """What an example in a docstring need not import."""
    names: dict[str, Any] = {"tf": tf, "np": np, "tf_basis": tf_basis}
    for module in (tf_basis, tf_basis.distributed, tf_basis.layers):
        names |= {n: getattr(module, n) for n in module.__all__}
    return names


def run_docstrings() -> int:
    """Runs each docstring's examples once; the number of failures."""
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    seen = set()
    for module in modules():
        tests = doctest.DocTestFinder(exclude_empty=True).find(
            module, extraglobs=names_of_users()
        )
        for test in tests:
            if test.examples and test.docstring not in seen:
                seen.add(test.docstring)
                with empty_folder():
                    runner.run(test)
    print(f"docstrings: {runner.tries} lines run in {len(seen)} docstrings")
    return runner.failures


def run_page(page: Path) -> int:
    """Runs the examples of a guide; the number of failures, at most 1."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    space: dict[str, Any] = {"__name__": "__main__"}
    runs, reasons = 0, []
    with empty_folder():
        for piece in PIECES.finditer(text):
            kind = piece.lastgroup
            source = piece[kind]
            line = text.count("\n", 0, piece.start(kind))
            if kind == "skipped":
                reasons.append(piece["reason"])
                compile("\n" * line + source, str(page), "exec")
                continue
            if kind == "content":
                Path(piece["path"]).write_text(source, encoding="utf-8")
                continue
            runs += kind == "code"
            if source.startswith(">>>"):
                runner = doctest.DocTestRunner(optionflags=FLAGS)
                test = doctest.DocTestParser().get_doctest(
                    source, space, name, name, line
                )
                if runner.run(test, clear_globs=False).failed:
                    return 1
                space.update(test.globs)
                continue
            output, padded = io.StringIO(), "\n" * line + source
            file = f"<{name}:{line + 1}>"
            lines = padded.splitlines(keepends=True)
            linecache.cache[file] = (len(padded), None, lines, file)  # for AutoGraph
            try:
                with contextlib.redirect_stdout(output):
                    exec(compile(padded, file, "exec"), space)
            except Exception:
                print(output.getvalue())
                traceback.print_exc()
                print(f"{name}: the example that starts in line {line + 1} fails")
                return 1
    tf.keras.backend.clear_session()
    if runs or reasons:
        print(f"{name}: {runs} examples run", *(f"- not run: {r}" for r in reasons))
    return 0


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    tf.get_logger().setLevel("ERROR")
    pages = [Path(a).resolve() for a in arguments]
    failures = 0
    if not pages:
        failures += run_docstrings()
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    failures += sum(map(run_page, pages))
    if failures:
        print(f"{failures} failed", file=sys.stderr)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
