"""Keras callbacks that change optimizers during `fit`, and how to go on after that."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import flavor, keras_modules
from tf_basis.optimizers.resizing import ResizingMixin

_UNITS, _PERIODS = ("factor", "num_buckets"), ("epoch", "step")


def retrace(model: Any) -> None:
    """Lets `fit` and `train_on_batch` trace their step again.

    Needed after `resize` or `grow_rows` of the optimizer of a model that has been
    trained: the traced step holds the variables that were replaced. Works between and
    inside `fit`, which looks the function up at each step. A `tf.function` of a loop
    of your own must be made anew. `evaluate` and `predict` trace theirs again when they
    are called next, as `EmbeddingCollection.grow` needs.

    Args:
      model: a compiled model of either Keras.

    Raises:
      ValueError: it is no such model.
    """
    if not hasattr(model, "make_train_function") or (
        getattr(model, "optimizer", None) is None
    ):
        raise ValueError(
            f"model must be a compiled model of either Keras, received {model!r}"
        )
    model.make_train_function(force=True)
    model.test_function = model.predict_function = None


def basis_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizers of this package in `optimizer`, itself and wrapped ones."""
    if isinstance(optimizer, ResizingMixin):
        yield optimizer
        return
    inner = getattr(optimizer, "inner_optimizer", None)  # LossScaleOptimizer
    wrapped = [inner] if inner is not None else []
    several = getattr(optimizer, "optimizers", None)  # MultiOptimizer
    if isinstance(several, (list, tuple)):
        wrapped += several
    for each in wrapped:
        yield from basis_optimizers(each)


class GrowBucketsMixin:
    """Changes the number of buckets of compressed tables in the course of a `fit`.

    Training goes on in the same `fit`: the step is traced again. Doubling the shared
    buckets loses no state, see `resize`.

    Args:
      schedule: a dict from the number of an epoch (or step), counted from 0, to the
        change at its start; or a callable from that number to the change, or None.
        A change is a number in the given `unit`, for all tables; or a dict from a
        pattern, searched in the path of a table, to such a number.
      unit: `"factor"` (default): by what to multiply the shared buckets; or
        `"num_buckets"`: B. (A `fit` that runs through an epoch number again applies
        factors again.)
      every: `"epoch"` (default) or `"step"`: what the schedule counts. Steps are
        the optimizer's `iterations`, so that resumed training repeats no change;
        with `steps_per_execution` a change comes at the next execution.
      verbose: 1 prints each change. Default 0.

    Attributes:
      changes: what was done, as (epoch or step, path, buckets before, after).

    Raises:
      ValueError: an argument breaks its rule; or at the start of a `fit` the model's
        optimizer is none of this package.

    Example:

    >>> grow = GrowBuckets({2: 2, 4: 2})
    >>> grow.changes
    []
    """

    def __init__(
        self,
        schedule: Mapping[int, Any] | Callable[[int], Any],
        unit: str = "factor",
        every: str = "epoch",
        verbose: int = 0,
    ) -> None:
        super().__init__()
        hyperparameters.check("unit", unit, hyperparameters.choice(*_UNITS))
        hyperparameters.check("every", every, hyperparameters.choice(*_PERIODS))
        self.unit, self.every, self.verbose = unit, every, verbose
        if isinstance(schedule, Mapping):
            for number, change in schedule.items():
                hyperparameters.check("schedule", number, _NUMBER)
                self._check_change(change)
        elif not callable(schedule):
            raise ValueError(
                f"schedule must be a dict or a callable, received {schedule!r}"
            )
        self.schedule = schedule
        self.changes: list[tuple[int, str, int, int]] = []
        self._next_step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._next_step = self._steps_so_far()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self.every == "epoch":
            self._apply(range(epoch, epoch + 1))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        if self.every == "step":
            now = self._steps_so_far()
            self._apply(range(self._next_step, now + 1))
            self._next_step = now + 1

    def _steps_so_far(self) -> int:
        for optimizer in basis_optimizers(self.model.optimizer):
            return int(tf.convert_to_tensor(optimizer.iterations))
        raise ValueError(
            "GrowBuckets must be used with an optimizer of tf_basis, received "
            f"{self.model.optimizer!r}"
        )

    def _apply(self, numbers: range) -> None:
        changed = False
        for number in numbers:
            if callable(self.schedule):
                change = self.schedule(number)
                if change is not None:
                    self._check_change(change)
            else:
                change = self.schedule.get(number)
            if change is not None:
                changed |= self._change_all(number, change)
        if changed:
            retrace(self.model)

    def _change_all(self, number: int, change: Any) -> bool:
        changed, used = False, set()
        patterns = change if isinstance(change, Mapping) else {"": change}
        optimizers = list(basis_optimizers(self.model.optimizer))
        if not all(o._is_built() for o in optimizers):
            with self.model.distribute_strategy.scope():
                self.model.optimizer.build(self.model.trainable_variables)
        for optimizer in optimizers:
            for layout in list(optimizer._basis.layouts.values()):
                matching = [p for p in patterns if re.search(p, layout.path)]
                used.update(matching)
                if len(matching) > 1:
                    raise ValueError(
                        f"schedule must match '{layout.path}' by one pattern, "
                        f"received {matching}"
                    )
                for pattern in matching:
                    before = layout.mapping.num_buckets
                    after = optimizer.resize(
                        layout.path, **{self.unit: patterns[pattern]}
                    )
                    changed |= after != before
                    self.changes.append((number, layout.path, before, after))
                    if self.verbose:
                        print(
                            f"\n{self.every} {number}: '{layout.path}' has {after} "
                            f"buckets, {before} before",
                            flush=True,
                        )
        unused = sorted(set(patterns) - used - {""})
        if unused:
            raise ValueError(
                f"schedule must name compressed tables of the model, received {unused}"
            )
        return changed

    def _check_change(self, change: Any) -> None:
        for pattern in change if isinstance(change, Mapping) else ():
            hyperparameters.check("schedule", pattern, _PATTERN)
        rule = {"factor": _FACTOR, "num_buckets": _BUCKETS}[self.unit]
        for value in change.values() if isinstance(change, Mapping) else [change]:
            hyperparameters.check("schedule", value, rule)


_NUMBER = hyperparameters.integer(
    "of at least 0 in its keys: epochs or steps", lambda v: v >= 0
)
_PATTERN = hyperparameters.Rule(
    "a dict whose changes are numbers, or dicts from regular expressions to numbers",
    hyperparameters.is_pattern,
)
_FACTOR = hyperparameters.real(
    "above 0 in its values: factors (unit='num_buckets' is for counts)",
    lambda v: v > 0,
)
_BUCKETS = hyperparameters.integer(
    "of at least 1 in its values: buckets", lambda v: v >= 1
)


@functools.cache
def for_flavor(name: str) -> SimpleNamespace:
    """The callbacks on one flavour of Keras: `"keras3"` or `"tf_keras"`."""
    base = keras_modules.keras_of(name).callbacks.Callback
    members = {"__doc__": GrowBucketsMixin.__doc__, "__module__": __name__}
    return SimpleNamespace(
        GrowBuckets=type("GrowBuckets", (GrowBucketsMixin, base), members)
    )


GrowBuckets = for_flavor(flavor.active()).GrowBuckets

__all__ = ["GrowBuckets", "basis_optimizers", "for_flavor", "retrace"]
