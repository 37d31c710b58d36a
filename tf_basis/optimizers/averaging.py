"""Moving averages of the weights (`use_ema`): of all variables but the tables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tf_basis.adapters import tracking


class _Averages:
    """One for each variable, in order; hidden from Keras's attribute tracking."""

    def __init__(self, aligned: list) -> None:
        self.aligned = aligned


class AveragingMixin:
    """Creates and finds the averages; the adapter's Keras keeps them up to date."""

    _averages: _Averages | None = None

    def _create_averages(self, variables: Sequence) -> None:
        """Called by the adapter once, after the slots are made."""
        tables = self._basis.layouts
        if tables:
            warnings.warn(
                "use_ema leaves compressed tables out, because an average would take "
                f"as much memory as the table: {[t.path for t in tables.values()]}",
                stacklevel=2,
            )
        self._averages = _Averages(
            [
                None if self._var_key(v) in tables else self._add_average(v)
                for v in variables
            ]
        )

    @property
    def _model_variables_moving_average(self) -> list:
        """Where both flavours of Keras look for the averages; None for tables."""
        return [] if self._averages is None else self._averages.aligned

    def _averaged(self, variables: Sequence) -> list[tuple[Any, Any]]:
        """Pairs of a variable and its average, for those that have one."""
        averages = self._model_variables_moving_average
        pairs = [(v, tracking.index_of(self, v)) for v in variables] if averages else []
        return [
            (v, averages[index])
            for v, index in pairs
            if index is not None and averages[index] is not None
        ]
