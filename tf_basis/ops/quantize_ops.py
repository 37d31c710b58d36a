"""Quantisation with error feedback: the C++ ops, or their pure-TF twins.

Arguments are checked by `tf_basis.distributed.quantize`, lengths here and in the ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_basis.ops import dispatch
from tf_basis.rules import quantize as rule

UNUSABLE_FROM = 1e37  # sums of a few larger numbers would overflow


def quantize(
    residual: tf.Variable,
    values: Sequence[tf.Tensor],
    bits: int,
    block: int,
    clip_value: float | None,
    momentum: tf.Variable | None = None,
    beta: float = 0.0,
    scales: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `tf_basis.distributed.quantize.quantize`; `values` are pieces of a vector."""
    library = dispatch.library_for_variable(residual)
    if library is not None:
        mix = {} if momentum is None else {"keep": beta, "take": 1 - beta}
        return library.tf_basis_quantize_blocks(
            residual.handle,
            values,
            [] if momentum is None else [momentum.handle],
            [] if scales is None else [scales],
            bits=bits,
            block=block,
            clip_value=clip_value or 0,
            **mix,
        )
    flat = joined(values)
    if momentum is not None:
        # As a difference, for sums of sums would be put in another order in a graph.
        flat = beta * momentum - (beta - 1) * flat
    raw = _checked(flat, residual.shape[0], "values") + residual
    clipped = tf.zeros([], tf.int64)
    u = raw
    if clip_value is not None:
        u = tf.clip_by_value(raw, -clip_value, clip_value)
        clipped = tf.math.count_nonzero(tf.abs(raw) > clip_value)
    return _feed_back(residual, u, bits, block, scales), clipped


def joined(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """The pieces of a vector in one tensor."""
    flat = [tf.reshape(piece, [-1]) for piece in pieces]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def average(
    residual: tf.Variable,
    messages: tf.Tensor,
    workers: int,
    bits: int,
    block: int,
    scales: tf.Tensor | None = None,
) -> tf.Tensor:
    """See `tf_basis.distributed.quantize.average`."""
    library = dispatch.library_for_variable(residual)
    if library is not None:
        return library.tf_basis_average_blocks(
            residual.handle,
            messages,
            [] if scales is None else [scales],
            workers=workers,
            bits=bits,
            block=block,
        )
    elements = residual.shape[0]
    length = rule.message_bytes(elements, bits, block)
    messages = _checked(messages, workers * length, "messages")
    messages = tf.reshape(messages, [workers, length])
    # `add_n` adds in this order, or the bits would differ.
    total = tf.add_n(
        [rule.decode(messages[r], elements, bits, block) for r in range(workers)]
    )
    return _feed_back(residual, total / workers + residual, bits, block, scales)


def dequantize(message: tf.Tensor, elements: int, bits: int, block: int) -> tf.Tensor:
    """See `tf_basis.distributed.quantize.dequantize`."""
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_dequantize_blocks(
            message, tf.constant(elements, tf.int64), bits=bits, block=block
        )
    length = rule.message_bytes(elements, bits, block)
    message = _checked(message, length, "message")
    return rule.decode(message, elements, bits, block)


def dequantize_into(
    values: tf.Variable, message: tf.Tensor, bits: int, block: int
) -> None:
    """Sets the variable to what the message stands for."""
    library = dispatch.library_for_variable(values)
    if library is not None:
        library.tf_basis_dequantize_into(values.handle, message, bits=bits, block=block)
        return
    values.assign(dequantize(message, values.shape[0], bits, block))


def count_unusable(values: tf.Tensor) -> tf.Tensor:
    """See `tf_basis.distributed.quantize.count_unusable`."""
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_count_unusable(values, limit=UNUSABLE_FROM)
    # Not by counting those that are not usable: graphs turn `not a <= b` into `a > b`,
    # which no NaN is.
    usable = tf.math.count_nonzero(tf.abs(values) <= UNUSABLE_FROM)
    return tf.size(values, tf.int64) - usable


def statistics(
    residual: tf.Variable, message: tf.Tensor, bits: int, block: int
) -> tf.Tensor:
    """See `tf_basis.distributed.quantize.statistics`."""
    library = dispatch.library_for_variable(residual)
    if library is not None:
        return library.tf_basis_message_statistics(
            residual.handle, message, bits=bits, block=block
        )
    left = tf.cast(residual, tf.float64)
    q = rule.decode(message, residual.shape[0], bits, block)
    u = tf.cast(q, tf.float64) + left
    sums = [u, tf.square(u), tf.square(left)]
    return tf.stack([tf.reduce_sum(each) for each in sums])


def _feed_back(
    residual: tf.Variable,
    u: tf.Tensor,
    bits: int,
    block: int,
    scales: tf.Tensor | None,
) -> tf.Tensor:
    """The message of u; what it does not say goes to the residual."""
    message, quantized = rule.encode(u, residual.shape[0], bits, block, scales)
    with tf.control_dependencies([message]):
        update = residual.assign(u - quantized, read_value=False)
    with tf.control_dependencies([update] if update is not None else []):
        return tf.identity(message)


def _checked(tensor: tf.Tensor, length: int, name: str) -> tf.Tensor:
    """The tensor, or InvalidArgumentError unless it has the shape [length]."""
    message = f"{name} must have the shape [{length}], received"
    if not tensor.shape.is_compatible_with([length]):
        raise tf.errors.InvalidArgumentError(None, None, f"{message} {tensor.shape}")
    if tensor.shape.is_fully_defined():
        return tensor
    fits = tf.reduce_all(tf.equal(tf.shape(tensor, tf.int64), [length]))
    with tf.control_dependencies(
        [tf.debugging.Assert(fits, [message, tf.shape(tensor)])]
    ):
        return tf.ensure_shape(tensor, [length])
