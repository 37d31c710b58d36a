"""Looking inside an optimizer: the state of its tables, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hashing
from tf_basis.rules import formats


class InspectionMixin:
    """`table_state`, `buckets` and `state_bytes`."""

    def _key_of_table(self, variable: Any) -> str:
        if not self._is_built():
            raise ValueError(
                "the optimizer has no state yet: call build(trainable_variables) or "
                "train a step first"
            )
        if isinstance(variable, str):
            keys = [k for k, p in self._basis.paths.items() if p == variable]
            key, path = (keys[0] if keys else None), variable
        elif not is_variable(variable):
            raise ValueError(
                "variable must be the variable of a compressed table, or its path, "
                f"received {variable!r}"
            )
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
          Copies as numpy arrays, by name, all that the rule has of: `first_moment`
          (of the buckets that use it, from bucket 0 on; absent for momentum
          "none"), `second_moment` [B, d], `bucket_steps` [B], `last_step` [B], and
          `row_energy` [N] (energy) or `scalar` [N] (learned), `row_steps` [N].
          Low-precision formats are returned as the float32 numbers they stand for.

        Raises:
          ValueError: the optimizer is not built, or the variable not compressed.
        """
        key = self._key_of_table(variable)
        layout = self._basis.layouts[key]
        state = {}
        if layout.momentum != "none":
            state["first_moment"] = np.zeros((0, layout.dim), np.float32)
        for name, slot in self._basis.slots[key].items():
            value = tf.convert_to_tensor(slot)
            counts = value.dtype in (tf.int32, tf.int64)
            state[name] = np.array(value if counts else formats.read(value))
        return state

    def buckets(self, variable: Any) -> np.ndarray:
        """The bucket of every row of one compressed table.

        Args:
          variable: the table's variable, or its path.

        Returns:
          int64 [N]; with `hashing="double"` [N, 2].

        Raises:
          ValueError: the optimizer is not built, or the variable not compressed.
        """
        mapping = self._basis.layouts[self._key_of_table(variable)].mapping
        return hashing.all_buckets(mapping)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state: by variable path, and in `"total"`.

        Variables of the `dense_optimizer` are counted together under
        `"dense_optimizer"`, accumulated gradients as they are now under
        `"accumulated_gradients"` and the averages of `use_ema` under `"averages"`.
        Not counted: the steps, the learning rate, and 104 bytes for each table that
        say what its layout is.
        """
        sizes: dict[str, int] = {}
        for key, slots in self._basis.slots.items():
            path = self._basis.paths[key]
            sizes[path] = sizes.get(path, 0) + sum(map(_bytes_of, slots.values()))
        if self._basis.delegated:
            inner = map(self._keras.tensorflow_variable, self.dense_optimizer.variables)
            sizes["dense_optimizer"] = sum(map(_bytes_of, inner))
        others = {
            "accumulated_gradients": getattr(self._accumulator, "sums", []),
            "averages": self._model_variables_moving_average,
        }
        for name, variables in others.items():
            variables = [v for v in tf.nest.flatten(variables) if v is not None]
            if variables:
                native = map(self._keras.tensorflow_variable, variables)
                sizes[name] = sum(map(_bytes_of, native))
        sizes["total"] = sum(sizes.values())
        return sizes


def is_variable(value: Any) -> bool:
    """Whether a value can be a variable of a model of either Keras."""
    return hasattr(value, "shape") and hasattr(value, "name")


def _bytes_of(variable: tf.Variable) -> int:
    shape = variable.shape
    if not shape.is_fully_defined():  # rows that come and go
        shape = tf.convert_to_tensor(variable).shape
    return int(np.prod(shape)) * tf.as_dtype(variable.dtype).size
