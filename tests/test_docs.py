"""README and guides name what exists; `make docs` builds them, runs their examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check_text():
    spec = importlib.util.spec_from_file_location(
        "check_text", ROOT / "docs" / "check_text.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_name_what_exists(check_text):
    found = {
        page.name: list(check_text.complaints(page.read_text("utf-8"), page.parent))
        for page in check_text.texts()
    }
    assert len(found) > 10
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("see benchmarks/absent.py", "there is no benchmarks/absent.py"),
        ("[here](absent.md#part)", "a link leads to absent.md, which is not there"),
        ("`tf_basis.layers.Absent`", "tf_basis.layers.Absent cannot be imported"),
        ("`distributed.Absent`", "tf_basis.distributed.Absent cannot be imported"),
        ("`--absent-option`", "no script or command here has the option --absent"),
        ("`BasisAdam(absent=1)`", "nothing public here has the argument absent"),
        ("run `tf-basis absent`", "there is no command tf-basis absent"),
        ("run `make absent`", "the Makefile has no target absent"),
        ("# A\n\n`benchmarks/step_time.py`\n\n# B\n\nAUC 0.7395", "the section '# B'"),
        ("# A\n\nIt was 3.4 times faster.", "the section '# A' names no script"),
    ],
)
def test_a_stale_text_is_noticed(check_text, text, complaint):
    found = list(check_text.complaints(text, ROOT / "docs"))
    assert len(found) == 1 and found[0].startswith(complaint), found


def test_a_good_text_is_not(check_text):
    text = (
        "# A\n\nIt was 3.4 times faster (`benchmarks/step_time.py`), see\n"
        "[hashing](hashing.md), `tf_basis.layers.EmbeddingCollection`, `make test`,\n"
        "`distributed.Policy`; `pip install --no-build-isolation .`,\n"
        "`BasisAdam(compression_ratio=10)` and `jit_compile=True`.\n"
    )
    assert list(check_text.complaints(text, ROOT / "docs")) == []
