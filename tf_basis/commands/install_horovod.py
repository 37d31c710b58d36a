"""`tf-basis install-horovod`: builds Horovod for the TensorFlow of this environment."""

from __future__ import annotations

import argparse
import sys

from tf_basis._version import HOROVOD

HELP = f"""Build and install Horovod for the TensorFlow of this environment.

Downloads the source of {HOROVOD} with pip (its configuration counts: index, proxy,
constraints), leaves out the one file that TensorFlow 2.19 and newer cannot compile,
builds, installs, and checks the result with an allreduce of two processes. Takes some
minutes. A Horovod that works with this TensorFlow is left alone.

Built by default: TensorFlow with Gloo. Horovod's own variables choose otherwise, such
as HOROVOD_WITH_MPI=1, HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_WITH_PYTORCH=1,
HOROVOD_CMAKE=/path/to/cmake; CXX names the compiler, MAKEFLAGS=-j1 saves memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--force", action="store_true", help="build even if a working one is there"
    )
    parser.add_argument(
        "--no-check",
        action="store_false",
        dest="check",
        help="leave out the allreduce of two processes",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the output of pip and compiler"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; its exit status: 0 if a working Horovod is there."""
    from tf_basis.distributed.horovod_build import InstallError
    from tf_basis.distributed.install import install

    try:
        install(arguments.force, arguments.check, arguments.verbose)
    except InstallError as error:
        print(f"tf-basis install-horovod: {error}", file=sys.stderr)
        return 1
    return 0
