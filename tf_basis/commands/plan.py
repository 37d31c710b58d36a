"""`tf-basis plan`: how many buckets and bytes tables would take."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tf_basis.commands import CommandError, UsageError

if TYPE_CHECKING:
    import h5py

HELP = """Say how many buckets and bytes the state of tables would take.

The tables are those of a saved model, or given by name and shape:

    tf-basis plan model.keras --state-budget 64MB
    tf-basis plan --table users=1_000_000x64 --table items=200000x64

A saved model is a .keras or .weights.h5 file, a SavedModel, or what export_saved_model
wrote; only the shapes of its variables are read. All with two dimensions and at least
--min-rows rows count as tables, but for optimizer state."""

_TABLE = re.compile(r"(?P<name>[^=]+)=(?P<rows>[\d_,]+)[xX](?P<dim>\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a saved model")
    add(
        "--table",
        action="append",
        default=[],
        type=_table,
        metavar="NAME=ROWSxDIM",
        help="a table; may be given several times",
    )
    add("--state-budget", metavar="SIZE", help="of all tables, such as 64MB or 1GiB")
    add("--compression-ratio", type=float, metavar="R", help="rows a bucket; 100")
    add("--num-buckets", type=int, metavar="B", help="buckets of each table")
    add(
        "--exclusive-rows", metavar="K", help="rows with a bucket of their own, or auto"
    )
    add("--min-rows", type=int, default=10_000, metavar="N", help="of a table; 10000")
    add("--optimizer", help="BasisAdam (default), BasisAdagrad or BasisSGD")
    add("--momentum", help="exclusive (default), shared or none")
    add("--invariant-scalar", help="energy (default), learned or none")
    add("--moment-dtype", help="float32 (default), bfloat16 or float16")
    add("--energy-dtype", help="float32 (default), bfloat16 or log8")
    add("--stale-decay", action="store_true", help="as the optimizer's argument")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; its exit status."""
    if bool(arguments.model) == bool(arguments.table):
        raise UsageError("give either a saved model or --table, and not both")
    names = [name for name, _ in arguments.table]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--table must name each table once, received {twice} again")
    shapes = dict(arguments.table) or shapes_of(Path(arguments.model))
    from tf_basis.planning import plan

    given = {
        name: getattr(arguments, name)
        for name in (
            "state_budget",
            "compression_ratio",
            "num_buckets",
            "min_rows",
            "optimizer",
            "momentum",
            "moment_dtype",
            "energy_dtype",
        )
        if getattr(arguments, name) is not None
    }
    if arguments.exclusive_rows is not None:
        rows = arguments.exclusive_rows
        given["exclusive_rows"] = int(rows) if rows.isdecimal() else rows
    if arguments.invariant_scalar is not None:
        scalar = arguments.invariant_scalar
        given["invariant_scalar"] = None if scalar == "none" else scalar
    try:
        found = plan(shapes, stale_decay=arguments.stale_decay, **given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    rows = [shape[0] for shape in shapes.values() if len(shape) == 2]
    left_out = [n for n in rows if n < arguments.min_rows]
    if arguments.json:
        print(json.dumps({**found.as_dict(), "left_out": len(left_out)}, indent=1))
        return 0
    print(found)
    if left_out:
        print(
            f"left out: {len(left_out)} of {len(rows)} variables with two dimensions; "
            f"the largest of them has {max(left_out):,} rows, and --min-rows is "
            f"{arguments.min_rows:,}"
        )
    if arguments.model:
        print(
            "only names and shapes are read: what the model's own optimizer and tables "
            "are set to is not known here; give it as options"
        )
    return 0


def _table(text: str) -> tuple[str, tuple[int, int]]:
    found = _TABLE.fullmatch(text)
    rows = int(re.sub("[_,]", "", found["rows"]) or 0) if found else 0
    dim = int(found["dim"]) if found else 0
    if min(rows, dim) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a name and a shape such as users=1000000x64, received {text!r}"
        )
    return found["name"], (rows, dim)


def shapes_of(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the variables of a saved model, without optimizer state.

    Raises:
      CommandError: it is none, or cannot be read.
    """
    if not path.exists():
        raise CommandError(f"'{path}' does not exist")
    try:
        if path.is_dir():
            return _of_directory(path)
        if path.suffix in (".keras", ".h5"):
            return _of_file(path)
    except CommandError:
        raise
    except Exception as error:  # of several kinds, by what is damaged
        raise CommandError(
            f"'{path}' cannot be read: {type(error).__name__}: {error}"
        ) from error
    raise CommandError(
        f"MODEL must be a .keras or .weights.h5 file or a SavedModel, received '{path}'"
    )


def _of_directory(path: Path) -> dict[str, tuple[int, ...]]:
    manifest = path / "tf_basis.json"
    if manifest.exists():
        entries = json.loads(manifest.read_text("utf-8"))["weights"]
        return {e["name"]: tuple(e["shape"]) for e in entries}
    if not (path / "saved_model.pb").exists():
        raise CommandError(
            f"'{path}' is no SavedModel: it has no saved_model.pb or tf_basis.json"
        )
    import tensorflow as tf

    ending = "/.ATTRIBUTES/VARIABLE_VALUE"
    listed = tf.train.list_variables(str(path / "variables" / "variables"))
    return {
        key.removesuffix(ending): tuple(shape)
        for key, shape in listed
        if key.endswith(ending) and "optimizer" not in key.split("/")[0]
    }


def _of_file(path: Path) -> dict[str, tuple[int, ...]]:
    import io
    import zipfile

    import h5py

    source = path
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            source = io.BytesIO(archive.read("model.weights.h5"))
    shapes: dict[str, tuple[int, ...]] = {}
    with h5py.File(source, "r") as file:

        def look(name: str, item: h5py.Dataset | h5py.Group) -> None:
            own = not name.startswith(("optimizer", "_optimizer"))
            if isinstance(item, h5py.Dataset) and own:
                known = _name_of(file, name)
                shapes[name if known in shapes else known] = tuple(item.shape)

        file.visititems(look)
    return shapes


def _name_of(file: h5py.File, name: str) -> str:
    """A variable by the names of its layers, as far as they are written down."""
    if not name.endswith("/vars/0"):
        return name
    path = name.removesuffix("/vars/0")
    parts = path.split("/")
    groups = ["/".join([*parts[:n], "vars"]) for n in range(1, len(parts) + 1)]
    layers = [file[g].attrs.get("name") for g in groups if g in file]
    return "/".join(layers) if layers and all(layers) else path
