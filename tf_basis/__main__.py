"""The command `tf-basis`, also `python -m tf_basis`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tf_basis._version import __version__
from tf_basis.commands import CommandError

# Each has a module in `tf_basis.commands`, `_` for `-`.
COMMANDS = ("doctor", "plan", "report", "install-horovod")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="tf-basis", description="Tools for training with tf_basis."
    )
    top.add_argument("--version", action="version", version=f"tf_basis {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"tf_basis.commands.{name.replace('-', '_')}")
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
    """Runs a command; its exit status.

    0: all is well; 1: what was looked at is not, or cannot be read; 2: wrong usage.
    """
    parsed = parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except CommandError as error:
        print(f"tf-basis {parsed.command}: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # of `tf-basis ... | head`
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
