"""Changing how many buckets the rows of a table share, in a built optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import growth, moments, transfer
from tf_basis.optimizers.slots import set_slots
from tf_basis.rules import formats
from tf_basis.tables import TableLayout


class ResizingMixin:
    """`resize`."""

    def resize(
        self,
        variable: Any,
        *,
        num_buckets: int | None = None,
        factor: float | None = None,
    ) -> int:
        """Changes how many buckets the rows of a compressed table share.

        Call it eagerly, between steps. Rows that own a bucket keep it. Where the
        number of shared buckets is multiplied by an integer (and the hash is not
        consistent), each is split, and all its parts inherit its state to the bit;
        else rows are hashed anew and moments averaged, see
        `tf_basis.transfer.move_buckets`. What belongs to rows (energies, learned
        scalars, step counts) stays, but for rows that gain or lose a bucket of
        their own. With `num_buckets` >= N every row owns one.

        The state lives in new variables, at the same places of `variables`, and the
        config remembers the size. A function that was traced before must be traced
        again: `tf_basis.retrace(model)` for `fit`; a stale one fails at its next step.

        Args:
          variable: the table's variable, or its path.
          num_buckets: B, exclusive buckets included.
          factor: instead, by what to multiply the number of shared buckets.

        Returns:
          The new number of buckets, at most N.

        Raises:
          ValueError: an argument breaks its rule, or the exclusive rows leave no
            bucket for the others.
          RuntimeError: it is called inside a tf.function.

        Example:

        >>> table = tf.Variable(tf.zeros([100, 4]), name="table")
        >>> optimizer = BasisAdam(tables=[table], num_buckets=10)
        >>> optimizer.build([table])
        >>> optimizer.resize(table, factor=2)
        20
        """
        self._require_eager("resize")
        key = self._key_of_table(variable)
        built = self._basis
        self._check_unique(built.paths[key])
        variable, old = built.variables[key], built.layouts[key]
        self._pin_budget()
        record = growth.resized(
            old, built.growth.get(old.path, {}), num_buckets, factor
        )
        if num_buckets is not None and num_buckets > old.mapping.n_rows:
            warnings.warn(
                f"num_buckets is limited to the {old.mapping.n_rows} rows of "
                f"'{old.path}', received {num_buckets}",
                stacklevel=2,
            )
        new = self._layout_with(variable, record)
        built.growth[old.path] = record
        if new != old:
            self._move(key, variable, old, new)
        return new.mapping.num_buckets

    def _require_eager(self, method: str) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{method} must be called eagerly, between steps, not inside a "
                "tf.function or graph"
            )
        if not self._is_built():
            raise ValueError(
                "the optimizer has no state yet: call build(trainable_variables) or "
                "train a step first"
            )

    def _check_unique(self, path: str) -> None:
        """The config tells tables apart by their paths."""
        if list(self._basis.paths.values()).count(path) > 1:
            raise ValueError(
                f"variable must have a path of its own, received '{path}', which "
                "several variables of this optimizer have"
            )

    def _layout_with(self, variable: Any, record: growth.Record) -> TableLayout:
        path = self._keras.path_of(variable)
        defaults, settings = self._layout_defaults(), self._basis.settings
        return growth.layout_of(path, variable, defaults, settings, record)

    def _pin_budget(self) -> None:
        """A budget would divide itself differently once one table is another."""
        built = self._basis
        for layout in built.layouts.values() if self.state_budget is not None else ():
            size = {"num_buckets": layout.mapping.num_buckets}
            built.growth.setdefault(layout.path, size)

    def _move(self, key, variable, old: TableLayout, new: TableLayout) -> None:
        """Moves the state of a table into slots for another layout."""
        a, b = old.mapping, new.mapping
        other_owners = (a.owners, a.owner_rows) != (b.owners, b.owner_rows)
        state = {
            name: numbers_of(slot)
            for name, slot in self._basis.slots[key].items()
            if name not in moments.OF_ROWS or (name == "row_energy" and other_owners)
        }
        step = int(tf.convert_to_tensor(self.iterations))
        moved, (rows, energies) = self._moved(old, new, state, step)
        set_slots(self, key, variable, self._table_slots(new), moved)
        if len(rows):
            energy = self._basis.slots[key]["row_energy"]
            values = tf.constant(moments.to_format(energies, energy.dtype))
            energy.scatter_update(tf.IndexedSlices(values, tf.constant(rows)))
        self._basis.layouts[key] = new
        self._update_fingerprint()

    def _moved(
        self, old: TableLayout, new: TableLayout, state: moments.State, step: int
    ) -> tuple[moments.State, tuple[np.ndarray, np.ndarray]]:
        """`transfer.move_buckets`, buckets in the formats of `new`."""
        specs = self._table_slots(new)
        fresh = {
            name: np.full(shape, start, _plain(dtype))
            for name, (shape, dtype, start) in specs.items()
            if name not in moments.OF_ROWS
        }
        rule = self._rule_of(new)
        moved, energies = transfer.move_buckets(old, new, rule, state, fresh, step)
        for name in moved:
            moved[name] = moments.to_format(moved[name], specs[name][1])
        return moved, energies


def numbers_of(slot: Any) -> np.ndarray:
    """Counts as they are, numbers of any format as float32."""
    value = tf.convert_to_tensor(slot)
    counts = value.dtype in (tf.int32, tf.int64)
    return (value if counts else formats.read(value)).numpy()


def _plain(dtype: tf.DType) -> Any:
    counts = dtype in (tf.int32, tf.int64)
    return dtype.as_numpy_dtype if counts else np.float32
