"""Giving all ranks the values that one of them has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis.distributed import control, watch
from tf_basis.distributed.world import World, unique_name

# What one collective carries; bounds the memory for copies.
CHUNK_BYTES = 256 << 20


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    *,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> None:
    r"""Gives the variables of all ranks the values that they have on one rank.

    Call it on all ranks, outside of graphs, with the same variables in the same order.
    Values travel as bytes, so that any dtype arrives to the bit, and together: one
    collective for each 256 MiB, after one that compares what the ranks have.

    Args:
      variables: variables of Keras 3 or tf.Variables, each once or more often.
      root_rank: whose values. Default 0. Ranks are counted inside the process set.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Raises:
      ValueError: on every rank and before anything changes: the ranks' variables
        differ in number, order, shape or dtype; `root_rank` is no rank; a variable
        holds strings or other things that are no numbers.

    Example:

    >>> weights = [tf.Variable([1.0, 2.0]), tf.Variable(3)]
    >>> broadcast_variables(weights)  # on one rank: nothing to do
    >>> weights[0].numpy().tolist()
    [1.0, 2.0]
    """
    if not isinstance(variables, Iterable) or isinstance(variables, tf.Variable):
        raise ValueError(f"variables must be a list of them, received {variables!r}")
    world = World(process_set)
    if not isinstance(root_rank, int) or not 0 <= root_rank < world.size:
        raise ValueError(
            f"root_rank must be one of the {world.size} ranks, received {root_rank!r}"
        )
    if world.size == 1:
        return
    distinct = {id(native(v)): v for v in variables}
    entries = [_entry(v) for v in distinct.values()]
    name = unique_name("broadcast")
    with watch.watched(world, name, timeout):
        control.agree(world, name, [f"root_rank {root_rank}", *entries])
        for variable in distinct.values():
            if native(variable).dtype.as_numpy_dtype is object:
                raise ValueError(
                    "variables must hold numbers, received "
                    f"'{path_of(variable)}' of {native(variable).dtype.name}"
                )
        _send(world, [native(v) for v in distinct.values()], root_rank)


def native(variable: Any) -> tf.Variable:
    """The tf.Variable inside a variable of Keras 3; a tf.Variable as it is."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def path_of(variable: Any) -> str:
    """What a variable is called in messages."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def name_of(variable: Any) -> str:
    """Its path without the numbers that depend on what a process made before.

    Numbers at the end of a name count layers and optimizers, and one rank, or the
    process that goes on with a checkpoint, may have made more.
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", path_of(variable))


def _entry(variable: Any) -> str:
    plain = native(variable)
    shape = tuple(tf.shape(plain).numpy().tolist())
    return f"'{name_of(variable)}' {shape} {plain.dtype.name}"


def _send(world: World, variables: list[tf.Variable], root_rank: int) -> None:
    root = world.rank == root_rank
    arrays: list[np.ndarray | None] = [None] * len(variables)
    sizes = [_bytes_of(v) for v in variables]
    for pieces in _chunks(sizes, CHUNK_BYTES):
        buffer = np.empty(sum(stop - start for _, start, stop in pieces), np.uint8)
        at = 0
        if root:
            for number, start, stop in pieces:
                if arrays[number] is None:
                    value = np.ascontiguousarray(variables[number].numpy())
                    arrays[number] = value.reshape(-1).view(np.uint8)
                buffer[at : at + stop - start] = arrays[number][start:stop]
                at += stop - start
                if stop == sizes[number]:
                    arrays[number] = None
        received = world.broadcast(tf.constant(buffer), root_rank).numpy()
        if root:
            continue
        for number, start, stop in pieces:
            if arrays[number] is None:
                arrays[number] = np.empty(sizes[number], np.uint8)
            arrays[number][start:stop] = received[at : at + stop - start]
            at += stop - start
            if stop == sizes[number]:
                plain = variables[number]
                flat = arrays[number].view(plain.dtype.as_numpy_dtype)
                plain.assign(flat.reshape(tf.shape(plain).numpy()))
                arrays[number] = None


def _bytes_of(variable: tf.Variable) -> int:
    return int(tf.size(variable, out_type=tf.int64)) * variable.dtype.size


def _chunks(sizes: list[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces (variable, first byte, behind the last) of at most `limit` together."""
    pieces, room = [], limit
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            pieces.append((number, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces
