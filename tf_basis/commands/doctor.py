"""`tf-basis doctor`: is this installation well, and what ails a training."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tf_basis.commands.symptoms import SYMPTOMS

HELP = """Check this installation, or name the known causes of a symptom.

Without --symptom: versions, C++ ops, Keras, Horovod, and a self-test of a few steps.
Exits with 1 if a check has failed.

With --symptom: what may cause it, the check that tells, and what to do; it checks
nothing and starts no TensorFlow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--symptom", choices=sorted(SYMPTOMS), help="of a training that goes wrong"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; its exit status."""
    if arguments.symptom:
        _tell(arguments.symptom, arguments.json)
        return 0
    from tf_basis.commands import checks

    found = checks.run_all()
    failed = [check for check in found if check.status == "failed"]
    if arguments.json:
        content = {"ok": not failed, "checks": [check._asdict() for check in found]}
        print(json.dumps(content, indent=1))
    else:
        _print(found)
    return 1 if failed else 0


def _print(found: list[Any]) -> None:
    width = max(len(check.name) for check in found)
    for check in found:
        print(f"{check.status:>7}  {check.name.ljust(width)}  {check.detail}")
    failed = sum(check.status == "failed" for check in found)
    print(f"{failed} of {len(found)} checks failed" if failed else "all is well")
    print(f"a training goes wrong? --symptom {'|'.join(sorted(SYMPTOMS))}")


def _tell(symptom: str, as_json: bool) -> None:
    causes = SYMPTOMS[symptom]
    if as_json:
        content = {"symptom": symptom, "causes": [c._asdict() for c in causes]}
        print(json.dumps(content, indent=1))
        return
    for number, cause in enumerate(causes, 1):
        print(f"{number}. {cause.cause}\n   check:  {cause.check}")
        print(f"   remedy: {cause.remedy}\n")
    print("the callbacks are in docs/debugging.md, reports in docs/diagnostics.md")
