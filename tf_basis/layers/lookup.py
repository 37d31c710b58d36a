"""From the inputs of a feature to ids in one row, and from their vectors back."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.layers.config import FeatureConfig


class Ids(NamedTuple):
    """The ids of a feature, one after the other.

    Attributes:
      values: int, shape [M].
      examples: the example of each id, int64, shape [M], ascending; None where ids are
        not combined, or each example has the same number of them.
      weights: float32, shape [M], or None.
      shape: of the ids, as a tensor; of examples and their ids with `examples` None.
      places: where a mask is set, int64, shape [M, rank], if ids are not combined.
    """

    values: tf.Tensor
    examples: tf.Tensor | None
    weights: tf.Tensor | None
    shape: tf.Tensor
    places: tf.Tensor | None = None


def ids_of(feature: FeatureConfig, ids: Any, weights: Any, mask: Any) -> Ids:
    """Checks what a feature is given, and takes it apart.

    Raises:
      ValueError: the kind, type or rank of ids, weights or mask is wrong.
      tf.errors.InvalidArgumentError: when it runs: an id is outside of the table, a
        weight is not finite, or they are of different shapes.
    """
    kind = _kind_of(ids)
    if kind == "dense":
        try:
            ids = tf.convert_to_tensor(ids)
        except (TypeError, ValueError):
            raise ValueError(
                f"{_of(feature)} must be integers, received {reprlib.repr(ids)}"
            ) from None
    if not ids.dtype.is_integer:
        raise ValueError(f"{_of(feature)} must be integers, received {ids.dtype.name}")
    rank = len(feature.input_shape)
    rigid = kind == "dense" and mask is None  # others have any number for an example
    if (ids.shape.rank is not None and ids.shape.rank != rank) or (
        rigid and not ids.shape.is_compatible_with(feature.input_shape)
    ):
        raise ValueError(
            f"{_of(feature)} must have the shape {feature.input_shape}, received "
            f"{ids.shape}"
        )
    if weights is not None:
        weights = _weights(feature, kind, ids, weights)
    if kind != "dense":
        if mask is not None or not feature.combined or rank != 2:
            what = "a mask" if mask is not None else f"shape {feature.input_shape}"
            raise ValueError(
                f"{_of(feature)} must be dense with {what}, received a {kind} tensor"
            )
        ragged = kind == "ragged"
        examples = ids.value_rowids() if ragged else ids.indices[:, 0]
        count = ids.nrows() if ragged else ids.dense_shape[0]
        examples = tf.cast(examples, tf.int64)
        if not ragged:
            examples = _within(feature, examples, count)
        found = Ids(ids.values, examples, weights, count[None])
    elif mask is not None:
        found = _unmasked(feature, ids, weights, mask)
    else:
        ids = _of_shape(feature, ids)
        flat = None if weights is None else tf.reshape(weights, [-1])
        found = Ids(tf.reshape(ids, [-1]), None, flat, tf.shape(ids))
    return _checked(feature, found)


def combine(feature: FeatureConfig, ids: Ids, vectors: tf.Tensor) -> tf.Tensor:
    """The output of a feature from the vectors of its ids, shape [M, d]."""
    dim = feature.table.embedding_dim
    weights = ids.weights
    if weights is not None:
        weights = tf.cast(weights, vectors.dtype)[:, None]
        vectors *= weights
    elif ids.examples is not None and feature.table.combiner != "sum":
        weights = tf.ones_like(vectors[:, :1])
    if not feature.combined:
        shape = tf.concat([ids.shape, [dim]], 0)
        if ids.places is None:
            return tf.reshape(vectors, shape)
        return tf.scatter_nd(ids.places, vectors, tf.cast(shape, tf.int64))
    if ids.examples is None:
        lead, count = ids.shape[:-1], ids.shape[-1]

        def total(x: tf.Tensor) -> tf.Tensor:
            width = x.shape[1]
            parts = tf.reshape(x, tf.concat([lead, [count, width]], 0))
            return tf.reduce_sum(parts, axis=-2)

    else:
        examples = ids.examples

        def total(x: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(x, examples, ids.shape[0])

    result = total(vectors)
    if feature.table.combiner == "sum":
        return result
    if weights is None:  # as many ids for each example
        number = tf.cast(ids.shape[-1], vectors.dtype)
        mean = feature.table.combiner == "mean"
        return tf.math.divide_no_nan(result, number if mean else tf.sqrt(number))
    if feature.table.combiner == "mean":
        return tf.math.divide_no_nan(result, total(weights))
    return tf.math.divide_no_nan(result, tf.sqrt(total(tf.square(weights))))


def _kind_of(ids: Any) -> str:
    if isinstance(ids, tf.RaggedTensor):
        return "ragged"
    return "sparse" if isinstance(ids, tf.SparseTensor) else "dense"


def _of(feature: FeatureConfig) -> str:
    return f"feature '{feature.name}': ids"


def _weights(feature: FeatureConfig, kind: str, ids: Any, weights: Any) -> tf.Tensor:
    """Of the shape of the ids: dense as they are, else the values alone."""
    if not feature.combined and kind == "dense":
        raise ValueError(
            f"feature '{feature.name}': weights must be None where ids are not "
            f"combined, received {weights!r}"
        )
    if _kind_of(weights) != kind:
        raise ValueError(
            f"feature '{feature.name}': weights must be {kind} as its ids are, "
            f"received {weights!r}"
        )
    if kind == "dense":
        weights = tf.convert_to_tensor(weights)
        if not weights.shape.is_compatible_with(ids.shape):
            raise ValueError(
                f"feature '{feature.name}': weights must have the shape {ids.shape} of "
                f"its ids, received {weights.shape}"
            )
        ours, theirs = tf.shape(weights), tf.shape(ids)
    elif kind == "ragged":
        ours, theirs = weights.row_splits, ids.row_splits
        weights = weights.values
    else:
        ours, theirs = weights.indices, ids.indices
        weights = weights.values
    if not weights.dtype.is_floating:
        if not (weights.dtype.is_integer or weights.dtype.is_bool):
            raise ValueError(
                f"feature '{feature.name}': weights must be numbers, received "
                f"{weights.dtype.name}"
            )
        weights = tf.cast(weights, tf.float32)
    same = tf.reduce_all(tf.equal(tf.shape(ours), tf.shape(theirs)))
    alike = tf.cond(
        same, lambda: tf.reduce_all(tf.equal(ours, theirs)), lambda: tf.constant(False)
    )
    words = f"feature '{feature.name}': weights must be where its ids are"
    with tf.control_dependencies([_assert(alike, [words])]):
        return tf.identity(weights)


def _unmasked(feature: FeatureConfig, ids, weights, mask) -> Ids:
    """Ids where the mask is set; the others are not looked up, nor updated."""
    mask = tf.convert_to_tensor(mask)
    if mask.dtype != tf.bool or not mask.shape.is_compatible_with(ids.shape):
        raise ValueError(
            f"feature '{feature.name}': mask must be boolean, of the shape {ids.shape} "
            f"of its ids, received {mask.dtype.name} {mask.shape}"
        )
    if feature.combined and len(feature.input_shape) != 2:
        raise ValueError(
            f"feature '{feature.name}': mask must be None with the input_shape "
            f"{feature.input_shape}, received {mask!r}"
        )
    places = tf.where(mask)
    if not feature.combined:
        return Ids(tf.gather_nd(ids, places), None, None, tf.shape(ids), places)
    chosen = None if weights is None else tf.gather_nd(weights, places)
    count = tf.shape(ids, tf.int64)[:1]
    return Ids(tf.gather_nd(ids, places), places[:, 0], chosen, count)


def _of_shape(feature: FeatureConfig, ids: tf.Tensor) -> tf.Tensor:
    """Dense ids; when it runs, of the `input_shape`, where the trace did not know."""
    shape = feature.input_shape
    words = f"{_of(feature)} must have the shape {shape}, received"
    if ids.shape.rank is None:
        good = tf.equal(tf.rank(ids), len(shape))
        with tf.control_dependencies([_assert(good, [words, tf.shape(ids)])]):
            ids = tf.identity(ids)
        ids.set_shape([None] * len(shape))
    places = [i for i, n in enumerate(shape) if i and n is not None]
    if not places or ids.shape[1:].is_fully_defined():
        return ids
    sizes = tf.gather(tf.shape(ids), places)
    good = tf.reduce_all(sizes == [shape[i] for i in places])
    with tf.control_dependencies([_assert(good, [words, tf.shape(ids)])]):
        return tf.identity(ids)


def _within(feature: FeatureConfig, examples: tf.Tensor, count: Any) -> tf.Tensor:
    """The examples of sparse ids, which are in [0, count)."""
    good = tf.reduce_all((examples >= 0) & (examples < count))
    words = f"{_of(feature)} must be of examples in [0, dense_shape[0]), received"
    with tf.control_dependencies([_assert(good, [words, examples])]):
        return tf.identity(examples)


def same_examples(found: Mapping[str, Ids]) -> tf.Operation:
    """Fails when it runs where features have different numbers of examples."""
    counts = tf.stack([tf.cast(ids.shape[0], tf.int64) for ids in found.values()])
    words = f"features {list(found)} must have as many examples each, received"
    return _assert(tf.reduce_all(counts == counts[0]), [words, counts])


def _checked(feature: FeatureConfig, ids: Ids) -> Ids:
    size = tf.constant(feature.table.vocabulary_size, ids.values.dtype)
    outside = (ids.values < 0) | (ids.values >= size)
    checks = [
        _assert(
            tf.logical_not(tf.reduce_any(outside)),
            [
                f"{_of(feature)} must be in [0, {feature.table.vocabulary_size}), "
                "received",
                tf.boolean_mask(ids.values, outside)[:8],
            ],
        )
    ]
    if ids.weights is not None:
        finite = tf.reduce_all(tf.math.is_finite(ids.weights))
        words = f"feature '{feature.name}': weights must be finite, received"
        checks.append(_assert(finite, [words, ids.weights]))
    with tf.control_dependencies([c for c in checks if c is not None]):
        return ids._replace(values=tf.identity(ids.values))


def _assert(condition: tf.Tensor, words: list) -> Any:
    made = tf.debugging.Assert(condition, words, summarize=8)
    return tf.no_op() if made is None else made
