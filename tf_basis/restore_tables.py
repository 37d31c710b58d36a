"""State of tables that was saved under another layout than the optimizer has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import export_manifest, layout_record, moments
from tf_basis.layout_record import Record
from tf_basis.optimizers.resizing import numbers_of


def changed_tables(
    optimizer: Any, theirs: Sequence[Record], migrate: bool
) -> dict[int, Record]:
    """The tables, by number, whose layout in `theirs` is another than here.

    Args:
      optimizer: built.
      theirs: the layouts of the saved state.
      migrate: whether such tables may be there.

    Returns:
      The number of each such table and its layout in `theirs`.

    Raises:
      ValueError: there are, with `migrate=False`; or layouts differ in what cannot be
        migrated.
    """
    ours = export_manifest.layouts_of(optimizer)
    if len(ours) != len(theirs):
        raise ValueError(
            f"optimizer must have the tables of the saved state, "
            f"{[r['path'] for r in theirs]}, received {[r['path'] for r in ours]}"
        )
    changed, refused, words = {}, [], []
    for number, (here, there) in enumerate(zip(ours, theirs)):
        found = layout_record.differences(here, there)
        if found:
            changed[number] = there
            words.append(layout_record.in_words(here["path"], found))
            refused += [name for name in found if not _can_migrate(name, *found[name])]
    if refused:
        raise ValueError(
            f"optimizer must have the table layout of the saved state (migrate=True "
            f"cannot change {', '.join(sorted(set(refused)))}): {' and '.join(words)}"
        )
    if changed and not migrate:
        raise ValueError(
            f"optimizer must have the table layout of the saved state, or migrate=True "
            f"be given: {' and '.join(words)}"
        )
    return changed


def moved_values(
    optimizer: Any,
    number: int,
    theirs: Record,
    stored: Mapping[str, np.ndarray],
    step: int,
) -> list[tuple[tf.Variable, np.ndarray]]:
    """The slots of one table with the values that the saved ones become.

    Args:
      optimizer: built.
      number: of the table.
      theirs: its layout in the saved state.
      stored: its slots there, in their formats.
      step: the saved iterations.

    Raises:
      ValueError: a slot that is needed is not there.
    """
    part, key = export_manifest.tables_of(optimizer)[number]
    new, slots = part._basis.layouts[key], part._basis.slots[key]
    # Scalars are the optimizer's: the slots tell whether those there are of their kind.
    old = replace(layout_record.layout_of(theirs), scalar=new.scalar)
    needed = set(part._table_slots(old))
    if needed != set(stored):
        raise ValueError(
            f"the saved state of '{new.path}' must hold {sorted(needed)}, received "
            f"{sorted(stored)}"
        )
    state = {name: numbers_of(tf.constant(value)) for name, value in stored.items()}
    moved, (rows, energies) = part._moved(old, new, state, step)
    for name in set(slots) & set(moments.OF_ROWS):
        values = np.array(state[name])
        if name == "row_energy":
            values[rows] = energies
        moved[name] = moments.to_format(values, slots[name].dtype)
    return [(slots[name], value) for name, value in moved.items()]


def _can_migrate(name: str, ours: Any, theirs: Any) -> bool:
    if name == "exclusive_rows" and "auto" in (ours, theirs):
        return False  # the leaders' moments are neither owners' nor shared
    return name in layout_record.MIGRATED
