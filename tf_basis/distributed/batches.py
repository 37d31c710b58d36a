"""Datasets whose ranks have batches of different sizes, or fewer of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed import watch
from tf_basis.distributed.world import World, unique_name


def even_batches(
    dataset: tf.data.Dataset,
    *,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> tf.data.Dataset:
    r"""Gives all ranks the same number of steps, and every example the same weight.

    In step t rank i has n_i examples of N_t = Σ n_i. Its examples get the sample weight
    n_i·W/N_t, so that the plain mean over the W ranks of the ranks' mean losses is the
    mean over all N_t examples. A rank without data repeats its last batch with
    weight 0 until every rank is done: nothing waits, and `fit` ends on all ranks at
    once.

    The ranks tell each other their batch sizes here, once; call it on all ranks. For
    that the dataset is read through once: it must give batches of the same sizes
    every time. Losses must use sample weights and the default reduction, the mean over
    the batch.

    Args:
      dataset: batches of (x, y) or (x, y, sample_weight), the examples along the first
        axis.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Returns:
      Batches of (x, y, sample_weight), with float32 weights of shape [n].

    Raises:
      ValueError: it is no dataset; or on every rank: some rank's has no end, no batch,
        batches that are not such tuples, or examples of another structure or type.

    Example:

    >>> data = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [0.0, 1.0])).batch(2)
    >>> [w.numpy().tolist() for _, _, w in even_batches(data)]
    [[1.0, 1.0]]
    """
    hyperparameters.check("timeout", timeout, watch.TIMEOUT_RULE)
    world = World(process_set)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"dataset must be a tf.data.Dataset, received {dataset!r}")
    structure = dataset.element_spec
    fits = isinstance(structure, tuple) and len(structure) in (2, 3)
    fits = fits and all(_has_examples(p) for p in tf.nest.flatten(structure))
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        fits, structure = False, f"an endless dataset of {structure}"
    sizes = []
    if fits:
        sizes = [
            int(n)
            for n in dataset.map(lambda *batch: _length(batch)).as_numpy_iterator()
        ]
    mine = (fits, _described(structure), sizes)
    name = unique_name("batches")
    with watch.watched(world, name, timeout):
        everyone = world.objects(mine, name)
    for rank, (good, theirs, batches) in enumerate(everyone):
        if not good or not batches:
            raise ValueError(
                "dataset must have at least one batch of (x, y) or (x, y, "
                f"sample_weight) on every rank, received {len(batches)} batches of "
                f"{theirs} on rank {rank}"
            )
        if theirs != everyone[0][1]:
            raise ValueError(
                "dataset must have batches of one structure on all ranks, received "
                f"{theirs} on rank {rank} and {everyone[0][1]} on rank 0"
            )
    steps = max(len(s) for _, _, s in everyone)
    table = np.zeros([world.size, steps])
    for rank, (_, _, s) in enumerate(everyone):
        table[rank, : len(s)] = s
    factors = table[world.rank] * world.size / table.sum(axis=0)
    endless = dataset
    if len(sizes) < steps:
        last = dataset.skip(len(sizes) - 1)
        endless = dataset.concatenate(last.repeat(steps - len(sizes)))
    weights = tf.data.Dataset.from_tensor_slices(factors.astype(np.float32))
    return tf.data.Dataset.zip((endless, weights)).map(_weighted)


def any_rank(
    flag: Any,
    world: World | None = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> bool:
    """Whether `flag` holds on some rank; call it on all ranks, outside graphs.

    For loops of your own in which ranks may run out of data: a rank without any goes on
    with weight 0 as long as some other has.

    Args:
      flag: a boolean.
      world: the ranks. Default: all.
      timeout: see `even_batches`.

    Raises:
      ValueError: it is none.

    Example:

    >>> any_rank(False)
    False
    """
    if np.ndim(flag) != 0:
        raise ValueError(f"flag must be True or False, received {flag!r}")
    world, name = world or World(), unique_name("any_rank")
    with watch.watched(world, name, timeout):
        return any(world.objects(bool(flag), name))


def _has_examples(spec: Any) -> bool:
    """Whether it has a first axis, that of the examples."""
    return getattr(spec, "shape", None) is None or spec.shape.rank != 0


def _described(structure: Any) -> str:
    """Structure, types and shapes of the examples; batches may differ in size."""

    def of(spec: Any) -> Any:
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None:
            return str(spec)
        return f"{spec.dtype.name} {['n', *shape[1:]] if shape.rank else 'scalar'}"

    if isinstance(structure, str):
        return structure
    return str(tf.nest.map_structure(of, structure))


def _length(batch: tuple) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0])[0]


def _weighted(batch: tuple, factor: tf.Tensor) -> tuple:
    x, y = batch[:2]
    weights = tf.fill([_length(batch)], factor)
    if len(batch) == 3:
        weights *= tf.cast(batch[2], tf.float32)
    return x, y, weights
