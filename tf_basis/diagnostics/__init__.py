"""Looking into the tables of an optimizer: how rows share, and what to do about it."""

from __future__ import annotations

from types import SimpleNamespace

from tf_basis.adapters import flavor
from tf_basis.diagnostics import callback
from tf_basis.diagnostics.advice import Advice
from tf_basis.diagnostics.report import Report, report
from tf_basis.diagnostics.shadows import ShadowRows


def for_flavor(name: str) -> SimpleNamespace:
    """The callback on one flavour of Keras: `"keras3"` or `"tf_keras"`."""
    return SimpleNamespace(CollisionReport=callback.define(name))


CollisionReport = for_flavor(flavor.active()).CollisionReport

__all__ = ["Advice", "CollisionReport", "Report", "ShadowRows", "for_flavor", "report"]
