"""tf_basis: optimizers for embedding tables that are too large for Adam's state."""

from tf_basis import hashing
from tf_basis._version import __version__
from tf_basis.optimizers import BasisAdam

__all__ = ["BasisAdam", "__version__", "hashing"]
