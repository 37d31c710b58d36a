"""`tf-basis report`: the diagnostics of the tables in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tf_basis.commands import CommandError

HELP = """Look into the compressed tables of a saved training, and say what to do.

PATH is a directory that export_saved_model wrote, or a .keras file. With --model it may
also be a .weights.h5 file, the prefix or folder of a tf.train.Checkpoint, or a folder
of CheckpointCallback: these do not say of what model and optimizer they are. What the
numbers mean is in docs/diagnostics.md.

    tf-basis report export --html report.html
    tf-basis report checkpoints --model model.keras"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("path", metavar="PATH", help="an export or a .keras file")
    parser.add_argument(
        "--model", metavar="FILE", help="a .keras file of the model that PATH is of"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with plots too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 where there is advice"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; its exit status."""
    path = Path(arguments.path)
    model = Path(arguments.model) if arguments.model else None
    index = Path(f"{path}.index")  # of the prefix of a checkpoint
    if not path.exists() and not (model and index.exists()):
        raise CommandError(f"'{path}' does not exist")
    from tf_basis.diagnostics import saved

    try:
        found = saved.report_file(path, model)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if arguments.html:
        try:
            found.to_html(arguments.html)
        except OSError as error:
            raise CommandError(f"--html cannot be written: {error}") from error
    print(json.dumps(found.as_dict(), indent=1) if arguments.json else found)
    return 1 if arguments.strict and found.advice else 0
