"""Batches of unequal sizes for ranks of unequal speed."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.distributed import watch
from tf_basis.distributed.balanced_data import planned_batches
from tf_basis.distributed.balanced_plan import Plan, apportion
from tf_basis.distributed.residuals import exchangers
from tf_basis.distributed.world import World, unique_name

RULES = {
    "global_batch_size": hyperparameters.count,
    "every": hyperparameters.count,
    "smoothing": hyperparameters.real("in [0, 1)", lambda v: 0 <= v < 1),
    "minimum": hyperparameters.count,
    "maximum": hyperparameters.integer(
        "of at least 1", lambda v: v >= 1, optional=True
    ),
    "timeout": watch.TIMEOUT_RULE,
}


class BalancedBatchMixin:
    r"""Gives faster ranks larger batches, so that none waits for the slowest.

    In a synchronous step every rank waits for the last. Ranks start with equal shares
    n_i of the N examples of a step. Every `every` steps they tell each other, in one
    small gather, for how long each was busy: the time of the steps less what it waited
    for the others where they first meet in a step. Then, in all ranks alike::

        speed_i ← smoothing·speed_i + (1 − smoothing)·examples_i/busy_i
        n_i     = N·speed_i/Σ speed, within [minimum, maximum], Σ n_i = N exactly

    What a step costs whatever its size slows the way there, not the end: sizes rest
    where all ranks are busy equally long. Batches already prepared are used up first:
    new sizes hold, on all ranks, from the first step that no rank's pipeline has begun.

    Every example has the same weight: those of rank i have n_i·W/N, so that the plain
    mean over the W ranks of their mean losses is the mean over all N. With 1 or 2 bits
    too, as gradients are weighted before they are quantised. Losses must use sample
    weights and the default reduction, the mean over the batch.

    Use it as a callback of `fit` and read `batches(dataset)` there::

        balance = BalancedBatch(4096)
        model.fit(balance.batches(data.repeat()), steps_per_epoch=500, epochs=9,
                  callbacks=[balance])

    or call `step(optimizer)` after each step of a loop of your own, on all ranks. The
    optimizer must be a `DistributedOptimizer` or `OneBitAdam`.

    Args:
      global_batch_size: N: examples of all ranks in a step.
      every: steps between changes. Default 20.
      smoothing: what is left of the speeds known before, in [0, 1). Default 0.5.
      minimum: of a rank's batch. Default 1.
      maximum: of a rank's batch, such as what fits its memory. Default None: no other
        limit than N.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Attributes:
      history: what was decided: `{"step": s, "sizes": [...], "speeds": [...]}`, where
        step s (counted from 0 in each `fit`) is the first with these sizes, and speeds
        are in examples per second.

    Raises:
      ValueError: an argument breaks its rule; or at the first step, on all ranks: their
        arguments differ; or at a change: training reads other batches than these.

    Example:

    >>> balance = BalancedBatch(4)
    >>> balance.sizes
    [4]
    >>> data = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [0.0, 1.0]))
    >>> next(iter(balance.batches(data.repeat())))[0].numpy().ravel().tolist()
    [1.0, 2.0, 1.0, 2.0]

    Reference: Tyagi and Sharma 2020, "Taming Resource Heterogeneity in Distributed ML
    Training with Dynamic Batching".
    """

    def __init__(
        self,
        global_batch_size: int,
        every: int = 20,
        smoothing: float = 0.5,
        minimum: int = 1,
        maximum: int | None = None,
        *,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        arguments = {
            "global_batch_size": global_batch_size,
            "every": every,
            "smoothing": smoothing,
            "minimum": minimum,
            "maximum": maximum,
        }
        hyperparameters.check_all({**arguments, "timeout": timeout}, RULES)
        self._world = world = World(process_set)
        most = global_batch_size if maximum is None else maximum
        if not minimum * world.size <= global_batch_size <= most * world.size:
            raise ValueError(
                "global_batch_size must be from minimum to maximum times the "
                f"{world.size} ranks, received {global_batch_size} with "
                f"minimum={minimum}, maximum={maximum}"
            )
        self.global_batch_size, self.every = int(global_batch_size), int(every)
        self.smoothing, self.minimum, self.maximum = smoothing, minimum, maximum
        self.timeout, self._arguments = timeout, arguments
        self.history: list[dict[str, Any]] = []
        self._speeds: list[float] | None = None
        self._plan = Plan(apportion(global_batch_size, [1.0] * world.size))
        self._name = unique_name("balance")
        self._watch: watch.Watch | None = None
        self._iterator = 0
        self._begin()

    @property
    def sizes(self) -> list[int]:
        """The batch sizes n_i of all ranks, as decided last."""
        return list(self._plan.sizes)

    def batches(
        self, dataset: tf.data.Dataset, weights: bool = True
    ) -> tf.data.Dataset:
        """The examples of this rank in batches of its size, whatever that is by then.

        Args:
          dataset: single examples, not batches, (x, y) or (x, y, sample_weight), in any
            structure of dense tensors; without an end, as `dataset.repeat()` has it:
            the ranks need not be given equally many, but must take equally many steps.
            Each rank has its own examples, as with `dataset.shard`.
          weights: whether sample weights are added. False: batches as the examples are,
            for loops that assign the length of each to `optimizer.step_weight` (and do
            not weight otherwise). Default True.

        Returns:
          Batches (x, y, sample_weight), with float32 weights of shape [n]; add
          `.prefetch` to it. One iterator at a time may read it.

        Raises:
          ValueError: it is no such dataset.
        """
        hyperparameters.check("weights", weights, hyperparameters.flag)
        _check(dataset, weights)
        world, total = self._world, self.global_batch_size
        return planned_batches(
            dataset,
            self._plan,
            world.rank,
            max(1, total // world.size),
            world.size / total if weights else None,
        )

    def step(self, optimizer: Any) -> None:
        """To be called after every step of a loop of your own, on all ranks."""
        self._advance(1, optimizer)

    # ---- what Keras calls ----------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del epoch, logs
        self._before_epoch = self._taken
        if self._since is not None:  # what lies between epochs is no work of a step
            self._pause(self.model.optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        steps = self._before_epoch + batch + 1 - self._taken
        self._advance(steps, self.model.optimizer)

    # ---- measuring -----------------------------------------------------------------

    def _begin(self) -> None:
        self._taken = self._before_epoch = 0
        self._from = 1  # the first step traces
        self._busy, self._counted = 0.0, 0
        self._since: tuple[float, float, int] | None = None

    def _pause(self, optimizer: Any) -> None:
        """Counts what was measured so far, and goes on after the next step."""
        now = (*_read(optimizer), self._taken)
        waited, seconds, steps = (n - s for n, s in zip(now, self._since))
        self._busy += seconds - waited
        self._counted += steps
        self._since = None

    def _advance(self, steps: int, optimizer: Any) -> None:
        if self._world.size == 1:
            return
        if self._watch is None:
            self._agree(optimizer)
        if self._iterator != self._plan.iterator:
            self._iterator = self._plan.iterator
            self._begin()
        self._taken += steps
        if self._taken < self._from:
            return
        if self._since is None:
            waited, at = _read(optimizer)
            if at > 0:  # with gradient accumulation the ranks may not have met yet
                self._since = (waited, at, self._taken)
        elif self._counted + self._taken - self._since[2] >= self.every:
            self._pause(optimizer)
            self._decide()

    def _agree(self, optimizer: Any) -> None:
        world, name = self._world, f"{self._name}_agreement"
        with watch.watched(world, name, self.timeout):
            mine = (self._arguments, any(True for _ in exchangers(optimizer)))
            everyone = world.objects(mine, name)
        for rank, (arguments, exchanging) in enumerate(everyone):
            if not exchanging:
                raise ValueError(
                    "optimizer must be a DistributedOptimizer or OneBitAdam, which "
                    "measure how long ranks wait, received "
                    f"{type(optimizer).__name__} or one that is not built on rank "
                    f"{rank}"
                )
            if arguments != everyone[0][0]:
                raise ValueError(
                    "all ranks must have the same arguments, received "
                    f"{arguments} on rank {rank} and {everyone[0][0]} on rank 0"
                )
        self._watch = watch.Watch(world, self._name, self.timeout)

    def _decide(self) -> None:
        """All ranks, after the same step."""
        examples = self._counted * self._plan.sizes[self._world.rank]
        with self._plan.held() as given:
            everyone = self._gather([self._busy, examples, given])
            ahead = [int(row[2]) for row in everyone]
            if min(ahead) < self._taken:
                raise ValueError(
                    "training must read the batches that BalancedBatch.batches "
                    f"returns, on every rank: of {self._taken} steps it has given "
                    f"{ahead} on the ranks (-1: never read)"
                )
            self._from = max(ahead)
            # A clock that was set back measures nothing.
            if all(row[0] > 0 for row in everyone):
                self._learn([row[1] / row[0] for row in everyone])
                sizes = apportion(
                    self.global_batch_size, self._speeds, self.minimum, self.maximum
                )
                self._plan.change(self._from, sizes)
                self.history.append(
                    {"step": self._from, "sizes": sizes, "speeds": list(self._speeds)}
                )
        self._busy, self._counted = 0.0, 0

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        self._watch.begin()
        try:
            mine = tf.constant([numbers], tf.float64)
            return self._world.gather(mine, self._name).numpy().tolist()
        finally:
            self._watch.end([])

    def _learn(self, speeds: list[float]) -> None:
        old, kept = self._speeds or speeds, self.smoothing
        self._speeds = [kept * o + (1 - kept) * s for o, s in zip(old, speeds)]


def _read(optimizer: Any) -> tuple[float, float]:
    """Seconds this rank has waited in all, and when it last met the others."""
    times = [part.watch.clock.read() for _, part in exchangers(optimizer)]
    return sum(waited for waited, _ in times), max(at for _, at in times)


def _check(dataset: Any, weights: bool) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"dataset must be a tf.data.Dataset, received {dataset!r}")
    structure = dataset.element_spec
    parts = tf.nest.flatten(structure)
    if not all(
        isinstance(p, tf.TensorSpec) and p.shape.rank is not None for p in parts
    ):
        raise ValueError(
            "dataset must have examples of dense tensors of known rank, received "
            f"{structure}"
        )
    if weights and not (isinstance(structure, tuple) and len(structure) in (2, 3)):
        raise ValueError(
            "dataset must have examples (x, y) or (x, y, sample_weight), received "
            f"{structure}"
        )
    if weights and len(structure) == 3:
        given = tf.nest.flatten(structure[2])
        if len(given) != 1 or given[0].shape.rank != 0:
            raise ValueError(
                "dataset must have one number as sample_weight of an example, received "
                f"{structure[2]}"
            )
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "dataset must have no end, so that all ranks take the same number of "
            "steps: give dataset.repeat(), and steps_per_epoch to fit; received one of "
            f"{_described(int(dataset.cardinality()))} examples"
        )


def _described(cardinality: int) -> str:
    return "an unknown number of" if cardinality < 0 else str(cardinality)


@functools.cache
def define(flavor_name: str) -> type:
    """`BalancedBatch` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": BalancedBatchMixin.__doc__, "__module__": __name__}
    return type("BalancedBatch", (BalancedBatchMixin, base), members)
