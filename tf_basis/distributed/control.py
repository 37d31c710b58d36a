"""What ranks tell each other before a step: one small gather, the same on all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.distributed import quantize, rows
from tf_basis.distributed.world import World


class Control(NamedTuple):
    """What all ranks know of a step after `exchange`; equal on all but `factor`.

    Attributes:
      go: whether the step is taken: every gradient is finite, some rank has data.
      factor: by what this rank multiplies its gradients so that the plain mean over
        ranks is the mean weighted by `weight`; float32, 1 where weights are equal.
      rows: int64, shape [ranks, tables].
      extras: float64, shape [ranks, extras].
    """

    go: tf.Tensor
    factor: tf.Tensor
    rows: tf.Tensor
    extras: tf.Tensor


def exchange(
    world: World,
    name: str,
    unusable: tf.Tensor,
    weight: Any = 1.0,
    pattern: Sequence[str] = (),
    row_counts: Sequence[tf.Tensor] = (),
    extras: Sequence[tf.Tensor] = (),
) -> Control:
    """Tells all ranks what this one has; call it on all ranks.

    Args:
      world: the ranks.
      name: names the collective.
      unusable: how many elements of this rank's gradients are not finite.
      weight: of this rank's gradients in the mean, such as its number of examples; 0
        where it has no data.
      pattern: "path: kind of gradient" for each variable; must be equal on all ranks.
      row_counts: how many rows of each table.
      extras: further numbers.

    Raises (all ranks, when the step runs):
      tf.errors.InvalidArgumentError: the patterns differ; a weight is below 0.
    """
    weight = tf.cast(weight, tf.float64)
    digest = float(zlib.crc32("\n".join(pattern).encode()))
    mine = tf.stack(
        [weight, tf.cast(unusable, tf.float64), tf.constant(digest, tf.float64)]
        + [tf.cast(r, tf.float64) for r in row_counts]
        + [tf.cast(e, tf.float64) for e in extras]
    )
    everyone = world.gather(mine[tf.newaxis], f"{name}/control")
    everyone = tf.ensure_shape(everyone, [world.size, mine.shape[0]])
    weights, digests = everyone[:, 0], everyone[:, 2]
    checks = [
        tf.debugging.Assert(
            tf.reduce_all(tf.equal(digests, digests[0])),
            [
                "tf_basis: ranks have gradients of different kinds for their variables "
                f"({name}): every rank must have a dense gradient, IndexedSlices or "
                "none for the same variables. Checksum of each rank:",
                digests,
                f"here (rank {world.rank}): {'; '.join(pattern)}",
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
    first = 3 + len(row_counts)
    return Control(
        go=go,
        factor=tf.cast(factor, tf.float32),
        rows=tf.cast(everyone[:, 3:first], tf.int64),
        extras=everyone[:, first:],
    )


def before_step(
    world: World,
    name: str,
    paths: Sequence[str],
    gradients: Sequence[Any],
    start: Sequence[tf.Tensor],
    weight: Any = 1.0,
    extras: Sequence[tf.Tensor] = (),
) -> tuple[list, Control]:
    """Sums the rows of IndexedSlices, and tells all ranks of this rank's gradients.

    Args:
      world: the ranks.
      name: names the collective.
      paths: of the variables; the same on all ranks.
      gradients: tensors, IndexedSlices or None, one for each variable.
      start: what has to be done first.
      weight: see `exchange`.
      extras: see `exchange`.

    Returns:
      The gradients, and what all ranks know.
    """
    sliced = [isinstance(g, tf.IndexedSlices) for g in gradients]
    gradients = [rows.summed(g) if s else g for g, s in zip(gradients, sliced)]
    values = [g.values if s else g for g, s in zip(gradients, sliced)]
    with tf.control_dependencies(start):
        unusable = tf.add_n(
            [tf.zeros([], tf.int64)]
            + [
                quantize.count_unusable(tf.cast(v, tf.float32))
                for v in values
                if v is not None
            ]
        )
    told = exchange(
        world,
        name,
        unusable,
        weight=weight,
        pattern=[
            f"{path}: {'none' if g is None else 'IndexedSlices' if s else 'dense'}"
            for path, g, s in zip(paths, gradients, sliced)
        ],
        # Of all variables, so that ranks that disagree send as many numbers.
        row_counts=[tf.shape(v)[0] if s else 0 for v, s in zip(values, sliced)],
        extras=extras,
    )
    return gradients, told


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
    longest = max(map(len, everyone))
    for i in range(longest):
        lines = [e[i] if i < len(e) else "nothing" for e in everyone]
        if len(set(lines)) > 1:
            told = "; ".join(f"rank {r}: {line}" for r, line in enumerate(lines[:64]))
            raise ValueError(
                "all ranks must have the same variables, shapes, types and policies "
                f"in the same order ({name}), received in place {i}: {told}"
            )
