"""A Sphinx extension: what is public has a docstring and a place in the reference.

Public is what a module of the package names in its `__all__`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from package import own, public_names
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

logger = logging.getLogger(__name__)


def without_docstring(name: str, value: Any) -> Iterator[str]:
    """The name, and those of a class's public members, that have no docstring."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return  # what a constant is, its page says
    if not (value.__doc__ or "").strip():
        yield name
    if inspect.isclass(value):
        for member in dir(value):
            got = inspect.getattr_static(value, member)
            if member.startswith("_") or not own(got):
                continue
            if not (inspect.getdoc(getattr(value, member)) or "").strip():
                yield f"{name}.{member}"


def complaints(documented: set[str]) -> list[str]:
    """What is missing, one line each."""
    names = list(public_names())
    shown = [id(value) for name, value in names if name in documented]
    found = []
    for name, value in names:
        if inspect.ismodule(value) or name.endswith(".__version__"):
            continue
        if id(value) not in shown:  # under no name
            found.append(f"{name} is public and in no page of docs/api")
        found += [f"{n} has no docstring" for n in without_docstring(name, value)]
    return found


def skip_foreign(app, what, name, value, skip, options):
    """Of members shows those of this package only, without what Keras alone calls."""
    if what not in ("class", "exception"):
        return None
    called_by_keras = (getattr(value, "__doc__", "") or "").startswith("Keras calls it")
    return True if called_by_keras or not own(value) else None


def signature_of_init(app, what, name, value, options, signature, returns):
    """Of layers too, whose `__new__` takes anything."""
    if what == "class" and signature == "(*args, **kwargs)":
        bound = inspect.signature(value.__init__)
        own_parameters = list(bound.parameters.values())[1:]
        signature = stringify_signature(bound.replace(parameters=own_parameters))
    return signature, returns


def check(app, env):
    for complaint in complaints(set(env.get_domain("py").objects)):
        logger.warning(complaint)


def setup(app):
    app.connect("autodoc-skip-member", skip_foreign)
    app.connect("autodoc-process-signature", signature_of_init)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
