"""The version of the package: setup, loader and `tf_basis.__version__` read it."""

__version__ = "0.1.0"
