"""The optimizers, for the active Keras flavour and for each by name."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from tf_basis.adapters import flavor
from tf_basis.optimizers.adagrad import BasisAdagradMixin
from tf_basis.optimizers.adam import BasisAdamMixin
from tf_basis.optimizers.sgd import BasisSGDMixin


@functools.cache
def for_flavor(name: str) -> SimpleNamespace:
    """The optimizer classes on one flavour of Keras: `"keras3"` or `"tf_keras"`.

    Both may be used in one process, though never in one model.

    Example:

    >>> tf_basis.optimizers.for_flavor("keras3").BasisAdam(1e-3).name
    'basis_adam'
    """
    adapter = flavor.load_adapter(name)
    mixins = {
        "BasisAdam": BasisAdamMixin,
        "BasisSGD": BasisSGDMixin,
        "BasisAdagrad": BasisAdagradMixin,
    }
    return SimpleNamespace(
        **{
            class_name: _define(class_name, mixin, adapter)
            for class_name, mixin in mixins.items()
        }
    )


def _define(class_name: str, mixin: type, adapter) -> type:
    members = {
        "__doc__": mixin.__doc__,
        "__module__": __name__,
        "_keras": adapter,
    }
    return adapter.register(
        type(class_name, (mixin, adapter.OptimizerAdapter), members)
    )


_active = for_flavor(flavor.active())
BasisAdam = _active.BasisAdam
BasisSGD = _active.BasisSGD
BasisAdagrad = _active.BasisAdagrad

__all__ = ["BasisAdagrad", "BasisAdam", "BasisSGD", "for_flavor"]
