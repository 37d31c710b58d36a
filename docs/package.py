"""What the package makes public: what its modules name in `__all__`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import tf_basis

PACKAGE = "tf_basis"


def public_names() -> Iterator[tuple[str, Any]]:
    """Each public name, dotted, with its value."""
    found = pkgutil.walk_packages(tf_basis.__path__, f"{PACKAGE}.")
    for module_name in [PACKAGE, *(m.name for m in found if "__main__" not in m.name)]:
        if module_name.endswith("._tf_basis_ops") or ".adapters" in module_name:
            continue  # the library of C++ ops is no module; adapters are internal
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            yield f"{module_name}.{name}", getattr(module, name)


def own(value: Any) -> bool:
    """Whether this package wrote a member of a class, and not a class of Keras."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return (getattr(value, "__module__", None) or "").startswith(PACKAGE)


def arguments() -> set[str]:
    """Names of the arguments of all public functions, classes and methods."""
    found: set[str] = set()
    for _, value in public_names():
        callables = [value]
        if inspect.isclass(value):
            callables = [getattr(value, name) for name in dir(value) if name[0] != "_"]
            callables.append(value.__init__)
            found |= set(getattr(value, "_fields", ()))  # of a named tuple
        for each in callables:
            if callable(each) and own(each):
                found |= set(inspect.signature(each).parameters)
    return found
