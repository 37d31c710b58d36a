"""The compressed tables of an optimizer, or of a file, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import export_manifest
from tf_basis.rules import formats
from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.tables import TableLayout


class Slot:
    """One array of a table's state, of which a few rows are in memory at a time.

    Numbers of any format come as float32, counts as they are.

    Args:
      value: a variable, or an array in the format of one.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self.shape = tuple(map(int, value.shape))
        self.dtype = tf.as_dtype(value.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """The rows with these numbers, in the shape of `rows`."""
        rows = np.asarray(rows, np.int64)
        if isinstance(self._value, np.ndarray):
            taken = tf.constant(self._value[rows])
        else:
            # Not tf.gather of the whole: a variable that was scattered to is copied
            # when it is read.
            taken = self._value.sparse_read(tf.constant(rows))
        counts = self.dtype in (tf.int32, tf.int64)
        return (taken if counts else formats.read(taken)).numpy()

    def block(self, first: int, last: int) -> np.ndarray:
        """The rows first to last - 1."""
        return self[np.arange(first, min(last, len(self)))]

    @property
    def bytes(self) -> int:
        """Of the whole, in its format."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size


@dataclass(frozen=True)
class Table:
    """What the diagnostics need of one compressed table.

    Attributes:
      layout: its sizes, formats and hash.
      rule: the numbers and modes of its optimizer, as this table has them.
      slots: its state by name, as `engine.slot_specs` lists it.
      optimizer: name of the class of the optimizer.
      asked_epsilon: what the optimizer was given; `rule.epsilon` may be larger.
      accumulator: where second moments and energies start.
      watchers: what looks at the table's gradients; see `ShadowRows`.
      place: numbers of its optimizer, and of the table in that.
    """

    layout: TableLayout
    rule: BucketRule
    slots: Mapping[str, Slot]
    optimizer: str
    asked_epsilon: float
    accumulator: float = 0.0
    watchers: tuple = field(default=())
    place: tuple[int, int] = (0, 0)

    @property
    def path(self) -> str:
        """Of the table's variable."""
        return self.layout.path

    @property
    def bytes(self) -> int:
        """Of all its state."""
        return sum(slot.bytes for slot in self.slots.values())


def tables_of(optimizer: Any) -> list[Table]:
    """All compressed tables in a built optimizer, and in those inside it.

    Raises:
      ValueError: there is no optimizer of this package in it, or none is built.
    """
    parts = parts_of(optimizer)
    if not parts:
        raise ValueError(
            "optimizer must be BasisAdam, BasisSGD or BasisAdagrad, or contain one, "
            f"received {optimizer!r}"
        )
    if not any(part._is_built() for part in parts):
        raise ValueError(
            "optimizer must have its state: call build(trainable_variables) or train "
            f"a step first, received '{parts[0].name}' without"
        )
    return [table for i, part in enumerate(parts) for table in _tables_of_part(part, i)]


def parts_of(optimizer: Any) -> list:
    """The optimizers of this package in it, each once."""
    found = export_manifest.optimizers_with_tables(optimizer)
    return list({id(part): part for part in found}.values())


def _tables_of_part(part: Any, place: int) -> Iterator[Table]:
    built = part._basis
    for number, (key, layout) in enumerate(built.layouts.items()):
        slots = {name: Slot(slot) for name, slot in built.slots[key].items()}
        yield table_of(part, layout, slots, tuple(built.watchers), (place, number))


def table_of(
    part: Any,
    layout: TableLayout,
    slots: Mapping[str, Slot],
    watchers: tuple = (),
    place: tuple[int, int] = (0, 0),
) -> Table:
    """A table of an optimizer that need not be built."""
    inner = getattr(type(part), "_inner_class", type(part))  # distributed ones
    rule = part._rule_of(layout)
    return Table(
        layout=layout,
        rule=rule,
        slots=slots,
        optimizer=inner.__name__,
        asked_epsilon=getattr(part, "epsilon", rule.epsilon),
        accumulator=getattr(part, "initial_accumulator_value", 0.0),
        watchers=watchers,
        place=place,
    )
