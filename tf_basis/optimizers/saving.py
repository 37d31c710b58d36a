"""Config and state of an optimizer, as Keras saves and loads them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import growth


class SavingMixin:
    """`get_config`, `from_config`, and exact loading: all of the state or an error."""

    def get_config(self) -> dict[str, Any]:
        """The arguments of this optimizer, ready for JSON."""
        config = super().get_config()
        for name in inspect.signature(type(self).__init__).parameters:
            if name in ("self", "kwargs", "dense_optimizer") or name in config:
                continue
            config[name] = _plain(getattr(self, name))
        inner = self.dense_optimizer
        serialize = self._keras.serialize
        config["dense_optimizer"] = None if inner is None else serialize(inner)
        if self._basis.growth:
            config[growth.CONFIG_KEY] = copy.deepcopy(self._basis.growth)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects=None):
        """The reverse of `get_config`."""
        config = dict(config)
        records = config.pop(growth.CONFIG_KEY, {})
        inner = config.get("dense_optimizer")
        if isinstance(inner, dict):
            config["dense_optimizer"] = cls._keras.deserialize(
                inner, custom_objects=custom_objects
            )
        optimizer = super().from_config(config, custom_objects=custom_objects)
        optimizer._basis.growth = growth.read_records(records)
        return optimizer

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
        variables = self._own_variables()
        if self._is_built() and not int(self.iterations):
            native = map(self._keras.tensorflow_variable, variables)
            slots = [v is self._basis.fingerprint for v in native].index(True)
            if len(values) == slots and not np.asarray(values[0]).any():
                # Saved before it was built, which a model does when it is loaded.
                variables = variables[:slots]
        self._assign_all(variables, values)

    def _assign_all(self, variables: list, values: list) -> None:
        # A new optimizer takes the state of a new one, as copies of it do.
        if not self._is_built() and len(variables) != len(values):
            raise ValueError(
                f"optimizer '{self.name}' must be built before its state is set: "
                "call build(trainable_variables) first"
            )
        # Buffers of accumulated gradients take any number of rows.
        expected = [self._keras.tensorflow_variable(v).shape for v in variables]
        received = [tuple(np.shape(v)) for v in values]
        if len(expected) != len(received) or not all(
            e.is_compatible_with(r) for e, r in zip(expected, received)
        ):
            raise ValueError(
                f"optimizer '{self.name}' cannot take this state: its variables have "
                f"the shapes {[tuple(e) for e in expected]}, the state {received}"
            )
        for variable, value in zip(variables, values):
            if self._keras.tensorflow_variable(variable) is self._basis.fingerprint:
                self._check_fingerprint(np.asarray(value))
        for variable, value in zip(variables, values):
            value = np.asarray(value)
            if value.dtype.kind == "V":  # what HDF5 makes of bfloat16
                value = value.view(tf.bfloat16.as_numpy_dtype)
            variable.assign(value)


def _plain(value: Any) -> Any:
    """Tuples and what Keras wrapped for tracking, as lists and dicts."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
