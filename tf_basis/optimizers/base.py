"""What all BASIS optimizers share, whatever the rule and the Keras flavour."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import engine, hashing, hyperparameters, tables
from tf_basis.ops import dispatch
from tf_basis.rules.grouping import sum_duplicates


class _Built:
    """Slots and layouts by variable key, hidden from Keras's attribute tracking.

    Keras and TensorFlow track the slot variables through the optimizer's own
    list; a second way to them would save every value twice.
    """

    def __init__(self) -> None:
        self.layouts: dict[str, tables.TableLayout] = {}
        self.slots: dict[str, dict[str, tf.Variable]] = {}
        self.delegated: set[str] = set()
        self.paths: dict[str, str] = {}


class BasisOptimizerMixin:
    """Selects the tables, makes their slots, and routes each gradient.

    A subclass is mixed with an adapter (`_keras` is its module) and defines
    `_table_slots(layout)`, `_dense_slots(variable)`, `_step_table` and
    `_step_dense`.
    """

    _keras: Any

    def _initialize(self, arguments: dict[str, Any]) -> None:
        """`__init__` of a subclass passes its `locals()` here."""
        arguments = {
            k: v for k, v in arguments.items() if k not in ("self", "__class__")
        }
        kwargs = arguments.pop("kwargs")
        hyperparameters.check_all(arguments)
        dense_optimizer = arguments.pop("dense_optimizer")
        if dense_optimizer is not None and not isinstance(
            dense_optimizer, self._keras.Optimizer
        ):
            raise ValueError(
                "dense_optimizer must be None or an optimizer of the same Keras "
                f"({self._keras.Optimizer.__module__.split('.')[0]}), received "
                f"{dense_optimizer!r}"
            )
        learning_rate = arguments.pop("learning_rate")
        if isinstance(learning_rate, int) and not isinstance(learning_rate, bool):
            learning_rate = float(learning_rate)
        if isinstance(learning_rate, float) and not 0 <= learning_rate < np.inf:
            raise ValueError(
                "learning_rate must be a finite number of at least 0, a schedule or "
                f"a callable, received {learning_rate!r}"
            )
        arguments["tables"] = self._table_selector(arguments["tables"])
        base = inspect.signature(self._keras.Optimizer.__init__).parameters
        theirs = {k: arguments.pop(k) for k in list(arguments) if k in base}
        super().__init__(learning_rate, **theirs, **kwargs)
        for name, value in arguments.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        self.dense_optimizer = dense_optimizer
        self._basis = _Built()

    def _table_selector(self, selector: Any) -> Any:
        """None, a pattern, or a tuple of paths."""
        if selector is None:
            return None
        if isinstance(selector, str):
            try:
                re.compile(selector)
            except re.error as error:
                raise ValueError(
                    f"tables must be a valid regular expression ({error}), received "
                    f"{selector!r}"
                ) from error
            return selector
        if isinstance(selector, (list, tuple)) and all(
            isinstance(v, str) or hasattr(v, "shape") and hasattr(v, "name")
            for v in selector
        ):
            paths = (v if isinstance(v, str) else self._keras.path_of(v) for v in selector)
            return tuple(paths)
        raise ValueError(
            "tables must be None, a regular expression on the variable path, or a "
            f"list of variables or paths, received {selector!r}"
        )

    # ---- building ----------------------------------------------------------

    def _create_slots(self, variables: list) -> None:
        """Called by the adapter once, with every trainable variable."""
        chosen = {self._var_key(v) for v in self._select_tables(variables)}
        layouts = {}
        for variable in variables:  # all layouts first: nothing is half built
            key = self._var_key(variable)
            if key in chosen:
                layouts[key] = self._layout(variable)
        built = self._basis
        built.layouts = layouts
        delegated = []
        for variable in variables:
            key = self._var_key(variable)
            built.paths[key] = self._keras.path_of(variable)
            if key in layouts:
                specs = self._table_slots(layouts[key])
            elif self.dense_optimizer is not None:
                built.delegated.add(key)
                delegated.append(variable)
                continue
            else:
                specs = self._dense_slots(variable)
            built.slots[key] = {
                name: self._add_slot(variable, name, *spec)
                for name, spec in specs.items()
            }
        if delegated:
            self.dense_optimizer.build(delegated)

    def _select_tables(self, variables: list) -> list:
        path_of = self._keras.path_of
        if self.tables is None:
            return [
                v
                for v in variables
                if path_of(v).split("/")[-1] == "embeddings"
                and len(v.shape) == 2
                and v.shape[0] >= self.min_rows
            ]
        known = f"the variables are {[path_of(v) for v in variables]}"
        if isinstance(self.tables, str):
            found = [v for v in variables if re.search(self.tables, path_of(v))]
            if not found:
                raise ValueError(
                    "tables must match the path of at least one variable, received "
                    f"{self.tables!r}; {known}"
                )
            return found
        missing = set(self.tables) - {path_of(v) for v in variables}
        if missing:
            raise ValueError(
                "tables must hold paths of trainable variables, received "
                f"{sorted(missing)}; {known}"
            )
        return [v for v in variables if path_of(v) in self.tables]

    def _layout(self, variable: Any) -> tables.TableLayout:
        path = self._keras.path_of(variable)
        dtype = tf.as_dtype(variable.dtype)
        if dtype != tf.float32:
            raise ValueError(
                f"tables must be float32 variables, but '{path}' is {dtype.name}"
            )
        return tables.table_layout(
            path,
            tuple(variable.shape),
            compression_ratio=self.compression_ratio,
            num_buckets=self.num_buckets,
            exclusive_rows=self.exclusive_rows,
            hashing=self.hashing,
            seed=self.seed,
            momentum=self.momentum,
        )

    # ---- updating ----------------------------------------------------------

    def _split(self, grads_and_vars: Iterable) -> tuple[list, list]:
        """(own, delegated) pairs of gradient and variable."""
        own, delegated = [], []
        for gradient, variable in grads_and_vars:
            theirs = self._var_key(variable) in self._basis.delegated
            (delegated if theirs else own).append((gradient, variable))
        return own, delegated

    def _row_checks(self, gradients: Iterable, variables: Iterable) -> list:
        """Ops that fail, before anything is written, where a row does not exist."""
        checks = [
            engine.check_indices(g, int(v.shape[0]), self._keras.path_of(v))
            for g, v in zip(gradients, variables)
            if isinstance(g, tf.IndexedSlices)
        ]
        return [c for c in checks if c is not None]

    def _clip_gradients(self, grads: list) -> list:
        """Keras's clipping on the rows alone: the norms are those of the dense
        gradient once duplicates are summed, and nothing becomes dense."""
        if not (self.clipnorm or self.clipvalue or self.global_clipnorm):
            return grads
        padded = dispatch.in_xla()
        grads = [
            sum_duplicates(g, padded) if isinstance(g, tf.IndexedSlices) else g
            for g in grads
        ]
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        return [
            tf.IndexedSlices(new, old.indices, old.dense_shape)
            if isinstance(old, tf.IndexedSlices)
            else new
            for new, old in zip(super()._clip_gradients(values), grads)
        ]

    def _decayed_by_rule(self, variable: Any) -> bool:
        """Tables decay their touched rows only; delegated variables their own way."""
        key = self._var_key(variable)
        return key in self._basis.layouts or key in self._basis.delegated

    def _step_variable(self, gradient, variable, learning_rate) -> None:
        key = self._var_key(variable)
        slots = self._basis.slots[key]
        layout = self._basis.layouts.get(key)
        if layout is None:
            self._step_dense(variable, slots, gradient, learning_rate)
        else:
            self._step_table(layout, variable, slots, gradient, learning_rate)

    # ---- looking inside ----------------------------------------------------

    def _key_of_table(self, variable: Any) -> str:
        if not self._is_built():
            raise ValueError(
                "the optimizer has no state yet: call build(trainable_variables) or "
                "train a step first"
            )
        if isinstance(variable, str):
            keys = [k for k, p in self._basis.paths.items() if p == variable]
            key, path = (keys[0] if keys else None), variable
        else:
            key, path = self._var_key(variable), self._keras.path_of(variable)
        if key not in self._basis.layouts:
            compressed = [x.path for x in self._basis.layouts.values()]
            raise ValueError(
                f"variable must be a compressed table, received '{path}'; the "
                f"compressed tables are {compressed}"
            )
        return key

    def table_state(self, variable: Any) -> dict[str, np.ndarray]:
        """The state of one compressed table.

        Args:
          variable: the table's variable, or its path.

        Returns:
          Copies as numpy arrays, by name: `first_moment` (of the buckets that use
          it, from bucket 0 on; absent where none does), `second_moment` [B, d],
          `bucket_steps` [B], and `row_energy` [N] (energy) or `scalar` [N]
          (learned), as the rule has them.

        Raises:
          ValueError: the optimizer is not built, or the variable not compressed.
        """
        slots = self._basis.slots[self._key_of_table(variable)]
        return {name: np.array(slot.numpy()) for name, slot in slots.items()}

    def buckets(self, variable: Any) -> np.ndarray:
        """The bucket of every row of one compressed table: int64 [N].

        Args:
          variable: the table's variable, or its path.

        Raises:
          ValueError: the optimizer is not built, or the variable not compressed.
        """
        mapping = self._basis.layouts[self._key_of_table(variable)].mapping
        return hashing.bucket_of_rows(
            np.arange(mapping.n_rows),
            mapping.n_rows,
            mapping.num_buckets,
            mapping.exclusive_rows,
            mapping.hashing,
            mapping.seed,
        )

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state: by variable path, and in `"total"`.

        Variables of the `dense_optimizer` are counted together under
        `"dense_optimizer"`.
        """
        sizes: dict[str, int] = {}
        for key, slots in self._basis.slots.items():
            path = self._basis.paths[key]
            sizes[path] = sizes.get(path, 0) + sum(map(_bytes_of, slots.values()))
        if self._basis.delegated:
            inner = self.dense_optimizer.variables
            sizes["dense_optimizer"] = sum(
                _bytes_of(self._keras.tensorflow_variable(v)) for v in inner
            )
        sizes["total"] = sum(sizes.values())
        return sizes

    # ---- saving ------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """The arguments of this optimizer, ready for JSON."""
        config = super().get_config()
        for name in inspect.signature(type(self).__init__).parameters:
            if name in ("self", "kwargs", "dense_optimizer") or name in config:
                continue
            value = getattr(self, name)
            config[name] = list(value) if isinstance(value, tuple) else value
        inner = self.dense_optimizer
        config["dense_optimizer"] = None if inner is None else self._keras.serialize(inner)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects=None):
        """The reverse of `get_config`."""
        config = dict(config)
        inner = config.get("dense_optimizer")
        if isinstance(inner, dict):
            config["dense_optimizer"] = cls._keras.deserialize(
                inner, custom_objects=custom_objects
            )
        return super().from_config(config, custom_objects=custom_objects)

    def set_weights(self, weights: list) -> None:
        """Sets all variables, those of the `dense_optimizer` included."""
        self._assign_all(self.variables, list(weights))

    def save_own_variables(self, store: Any) -> None:
        """Keras saves the `dense_optimizer` as an object of its own."""
        for i, variable in enumerate(self._own_variables()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Restores what `save_own_variables` wrote.

        Raises:
          ValueError: the file holds the state of another layout.
        """
        values = [store[str(i)] for i in range(len(store.keys()))]
        self._assign_all(self._own_variables(), values)

    def _assign_all(self, variables: list, values: list) -> None:
        if not self._is_built():
            raise ValueError(
                f"optimizer '{self.name}' must be built before its state is set: "
                "call build(trainable_variables) first"
            )
        expected = [tuple(v.shape) for v in variables]
        received = [tuple(np.shape(v)) for v in values]
        if expected != received:
            raise ValueError(
                f"optimizer '{self.name}' cannot take this state: its variables have "
                f"the shapes {expected}, the state {received}"
            )
        for variable, value in zip(variables, values):
            variable.assign(value)


def _bytes_of(variable: tf.Variable) -> int:
    return int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
