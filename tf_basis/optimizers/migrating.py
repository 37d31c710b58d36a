"""Going on from Keras's Adam, and back to it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_basis import migration
from tf_basis.adapters import keras_modules, tracking
from tf_basis.optimizers.resizing import numbers_of

_SLOTS = {"momentum": "_momentums", "velocity": "_velocities"}


class MigrationMixin:
    """`load_adam` and `to_adam`, for BasisAdam."""

    def load_adam(self, adam: Any, variables: Any = None) -> None:
        """Takes over the state of a built Adam (or AdamW) of the same Keras.

        Tables: see `tf_basis.migration.fold`. Other variables: momentum and velocity
        to the bit, also into a `dense_optimizer` that is an Adam. `iterations` too;
        not the learning rate or other arguments.

        Args:
          adam: trained, or restored from a file, with its variables built.
          variables: those to build this optimizer with, if it is not built yet;
            default None takes those of `adam`, where its Keras tells (Keras 3).

        Raises:
          ValueError: `adam` is no such optimizer, or has no state for a variable.

        Example:

        >>> table = tf.Variable(tf.zeros([100, 4]), name="table")
        >>> adam = tf.keras.optimizers.Adam()
        >>> adam.build([table])
        >>> optimizer = BasisAdam(tables=[table])
        >>> optimizer.load_adam(adam, [table])
        """
        adam = getattr(adam, "inner_optimizer", adam)
        self._check_adam("adam", adam)
        if not self._is_built():
            variables = variables or getattr(adam, "_trainable_variables", None)
            if not variables:
                raise ValueError(
                    "variables must be given, since the optimizer is not built, "
                    f"received {variables!r}"
                )
            with self._distribution_strategy.scope():
                self.build(list(variables))
        built = self._basis
        for key, variable in built.variables.items():
            if tracking.index_of(adam, variable) is None:
                raise ValueError(
                    "adam must have been built with all variables of this optimizer, "
                    f"received one without state for '{built.paths[key]}'"
                )
        if built.delegated:
            self._check_adam("dense_optimizer", self.dense_optimizer)
        step = self._updates_of("adam", adam)
        for key, variable in built.variables.items():
            source = self._adam_slots(adam, variable)
            if key in built.layouts:
                self._fold(key, source, (adam.beta_1, adam.beta_2), step)
                continue
            target = built.slots.get(key)
            if target is None:
                target = self._adam_slots(self.dense_optimizer, variable)
            for name, slot in target.items():
                slot.assign(tf.convert_to_tensor(source[name]))
        for optimizer in [self, self.dense_optimizer] if built.delegated else [self]:
            optimizer._iterations.assign(step * self._counts_per_update(optimizer))

    def to_adam(self) -> Any:
        """A Keras Adam that goes on where this optimizer is.

        It has this optimizer's arguments, as far as Adam has them, and is built with
        the same variables. Tables: see `tf_basis.migration.unfold`; with every row an
        owner the moments are those of the table, but for rounding. Other variables
        and `iterations`: to the bit. The learning rate of a `dense_optimizer` is lost.

        Returns:
          A built `Adam` of the same Keras: `model.compile` takes it.

        Raises:
          ValueError: the optimizer has no state yet, or a `dense_optimizer` that is no
            Adam.
        """
        self._require_eager("to_adam")
        self._check_adam("the optimizer", self, own=True)
        built = self._basis
        if built.delegated:
            self._check_adam("dense_optimizer", self.dense_optimizer)
        kind = self._keras_module().optimizers.Adam
        known = set(kind().get_config()) - {"name"}
        config = {k: v for k, v in self.get_config().items() if k in known}
        with self._distribution_strategy.scope():
            adam = kind.from_config(config)
            variables = sorted(
                built.variables.values(), key=lambda v: tracking.index_of(self, v)
            )
            adam.build(variables)
        step = self._updates_of("the optimizer", self)
        for key, variable in built.variables.items():
            target = self._adam_slots(adam, variable)
            if key in built.layouts:
                self._unfold(key, target, step)
                continue
            source = built.slots.get(key)
            if source is None:
                source = self._adam_slots(self.dense_optimizer, variable)
            for name, slot in target.items():
                slot.assign(tf.convert_to_tensor(source[name]))
        adam._iterations.assign(step * self._counts_per_update(adam))
        return adam

    def _keras_module(self) -> Any:
        return keras_modules.keras_of(keras_modules.flavor_of(self))

    def _check_adam(self, what: str, adam: Any, own: bool = False) -> None:
        kinds = self._keras_module().optimizers
        if not own:
            if not isinstance(adam, (kinds.Adam, kinds.AdamW)) or adam.amsgrad:
                raise ValueError(
                    f"{what} must be an Adam or AdamW of {kinds.__name__} without "
                    f"amsgrad, received {adam!r}"
                )
            if not hasattr(adam, "_velocities"):
                raise ValueError(
                    f"{what} must be built: call build(trainable_variables) or train "
                    f"a step first, received {adam!r}"
                )
        if adam.use_ema:
            raise ValueError(
                f"{what} must have use_ema=False: averages of variables are not "
                "converted, received use_ema=True"
            )

    def _counts_per_update(self, optimizer: Any) -> int:
        """Keras 3 counts the batches of an accumulated update, tf_keras updates."""
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        return steps if steps and hasattr(optimizer, "_tracker") else 1

    def _updates_of(self, what: str, optimizer: Any) -> int:
        counts = int(tf.convert_to_tensor(optimizer._iterations))
        updates, batches = divmod(counts, self._counts_per_update(optimizer))
        counter = getattr(getattr(optimizer, "_accumulator", None), "counter", None)
        if counter is not None:
            batches = int(tf.convert_to_tensor(counter))
        if batches:
            raise ValueError(
                f"{what} must be between two updates, received one that has "
                f"accumulated {batches} of {optimizer.gradient_accumulation_steps} "
                "gradients"
            )
        return updates

    def _adam_slots(self, adam: Any, variable: Any) -> dict[str, tf.Variable]:
        index = tracking.index_of(adam, variable)
        native = self._keras.tensorflow_variable
        return {
            name: native(getattr(adam, attribute)[index])
            for name, attribute in _SLOTS.items()
        }

    def _fold(self, key: str, source: dict, betas: tuple, step: int) -> None:
        layout = self._basis.layouts[key]
        rule = self._rule_of(layout)

        def read(first: int, last: int):
            return [migration.read_rows(source[name], first, last) for name in _SLOTS]

        specs = self._table_slots(layout)
        state = migration.fold(layout, rule, specs, read, betas, step)
        for name, slot in self._basis.slots[key].items():
            slot.assign(state[name])

    def _unfold(self, key: str, target: dict, step: int) -> None:
        layout = self._basis.layouts[key]
        rule = self._rule_of(layout)
        slots = self._basis.slots[key].items()
        state = {name: numbers_of(slot) for name, slot in slots}
        betas = (self.beta_1, self.beta_2)
        for first, last, *moments in migration.unfold(layout, rule, state, betas, step):
            rows = tf.range(first, last)
            for slot, values in zip(target.values(), moments):
                values = tf.cast(values, slot.dtype)
                slot.scatter_update(tf.IndexedSlices(values, rows))
