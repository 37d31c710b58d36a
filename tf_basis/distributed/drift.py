"""Whether all ranks still have the same weights."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_basis import checksums, hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.distributed import watch
from tf_basis.distributed.broadcast import name_of, native
from tf_basis.distributed.callbacks import optimizer_variables
from tf_basis.distributed.residuals import local_state
from tf_basis.distributed.synchronize import apart
from tf_basis.distributed.world import World, unique_name


class ReplicaDriftError(RuntimeError):
    """Ranks that should have the same weights do not."""


class ReplicaDriftCheckMixin:
    """Ends `fit` on all ranks, every few steps, where their weights differ in a bit.

    Every rank hashes its variables, and all tell each other one hash; only where these
    differ do they compare variable by variable. What is compared is what the ranks are
    to have in common: trainable weights, and on request the others and the state of the
    optimizer. Residuals and gradients being accumulated are a rank's own and left out.

    All ranks must take equally many steps, as they must for the exchange itself.

    Args:
      every: after how many batches the next comparison comes. Default 1000.
      optimizer: whether the optimizer's variables are compared too. Default False.
      non_trainable: whether weights that are not trained are compared too: averages of
        batch normalisation and seeds of dropout, which differ between ranks unless
        something makes them equal. Default False.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Attributes:
      checks: how many comparisons found no difference.

    Raises:
      ValueError: an argument breaks its rule.
      ReplicaDriftError: in `fit`, on every rank: names the first variable that differs
        and which ranks have the same.

    Example:

    >>> check = ReplicaDriftCheck(every=100)
    >>> check.checks
    0
    """

    def __init__(
        self,
        every: int = 1000,
        *,
        optimizer: bool = False,
        non_trainable: bool = False,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        for name, value, rule in [
            ("every", every, hyperparameters.count),
            ("optimizer", optimizer, hyperparameters.flag),
            ("non_trainable", non_trainable, hyperparameters.flag),
            ("timeout", timeout, watch.TIMEOUT_RULE),
        ]:
            hyperparameters.check(name, value, rule)
        self.every, self.optimizer, self.non_trainable = every, optimizer, non_trainable
        self.process_set, self.timeout = process_set, timeout
        self.checks = self._batches = 0
        self._due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        self._batches += 1
        self._due = self._due or self._batches % self.every == 0
        # Ranks that step alone (`local_steps`) are compared after their next exchange.
        if self._due and not apart(self.model.optimizer):
            self._due = False
            self._compare()

    def _compare(self) -> None:
        mine = [(name_of(v), digest(v)) for v in self._variables()]
        whole = hashlib.sha256(repr(mine).encode()).hexdigest()
        world, name = World(self.process_set), unique_name("drift")
        with watch.watched(world, name, self.timeout):
            if len(set(world.objects(whole, name))) > 1:  # known to all ranks alike
                everyone = world.objects(mine, f"{name}_variables")
                raise ReplicaDriftError(self._message(everyone))
        self.checks += 1

    def _variables(self) -> list:
        model = self.model
        found = list(model.trainable_weights)
        if self.non_trainable:
            metrics = {id(v) for m in model.metrics for v in m.variables}
            found += [v for v in model.non_trainable_variables if id(v) not in metrics]
        if self.optimizer:
            local = {id(state.variable) for state in local_state(model.optimizer)}
            found += [
                v
                for v in optimizer_variables(model.optimizer)
                if id(native(v)) not in local
            ]
        return list({id(native(v)): v for v in found}.values())

    def _message(self, everyone: Sequence[Sequence[tuple[str, str]]]) -> str:
        def entries(place: int) -> list[tuple]:
            return [tuple(each[place : place + 1]) for each in everyone]

        places = range(max(map(len, everyone)))
        differ = [p for p in places if len(set(entries(p))) > 1]
        groups: dict[tuple, list[int]] = {}
        for rank, entry in enumerate(entries(differ[0])):
            groups.setdefault(entry, []).append(rank)
        told = "; ".join(
            f"ranks {ranks}: " + (f"{e[0][1][:8]} of '{e[0][0]}'" if e else "nothing")
            for e, ranks in groups.items()
        )
        name = next(e[0][0] for e in groups if e)
        return (
            f"after {self._batches} batches all ranks must have the same variables, "
            f"but '{name}' differs ({told}), and {len(differ) - 1} after it. Give the "
            "ranks equal weights at the start (BroadcastCallback) and equal steps "
            "(DistributedOptimizer), and change no weights on one rank alone"
        )


def digest(variable: Any) -> str:
    """A hash of the bytes of a variable, its dtype and shape."""
    value = tf.convert_to_tensor(native(variable)).numpy()
    return checksums.of_array(value, f"{value.dtype} {value.shape}")


@functools.cache
def define(flavor_name: str) -> type:
    """`ReplicaDriftCheck` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": ReplicaDriftCheckMixin.__doc__, "__module__": __name__}
    return type("ReplicaDriftCheck", (ReplicaDriftCheckMixin, base), members)
