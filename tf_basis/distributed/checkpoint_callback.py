"""Keras callback that saves a training on several ranks, and goes on with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_basis import folders, hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.distributed import watch
from tf_basis.distributed.checkpoint import (
    KEEP_RULE,
    CheckpointInfo,
    restore_checkpoint,
    save_checkpoint,
    together,
)
from tf_basis.distributed.world import World, unique_name

_EVERY = hyperparameters.Rule(
    "'epoch' or an integer of at least 1",
    lambda v: (
        v == "epoch" or (isinstance(v, int) and not isinstance(v, bool) and v >= 1)
    ),
)
_COUNT = hyperparameters.integer("of at least 1", lambda v: v >= 1, optional=True)


class CheckpointCallbackMixin:
    """Saves weights, optimizer state and residuals of all ranks in the course of `fit`.

    See `save_checkpoint` for what is written and how. All ranks must have the callback
    in the same place of the list.

    To go on: `restore`, then fit what is left. Where checkpoints are made at the ends
    of epochs that is `fit(..., initial_epoch=checkpoint.initial_epoch)`. In the middle
    of an epoch the batches that are done must be left out, and Keras cannot make the
    first epoch shorter than the others: `parts` gives the arguments of two calls of
    `fit`, one for the rest of that epoch, one for what follows. The data must come in
    the same order in every run: training then goes on to the same bits. Logs of the
    first of these epochs are of its rest alone, and callbacks see its batches counted
    from 0.

    Args:
      directory: where checkpoints are, on a file system that all ranks share.
      every: `"epoch"` (default): at the end of each; or so many steps.
      keep: how many checkpoints stay. Default 3.
      process_set: that of the optimizer. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Attributes:
      initial_epoch: the epoch to go on with; 0 before `restore`.
      step: steps so far, those before `restore` included.

    Raises:
      ValueError: an argument breaks its rule; in `fit`: it begins in the middle of an
        epoch, but not with `parts`; and see `save_checkpoint`.
      OSError: as `fit` begins, on every rank: some rank cannot write in `directory`.

    Example:

    >>> checkpoint = CheckpointCallback("checkpoints", every=1000, keep=2)
    >>> data = tf.data.Dataset.range(10).batch(2)
    >>> [(p["initial_epoch"], p["epochs"]) for p in checkpoint.parts(data, epochs=3)]
    [(0, 3)]
    """

    def __init__(
        self,
        directory: str | Path,
        every: int | str = "epoch",
        keep: int = 3,
        *,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        for argument, value, rule in [
            ("directory", directory, hyperparameters.folder),
            ("every", every, _EVERY),
            ("keep", keep, KEEP_RULE),
            ("timeout", timeout, watch.TIMEOUT_RULE),
        ]:
            hyperparameters.check(argument, value, rule)
        self.directory, self.every, self.keep = Path(directory), every, keep
        self.process_set, self.timeout = process_set, timeout
        self.initial_epoch = self.step = 0
        self._done = 0  # batches of `initial_epoch`
        self._left_out = False  # whether the data begins behind them
        self._epoch = self._before = self._saved = 0

    def restore(self, model: Any, fallback: bool = False) -> CheckpointInfo | None:
        """Gives all ranks the newest state; see `restore_checkpoint`."""
        info = restore_checkpoint(
            self.directory,
            model,
            fallback=fallback,
            process_set=self.process_set,
            timeout=self.timeout,
        )
        if info is not None:
            self.step = self._saved = info.step
            self.initial_epoch, self._done = info.epoch, info.batch
        return info

    def parts(
        self, data: tf.data.Dataset, epochs: int, steps_per_epoch: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Arguments for the calls of `fit` that are left, one after the other::

            for part in checkpoint.parts(data, epochs=10):
                model.fit(**part, callbacks=[checkpoint])

        Args:
          data: of one epoch; or, with `steps_per_epoch`, of all of them, without end.
          epochs: the last epoch, exclusive, as in `fit`.
          steps_per_epoch: as in `fit`. Default None: `data` ends.

        Raises:
          ValueError: `data` is no `tf.data.Dataset`, or `steps_per_epoch` no count.
        """
        hyperparameters.check("steps_per_epoch", steps_per_epoch, _COUNT)
        if not isinstance(data, tf.data.Dataset):
            raise ValueError(
                f"data must be a tf.data.Dataset, of batches, received {type(data)}"
            )
        first, done, size = self.initial_epoch, self._done, steps_per_epoch
        if done and ((size is None and _has(data, done)) or (size and done < size)):
            if first < epochs:
                self._left_out = True
                yield {
                    "x": data.skip(done if size is None else first * size + done),
                    "initial_epoch": first,
                    "epochs": first + 1,
                    "steps_per_epoch": size and size - done,
                }
            first += 1
        elif done:  # it was the last batch, which is not known in time
            first += 1
        self.initial_epoch, self._done, self._left_out = first, 0, False
        if first < epochs:
            yield {
                "x": data if size is None else data.skip(first * size),
                "initial_epoch": first,
                "epochs": epochs,
                "steps_per_epoch": size,
            }

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        world, name = World(self.process_set), unique_name("checkpoint_folder")
        with watch.watched(world, name, self.timeout):
            together(world, name, self._check)

    def _check(self) -> None:
        """Before the first step, on all ranks, whether there can be a checkpoint."""
        if self._done and not self._left_out:
            raise ValueError(
                f"training goes on behind batch {self._done} of epoch "
                f"{self.initial_epoch}: fit what CheckpointCallback.parts(data, "
                "epochs) gives, or save with every='epoch'"
            )
        folders.make_writable("directory", self.directory)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self._epoch, self._before = epoch, self.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        self.step = self._before + batch + 1
        if (
            self.every == "epoch"
            or self.step // self.every == self._saved // self.every
        ):
            return
        if batch + 1 == (self.params or {}).get("steps"):
            self._save(self._epoch + 1, 0)
            return
        done = self._done if self._epoch == self.initial_epoch else 0
        self._save(self._epoch, done + batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self.every == "epoch":
            self._save(epoch + 1, 0)

    def _save(self, epoch: int, batch: int) -> None:
        save_checkpoint(
            self.directory,
            self.model,
            self.step,
            epoch=epoch,
            batch=batch,
            keep=self.keep,
            process_set=self.process_set,
            timeout=self.timeout,
        )
        self._saved = self.step


def _has(data: tf.data.Dataset, done: int) -> bool:
    """Whether there are more than `done` batches."""
    number = int(data.cardinality())
    if number >= 0:
        return number > done
    return any(True for _ in data.skip(done).take(1))


@functools.cache
def define(flavor_name: str) -> type:
    """`CheckpointCallback` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": CheckpointCallbackMixin.__doc__, "__module__": __name__}
    return type("CheckpointCallback", (CheckpointCallbackMixin, base), members)
