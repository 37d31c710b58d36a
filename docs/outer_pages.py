"""A Sphinx extension: pages that lie outside of docs, such as the README.

Each has a page here that only links to it, for readers of the repository. In what is
built that page has its text, and links lead from page to page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
OUTER = {
    "overview": DOCS.parent / "README.md",
    "examples": DOCS.parent / "examples" / "README.md",
    "benchmarks": DOCS.parent / "benchmarks" / "README.md",
    "contributing": DOCS.parent / "CONTRIBUTING.md",
    "changelog": DOCS.parent / "CHANGELOG.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[\w-]*)?\)")


def bring_in(app, docname, source):
    """Takes the text of the page outside, and leads links to the pages here."""
    file = OUTER.get(docname, DOCS / f"{docname}.md")
    if file.suffix != ".md" or not file.exists():
        return

    def led(match: re.Match) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        there = (file.parent / target).resolve()
        names = [name for name, outer in OUTER.items() if outer == there]
        if names:
            return f"[{label}]({names[0]}.md{anchor})"
        if there.is_relative_to(DOCS):
            return f"[{label}]({os.path.relpath(there, DOCS)}{anchor})"
        return label  # a file that is no page, such as LICENSE

    source[0] = LINK.sub(led, file.read_text("utf-8"))


def setup(app):
    app.connect("source-read", bring_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
