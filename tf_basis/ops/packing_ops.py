"""Messages as they travel where scales do not go along every time: C++ ops or twins.

Packed, the segment of a message is a byte that says what follows (0: no scales, 1: the
scales, 2: the scales deflated by zlib), four bytes that say how long that is, the
scales in planes (byte 0 of each, byte 1 of each, ...), and the codes. A twin sends and
takes the kinds 0 and 1 only.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_basis.ops import dispatch
from tf_basis.rules import quantize as rule

HEADER = 5
_NONE, _PLAIN = 0, 1


def deflates() -> bool:
    """Whether scales may be deflated here."""
    return dispatch.library_for_tensors() is not None


def pack(
    message: tf.Tensor,
    with_scales: tf.Tensor,
    elements: Sequence[int],
    bits: int,
    block: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Messages of so many elements each, one after the other, made shorter.

    Args:
      message: uint8.
      with_scales: whether scales go along, a boolean tensor.
      elements: of each segment.
      bits: of an element.
      block: elements that share their scales.

    Returns:
      The bytes; how many are of each segment, int32; all scales, float32.
    """
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_pack_message(
            message, with_scales, elements=list(elements), bits=bits, block=block
        )
    packed, sizes, scales, start = [], [], [], 0
    for count in elements:
        length = rule.message_bytes(count, bits, block)
        part = tf.slice(message, [start], [length])
        found, codes = rule.split(part, count, bits, block)
        planes = tf.reshape(tf.transpose(tf.bitcast(found, tf.uint8)), [-1])
        plain = tf.concat(
            [_header(_PLAIN, rule.SCALE_BYTES * found.shape[0]), planes], 0
        )
        head = tf.cond(with_scales, lambda p=plain: p, lambda: _header(_NONE, 0))
        packed += [head, codes]
        sizes.append(tf.size(head) + tf.size(codes))
        scales.append(found)
        start += length
    return tf.concat(packed, 0), tf.stack(sizes), tf.concat(scales, 0)


def unpack(
    packed: tf.Tensor, known: tf.Tensor, elements: Sequence[int], bits: int, block: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The reverse of `pack`: the message and its scales.

    Args:
      packed: uint8.
      known: float32, the scales where none came along.
      elements: of each segment.
      bits: of an element.
      block: elements that share their scales.

    Raises:
      tf.errors.InvalidArgumentError: the bytes are not such a message.
    """
    library = dispatch.library_for_tensors()
    if library is not None:
        return library.tf_basis_unpack_message(
            packed, known, elements=list(elements), bits=bits, block=block
        )
    messages, scales, start, at = [], [], 0, tf.constant(0)
    for count in elements:
        mine = known[start : start + rule.scale_count(count, bits, block)]
        start += mine.shape[0]
        kind = tf.cast(packed[at], tf.int32)
        told = "scales are deflated: all ranks need the C++ ops, or none; kind"
        check = tf.debugging.Assert(kind <= _PLAIN, [told, kind])
        with tf.control_dependencies([check] if check is not None else []):
            at = at + HEADER
        length = kind * rule.SCALE_BYTES * mine.shape[0]
        sent = packed[at : at + length]

        def came(sent: tf.Tensor = sent) -> tf.Tensor:
            return tf.bitcast(
                tf.transpose(tf.reshape(sent, [rule.SCALE_BYTES, -1])), tf.float32
            )

        found = tf.cond(kind > 0, came, lambda mine=mine: mine)
        found = tf.ensure_shape(found, mine.shape)
        codes = tf.slice(packed, [at + length], [rule.code_bytes(count, bits, block)])
        messages.append(rule.join(found, codes, count, bits, block))
        scales.append(found)
        at = at + length + tf.size(codes)
    return tf.concat(messages, 0), tf.concat(scales, 0)


def _header(kind: int, length: int) -> tf.Tensor:
    return tf.constant([kind, *length.to_bytes(4, "little")], tf.uint8)
