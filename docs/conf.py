"""Sphinx: `make docs` builds the pages of this folder into build/docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from tf_basis._version import __version__  # noqa: E402

project = "tf_basis"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "outer_pages",
    "public_names",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = f"tf_basis {release}"
html_copy_source = False

# Every reference must have a target, those of signatures too.
nitpicky = True
nitpick_ignore_regex = [
    # No index of other projects is fetched: a build needs no network.
    ("py:.*", r"(tf|tensorflow|keras|tf_keras|np|numpy|horovod)\..*"),
    ("py:.*", r"(collections\.abc|os|pathlib|types)\..*"),
    # Types of arguments that users leave out.
    ("py:.*", r"tf_basis\.distributed\.(control|policy|world)\.\w+"),
    ("py:.*", r"tf_basis\.diagnostics\.(measures|tables)\.\w+"),
]

myst_heading_anchors = 3
myst_links_external_new_tab = False

# Docstrings write `name` in single backticks, as Markdown does.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80


def read_as_markdown(app, what, name, value, options, lines):
    """Letters may follow the backtick that closes code; pages of docs are links."""
    for i, line in enumerate(lines):
        line = re.sub(r"`docs/(\w+)\.md`", r":doc:`/\1`", line)
        lines[i] = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line)


def setup(app):
    app.connect("autodoc-process-docstring", read_as_markdown, priority=400)
