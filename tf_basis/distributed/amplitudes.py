"""Scales of blocks that travel every k-th exchange and are remembered between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_basis.distributed.world import World
from tf_basis.ops import packing_ops
from tf_basis.rules import quantize as rule


class Amplitudes:
    """What a rank has to remember so that a message can do without its scales.

    In between, a rank quantises with the scales it sent last; whoever receives codes
    alone takes the scales it heard last. All ranks send scales in the same exchange.
    The variables are of this rank alone; where the ranks become others they start anew.

    Args:
      owned: how many elements each rank owns.
      world: the ranks.
      bits: of an element.
      block: elements that share their scales.

    Attributes:
      sent: of this rank's own messages, float32.
      heard: of all ranks' messages to this one, in rank order.
      mean: of the messages of all owners, equal on all ranks.
      traffic: bytes of scales that were sent, and of what they were before they were
        deflated; float64, shape [2].
    """

    def __init__(
        self, owned: Sequence[int], world: World, bits: int, block: int
    ) -> None:
        self.world, self.form = world, {"bits": bits, "block": block}
        self.owned = list(owned)
        with tf.init_scope():
            self.sent = self._zeros(sum(owned))
            self.heard = self.mean = None
            if world.size > 1:
                self.heard = self._zeros(owned[world.rank], world.size)
                self.mean = self._zeros(sum(owned))
            self.traffic = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False)

    def _zeros(self, elements: int, times: int = 1) -> tf.Variable:
        count = times * rule.scale_count(elements, **self.form)
        return tf.Variable(tf.zeros([count]), trainable=False, name="scales")

    @property
    def variables(self) -> list[tf.Variable]:
        """What is remembered."""
        return [v for v in (self.sent, self.heard, self.mean) if v is not None]

    def choose(
        self, fresh: tf.Tensor, scales: tf.Tensor, quantise: Callable[..., tf.Tensor]
    ) -> tf.Tensor:
        """`quantise(None)` where scales are `fresh`, else `quantise(scales)`."""
        return tf.cond(fresh, lambda: quantise(None), lambda: quantise(scales))

    def own_mean(self) -> tf.Tensor:
        """The scales of the messages that this rank sent to all."""
        before = [rule.scale_count(n, **self.form) for n in self.owned]
        start = sum(before[: self.world.rank])
        return self.mean[start : start + before[self.world.rank]]

    def remember(self, message: tf.Tensor) -> None:
        """On one rank: nothing is sent, but the scales stay all the same."""
        scales, _ = rule.split(message, sum(self.owned), **self.form)
        self.sent.assign(scales)

    def scatter(self, message: tf.Tensor, fresh: tf.Tensor, name: str) -> tf.Tensor:
        """Every rank's message for the blocks that this one owns."""
        packed, sizes, scales = packing_ops.pack(
            message, fresh, self.owned, **self.form
        )
        self.sent.assign(scales)
        self._count(sizes, self.owned, fresh)
        received = self.world.scatter(packed, sizes, name)
        mine = [self.owned[self.world.rank]] * self.world.size
        messages, heard = packing_ops.unpack(received, self.heard, mine, **self.form)
        self.heard.assign(heard)
        return messages

    def gather(self, message: tf.Tensor, fresh: tf.Tensor, name: str) -> tf.Tensor:
        """The messages of all owners."""
        mine = [self.owned[self.world.rank]]
        packed, sizes, _ = packing_ops.pack(message, fresh, mine, **self.form)
        self._count(sizes, mine, fresh)
        everything = self.world.gather(packed, name)
        messages, mean = packing_ops.unpack(
            everything, self.mean, self.owned, **self.form
        )
        self.mean.assign(mean)
        return messages

    def _count(
        self, sizes: tf.Tensor, elements: Sequence[int], fresh: tf.Tensor
    ) -> None:
        scales = sum(rule.scale_count(n, **self.form) for n in elements)
        codes = sum(rule.code_bytes(n, **self.form) for n in elements)
        sent = tf.reduce_sum(sizes) - codes - packing_ops.HEADER * len(elements)
        plain = rule.SCALE_BYTES * scales * tf.cast(fresh, tf.int32)
        self.traffic.assign_add(tf.cast(tf.stack([sent, plain]), tf.float64))
