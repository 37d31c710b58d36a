"""Training that goes on while ranks join, leave and die, with Horovod elastic."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import callbacks as retracing
from tf_basis.adapters import tracking
from tf_basis.distributed import control, residuals, watch
from tf_basis.distributed.broadcast import broadcast_variables, native
from tf_basis.distributed.callbacks import build
from tf_basis.distributed.rank_state import ModelState, checked_optimizer
from tf_basis.distributed.reducer import described
from tf_basis.distributed.synchronize import synchronize
from tf_basis.distributed.world import World, alone, unique_name

# What TensorFlow makes of an exchange that failed.
_FAILURES = (tf.errors.UnknownError, tf.errors.AbortedError)
_WORDS = ("horovod", "gloo", "tf_basis_")


class ElasticStateMixin:
    r"""Weights, optimizer variables and residuals of a training whose ranks change.

    For `elastic_run`. Values given by name (epoch, batch, ...) become attributes, which
    are committed and sent along.

    * Ranks that join are given all that is shared.
    * Where the number of ranks changes residuals are cut anew, so that what the
      exchange owes to the mean over the ranks stays what it was; see `residuals`.
    * A rank that leaves hands over its residuals; those of a rank that dies are lost,
      which rank 0 says. The others go back to their last commit.

    It makes the variables of the optimizer, which must not have been made before: a
    rank that joins could not compare them with ranks that train.

    Args:
      model: a compiled model that has its variables, on every rank the same.
      **values: further values to keep, that can be pickled, equal on all ranks.

    Raises:
      ValueError: the model is not compiled or has no variables; the optimizer has been
        built on several ranks, or has a `process_set`.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> state = ElasticState(model, epoch=0)
    >>> state.epoch
    0
    """

    def _start(self, model: Any, values: dict[str, Any]) -> None:
        optimizer = checked_optimizer(model)
        for each in residuals.nested_optimizers(optimizer):
            for part in (
                getattr(each, n, None) for n in ("_distribution", "_exchange")
            ):
                given = getattr(part, "process_set", None)
                if given is not None:
                    raise ValueError(
                        "process_set must be None in an elastic training, received "
                        f"{given!r} in '{each.name}'"
                    )
        with alone():
            build(optimizer, model)
        for _, part in residuals.exchangers(optimizer):
            if part.world.size > 1:
                raise ValueError(
                    "optimizer must not be built before ElasticState builds it, "
                    f"received '{optimizer.name}' with its variables"
                )
        self.model = model
        self._names, self._commits = list(values), 0
        self._synced = self._failed = False
        self._cut: tuple[int, int] | None = None  # ranks and rank of the residuals
        self._pool: list[residuals.Values] | None = None
        for name, value in values.items():
            setattr(self, name, value)
        self._keep()

    # ---- what Horovod calls ----------------------------------------------------------

    def save(self) -> None:
        """Keeps the present state, to come back to."""
        synchronize(self.model.optimizer)
        self._commits += 1
        self._keep()

    def restore(self) -> None:
        """Goes back to the last commit."""
        self._failed = True
        for variable, value in zip(self._shared(), self._kept["shared"]):
            variable.assign(value)
        for name, value in self._kept["values"].items():
            setattr(self, name, value)
        self._commits = self._kept["commits"]

    def reset(self) -> None:
        """The ranks have changed."""
        self._synced = False

    def sync(self) -> None:
        """Nothing yet: `elastic_run` does it where a failure is noticed.

        Horovod leaves it out where ranks have only left.
        """

    def commit(self) -> None:
        """`save`, then `check_host_updates`: on all ranks, between two steps."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises Horovod's interrupt where ranks come or go, on all of them."""
        if not _in_elastic_job():
            return
        synchronize(self.model.optimizer)
        from horovod.common.exceptions import HostsUpdatedInterrupt

        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # While those who leave are there.
            mine = [state.variable.numpy() for state in self._local()]
            everyone = World().objects(mine, unique_name("elastic"))
            self._pool = [list(values) for values in zip(*everyone)]
            raise

    # ---- what `elastic_run` calls ----------------------------------------------------

    def enter(self) -> None:
        """Makes all ranks alike, where that is not yet so."""
        if self._synced:
            return
        cut, pool, local = self._cut, self._pool, self._local_values()
        for owner, part in residuals.exchangers(self.model.optimizer):
            _follow(owner, part)
        world, name = World(), unique_name("elastic")
        with watch.watched(world, name, _timeout_of(self.model.optimizer)):
            state = ModelState(self.model, world)
            told = {
                "commits": self._commits,
                "cut": cut,
                "pool": pool is not None and not self._failed,
                "lines": state.described() + _settings(self.model.optimizer),
            }
            everyone = world.objects(told, name)
            _check_alike([each["lines"] for each in everyone])
            root = max(range(world.size), key=lambda r: _seniority(everyone[r], r))
            broadcast_variables([v for _, v in state.shared], root, timeout=None)
            values = {n: getattr(self, n) for n in self._names}
            sent = world.objects(values if world.rank == root else None, name)[root]
            old, values_of = self._gathered(world, name, everyone, root, pool, local)
        for key, value in sent.items():
            setattr(self, key, value)
        state.assign_local(values_of.__getitem__, old)
        self._commits = everyone[root]["commits"]
        self._cut, self._pool = (world.size, world.rank), None
        self._synced, self._failed = True, False
        self._keep()
        retracing.retrace(self.model)

    def give_up(self) -> None:
        """Stops the clocks of exchanges that have failed."""
        for _, part in residuals.exchangers(self.model.optimizer):
            part.watch.give_up()

    def _gathered(self, world, name, everyone, root, pool, local) -> tuple:
        """How many ranks there were, and what of their residuals is left."""
        first = everyone[root]
        if first["cut"] is None:  # nothing has been trained in this job
            size, holders = 1, {root: 0}
        else:
            size, holders = first["cut"][0], {}
            for rank, told in enumerate(everyone):
                cut = told["cut"]
                if cut and cut[0] == size and told["commits"] == first["commits"]:
                    holders[rank] = cut[1]
        if first["pool"]:
            mine = pool if world.rank == root else None
            return size, world.objects(mine, name)[root]
        values_of = []
        for number in range(len(local)):
            mine = local[number] if world.rank in holders else None
            given = world.objects(mine, name)
            values: list[np.ndarray | None] = [None] * size
            for rank, old in holders.items():
                values[old] = given[rank]
            values_of.append(values)
        lost = sorted(set(range(size)) - set(holders.values()))
        if lost and local and world.rank == 0:
            sys.stderr.write(
                f"tf_basis: of {size} ranks, ranks {lost} are gone: their residuals "
                f"are lost, those of the others are cut anew for {world.size} ranks\n"
            )
        return size, values_of

    def _local(self) -> list[residuals.Local]:
        return residuals.local_state(self.model.optimizer)

    def _local_values(self) -> list[np.ndarray]:
        if self._failed:
            return self._kept["local"]
        return [state.variable.numpy() for state in self._local()]

    def _shared(self) -> list[tf.Variable]:
        return [v for _, v in ModelState(self.model).shared]

    def _keep(self) -> None:
        self._kept = {
            "shared": [v.numpy() for v in self._shared()],
            "local": [state.variable.numpy() for state in self._local()],
            "values": {name: getattr(self, name) for name in self._names},
            "commits": self._commits,
        }


def ElasticState(model: Any, **values: Any) -> Any:  # noqa: N802  a class to its users
    """See `ElasticStateMixin`, whose documentation this has."""
    return _state_class()(model, **values)


ElasticState.__doc__ = ElasticStateMixin.__doc__


def elastic_run(function: Callable) -> Callable:
    """Runs `function(state, ...)` again from the last commit whenever ranks change.

    As Horovod's `hvd.elastic.run`, which knows a failed exchange only by the names of
    its own operations, and takes others for success. Make a `tf.function` of a loop of
    your own inside `function`: what was traced holds the old number of ranks. The
    steps of `fit` are traced again.

    Args:
      function: takes an `ElasticState` and what else it is given.

    Returns:
      A function with the same arguments. In a process that nobody launched it is
      called once.
    """

    @functools.wraps(function)
    def run(state: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(function)
        def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state.enter()
                return function(state, *args, **kwargs)
            except _FAILURES as error:
                words = str(error).lower()
                if not any(word in words for word in _WORDS):
                    raise
                from horovod.common.exceptions import HorovodInternalError

                state.give_up()
                raise HorovodInternalError(str(error)) from error

        if not _in_elastic_job():
            return guarded(state, *args, **kwargs)
        import horovod.tensorflow as hvd
        from horovod.common.elastic import run_fn

        def reset() -> None:
            hvd.shutdown()
            hvd.init()

        return run_fn(guarded, reset)(state, *args, **kwargs)

    return run


def _in_elastic_job() -> bool:
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _seniority(told: dict[str, Any], rank: int) -> tuple:
    """By what the rank is chosen whose state all take."""
    return told["cut"] is not None, told["commits"], -rank


def _follow(owner: Any, part: Any) -> None:
    """Prepares what exchanges for the ranks that there are now."""
    part.world.follow()
    for channel in part.channels:
        exchange = channel.exchange
        if exchange is None:
            continue
        old = exchange.server_error
        exchange.follow_world(
            lambda name, *spec, stem=channel.name: owner._add_state(
                f"{stem}_{name}", *spec
            )
        )
        listed = tracking.own_variables(owner)
        new = listed.pop()
        place = next(i for i, v in enumerate(listed) if native(v) is old)
        listed[place] = new
        tracking.replace_variables(owner, listed)
    part.watch = watch.Watch(part.world, part.name, part.watch.timeout)


def _timeout_of(optimizer: Any) -> float | None:
    for _, part in residuals.exchangers(optimizer):
        return part.watch.timeout
    return watch.DEFAULT_TIMEOUT


def _settings(optimizer: Any) -> list[str]:
    """What must be equal on all ranks; they could not compare it when it was built."""
    lines = []
    for owner, part in residuals.exchangers(optimizer):
        specs = getattr(part, "specs", None)
        if specs is None:
            lines += [f"OneBitAdam {k}={v}" for k, v in owner._compared().items()]
        else:
            lines += described(part.compression, {})
            lines += [s.described(w) for s, w in zip(specs, part.ways)]
    return lines


def _check_alike(everyone: list[list[str]]) -> None:
    first = everyone[0]
    for rank, lines in enumerate(everyone):
        found = control.first_difference([first, lines])
        if found is not None:
            place, (ours, theirs) = found
            raise ValueError(
                "all ranks must have the same variables, types and policies in the "
                f"same order, received in place {place}: rank 0: {ours}; rank "
                f"{rank}: {theirs}"
            )


@functools.cache
def _state_class() -> type:
    try:
        from horovod.common.elastic import ObjectState as Base
        from horovod.tensorflow.functions import broadcast_object
        from horovod.tensorflow.mpi_ops import rank

        arguments = (broadcast_object, rank)
    except ImportError:  # one process, which nobody launched
        Base, arguments = object, ()

    def init(self: Any, model: Any, **values: Any) -> None:
        Base.__init__(self, *arguments)
        self._start(model, values)

    members = {
        "__init__": init,
        "__doc__": ElasticStateMixin.__doc__,
        "__module__": __name__,
    }
    return type("ElasticState", (ElasticStateMixin, Base), members)
