"""Keras callbacks for training on several ranks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from tf_basis import hyperparameters
from tf_basis.adapters import flavor, keras_modules
from tf_basis.distributed import watch
from tf_basis.distributed.broadcast import broadcast_variables, native
from tf_basis.distributed.metrics import average_metrics
from tf_basis.distributed.residuals import local_state, nested_optimizers
from tf_basis.distributed.world import World, unique_name


class BroadcastCallbackMixin:
    """Gives all ranks the weights and the optimizer state of one at the start of `fit`.

    With equal starts and equal gradients all ranks stay equal. What is sent: all
    variables of the model, states of random seeds included, and all of the optimizer
    and of those inside it. What is not: `residual_variables` of optimizers and
    gradients being accumulated, which are the state of one rank.

    Sent at the start of the first epoch of each `fit`, when callbacks that restore
    something have done so. A model that has no variables before it sees data (a
    subclass on tf_keras) is sent after its first batch.

    Args:
      root_rank: whose values. Default 0.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Raises:
      ValueError: in `fit`, on every rank: the ranks' variables differ in number, order,
        shape or dtype, or `root_rank` is no rank.

    Example:

    >>> callback = BroadcastCallback(root_rank=0)
    >>> callback.root_rank
    0
    """

    def __init__(
        self,
        root_rank: int = 0,
        *,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        hyperparameters.check("root_rank", root_rank, _RANK)
        hyperparameters.check("timeout", timeout, watch.TIMEOUT_RULE)
        self.root_rank, self.process_set, self.timeout = root_rank, process_set, timeout
        self._due_after_batch = self._due_at_epoch = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._due_after_batch, self._due_at_epoch = False, True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del epoch, logs
        if not self._due_at_epoch:
            return
        self._due_at_epoch = False
        world = World(self.process_set)
        # Together: all ranks must send at the same time.
        name = unique_name("built")
        with watch.watched(world, name, self.timeout):
            built = world.objects(is_built(self.model), name)
        if all(built):
            self._broadcast()
        else:
            self._due_after_batch = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        if self._due_after_batch:
            self._due_after_batch = False
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        build(optimizer, self.model)
        variables = [*self.model.variables, *optimizer_variables(optimizer)]
        local = {id(state.variable) for state in local_state(optimizer)}
        broadcast_variables(
            [v for v in variables if id(native(v)) not in local],
            self.root_rank,
            process_set=self.process_set,
            timeout=self.timeout,
        )


class MetricAverageCallbackMixin:
    """Replaces the logs of an epoch by their means over all ranks, on all ranks.

    Callbacks that act on logs (`EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`,
    loggers) then do the same everywhere; they must come after this one in the list.
    The mean is plain: ranks count alike. A metric that only some ranks have is the mean
    over those, so that one rank alone may validate. See `average_metrics`.

    Args:
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Raises:
      ValueError: at the end of an epoch, on every rank: shapes of a metric differ.

    Example:

    >>> logs = {"loss": 0.5}
    >>> MetricAverageCallback().on_epoch_end(0, logs)
    >>> logs
    {'loss': 0.5}
    """

    def __init__(
        self,
        *,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        hyperparameters.check("timeout", timeout, watch.TIMEOUT_RULE)
        self.process_set, self.timeout = process_set, timeout

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del epoch
        means = average_metrics(
            logs or {}, process_set=self.process_set, timeout=self.timeout
        )
        if logs is not None:
            logs.update(means)


class LearningRateWarmupCallbackMixin:
    r"""Raises the learning rate from that of one process to that of all in some epochs.

    W ranks see W times as large a batch, which bears about W times the learning rate,
    but not from the first step on. In step b (from 0) of S in epoch n::

        t = n + (b + 1)/S,      learning rate = lr·(1 + (W − 1)·min(t/warmup_epochs, 1))

    Afterwards it stays at lr·W and is left alone. Note that `initial_learning_rate` is
    lr, where the rate starts; Horovod's callback of this name takes lr·W.

    Other optimizers inside the model's (`dense_optimizer`, those of a `MultiOptimizer`
    after its first) keep the ratio of their learning rates to that of the first.

    Args:
      initial_learning_rate: lr, good for one process.
      warmup_epochs: how many epochs it takes, possibly a part of one. Default 5.
      steps_per_epoch: S. Default: what Keras says; where it is unknown, it must be
        given. Ranks may differ: the largest counts.
      verbose: 1: rank 0 prints a line at the end. Default 0.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Raises:
      ValueError: an argument breaks its rule; or at the start of `fit`, on every rank:
        a learning rate is a schedule or a function, the number of steps is unknown on
        some rank, arguments differ between ranks.

    Example:

    >>> warmup = LearningRateWarmupCallback(1e-3, warmup_epochs=2)
    >>> [warmup.rate(t, ranks=4) for t in (0.0, 1.0, 2.0, 3.0)]
    [0.001, 0.0025, 0.004, 0.004]

    Reference: Goyal et al. 2017, "Accurate, Large Minibatch SGD".
    """

    def __init__(
        self,
        initial_learning_rate: float,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        for name, value, rule in [
            ("initial_learning_rate", initial_learning_rate, _POSITIVE),
            ("warmup_epochs", warmup_epochs, _POSITIVE),
            ("steps_per_epoch", steps_per_epoch, _COUNT),
            ("verbose", verbose, hyperparameters.choice(0, 1)),
            ("timeout", timeout, watch.TIMEOUT_RULE),
        ]:
            hyperparameters.check(name, value, rule)
        self.initial_learning_rate = initial_learning_rate
        self.warmup_epochs, self.steps_per_epoch = warmup_epochs, steps_per_epoch
        self.verbose, self.process_set, self.timeout = verbose, process_set, timeout
        self._epoch = 0

    def rate(self, epochs: float, ranks: int) -> float:
        """The learning rate after so many epochs, a fraction included."""
        part = min(epochs / self.warmup_epochs, 1.0)
        return self.initial_learning_rate * (1 + (ranks - 1) * part)

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        world = World(self.process_set)
        steps = self.steps_per_epoch or self.params.get("steps")
        problem, self._rates = _rates_of(self.model.optimizer)
        settings = (self.initial_learning_rate, self.warmup_epochs)
        # What one rank finds all must know, or the others would wait for it.
        name = unique_name("warmup")
        with watch.watched(world, name, self.timeout):
            everyone = world.objects((problem, steps, settings), name)
        for rank, (told, number, theirs) in enumerate(everyone):
            if told:
                raise ValueError(f"{told} on rank {rank}")
            if not number:
                raise ValueError(
                    "steps_per_epoch must be given where Keras does not know the "
                    f"number of steps, received {number} on rank {rank}"
                )
            if theirs != settings:
                raise ValueError(
                    "initial_learning_rate and warmup_epochs must be equal on all "
                    f"ranks, received {settings} on rank {world.rank}, {theirs} on "
                    f"rank {rank}"
                )
        self._steps, self._world = max(n for _, n, _ in everyone), world

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self._epoch < self.warmup_epochs:
            now = self._epoch + (batch + 1) / self._steps
            rate = self.rate(now, self._world.size)
            for variable, ratio in self._rates:
                variable.assign(rate * ratio)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        last = epoch < self.warmup_epochs <= epoch + 1
        if last and self.verbose and self._world.rank == 0:
            rate = self.rate(epoch + 1, self._world.size)
            print(f"\nEpoch {epoch + 1}: the learning rate is warm at {rate:g}.")


def _rates_of(optimizer: Any) -> tuple[str | None, list[tuple[Any, float]]]:
    """Variables of learning rates, and their ratios to the first; or what is wrong."""
    rates = []
    for each in nested_optimizers(optimizer):
        if hasattr(each, "inner_optimizer") or hasattr(each, "optimizers"):
            continue  # they have no learning rate of their own
        rate = getattr(each, "_learning_rate", None)
        if rate is None:
            rate = each.learning_rate
        if not hasattr(rate, "assign"):
            problem = (
                "LearningRateWarmupCallback needs optimizers whose learning rate is a "
                f"number, received {rate!r} in '{each.name}'"
            )
            return problem, []
        rates.append((rate, float(native(rate).numpy())))
    first = rates[0][1]
    if first <= 0:
        return f"the learning rate must be above 0, received {first}", []
    return None, [(rate, value / first) for rate, value in rates]


def is_built(model: Any) -> bool:
    """Whether the model has all its variables: tf_keras makes some with first data."""
    return all(layer.built for layer in model._flatten_layers())


def build(optimizer: Any, model: Any) -> None:
    """Makes the optimizer's variables; all ranks must do so at the same time."""
    if not getattr(optimizer, "built", False):
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def optimizer_variables(optimizer: Any) -> list:
    """The variables of an optimizer and of those inside it, some of them twice."""
    variables = []
    for each in nested_optimizers(optimizer):
        own = each.variables
        variables += own() if callable(own) else own
        variables += _unlisted(each)
    return variables


def _unlisted(optimizer: Any) -> list:
    """State that tf_keras leaves out of the variables of its optimizers."""
    found = [getattr(optimizer, "_learning_rate", None)]
    scale = getattr(optimizer, "_loss_scale", None)
    found += list(getattr(scale, "_weights", {}).values())
    return [v for v in found if hasattr(v, "assign")]


_RANK = hyperparameters.integer("of at least 0", lambda v: v >= 0)
_COUNT = hyperparameters.integer("of at least 1", lambda v: v >= 1, optional=True)
_POSITIVE = hyperparameters.real("above 0", lambda v: v > 0)


@functools.cache
def for_flavor(name: str) -> SimpleNamespace:
    """The callbacks on one flavour of Keras: `"keras3"` or `"tf_keras"`."""
    base = keras_modules.keras_of(name).callbacks.Callback
    made = {}
    for mixin in (
        BroadcastCallbackMixin,
        MetricAverageCallbackMixin,
        LearningRateWarmupCallbackMixin,
    ):
        own = mixin.__name__.removesuffix("Mixin")
        members = {"__doc__": mixin.__doc__, "__module__": __name__}
        made[own] = type(own, (mixin, base), members)
    return SimpleNamespace(**made)


_active = for_flavor(flavor.active())
BroadcastCallback = _active.BroadcastCallback
MetricAverageCallback = _active.MetricAverageCallback
LearningRateWarmupCallback = _active.LearningRateWarmupCallback
