"""State that belongs to one rank, and how it is cut for another number of ranks.

Results of an exchange are means over ranks, and what it still owes to the sum of all
results is  mean over ranks of e_w, + e_s. So it is the means that stay when W ranks
become W' (not the sums over ranks, which count for less where there are more):

    e_w (each new rank)  = Σ e_w / W      and + e_s where W' = 1, which has no e_s
    e_s                  = joined in the order of the ranks, cut by the new owners
    accumulated          = Σ / W          gradients of steps that are not complete
    rows of tables       = all rows, values / W
    clipped              = Σ on rank 0    a count
    what is remembered   = as it was where the ranks are the same, else zeros: scales
                           that others were told, which all ranks then tell anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_basis.distributed.broadcast import native
from tf_basis.distributed.exchange import OneBitExchange, owned_elements

# What `recut` is given of one variable: the values of the old ranks; None where lost.
Values = Sequence[np.ndarray | None]


class Local(NamedTuple):
    """A variable that holds another value on every rank.

    Attributes:
      variable: it.
      kind: how it is cut: "worker", "server", "mean", "count", "memory", "heard"
        (memory whose length depends on the ranks), "rows" (indices), "row_values", or
        "own": an old rank keeps its own, a new one has rank 0's.
      exchange: of "worker", "server" and "heard".
    """

    variable: tf.Variable
    kind: str
    exchange: OneBitExchange | None = None

    def shape(self, ranks: int, rank: int) -> tf.TensorShape:
        """The shape that the variable has on one of so many ranks."""
        if self.kind == "server":
            return tf.TensorShape([_owned(self.exchange, ranks)[rank]])
        if self.kind == "heard":  # of another number of ranks it is not read
            return tf.TensorShape([None])
        return self.variable.shape


def nested_optimizers(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those inside it, each once, outer ones first."""
    yield optimizer
    inside = [
        getattr(optimizer, "inner_optimizer", None),  # LossScaleOptimizer
        getattr(optimizer, "dense_optimizer", None),  # ours
    ]
    several = getattr(optimizer, "optimizers", None)  # MultiOptimizer
    inside += several if isinstance(several, (list, tuple)) else []
    for each in inside:
        if each is not None:
            yield from nested_optimizers(each)


def exchangers(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """What exchanges in an optimizer and those inside it, and whose it is.

    Each has a `world`, `channels`, a `watch` and a `name`.
    """
    for each in nested_optimizers(optimizer):
        reducer = getattr(getattr(each, "_distribution", None), "reducer", None)
        if reducer is not None:
            yield each, reducer
        state = getattr(each, "_exchange", None)
        if getattr(state, "channels", None):
            yield each, state


def local_state(optimizer: Any) -> list[Local]:
    """All state of this rank alone in an optimizer and those inside it."""
    found: list[Local] = []
    for _, part in exchangers(optimizer):
        for channel in part.channels:
            found += _of_channel(channel)
        for variable in getattr(getattr(part, "local", None), "own", ()):
            found.append(Local(variable, "mean"))
    for each in nested_optimizers(optimizer):
        found += _accumulators(each)
    known = {id(local.variable) for local in found}
    for each in nested_optimizers(optimizer):
        for variable in map(native, getattr(each, "residual_variables", ())):
            if id(variable) not in known:  # of an optimizer that is not ours
                known.add(id(variable))
                found.append(Local(variable, "own"))
    return found


def recut(
    states: Sequence[Local],
    values_of: Callable[[int], Values],
    old_ranks: int,
    ranks: int,
    rank: int,
) -> list[np.ndarray]:
    """The values of `states` on one of `ranks` ranks, from those of `old_ranks`.

    Args:
      states: what is cut.
      values_of: for the number of a state its values on the old ranks, in order; None
        for a rank whose values are lost.
      old_ranks: W.
      ranks: W'.
      rank: for which of them.
    """
    results = []
    for number, state in enumerate(states):
        values = values_of(number)
        if state.kind == "worker":
            mean = _mean(values, old_ranks, state.exchange.elements)
            if ranks == 1 and old_ranks > 1:
                server = next(
                    i
                    for i, s in enumerate(states)
                    if s.kind == "server" and s.exchange is state.exchange
                )
                mean += _joined(values_of(server), old_ranks, state.exchange)
            result = mean
        elif state.kind == "server":
            whole = _joined(values, old_ranks, state.exchange)
            sizes = _owned(state.exchange, ranks)
            start = sum(sizes[:rank])
            result = whole[start : start + sizes[rank]]
        elif state.kind == "mean":
            result = _mean(values, old_ranks, state.variable.shape)
        elif state.kind == "count":
            total = sum(int(v.sum()) for v in values if v is not None)
            result = np.array([total if rank == 0 else 0])
        elif state.kind in ("memory", "heard"):
            same = old_ranks == ranks and all(v is not None for v in values)
            result = values[rank] if same else np.zeros(state.variable.shape)
        elif state.kind == "own":
            first = next(v for v in values if v is not None)
            mine = values[rank] if rank < old_ranks else None
            result = first if mine is None else mine
        else:
            kept = [v for v in values if v is not None]
            result = np.concatenate(kept)
            if state.kind == "row_values":
                result = result.astype(np.float64) / old_ranks
        results.append(result.astype(state.variable.dtype.as_numpy_dtype))
    return results


def _mean(values: Values, ranks: int, shape: Any) -> np.ndarray:
    total = np.zeros(shape, np.float64)
    for value in values:
        if value is not None:
            total += value.astype(np.float64)
    return total / ranks


def _owned(exchange: OneBitExchange, ranks: int) -> list[int]:
    if ranks == 1:
        return [0]
    return owned_elements(exchange.elements, exchange.block, ranks)


def _joined(values: Values, ranks: int, exchange: OneBitExchange) -> np.ndarray:
    if ranks == 1:
        return np.zeros(exchange.elements)
    parts = [
        np.zeros(size) if value is None else value.astype(np.float64)
        for value, size in zip(values, _owned(exchange, ranks))
    ]
    return np.concatenate(parts)


def _of_channel(channel: Any) -> list[Local]:
    found = []
    for variable in (channel.accumulated, channel.pending):
        if variable is not None:
            found.append(Local(variable, "mean"))
    exchange = channel.exchange
    if exchange is not None:
        found.append(Local(exchange.worker_error, "worker", exchange))
        found.append(Local(exchange.server_error, "server", exchange))
        if exchange.clipped is not None:
            found.append(Local(exchange.clipped, "count"))
        if exchange.sums is not None:
            found.append(Local(exchange.sums, "memory"))
        if exchange.age is not None:
            found.append(Local(exchange.age, "memory"))
        for amplitudes in exchange.amplitudes.values():
            for variable in amplitudes.variables:
                heard = variable is amplitudes.heard
                kind = "heard" if heard else "memory"
                found.append(Local(variable, kind, exchange))
    return found


def _accumulators(optimizer: Any) -> list[Local]:
    """Gradients that `gradient_accumulation_steps` has added up so far."""
    ours = getattr(optimizer, "_accumulator", None)
    if ours is None:
        if not getattr(optimizer, "gradient_accumulation_steps", None):
            return []
        keras = getattr(optimizer, "_accumulated_gradients", None) or []
        return [Local(native(v), "mean") for v in keras if v is not None]
    found = []
    for sums in ours.sums:
        if isinstance(sums, tuple):
            found.append(Local(native(sums.indices), "rows"))
            found.append(Local(native(sums.values), "row_values"))
        else:
            found.append(Local(native(sums), "mean"))
    return found
