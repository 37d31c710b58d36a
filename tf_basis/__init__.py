"""tf_basis: optimizers for embedding tables that are too large for Adam's state."""

from tf_basis import hashing
from tf_basis._version import __version__
from tf_basis.optimizers import BasisAdagrad, BasisAdam, BasisSGD

__all__ = ["BasisAdagrad", "BasisAdam", "BasisSGD", "__version__", "hashing"]
