"""The command `tf-basis`, also `python -m tf_basis`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tf_basis._version import __version__
from tf_basis.distributed import install

# Each module has HELP, add_arguments(parser) and run(arguments) -> exit status.
_COMMANDS = {"install-horovod": install}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="tf-basis", description="Tools for training with tf_basis."
    )
    top.add_argument("--version", action="version", version=f"tf_basis {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        short = module.HELP.partition("\n")[0]
        own = commands.add_parser(
            name,
            help=short,
            description=module.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(own)
        own.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status."""
    parsed = parser().parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
