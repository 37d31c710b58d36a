"""tf_basis: optimizers for embedding tables that are too large for Adam's state."""

from tf_basis import _process
from tf_basis._version import __version__

if not _process.is_command():
    from tf_basis import config, diagnostics, distributed, hashing, layers
    from tf_basis.callbacks import GrowBuckets, retrace
    from tf_basis.diagnostics import CollisionReport
    from tf_basis.distributed import OneBitAdam
    from tf_basis.export import export_saved_model
    from tf_basis.optimizers import BasisAdagrad, BasisAdam, BasisSGD
    from tf_basis.planning import plan
    from tf_basis.restore import restore_optimizer

__all__ = [
    "BasisAdagrad",
    "BasisAdam",
    "BasisSGD",
    "CollisionReport",
    "GrowBuckets",
    "OneBitAdam",
    "__version__",
    "config",
    "diagnostics",
    "distributed",
    "export_saved_model",
    "hashing",
    "layers",
    "plan",
    "restore_optimizer",
    "retrace",
]
