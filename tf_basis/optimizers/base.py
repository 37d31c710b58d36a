"""What all BASIS optimizers share, whatever the rule and the Keras flavour."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tf_basis import budget, engine, growth, hyperparameters
from tf_basis.ops import dispatch
from tf_basis.optimizers import selection, setting_checks
from tf_basis.optimizers.accumulation import AccumulationMixin
from tf_basis.optimizers.averaging import AveragingMixin
from tf_basis.optimizers.fingerprint import FingerprintMixin
from tf_basis.optimizers.growing import GrowthMixin
from tf_basis.optimizers.inspection import InspectionMixin
from tf_basis.optimizers.saving import SavingMixin
from tf_basis.rules.bucket_rule import BucketRule
from tf_basis.rules.grouping import sum_duplicates
from tf_basis.tables import TableLayout


class _Built:
    """Slots and layouts by variable key, hidden from Keras's attribute tracking.

    Keras and TensorFlow track the slot variables through the optimizer's own
    list; a second way to them would save every value twice.
    """

    def __init__(self) -> None:
        self.layouts: dict[str, TableLayout] = {}
        self.slots: dict[str, dict[str, tf.Variable]] = {}
        self.delegated: set[str] = set()
        self.paths: dict[str, str] = {}
        self.variables: dict[str, Any] = {}
        # `table_settings`, and those that layers left on their tables.
        self.settings: dict[str, Mapping[str, Any]] = {}
        self.growth: dict[str, growth.Record] = {}
        self.frequency_lengths: dict[str | None, int] = {}
        self.fingerprint: tf.Variable | None = None
        # Called with what each table is given; see `tf_basis.diagnostics.shadows`.
        self.watchers: list[Callable] = []


class BasisOptimizerMixin(
    AccumulationMixin,
    AveragingMixin,
    FingerprintMixin,
    GrowthMixin,
    InspectionMixin,
    SavingMixin,
):
    """Selects the tables, makes their slots, and routes each gradient.

    A subclass is mixed with an adapter (`_keras` is its module) and defines
    `_bucket_rule(decay)`, `_dense_slots()` and `_dense_rule(learning_rate)`.
    """

    _keras: Any
    # Rules of arguments that mean something else here than elsewhere.
    _rules: ClassVar[dict[str, hyperparameters.Rule]] = {}

    def _initialize(self, arguments: dict[str, Any]) -> None:
        """`__init__` of a subclass passes its `locals()` here."""
        arguments = {
            k: v for k, v in arguments.items() if k not in ("self", "__class__")
        }
        kwargs = arguments.pop("kwargs")
        hyperparameters.check_all(arguments, self._rules)
        budget.check_sizes(arguments, type(self).__init__)
        dense_optimizer = arguments.pop("dense_optimizer")
        if dense_optimizer is not None and not isinstance(
            dense_optimizer, self._keras.Optimizer
        ):
            raise ValueError(
                "dense_optimizer must be None or an optimizer of the same Keras "
                f"({self._keras.Optimizer.__module__.split('.')[0]}), received "
                f"{dense_optimizer!r}"
            )
        learning_rate = hyperparameters.checked_learning_rate(
            arguments.pop("learning_rate")
        )
        arguments["tables"] = selection.parse_tables(
            arguments["tables"], self._keras.path_of
        )
        settings = arguments["table_settings"]
        arguments["table_settings"] = selection.parse_settings(
            settings, self._settings(), self._rules
        )
        frequency_lengths = setting_checks.frequency_lengths(
            arguments["row_frequencies"], settings
        )
        arguments = selection.own_exclusive_rows(arguments)
        arguments["row_frequencies"] = None  # exclusive_rows has their list now
        known = self._keras.ARGUMENTS
        theirs = {k: arguments.pop(k) for k in list(arguments) if k in known}
        super().__init__(learning_rate, **theirs, **kwargs)
        for name, value in arguments.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        self.dense_optimizer = dense_optimizer
        self._basis = _Built()
        self._basis.frequency_lengths = frequency_lengths

    # ---- building ----------------------------------------------------------

    def _create_slots(self, variables: list) -> None:
        """Called by the adapter once, with every trainable variable."""
        path_of = self._keras.path_of
        built = self._basis
        chosen = selection.select_tables(self.tables, self.min_rows, variables, path_of)
        chosen = growth.without_dense(chosen, path_of, built.growth)
        built.settings = selection.with_own_settings(
            self.table_settings, chosen, path_of, self._settings(), self._rules
        )
        self._check_settings(chosen)
        if self.tables is None:
            setting_checks.warn_of_large_variables(variables, self.min_rows, path_of)
        # All layouts first: a setting that does not fit leaves nothing half built.
        built.layouts = dict(zip(map(self._var_key, chosen), self._layouts(chosen)))
        for layout in built.layouts.values():
            kind = self._rule_of(layout).invariant_scalar
            own = "invariant_scalar" in dict(layout.scalar)
            # Of a scalar for all tables the optimizer has warned when it was made.
            momentum = layout.momentum if own else "shared"
            setting_checks.check_scalar(kind, layout.led, momentum, layout.path)
        self._add_fingerprint()
        delegated = []
        for variable in variables:
            key = self._var_key(variable)
            built.paths[key], built.variables[key] = path_of(variable), variable
            if key in built.layouts:
                specs = self._table_slots(built.layouts[key])
            elif self.dense_optimizer is not None:
                built.delegated.add(key)
                delegated.append(variable)
                continue
            else:
                dtype, shape = tf.as_dtype(variable.dtype), tuple(variable.shape)
                specs = {
                    name: (shape, dtype, start)
                    for name, start in self._dense_slots().items()
                }
            built.slots[key] = {
                name: self._add_slot(variable, name, *spec)
                for name, spec in specs.items()
            }
        if delegated:
            self.dense_optimizer.build(delegated)

    def _check_settings(self, tables: list) -> None:
        rows = setting_checks.rows_of(tables, self._keras.path_of)
        settings = self._basis.settings
        setting_checks.check_patterns(settings, list(rows))
        setting_checks.check_frequencies(self._basis.frequency_lengths, settings, rows)
        setting_checks.warn_of_sizes(
            self.num_buckets, self.exclusive_rows, settings, rows
        )

    def _layouts(self, variables: list) -> list[TableLayout]:
        return growth.table_layouts(
            [(self._keras.path_of(v), v) for v in variables],
            self._layout_defaults(),
            self._basis.settings,
            self.state_budget,
            self._table_slots,
            self._basis.growth,
        )

    def _layout_defaults(self) -> dict[str, Any]:
        defaults = {
            name: getattr(self, name)
            for name in self._settings()
            if name in selection.LAYOUT_SETTINGS
            and name not in ("row_frequencies", "momentum")
        }
        defaults["momentum"] = self._momentum_mode()
        return defaults

    @classmethod
    def _settings(cls) -> list[str]:
        """What `table_settings` may set here: what this class has arguments for."""
        known = inspect.signature(cls.__init__).parameters
        return [name for name in selection.SETTINGS if name in known]

    def _momentum_mode(self) -> str:
        return self.momentum

    def _table_slots(self, layout: TableLayout) -> dict[str, tuple]:
        return engine.slot_specs(layout, self._bucket_rule(decay=False))

    def _rule_of(self, layout: TableLayout, decay: bool = False) -> BucketRule:
        return engine.rule_of(self._bucket_rule(decay), layout)

    def _common_modes(self, decay: bool) -> dict[str, Any]:
        """The fields of a `BucketRule` that every optimizer here has arguments for."""
        return {
            "invariant_scalar": self.invariant_scalar,
            "collision_reduce": self.collision_reduce,
            "weight_decay": self.weight_decay if decay else None,
            "row_clipnorm": self.row_clipnorm,
        }

    # ---- updating ----------------------------------------------------------

    def _split(self, grads_and_vars: Iterable) -> tuple[list, list]:
        """(own, delegated) pairs of gradient and variable."""
        own, delegated = [], []
        for gradient, variable in grads_and_vars:
            theirs = self._var_key(variable) in self._basis.delegated
            (delegated if theirs else own).append((gradient, variable))
        return own, delegated

    def _row_ids(self, gradients: Iterable, variables: Iterable) -> list:
        """The gradients, row ids of other integer types cast."""
        gradients = list(gradients)
        for i, (gradient, variable) in enumerate(zip(gradients, variables)):
            path = self._keras.path_of(variable)
            gradients[i] = engine.with_row_ids(gradient, path)
        return gradients

    def _row_checks(self, gradients: Iterable, variables: Iterable) -> list:
        """Ops that fail, before anything is written, where a row does not exist."""
        checks = [
            engine.check_gradient(g, tuple(v.shape), self._keras.path_of(v))
            for g, v in zip(gradients, variables)
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
            rule = self._dense_rule(learning_rate)
            engine.step_dense(rule, variable, slots, gradient)
            return
        for watcher in self._basis.watchers:
            watcher(key, gradient, self.iterations + 1)
        engine.step_table(
            self._rule_of(layout, decay=self._use_weight_decay(variable)),
            layout,
            variable,
            slots,
            gradient,
            learning_rate,
            self.iterations + 1,
        )
