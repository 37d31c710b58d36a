"""The version of the package: setup, loader and `tf_basis.__version__` read it."""

__version__ = "0.1.0"

# What `tf-basis install-horovod` builds.
HOROVOD = "horovod==0.28.1"
