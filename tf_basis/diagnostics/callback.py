"""`CollisionReport`: reports in the course of `fit`, with exact rows beside it."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis import folders, hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.diagnostics import advice
from tf_basis.diagnostics.report import Report, report
from tf_basis.diagnostics.shadows import ROWS_RULE, ShadowRows
from tf_basis.diagnostics.tables import parts_of
from tf_basis.distributed.statistics import RANKS_RULE
from tf_basis.distributed.world import World

_UNITS = ("epoch", "step")
_PAGE = hyperparameters.Rule(
    "None or the path of a file",
    lambda v: v is None or (isinstance(v, (str, os.PathLike)) and bool(str(v))),
)


class CollisionReportMixin:
    r"""Reports on compressed tables, every few epochs or steps of `fit`.

    Keeps exact state of a few rows beside the training, see `ShadowRows`, so that each
    report says how far updates of rows that share state are from those of rows that do
    not; makes a `report`; and warns once of each new thing to do. The steps of `fit`
    are traced anew before and after.

    Each rank reports for itself, and none waits for another; as ranks have the same
    tables, `ranks=[0]` is enough.

    Args:
      every: after how many epochs or steps the next report comes. Default 1.
      unit: `"epoch"` (default), or `"step"`: batches of this `fit`.
      shadow_rows: how many rows of each table have exact state. Default 64.
      seed: which they are, an integer in [0, 2**32). Default 0.
      log_dir: where TensorBoard finds histograms and scalars `tables/<path>/…`, over
        the optimizer's steps. Default None: nowhere.
      html: the file of a page that each report replaces; its folder is made where
        there is none. Default None: no page.
      ranks: which ranks report. Default None: all.
      verbose: 1 prints each report. Default 0.

    Attributes:
      history: what `Report.as_dict` gives, for each report, with "epoch" or "batch",
        counted from 1.
      last: the last `Report`, None before the first.
      shadows: the `ShadowRows` of the last `fit`, None before the first.

    Raises:
      ValueError: an argument breaks its rule; or at the start of a `fit`, the model's
        optimizer is none of this package, or the model is one of a `tf.distribute`
        strategy with several replicas.
      OSError: at the start of a `fit`: `html` or `log_dir` cannot be written.

    Warns:
      UserWarning: once for each table and code of advice.

    Example:

    >>> watch = CollisionReport(every=100, unit="step")
    >>> watch.history
    []
    """

    def __init__(
        self,
        every: int = 1,
        unit: str = "epoch",
        *,
        shadow_rows: int = 64,
        seed: int = 0,
        log_dir: Any = None,
        html: Any = None,
        ranks: Sequence[int] | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        for name, value, rule in [
            ("every", every, hyperparameters.count),
            ("unit", unit, hyperparameters.choice(*_UNITS)),
            ("shadow_rows", shadow_rows, ROWS_RULE),
            ("log_dir", log_dir, hyperparameters.optional_folder),
            ("html", html, _PAGE),
            ("ranks", ranks, RANKS_RULE),
        ]:
            hyperparameters.check(name, value, rule)
        hyperparameters.check("seed", seed)
        self.every, self.unit, self.verbose = every, unit, verbose
        self.shadow_rows, self.seed, self.ranks = shadow_rows, seed, ranks
        self.log_dir, self.html = log_dir, html
        self.history: list[dict[str, Any]] = []
        self.last: Report | None = None
        self.shadows: ShadowRows | None = None
        self._writer, self._warned = None, set()
        self._on = self._adopting = self._watching = False
        self._batches, self._steps_at_end = 0, None

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                "CollisionReport must be used without a tf.distribute strategy of "
                f"several replicas, received one of {replicas}"
            )
        rank = World().rank
        self._batches, self._adopting = 0, True
        self._on = self.ranks is None or rank in self.ranks
        if not self._on:
            return
        if self.html is not None:
            folders.check_file("html", self.html)
        if self.log_dir is not None and self._writer is None:
            folder = os.path.join(str(self.log_dir), f"rank_{rank}")
            folders.make_writable("log_dir", folder)
            self._writer = tf.summary.create_file_writer(folder)
        if self.shadows is not None:
            self.shadows.detach()  # of a `fit` that ended with an error
        self._watching = False
        if self.model.built:  # else tf_keras builds it in the first step
            self._watch()

    def _watch(self) -> None:
        optimizer = self.model.optimizer
        parts = parts_of(optimizer)  # a MultiOptimizer has none before it is built
        if not parts or not all(part._is_built() for part in parts):
            optimizer.build(self.model.trainable_variables)
        if not parts_of(optimizer):
            raise ValueError(
                "CollisionReport must be used with an optimizer of tf_basis, received "
                f"{optimizer!r}"
            )
        # Rows go on only where nothing was missed between two `fit`s.
        if (
            self.shadows is None
            or self.shadows.optimizer is not optimizer
            or self._steps() != self._steps_at_end
        ):
            self.shadows = ShadowRows(optimizer, self.shadow_rows, self.seed)
        self.shadows.attach()
        self._watching = True
        self.model.make_train_function(force=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        if not self._on:
            return
        if not self._watching:
            self._watch()
        if self._adopting:
            self._adopting = self.shadows.adopt()
        self._batches += 1
        if self.unit == "step" and self._batches % self.every == 0:
            self._report("batch", self._batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self._on and self.unit == "epoch" and (epoch + 1) % self.every == 0:
            self._report("epoch", epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self._on and self._watching:
            self._steps_at_end = self._steps()
            self.shadows.detach()
            self.model.make_train_function(force=True)  # without the shadow rows

    def _steps(self) -> list[int]:
        parts = parts_of(self.model.optimizer)
        return [int(tf.convert_to_tensor(part.iterations)) for part in parts]

    def _report(self, unit: str, number: int) -> None:
        found = report(self.model.optimizer, self.shadows)
        for place, table in enumerate(found.tables):
            before = [record["tables"][place] for record in self.history[-2:]]
            codes = {(each.code, each.path) for each in found.advice}
            found.advice += [
                each
                for each in advice.swing([*before, table])
                if (each.code, each.path) not in codes
            ]
        self.last = found
        self.history.append({unit: number, **found.as_dict()})
        if self._writer is not None:
            found.write_summaries(self._writer, found.step)
        if self.html is not None:
            found.to_html(self.html)
        if self.verbose:
            print(f"\n{unit} {number}:\n{found}", flush=True)
        for each in found.advice:
            if (each.path, each.code) not in self._warned:
                self._warned.add((each.path, each.code))
                warnings.warn(
                    f"{each.code}: '{each.path}': {each.message}", stacklevel=2
                )


@functools.cache
def define(flavor_name: str) -> type:
    """`CollisionReport` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": CollisionReportMixin.__doc__, "__module__": __name__}
    return type("CollisionReport", (CollisionReportMixin, base), members)
