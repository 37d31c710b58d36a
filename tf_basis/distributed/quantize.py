"""Vectors as messages of 1 or 2 bits an element, and what the bits cannot say.

A vector of n float32 is cut into blocks of `block` elements; the last may be short.
Its message is, block after block, the scales and then the packed codes:

1 bit   one scale s = mean |u|; then a bit for each element, 1 where u >= 0.
        The element stands for +s or -s.
2 bits  two scales: the means of |u| below mean |u| (lo) and at or above it (hi), 0
        where there are none; then two bits for each element: the low one 1 where
        u >= 0, the high one 1 where |u| >= mean |u|. It stands for +-lo or +-hi.

Scales are little-endian float32, of sums in float64. Code i of a block begins at bit
`i * bits` of its bytes, lowest bits first; bits past the end are 0. A block of zeros
has the scale 0 and stays zero.

Nothing is lost: `quantize` and `average` keep the difference in a variable, the
residual, and add it to what comes next (error feedback). Both run as one C++ op that
goes over memory once, or in plain TensorFlow (`TF_BASIS_OPS`).

Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis.ops import quantize_ops
from tf_basis.rules import quantize as rule

WIDTHS = (1, 2)


def message_bytes(elements: int, *, bits: int, block: int) -> int:
    """Bytes of a message.

    Args:
      elements: n, the elements of the vector, 0 or more.
      bits: an element, 1 or 2.
      block: elements that share their scales; a multiple of 8.

    Returns:
      `4 * bits` for each block and `bits` bits for each element, in whole bytes.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> message_bytes(25_000_000, bits=1, block=2048) / (4 * 25_000_000)
    0.03173832
    """
    _check_format(bits, block)
    return rule.message_bytes(_checked_count("elements", elements, 0), bits, block)


def quantize(
    residual: tf.Variable,
    values: tf.Tensor | Sequence[tf.Tensor],
    *,
    bits: int,
    block: int,
    clip_value: float | None = None,
    momentum: tf.Variable | None = None,
    beta: float = 0.0,
    scales: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Quantises values and what was left over before, and keeps what is left now::

        u = clip(values + residual, -clip_value, clip_value)
        message = quantised u, stands for q
        residual <- u - q

    With a momentum m, u = clip(beta * m + (1 - beta) * values + residual, ...).

    Args:
      residual: float32 [n] variable, changed in place.
      values: float32 [n], or a list of tensors of any shape that make it.
      bits: of an element, 1 or 2.
      block: elements that share their scales; a multiple of 8.
      clip_value: largest magnitude of u, above 0; what exceeds it is dropped.
        Default None: no limit.
      momentum: float32 [n] variable, only read. Default None.
      beta: of the momentum.
      scales: float32, `bits` of them for each block, to be used instead of those of u;
        with two bits magnitudes take the nearer one. Default None: those of u.

    Returns:
      The message, uint8 [`message_bytes(n)`], and the number of elements that were
      clipped, int64.

    Raises:
      ValueError: an argument breaks its rule.
      tf.errors.InvalidArgumentError: `values` has not n elements; nothing has been
        changed.

    Example:

    >>> residual = tf.Variable([0.0, 0.0, 0.0])
    >>> message, _ = quantize(residual, tf.constant([3., -1., 2.]), bits=1, block=8)
    >>> residual.numpy()
    array([1., 1., 0.], dtype=float32)
    >>> dequantize(message, 3, bits=1, block=8).numpy()
    array([ 2., -2.,  2.], dtype=float32)
    """
    _check_format(bits, block)
    elements = _elements_of(residual, "residual")
    if momentum is not None:
        check_vector("momentum", momentum, elements)
    if clip_value is not None:
        clip_value = _checked_clip_value(clip_value)
    if not isinstance(values, (list, tuple)):
        values = [values]
    pieces = [tf.convert_to_tensor(v, tf.float32) for v in values]
    message, clipped = quantize_ops.quantize(
        residual, pieces, bits, block, clip_value, momentum, beta, scales
    )
    return _of_length(message, rule.message_bytes(elements, bits, block)), clipped


def average(
    residual: tf.Variable,
    messages: tf.Tensor,
    *,
    workers: int,
    bits: int,
    block: int,
    scales: tf.Tensor | None = None,
) -> tf.Tensor:
    """Averages the messages of all workers and quantises the mean::

        u = (q of worker 0 + q of worker 1 + ...) / workers + residual
        message = quantised u, stands for q
        residual <- u - q

    Args:
      residual: float32 [n] variable, changed in place. n may be 0.
      messages: uint8, the workers' messages of n elements each, one after the other.
      workers: how many, at least 1.
      bits: of an element, 1 or 2, in and out.
      block: elements that share their scales; a multiple of 8.
      scales: see `quantize`.

    Returns:
      The message, uint8 [`message_bytes(n)`].

    Raises:
      ValueError: an argument breaks its rule.
      tf.errors.InvalidArgumentError: `messages` has not the length of that many
        messages; nothing has been changed.

    Example:

    >>> residual = tf.Variable([0.0, 0.0])
    >>> message = tf.constant([0, 0, 128, 63, 0b01], tf.uint8)  # 1, -1
    >>> average(residual, message, workers=1, bits=1, block=8).numpy()
    array([  0,   0, 128,  63,   1], dtype=uint8)
    """
    _check_format(bits, block)
    elements = _elements_of(residual, "residual")
    workers = _checked_count("workers", workers, 1)
    messages = tf.convert_to_tensor(messages, tf.uint8)
    message = quantize_ops.average(residual, messages, workers, bits, block, scales)
    return _of_length(message, rule.message_bytes(elements, bits, block))


def dequantize(
    message: tf.Tensor, elements: int, *, bits: int, block: int
) -> tf.Tensor:
    """What a message stands for.

    Args:
      message: uint8 [`message_bytes(elements)`].
      elements: n, 0 or more.
      bits: of an element, 1 or 2.
      block: elements that share their scales; a multiple of 8.

    Returns:
      float32 [n].

    Raises:
      ValueError: an argument breaks its rule.
      tf.errors.InvalidArgumentError: the message has another length.

    Example:

    >>> message = tf.constant([0, 0, 128, 63, 0b01], tf.uint8)
    >>> dequantize(message, 2, bits=1, block=8).numpy()
    array([ 1., -1.], dtype=float32)
    """
    _check_format(bits, block)
    elements = _checked_count("elements", elements, 0)
    message = tf.convert_to_tensor(message, tf.uint8)
    return _of_length(quantize_ops.dequantize(message, elements, bits, block), elements)


def statistics(
    residual: tf.Variable, message: tf.Tensor, *, bits: int, block: int
) -> tf.Tensor:
    """How well a message says what was quantised.

    Args:
      residual: float32 [n] variable as `quantize` left it, u - q.
      message: what `quantize` returned; it stands for q.
      bits: of an element, 1 or 2.
      block: elements that share their scales; a multiple of 8.

    Returns:
      float64 [3]: the sums over all elements of u, of u^2 and of (u - q)^2.

    Raises:
      ValueError: an argument breaks its rule.
      tf.errors.InvalidArgumentError: the message has another length.

    Example:

    >>> residual = tf.Variable([0.0, 0.0])
    >>> message, _ = quantize(residual, tf.constant([3., -1.]), bits=1, block=8)
    >>> statistics(residual, message, bits=1, block=8).numpy()
    array([ 2., 10.,  2.])
    """
    _check_format(bits, block)
    _elements_of(residual, "residual")
    message = tf.convert_to_tensor(message, tf.uint8)
    return quantize_ops.statistics(residual, message, bits, block)


def count_unusable(values: tf.Tensor) -> tf.Tensor:
    """How many elements are NaN, infinite or of a magnitude above 1e37.

    Such a value would spoil its block, and stay in the residual for ever.

    Args:
      values: float32, of any shape.

    Returns:
      int64.

    Example:

    >>> int(count_unusable(tf.constant([1.0, float("nan"), -2e37])))
    2
    """
    return quantize_ops.count_unusable(tf.convert_to_tensor(values, tf.float32))


def _check_format(bits: Any, block: Any) -> None:
    if (
        type(bits) is bool
        or not isinstance(bits, numbers.Integral)
        or bits not in WIDTHS
    ):
        raise ValueError(f"bits must be one of {WIDTHS}, received {bits!r}")
    if _checked_count("block", block, 8) % rule.BITS_PER_BYTE:
        raise ValueError(f"block must be a multiple of 8, received {block!r}")


def _checked_count(name: str, value: Any, least: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or value < least
    ):
        raise ValueError(
            f"{name} must be an integer of at least {least}, received {value!r}"
        )
    return int(value)


def _checked_clip_value(value: Any) -> float:
    """The float32 that both the op and its twin compare with."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
        if 0 < rounded < math.inf:
            return rounded
    raise ValueError(
        f"clip_value must be None or a float32 above 0, received {value!r}"
    )


def _elements_of(variable: Any, name: str) -> int:
    """The length of a variable that the ops take."""
    if not isinstance(variable, tf.Variable):
        raise ValueError(
            f"{name} must be a tf.Variable, received {type(variable).__name__} of "
            f"shape {getattr(variable, 'shape', None)}"
        )
    if variable.dtype != tf.float32 or variable.shape.rank != 1:
        raise ValueError(
            f"{name} must be a float32 variable of rank 1, received "
            f"{variable.dtype.name} of shape {variable.shape}"
        )
    if variable.shape[0] is None:
        raise ValueError(f"{name} must have a known length, received shape (None,)")
    return variable.shape[0]


def check_vector(name: str, variable: Any, elements: int) -> None:
    """Raises ValueError unless it is a float32 variable of shape [elements]."""
    if _elements_of(variable, name) != elements:
        raise ValueError(
            f"{name} must have {elements} elements, received {variable.shape[0]}"
        )


def _of_length(tensor: tf.Tensor, length: int) -> tf.Tensor:
    """The tensor, its length known to whoever traces a function with it."""
    tensor.set_shape([length])
    return tensor
