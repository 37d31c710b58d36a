"""Checks that what README and guides name exists: `python docs/check_text.py`.

Five rules, each of which catches a text that was not kept up to date:

1. A path below benchmarks, docs, examples, requirements, tests, tf_basis or tf_ops is
   there; a link leads to a file.
2. A dotted name `tf_basis.x.y`, also `distributed.x`, can be imported.
3. An option `--x` is one of the scripts and commands of this project, or of a tool in
   OTHER_OPTIONS; `make x` is a target, `tf-basis x` a command.
4. In code within a sentence, `x=...` is an argument of something public, or one of
   OTHER_ARGUMENTS.
5. A section that holds measured numbers (see MEASURED) names a script of benchmarks or
   examples that is there. `<!-- not measured: why -->` in a section is for numbers that
   no script can print. Whether a script prints exactly these numbers, no check can say.

The changelog tells of what was, and is left out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
ROOT = Path(__file__).resolve().parent.parent

FOLDERS = "benchmarks|docs|examples|requirements|tests|tf_basis|tf_ops"
PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/\w[\w./-]*[\w/]")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")
DOTTED = re.compile(r"(?<![\w./-])(?:tf_basis|distributed)(?:\.\w+)+")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
ARGUMENT = re.compile(r"(?<![\w.<>=!\[{\"-])([a-z_]\w*)=(?!=)")
CODE = re.compile(r"`([^`\n]+)`")
TARGET = re.compile(r"`make ([a-z][a-z-]*)|^make ([a-z][a-z-]*)", re.MULTILINE)
SCRIPT = re.compile(r"(?:benchmarks|examples)/\w+\.py")
COMMAND = re.compile(r"(?<![\w/-])tf-basis ([a-z][a-z-]*)(?![\w.])")
MEASURED = re.compile(
    r"± ?\d|\d (?:times|ms\b|GiB)|\d\.\d+ ?(?:%|times)|(?<![\d.])0\.\d{3,}(?!\d*\])"
)
HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

# Written by scripts, the build or a program, not kept under version control.
MADE = ("benchmarks/results", "tf_basis/ops/build_info.json")
# Of pip, horovodrun, git and other programs.
OTHER_OPTIONS = {
    "--gloo",
    "--help",
    "--host-discovery-script",
    "--max-np",
    "--min-np",
    "--network-interfaces",
    "--no-build-isolation",
}
# Of Keras.
OTHER_ARGUMENTS = {"initial_epoch", "jit_compile", "save_format", "training"}


def texts() -> list[Path]:
    """The pages that are checked: all Markdown that users read."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found += [*(ROOT / "docs" / "api").glob("*.rst")]
    found += [ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"]
    return sorted(path for path in found if path.name != "CHANGELOG.md")


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    value: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def own_options() -> set[str]:
    """Options that some script or command of this project defines."""
    found = set()
    for folder in ("benchmarks", "examples", "tf_basis", "docs"):
        for file in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'"(--[a-z][\w-]*)"', file.read_text("utf-8")))
    return found


def sections(text: str) -> Iterator[str]:
    starts = [0, *(m.start() for m in HEADING.finditer(FENCE.sub(_blank, text)))]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        yield text[start:end]


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])  # as long: positions stay


@functools.cache
def known() -> tuple[set[str], set[str]]:
    """Options and arguments that a text may name."""
    package = _module("package")
    return own_options() | OTHER_OPTIONS, package.arguments() | OTHER_ARGUMENTS


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def complaints(text: str, folder: Path) -> Iterator[str]:
    """What a text names that does not exist; `folder` is where it lies."""
    options, arguments = known()
    for path in sorted(set(PATH.findall(text))):
        if not path.startswith(MADE) and not (ROOT / path).exists():
            yield f"there is no {path}"
    for link in sorted(set(LINK.findall(text))):
        if not (folder / link).exists():
            yield f"a link leads to {link}, which is not there"
    for dotted in sorted(set(DOTTED.findall(text))):
        full = dotted if dotted.startswith("tf_basis") else f"tf_basis.{dotted}"
        if not dotted.endswith((".json", ".py")) and not resolves(full):
            yield f"{full} cannot be imported"
    for option in sorted(set(OPTION.findall(text)) - options):
        yield f"no script or command here has the option {option}"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for names in TARGET.findall(text):
        if not re.search(rf"^{''.join(names)}:", makefile, re.MULTILINE):
            yield f"the Makefile has no target {''.join(names)}"
    commands = importlib.import_module("tf_basis.__main__").COMMANDS
    for command in sorted(set(COMMAND.findall(text)) - set(commands)):
        yield f"there is no command tf-basis {command}"
    code = "\n".join(CODE.findall(FENCE.sub(_blank, text)))
    for argument in sorted(set(ARGUMENT.findall(code)) - arguments):
        yield f"nothing public here has the argument {argument}"
    for section in sections(text):
        prose = FENCE.sub(_blank, section)
        found = MEASURED.search(prose)
        named = any((ROOT / s).exists() for s in SCRIPT.findall(section))
        if folder.name in ("benchmarks", "examples"):  # its scripts lie beside it
            named |= any((folder / s).exists() for s in re.findall(r"\w+\.py", section))
        if found and not named and "<!-- not measured: " not in section:
            title = section.splitlines()[0]
            near = prose[max(found.start() - 30, 0) : found.end() + 30].strip()
            yield f"the section '{title}' names no script for: {near!r}"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    failures = 0
    for page in texts():
        for complaint in complaints(page.read_text("utf-8"), page.parent):
            print(f"{page.relative_to(ROOT)}: {complaint}", file=sys.stderr)
            failures += 1
    if not failures:
        print(f"{len(texts())} pages name what exists")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
