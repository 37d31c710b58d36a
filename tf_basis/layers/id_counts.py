"""Counts ids of any form in one pass, and orders them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

ID_DTYPES = ("string", "int64")
_BATCH = 4096


def as_tensor(data: Any, what: str) -> Any:
    """A tensor, ragged where lists differ in length; composite tensors as they are.

    Raises:
      ValueError: it is none, such as strings among numbers.
    """
    if isinstance(data, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return data
    for convert in (tf.convert_to_tensor, tf.ragged.constant):
        try:
            made = convert(data)
        except (TypeError, ValueError):
            continue
        # Of lists, the first of which is empty, TensorFlow makes an empty tensor.
        if convert is tf.ragged.constant or made.shape.num_elements() != 0:
            return made
    raise ValueError(
        f"{what} must be all strings or all integers, received {reprlib.repr(data)}"
    )


def check_dtype(dtype: Any, id_dtype: str, what: str) -> None:
    """Raises ValueError where ids have another type than the encoder's."""
    dtype = tf.as_dtype(dtype)
    if id_dtype == "string":
        fits, words = dtype == tf.string, "strings"
    else:  # what int64 can hold
        fits, words = dtype.is_integer and dtype != tf.uint64, "integers, not uint64,"
    if not fits:
        raise ValueError(
            f"{what} must be {words} with id_dtype='{id_dtype}', received {dtype.name}"
        )


def typed(values: tf.Tensor, id_dtype: str, what: str) -> tf.Tensor:
    """Ids of any integer type as int64, strings as they are; see `check_dtype`."""
    check_dtype(values.dtype, id_dtype, what)
    return tf.cast(values, tf.int64) if id_dtype == "int64" else values


def as_dataset(data: Any, id_dtype: str, what: str) -> tf.data.Dataset:
    """A finite dataset of tensors of ids, in any form.

    Raises:
      ValueError: `data` is no such thing, or of another type.
    """
    if not isinstance(data, tf.data.Dataset):
        data = as_tensor(data, what)
        if getattr(data, "values", data).shape.num_elements() == 0:
            raise ValueError(f"{what} must hold ids, received none")
        data = tf.data.Dataset.from_tensors(data)
    spec = data.element_spec
    if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        raise ValueError(
            f"{what} must give one tensor of ids at a time, dense, ragged or sparse, "
            f"received elements like {spec}"
        )
    check_dtype(spec.dtype, id_dtype, what)
    if data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"{what} must end, received an infinite dataset: take a part")
    # One id at a time, a pass would take far longer.
    return data.batch(_BATCH) if spec.shape.rank == 0 else data


def count(
    dataset: tf.data.Dataset, key_dtype: str, keys_of: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """The different keys in a dataset, and how often each occurs.

    The pass runs inside tf.data, and holds the different keys only.

    Args:
      dataset: as `as_dataset` gives it.
      key_dtype: of the keys.
      keys_of: from the ids of an element, shape [M], to what is counted, shape [K].

    Returns:
      Keys in no order (strings as bytes), and int64 counts.
    """
    with tf.device("CPU:0"):
        # Anonymous: gone with this function.
        found = tf.lookup.experimental.MutableHashTable(
            key_dtype, tf.int64, 0, experimental_is_anonymous=True
        )

    def add(total: tf.Tensor, element: Any) -> tf.Tensor:
        if isinstance(element, tf.RaggedTensor):
            element = element.flat_values
        elif isinstance(element, tf.SparseTensor):
            element = element.values
        keys = keys_of(tf.reshape(element, [-1]))
        different, _, counts = tf.unique_with_counts(keys, tf.int64)
        found.insert(different, counts + found.lookup(different))
        return total + 1

    dataset.reduce(tf.constant(0, tf.int64), add)
    keys, counts = found.export()
    return keys.numpy(), counts.numpy()


def most_frequent_first(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The order of the keys by count, equal ones by key."""
    order = np.argsort(keys, kind="stable")
    return order[np.argsort(-counts[order], kind="stable")]


def packed(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Ids as arrays of numbers, which all formats of Keras can store."""
    if ids.dtype != object:
        return {"ids": ids}
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return {"bytes": np.frombuffer(b"".join(ids), np.uint8), "lengths": lengths}


def unpacked(stored: Any, what: str) -> np.ndarray:
    """The reverse of `packed`.

    Raises:
      ValueError: what is stored is damaged.
    """
    if "ids" in stored.keys():  # noqa: SIM118 (Keras's stores have keys alone)
        return np.asarray(stored["ids"], np.int64)
    data, lengths = np.asarray(stored["bytes"]).tobytes(), np.asarray(stored["lengths"])
    ends = np.cumsum(lengths)
    if len(data) != (ends[-1] if len(ends) else 0):
        raise ValueError(
            f"{what} must be stored with {ends[-1]} bytes, received {len(data)}"
        )
    ids = np.empty(len(lengths), object)
    ids[:] = [data[end - n : end] for end, n in zip(ends.tolist(), lengths.tolist())]
    return ids
