"""What the gradients of each variable look like in the course of `fit`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.distributed.broadcast import native, path_of
from tf_basis.distributed.scalars import ScalarWriter
from tf_basis.distributed.world import World
from tf_basis.ops import dispatch
from tf_basis.rules.grouping import sum_duplicates

NAMES = ("mean", "std", "min", "max", "zeros", "non_finite")
RANKS_RULE = hyperparameters.Rule(
    "None or a list of ranks, integers of at least 0",
    lambda v: v is None or (isinstance(v, (list, tuple)) and all(map(_is_rank, v))),
)
_is_rank = hyperparameters.integer("of at least 0", lambda v: v >= 0).accepts


class GradientStatisticsMixin:
    r"""Records statistics of every variable's gradient, every few steps of `fit`.

    Of this rank's own gradient, as the optimizer receives it: before ranks exchange,
    before accumulation and clipping, loss scales divided out. Any optimizer of Keras
    will do. No rank waits for another::

        mean, std, min, max   of the finite elements (std = √(mean of (g − mean)²))
        zeros                 the share of elements that are 0, of all
        non_finite            how many are infinite or not a number

    IndexedSlices stay sparse: duplicate rows are summed, and the rows that no slice
    touches count as the zeros that they are. A variable without a gradient is left
    out. Steps in between cost one comparison.

    Args:
      every: after how many steps the next record comes. Default 100.
      ranks: which ranks record. Default None: all.
      log_dir: where TensorBoard finds scalars `gradients/<variable>/<statistic>`, in a
        folder for each rank. Default None: nowhere.
      logs: whether the logs of an epoch, and with them `History`, get the last record,
        as `gradients/<variable>/<statistic>`. Default False.

    Attributes:
      history: the records: dicts of "step" (counted from 1, over all `fit`s of this
        callback) and "variables", a dict from paths to dicts of the statistics. With
        `steps_per_execution` the last one of each execution.

    Raises:
      ValueError: an argument breaks its rule; or in `fit`, the model is one of a
        `tf.distribute` strategy with several replicas.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> statistics = GradientStatistics(every=1)
    >>> history = model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0,
    ...                     callbacks=[statistics])
    >>> [len(record["variables"]) for record in statistics.history]
    [2]
    """

    _flavor: str

    def __init__(
        self,
        every: int = 100,
        *,
        ranks: Sequence[int] | None = None,
        log_dir: Any = None,
        logs: bool = False,
    ) -> None:
        super().__init__()
        for name, value, rule in [
            ("every", every, hyperparameters.count),
            ("ranks", ranks, RANKS_RULE),
            ("log_dir", log_dir, hyperparameters.optional_folder),
            ("logs", logs, hyperparameters.flag),
        ]:
            hyperparameters.check(name, value, rule)
        self.every, self.ranks, self.log_dir, self.logs = every, ranks, log_dir, logs
        self.history: list[dict[str, Any]] = []
        self._state: _State | None = None
        self._writer = None
        self._hooked = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                "GradientStatistics must be used without a tf.distribute strategy of "
                f"several replicas, received one of {replicas}"
            )
        self._unhook()  # of a `fit` that ended with an error
        rank = World().rank
        if self.ranks is not None and rank not in self.ranks:
            return
        if self.log_dir is not None and self._writer is None:
            folder = os.path.join(os.fspath(self.log_dir), f"rank_{rank}")
            self._writer = ScalarWriter(folder)
        self._hook(self.model.optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        if self._hooked is None or self._state is None:
            return
        step = int(self._state.recorded)
        if not step or (self.history and self.history[-1]["step"] == step):
            return
        found = {
            path: dict(zip(NAMES, row))
            for path, row in zip(self._state.paths, self._state.values.numpy().tolist())
            if row[-1] >= 0  # it had a gradient
        }
        for statistics in found.values():
            statistics["non_finite"] = int(statistics["non_finite"])
        self.history.append({"step": step, "variables": found})
        if self._writer is not None:
            self._writer.write(_flat(self.history[-1]), step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del epoch
        if self.logs and logs is not None and self._hooked and self.history:
            logs.update(_flat(self.history[-1]))

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self._hooked is not None:
            self._unhook()
            self.model.make_train_function(force=True)  # without the statistics
        if self._writer is not None:
            self._writer.flush()

    def _unhook(self) -> None:
        if self._hooked is not None:
            optimizer, name = self._hooked
            vars(optimizer).pop(name, None)
            self._hooked = None

    # ---- in the step ---------------------------------------------------------------

    def _hook(self, optimizer: Any) -> None:
        """Sees what `fit` gives to the public method that takes gradients.

        For this object and the time of a `fit` only; Keras traces its step anew.
        """
        name = "apply" if self._flavor == "keras3" else "apply_gradients"
        original = getattr(optimizer, name)

        @tf.autograph.experimental.do_not_convert
        def seen(first, *rest, **more):
            first = list(first)
            if name == "apply_gradients":
                gradients, variables = [g for g, _ in first], [v for _, v in first]
            else:
                gradients = first
                variables = rest[0] if rest else more.get("trainable_variables")
                if variables is None:  # Keras's default
                    variables = self.model.trainable_variables
            self._look(gradients, variables, _scale_of(optimizer))
            return original(first, *rest, **more)

        # Not through Keras's attribute tracking: it is no part of the optimizer.
        object.__setattr__(optimizer, name, seen)
        self._hooked = (optimizer, name)
        self.model.make_train_function(force=True)

    def _look(self, gradients: Sequence, variables: Sequence, scale: Any) -> None:
        paths = [path_of(v) for v in variables]
        if self._state is None or self._state.paths != paths:
            steps = 0 if self._state is None else int(self._state.steps)
            self._state = _State(paths, steps)
        state = self._state
        steps = state.steps.assign_add(1, read_value=True)

        def record() -> tf.Tensor:
            rows = [
                _statistics(g, tuple(native(v).shape), scale)
                for g, v in zip(gradients, variables)
            ]
            state.values.assign(tf.stack(rows))
            state.recorded.assign(steps)
            return tf.constant(0)

        tf.cond(tf.equal(steps % self.every, 0), record, lambda: tf.constant(0))


class _State:
    """Where the step leaves its statistics: of this rank alone, saved nowhere."""

    def __init__(self, paths: list[str], steps: int) -> None:
        self.paths = paths
        with tf.init_scope(), tf.device("CPU:0"):
            make = functools.partial(tf.Variable, trainable=False)
            self.steps = make(tf.constant(steps, tf.int64), name="statistics_steps")
            self.recorded = make(tf.constant(0, tf.int64), name="statistics_recorded")
            self.values = make(
                tf.zeros([len(paths), len(NAMES)], tf.float64), name="statistics"
            )


def _statistics(gradient: Any, shape: tuple[int, ...], scale: Any) -> tf.Tensor:
    """The numbers of `NAMES`, float64; `non_finite` is −1 without a gradient."""
    nan = tf.constant(math.nan, tf.float64)
    if gradient is None:
        return tf.stack([nan] * (len(NAMES) - 1) + [tf.constant(-1.0, tf.float64)])
    if isinstance(gradient, tf.IndexedSlices):
        gradient = sum_duplicates(gradient, dispatch.in_xla())
        # Padding, under XLA, has the row −1.
        x, rows = gradient.values, gradient.indices >= 0
        rows = tf.reshape(rows, [-1, *[1] * (len(shape) - 1)])
        real = tf.broadcast_to(rows, tf.shape(x))
    else:
        x = tf.convert_to_tensor(gradient)
        real = tf.ones_like(x, tf.bool)
    total = tf.constant(float(math.prod(shape)), tf.float64)
    x = tf.cast(x, tf.float64) / tf.cast(scale, tf.float64)
    usable = real & tf.math.is_finite(x)
    absent = total - _number(real)  # zeros of rows that are not in the slices
    bad = _number(real) - _number(usable)
    count = total - bad
    mean = tf.reduce_sum(tf.where(usable, x, 0)) / count
    spread = tf.reduce_sum(tf.where(usable, tf.square(x - mean), 0))
    std = tf.sqrt((spread + absent * tf.square(mean)) / count)
    least = tf.reduce_min(tf.where(usable, x, math.inf))
    most = tf.reduce_max(tf.where(usable, x, -math.inf))
    least = tf.where(absent > 0, tf.minimum(least, 0), least)
    most = tf.where(absent > 0, tf.maximum(most, 0), most)
    zeros = (_number(usable & tf.equal(x, 0)) + absent) / total
    some = count > 0
    numbers = [tf.where(some, n, nan) for n in (mean, std, least, most)]
    return tf.stack([*numbers, zeros, bad])


def _number(mask: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(mask, tf.float64))


def _scale_of(optimizer: Any) -> Any:
    """By what the gradients that the optimizer is given are too large."""
    scale = getattr(optimizer, "scale_loss", None)  # Keras 3; tf_keras divides before
    return tf.constant(1.0) if scale is None else tf.convert_to_tensor(scale(1.0))


def _flat(record: dict[str, Any]) -> dict[str, float]:
    return {
        f"gradients/{path}/{name}": value
        for path, statistics in record["variables"].items()
        for name, value in statistics.items()
    }


@functools.cache
def define(flavor_name: str) -> type:
    """`GradientStatistics` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {
        "__doc__": GradientStatisticsMixin.__doc__,
        "__module__": __name__,
        "_flavor": flavor_name,
    }
    return type("GradientStatistics", (GradientStatisticsMixin, base), members)
