"""The C++ ops, their pure-TF twins, and the choice between the two."""

from tf_basis.ops.loader import get_mode, set_mode, status, use

__all__ = ["get_mode", "set_mode", "status", "use"]
