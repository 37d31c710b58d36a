"""The ranks that take part, and the three collectives that everything here uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# What launchers set for each process they start.
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
HOW_TO_INSTALL = "Install Horovod with `tf-basis install-horovod`."


def horovod() -> Any | None:
    """`horovod.tensorflow`, initialised; None in a process that nobody launched.

    Raises:
      ImportError: a launcher started several processes, but Horovod is missing.
      RuntimeError: a launcher started several processes, and nobody called
        `horovod.tensorflow.init()`.
    """
    launched = any(int(os.environ.get(name, "1")) > 1 for name in _SIZE_VARIABLES)
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        if launched:
            raise ImportError(
                "this process is one of several, but Horovod cannot be imported "
                f"({error}). {HOW_TO_INSTALL}"
            ) from error
        return None
    if hvd.is_initialized():
        return hvd
    if launched:
        raise RuntimeError(
            "Horovod is not initialised: call horovod.tensorflow.init() before the "
            "first distributed object is made"
        )
    return None


_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A `World` that is made inside has one rank, until it is told to `follow`."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


class World:
    """The ranks of a process set and their collectives; one rank exchanges nothing.

    Names of collectives are the same on every rank and in every trace: `name` of the
    object that communicates, then what is sent. Ranks are counted inside the set.

    Args:
      process_set: a `horovod.tensorflow.ProcessSet` that contains this rank, or None
        (default): all ranks.

    Raises:
      ValueError: `process_set` does not contain this rank.
    """

    def __init__(self, process_set: Any = None) -> None:
        self._given = process_set
        self._enter(None if _alone else horovod())

    def follow(self) -> None:
        """Takes the ranks that there are now: Horovod was initialised again."""
        self._enter(horovod())

    def _enter(self, hvd: Any) -> None:
        self._hvd, process_set = hvd, self._given
        if self._hvd is None:
            if process_set is not None:
                raise ValueError(
                    "process_set must be None where Horovod is not initialised, "
                    f"received {process_set!r}"
                )
            self.size, self.rank = 1, 0
            return
        self._set = process_set or self._hvd.global_process_set
        if not hasattr(self._set, "included"):
            raise ValueError(
                "process_set must be None or a horovod.tensorflow.ProcessSet, received "
                f"{process_set!r}"
            )
        if not self._set.included():
            raise ValueError(
                "process_set must contain this rank, received "
                f"{process_set!r} on rank {self._hvd.rank()}"
            )
        self.size, self.rank = self._set.size(), self._set.rank()

    def total(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The sum over all ranks of tensors of one shape."""
        if self.size == 1:
            return tensor
        result = self._hvd.allreduce(
            tensor, op=self._hvd.Sum, process_set=self._set, **_named(name)
        )
        return tf.ensure_shape(result, tensor.shape)

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' tensors, one after the other along the first axis."""
        if self.size == 1:
            return tensor
        result = self._hvd.allgather(tensor, process_set=self._set, **_named(name))
        return tf.ensure_shape(result, [None, *tensor.shape[1:]])

    def scatter(
        self, tensor: tf.Tensor, splits: Sequence[int] | tf.Tensor, name: str
    ) -> tf.Tensor:
        """Sends `splits[j]` entries to rank j; what was received, in rank order."""
        if self.size == 1:
            return tensor
        received, _ = self._hvd.alltoall(
            tensor,
            splits=tf.convert_to_tensor(splits, tf.int32),
            process_set=self._set,
            **_named(name),
        )
        return tf.ensure_shape(received, [None])

    def broadcast(self, tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
        """The tensor of one rank of this set, on all; now, not in a graph."""
        if self.size == 1:
            return tensor
        ranks = self._set.ranks  # None: all
        root = root_rank if ranks is None else ranks[root_rank]
        return self._hvd.broadcast(tensor, root, process_set=self._set)

    def objects(self, value: Any, name: str) -> list:
        """Every rank's `value`, in rank order; now, not in a graph."""
        if self.size == 1:
            return [value]
        with tf.init_scope():
            return self._hvd.allgather_object(value, name=name, process_set=self._set)


def _named(name: str) -> dict[str, Any]:
    # In eager mode Horovod matches by type and order, and takes no name.
    if tf.executing_eagerly():
        return {}
    return {"name": name.replace("/", "_"), "ignore_name_scope": True}


_names: dict[str, int] = {}


def unique_name(stem: str) -> str:
    """`stem` and a number: equal on all ranks that make their objects in one order."""
    number = _names[stem] = _names.get(stem, -1) + 1
    return f"tf_basis_{stem}_{number}"
