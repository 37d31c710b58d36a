"""Rows that grow with the vocabulary: one variable takes the place of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from tf_basis import growth, hyperparameters
from tf_basis.adapters import tracking
from tf_basis.optimizers import selection
from tf_basis.optimizers.inspection import is_variable
from tf_basis.optimizers.resizing import ResizingMixin
from tf_basis.optimizers.slots import extend_slots
from tf_basis.tables import TableLayout


class GrowthMixin(ResizingMixin):
    """`grow_rows`, and `resize`."""

    def grow_rows(
        self,
        old_variable: Any,
        new_variable: Any,
        *,
        num_buckets: int | None = None,
    ) -> None:
        """Hands the state of a variable to one that replaces it and may have more rows.

        The leading rows of `new_variable` are those of `old_variable`; their values
        are the caller's business. Of a compressed table the old rows keep buckets
        and state; the new ones start afresh and are hashed among themselves into the
        shared buckets, whose number stays. Where every row owned a bucket, new rows
        own one too as long as the settings say so; else the former rows stay owners
        and the new ones share. With a dense rule, state starts for new rows as it
        does for a new variable. Variables of the `dense_optimizer` must keep their
        shape.

        Call it eagerly, between steps: for each trainable variable of a model that
        was built anew, which is then compiled with this optimizer; or for a variable
        that was exchanged in the same model, which is then traced again
        (`tf_basis.retrace`).

        Args:
          old_variable: a variable that the optimizer was built with.
          new_variable: what takes its place, of the same type and shape but for
            more rows.
          num_buckets: B of the grown table. Default None: as above.

        Raises:
          ValueError: the variables do not fit, or `tables` and `table_settings` would
            treat the path of the new one differently.
          RuntimeError: it is called inside a tf.function.

        Example:

        >>> old = tf.Variable(tf.zeros([100, 4]), name="table")
        >>> optimizer = BasisAdam(tables="table", num_buckets=10)
        >>> optimizer.build([old])
        >>> new = tf.Variable(tf.zeros([150, 4]), name="table")
        >>> optimizer.grow_rows(old, new)
        >>> optimizer.table_state(new)["row_energy"].shape
        (150,)
        """
        self._require_eager("grow_rows")
        for name, value in (
            ("old_variable", old_variable),
            ("new_variable", new_variable),
        ):
            if not is_variable(value):
                raise ValueError(f"{name} must be a variable, received {value!r}")
        if num_buckets is not None:
            hyperparameters.check("num_buckets", num_buckets)
        built, path_of = self._basis, self._keras.path_of
        key, new_key = self._var_key(old_variable), self._var_key(new_variable)
        if key not in built.paths:
            raise ValueError(
                "old_variable must be a variable that the optimizer was built with, "
                f"received '{path_of(old_variable)}'"
            )
        old_path, path = built.paths[key], path_of(new_variable)
        self._check_unique(old_path)
        more = _has_more_rows(built.variables[key], new_variable, path)
        table = key in built.layouts
        if table:
            self._grow_table(key, new_variable, num_buckets)
        elif more:
            self._grow_dense(key, new_variable, path)
        if not table and self._selects(new_variable):
            built.growth[path] = {"dense": True}
        if isinstance(self.tables, (list, tuple)):
            self.tables = tuple(path if p == old_path else p for p in self.tables)
        tracking.rebind(self, old_variable, new_variable)
        if key in built.delegated:
            tracking.rebind(self.dense_optimizer, old_variable, new_variable)
            built.delegated = (built.delegated - {key}) | {new_key}
        for by_key in (built.slots, built.layouts, built.paths, built.variables):
            # In its place: an optimizer that is made anew has the tables in that order.
            items = [(new_key if k == key else k, v) for k, v in by_key.items()]
            by_key.clear()
            by_key.update(items)
        built.paths[new_key], built.variables[new_key] = path, new_variable
        self._update_fingerprint()
        if table and num_buckets is not None:
            self.resize(new_variable, num_buckets=num_buckets)

    def _grow_table(self, key: str, variable: Any, num_buckets: int | None) -> None:
        built, path = self._basis, self._keras.path_of(variable)
        self._pin_budget()
        old = built.layouts[key]
        record = built.growth.get(old.path, {})
        if variable.shape[0] > old.mapping.n_rows:
            settings = selection.settings_of(
                path, self._layout_defaults(), self._basis.settings
            )
            n_rows = int(variable.shape[0])
            record = growth.extended(old, record, n_rows, num_buckets, settings)
        new = self._layout_with(variable, record)
        listed = isinstance(self.tables, (list, tuple))
        if not (listed or self._selects(variable)) or not _alike(old, new):
            raise ValueError(
                "new_variable must have a path that tables and table_settings treat "
                f"as they do '{old.path}', received '{path}'"
            )
        built.growth.pop(old.path, None)
        if record:
            built.growth[path] = record
        extend_slots(self, key, variable, self._table_slots(new))
        built.layouts[key] = new

    def _grow_dense(self, key: str, variable: Any, path: str) -> None:
        reasons = {
            "a dense_optimizer has its state": key in self._basis.delegated,
            "use_ema is set": self.use_ema,
            "gradient_accumulation_steps is set": self._accumulator is not None,
        }
        why = next((why for why, applies in reasons.items() if applies), None)
        if why:
            raise ValueError(
                f"new_variable must have the shape of the old one, since {why}, "
                f"received '{path}' of shape {tuple(variable.shape)}"
            )
        dtype, shape = tf.as_dtype(variable.dtype), tuple(variable.shape)
        slots = self._dense_slots().items()
        specs = {name: (shape, dtype, start) for name, start in slots}
        extend_slots(self, key, variable, specs)

    def _selects(self, variable: Any) -> bool:
        """Whether the argument `tables` makes the variable a compressed table."""
        path_of = self._keras.path_of
        if isinstance(self.tables, (list, tuple)):
            return path_of(variable) in self.tables
        try:
            return bool(
                selection.select_tables(self.tables, self.min_rows, [variable], path_of)
            )
        except ValueError:  # a pattern that matches nothing
            return False


def _has_more_rows(old: Any, new: Any, path: str) -> bool:
    """Raises where `new` is not like `old`, but for rows at the end."""
    before, after = tuple(old.shape), tuple(new.shape)
    same = before == after
    fits = before[:1] <= after[:1] and before[1:] == after[1:]
    kinds = [tf.as_dtype(v.dtype).name for v in (old, new)]
    if not (same or (before and fits)) or kinds[0] != kinds[1]:
        raise ValueError(
            "new_variable must have the type and shape of the old one, or more rows, "
            f"received '{path}': {kinds[1]} {after} for {kinds[0]} {before}"
        )
    return not same


def _alike(old: TableLayout, new: TableLayout) -> bool:
    """Whether rows of `old` have in `new` the state that they had."""
    a, b = old.mapping, new.mapping
    if a.num_buckets < a.n_rows:  # as if the new rows were not there
        b = replace(b, n_rows=a.n_rows, domains=a.domains)
    else:  # all buckets have owners
        b = replace(a, hashing=b.hashing, seed=b.seed)
    return old == replace(new, path=old.path, mapping=b)
