"""What ranks tell each other before a step: one small gather, the same on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.distributed import quantize, rows
from tf_basis.distributed.watch import Watch
from tf_basis.distributed.world import World


class Control(NamedTuple):
    """What all ranks know of a step after `exchange`; equal on all but `factor`.

    Attributes:
      go: whether the step is taken: every gradient is finite, some rank has data.
      factor: by what this rank multiplies its gradients so that the plain mean over
        ranks is the mean weighted by `weight`; float32, 1 where weights are equal.
      rows: of IndexedSlices, int64, shape [ranks, variables]; below 0 for others.
      extras: float64, shape [ranks, extras].
    """

    go: tf.Tensor
    factor: tf.Tensor
    rows: tf.Tensor
    extras: tf.Tensor


# What stands for a gradient where IndexedSlices have the number of their rows.
_DENSE, _NONE = -1, -2


def exchange(
    world: World,
    name: str,
    paths: Sequence[str],
    kinds: Sequence[Any],
    unusable: tf.Tensor,
    watch: Watch,
    weight: Any = 1.0,
    extras: Sequence[tf.Tensor] = (),
) -> Control:
    """Tells all ranks what this one has; call it on all ranks.

    Args:
      world: the ranks.
      name: names the collective.
      paths: of the variables; the same on all ranks.
      kinds: of their gradients: the number of rows, `_DENSE` or `_NONE`.
      unusable: how many elements of this rank's gradients are not finite.
      watch: of the ranks that do not come.
      weight: of this rank's gradients in the mean, such as its number of examples; 0
        where it has no data.
      extras: further numbers.

    Raises (all ranks, when the step runs):
      tf.errors.InvalidArgumentError: the kinds differ, but for numbers of rows; a
        weight is below 0.
    """
    weight = tf.cast(weight, tf.float64)
    numbers = [weight, unusable, *kinds, *extras]
    mine = tf.stack([tf.cast(n, tf.float64) for n in numbers])
    with tf.control_dependencies([mine]):  # this rank's gradients are there
        came = tf.timestamp()
    with tf.control_dependencies([came, *watch.begin()]):
        everyone = world.gather(tf.identity(mine)[tf.newaxis], f"{name}/control")
    with tf.control_dependencies([everyone]):
        met = watch.clock.met(came, tf.timestamp())
    with tf.control_dependencies([*met, *watch.end(everyone)]):
        everyone = tf.ensure_shape(tf.identity(everyone), [world.size, len(numbers)])
    first = 2 + len(kinds)
    weights, rows = everyone[:, 0], tf.cast(everyone[:, 2:first], tf.int64)
    seen = tf.minimum(rows, 0)
    differ = tf.reduce_any(tf.not_equal(seen, seen[0]), axis=0)
    checks = [
        tf.debugging.Assert(
            tf.logical_not(tf.reduce_any(differ)),
            [
                "tf_basis: ranks have gradients of different kinds for their variables "
                f"({name}): every rank must have a dense gradient, IndexedSlices or "
                "none for the same variables. They differ for",
                tf.boolean_mask(tf.constant(list(paths), tf.string), differ),
                f"and are on each rank, of 0 to {world.size - 1} ({_DENSE}: dense, "
                f"{_NONE}: none, 0 or more: rows):",
                tf.boolean_mask(rows, differ, axis=1),
            ],
            summarize=64,
        ),
        tf.debugging.Assert(
            tf.reduce_all((weights >= 0) & tf.math.is_finite(weights)),
            [
                "tf_basis: weight (an optimizer's step_weight) must be a finite "
                f"number of at least 0 on every rank ({name}), received of each rank:",
                weights,
            ],
            summarize=64,
        ),
    ]
    with tf.control_dependencies([c for c in checks if c is not None]):
        total = tf.reduce_sum(weights)
        go = tf.equal(tf.reduce_sum(everyone[:, 1]), 0) & (total > 0)
    factor = tf.math.divide_no_nan(weight * world.size, total)
    return Control(
        go=go,
        factor=tf.cast(factor, tf.float32),
        rows=rows,
        extras=everyone[:, first:],
    )


def before_step(
    world: World,
    name: str,
    paths: Sequence[str],
    gradients: Sequence[Any],
    watch: Watch,
    weight: Any = 1.0,
    factor: float = 1.0,
    extras: Sequence[tf.Tensor] = (),
) -> tuple[list, Control]:
    """Sums and weighs this rank's gradients, and tells all ranks of them.

    Args:
      world: the ranks.
      name: names the collective.
      paths: of the variables; the same on all ranks.
      gradients: tensors, IndexedSlices or None, one for each variable.
      watch: see `exchange`.
      weight: see `exchange`.
      factor: by which gradients are multiplied, beside `Control.factor`.
      extras: see `exchange`.

    Returns:
      The gradients, duplicate rows summed, times the factors; and what all ranks know.
    """
    gradients = [
        rows.summed(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients
    ]
    unusable, kinds = [tf.zeros([], tf.int64)], []
    for gradient in gradients:
        if gradient is None:
            kinds.append(_NONE)
            continue
        sliced = isinstance(gradient, tf.IndexedSlices)
        values = gradient.values if sliced else gradient
        kinds.append(tf.shape(values)[0] if sliced else _DENSE)
        unusable.append(quantize.count_unusable(tf.cast(values, tf.float32)))
    told = exchange(
        world, name, paths, kinds, tf.add_n(unusable), watch, weight, extras
    )
    factor = told.factor * factor
    return [g if g is None else scaled(g, factor) for g in gradients], told


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """`factor` times the gradient; the gradient itself where that is 1."""
    if isinstance(gradient, tf.IndexedSlices):
        values = scaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cond(
        tf.equal(factor, 1),
        lambda: gradient,
        lambda: gradient * tf.cast(factor, gradient.dtype),
    )


def all_ranks(world: World, name: str, flag: tf.Tensor) -> tf.Tensor:
    """Whether a flag holds on every rank; call it on all ranks."""
    return tf.equal(world.total(1.0 - tf.cast(flag, tf.float32), name), 0)


def agree(world: World, name: str, entries: Sequence[str]) -> None:
    """Compares what the ranks are about to do, once, before anything is exchanged.

    Args:
      entries: a line each, in an order that is the same on all ranks.

    Raises:
      ValueError: on every rank, where some entry differs; names entry and ranks.
    """
    everyone = world.objects(list(entries), f"{name}/agreement")
    found = first_difference(everyone)
    if found is not None:
        place, lines = found
        told = "; ".join(f"rank {r}: {line}" for r, line in enumerate(lines[:64]))
        raise ValueError(
            "all ranks must have the same variables, shapes, types and policies "
            f"in the same order ({name}), received in place {place}: {told}"
        )


def first_difference(
    everyone: Sequence[Sequence[str]],
) -> tuple[int, list[str]] | None:
    """The first place where not all lists have the same, and what each has there."""
    for place in range(max(map(len, everyone))):
        entries = [e[place] if place < len(e) else "nothing" for e in everyone]
        if len(set(entries)) > 1:
            return place, entries
    return None
