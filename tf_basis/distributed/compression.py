"""One-bit compression with error feedback: its settings, and Horovod's own hook."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed import quantize, rows
from tf_basis.distributed.channel import Channel, Feedback
from tf_basis.distributed.exchange import RULES as EXCHANGE_RULES
from tf_basis.distributed.exchange import new_variable
from tf_basis.distributed.metadata import AdaptiveBits, AdaptiveRate, checked
from tf_basis.distributed.policy import Policy, Rule, Way
from tf_basis.distributed.world import World, unique_name

RULES = {
    "block": EXCHANGE_RULES["block"],
    "clip_value": EXCHANGE_RULES["clip_value"],
    "reset_interval": hyperparameters.integer(
        "of at least 1", lambda v: v >= 1, optional=True
    ),
    "reset": hyperparameters.choice("flush", "zero"),
    "warmup_steps": hyperparameters.integer("of at least 0", lambda v: v >= 0),
    "sparse_values": hyperparameters.choice(*rows.VALUES),
    "amplitude_interval": EXCHANGE_RULES["amplitude_interval"],
    "statistics": hyperparameters.flag,
    "delay": hyperparameters.integer("of 0 or 1", lambda v: v in (0, 1)),
    "staleness_decay": hyperparameters.real("above 0, at most 1", lambda v: 0 < v <= 1),
}


def check_staleness(delay: int, staleness_decay: float) -> None:
    """Raises ValueError where something is to decay that is never stale."""
    if staleness_decay != 1 and not delay:
        raise ValueError(
            f"staleness_decay must be 1 where delay is 0, received {staleness_decay}"
        )


class _Hook:
    """A method that a class offers too, through one instance with the defaults.

    Horovod is given compression classes: `compression=OneBitCompression`.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            instance = owner._shared()
        return self._function.__get__(instance, owner)


_GRAPHS_OF_CONTROL_FLOW = (
    "CondBranchFuncGraph",
    "WhileBodyFuncGraph",
    "WhileCondFuncGraph",
)


class OneBitCompression:
    """Dense gradients in one bit per element; what a bit cannot say comes later.

    Settings for `DistributedOptimizer` and `DistributedGradientTape` of this package,
    which send all gradients in one exchange (see `OneBitExchange`). Horovod's own
    `DistributedGradientTape` and tf_keras `DistributedOptimizer` take it as
    `compression=` too: an exchange per tensor then, every tensor in one bit. Give
    each of them an instance of its own; the bare class works for one of them.

    Args:
      policy: a `Policy`, or rules for one: which variables travel in how many bits.
        Default: `Policy()`. Horovod's own wrappers know no paths and ignore it.
      block: elements that share a scale, a multiple of 8. Default 2048.
      clip_value: compensated gradients are clipped to ±clip_value before they are
        quantised, and the excess dropped and counted. Default None.
      reset_interval: every so many exchanges the residuals are emptied. Default 2000;
        None: never.
      reset: `"flush"` (default): that exchange is in full precision and takes the
        residuals along, so that nothing is lost; or `"zero"`: they are dropped.
      warmup_steps: so many first exchanges are in full precision. Default 0.
      sparse_values: how values of IndexedSlices travel: `"float32"` (default),
        `"float16"`, or `"1bit"` with a scale per row and no feedback.
      amplitude_interval: scales travel in every so many-th exchange, deflated, and are
        remembered between; see `OneBitExchange`. Default 1.
      statistics: whether each step says how well the bits say the gradients: see
        `quantization_statistics` of an optimizer. Default False.
      adaptive_bits: True or an `AdaptiveBits`: groups of one bit travel in two while
        one says too little. Default None.
      adaptive_rate: True or an `AdaptiveRate`: the learning rate is multiplied by
        1 − the relative error of what is quantised. Default None.
      delay: 1: the gradients of a step are exchanged during the next one and applied at
        its end: dense ones; rows of tables are not delayed, nor are dense gradients of
        embeddings in 16 or 32 bits. Default 0.
      staleness_decay: delayed gradients are multiplied by staleness_decay^delay.
        Default 1.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> OneBitCompression(clip_value=2.0, reset="zero").get_config()["reset"]
    'zero'

    Reference: Seide et al. 2014, "1-bit stochastic gradient descent".
    """

    def __init__(
        self,
        policy: Policy | Iterable[Rule] | None = None,
        *,
        block: int = 2048,
        clip_value: float | None = None,
        reset_interval: int | None = 2000,
        reset: str = "flush",
        warmup_steps: int = 0,
        sparse_values: str = "float32",
        amplitude_interval: int = 1,
        statistics: bool = False,
        adaptive_bits: AdaptiveBits | dict | bool | None = None,
        adaptive_rate: AdaptiveRate | dict | bool | None = None,
        delay: int = 0,
        staleness_decay: float = 1.0,
    ) -> None:
        settings = {
            "block": block,
            "clip_value": clip_value,
            "reset_interval": reset_interval,
            "reset": reset,
            "warmup_steps": warmup_steps,
            "amplitude_interval": amplitude_interval,
            "statistics": statistics,
            "delay": delay,
            "staleness_decay": staleness_decay,
        }
        hyperparameters.check_all({**settings, "sparse_values": sparse_values}, RULES)
        check_staleness(delay, staleness_decay)
        self.policy, self.sparse_values = Policy.of(policy), sparse_values
        self.feedback = Feedback(
            **settings,
            adaptive_bits=checked("adaptive_bits", adaptive_bits, AdaptiveBits),
            adaptive_rate=checked("adaptive_rate", adaptive_rate, AdaptiveRate),
        )
        self._calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._channels: list[tuple[Channel, tf.Variable]] = []

    def get_config(self) -> dict[str, Any]:
        """The arguments, ready for JSON."""
        return {
            "policy": self.policy.get_config(),
            **self.feedback.get_config(),
            "sparse_values": self.sparse_values,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OneBitCompression:
        """The reverse of `get_config`."""
        return cls(**config)

    # ---- Horovod's hook --------------------------------------------------------

    @classmethod
    def _shared(cls) -> OneBitCompression:
        if "_default" not in vars(cls):
            cls._default = cls()
        return cls._default

    @_Hook
    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Performs the whole exchange; Horovod is left a single 1 to reduce.

        NaN throughout, on every rank, where some rank's tensor is not finite.
        """
        channel, steps = self._channel_of(tensor)
        pieces = channel.pieces([tensor])
        unusable = channel.world.total(
            quantize.count_unusable(pieces[0]), f"{channel.name}/unusable"
        )

        def average() -> tf.Tensor:
            mean = channel.mean(pieces, tf.reshape(steps, []))
            steps.assign_add([1])
            return mean

        mean = tf.cond(
            tf.equal(unusable, 0),
            average,
            lambda: tf.fill([channel.elements], float("nan")),
        )
        (mean,) = channel.split(mean)
        return tf.ones([1], tensor.dtype), tf.cast(mean, tensor.dtype)

    @_Hook
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The mean; W times it where Horovod reduces with `op=Sum`."""
        return ctx * tensor[0]

    def _channel_of(self, tensor: tf.Tensor) -> tuple[Channel, tf.Variable]:
        # Tensors are told apart by the order of the calls in a traced function: it is
        # the same when that is traced again, on every rank. Horovod calls from inside
        # a condition, which has a graph of its own. The function is the innermost one:
        # TensorFlow traces one that has made variables again, within the same outer.
        if self.feedback.delay or self.feedback.measures:
            raise ValueError(
                "OneBitCompression must be without delay, statistics, adaptive_bits "
                "and adaptive_rate in Horovod's own wrappers: use those of tf_basis"
            )
        if tf.executing_eagerly():
            raise ValueError(
                "OneBitCompression must be used inside a tf.function: its residuals "
                "belong to the order of the calls there, received an eager tensor"
            )
        graph = tf.compat.v1.get_default_graph()
        while type(graph).__name__ in _GRAPHS_OF_CONTROL_FLOW:
            graph = graph.outer_graph
        number = self._calls[graph] = self._calls.get(graph, -1) + 1
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                "OneBitCompression must be given tensors of a fixed shape, received "
                f"shape {tensor.shape}"
            )
        shape = tuple(tensor.shape)
        if number == len(self._channels):
            name = unique_name("compression")
            channel = Channel(
                [0], [shape], Way(1, 1), self.feedback, World(), name, new_variable
            )
            steps = new_variable(f"{name}_steps", 1, tf.int64)
            self._channels.append((channel, steps))
        channel, steps = self._channels[number]
        if channel.shapes != [shape]:
            raise ValueError(
                f"tensor {number} of OneBitCompression must keep its shape, received "
                f"{shape} after {channel.shapes[0]}: give each tape and each optimizer "
                "an instance of its own"
            )
        return channel, steps

    @property
    def residuals(self) -> list[tf.Variable]:
        """Of the exchanges through Horovod's hook; this rank's own."""
        return [v for channel, _ in self._channels for v in channel.residuals]


_RULES_OF = {"none": [(".*", 32)], "fp16": [(".*", 16)], "onebit": None}
NAMES = tuple(_RULES_OF)


def named(compression: Any) -> OneBitCompression:
    """The settings that `compression=` means.

    Raises:
      ValueError: it is none of `NAMES`, None or a `OneBitCompression`.
    """
    if isinstance(compression, OneBitCompression):
        return compression
    if compression is OneBitCompression:
        return OneBitCompression()
    if isinstance(compression, dict) and "policy" in compression:
        return OneBitCompression.from_config(compression)
    if compression is None or (
        isinstance(compression, str) and compression in _RULES_OF
    ):
        return OneBitCompression(_RULES_OF[compression or "none"])
    raise ValueError(
        f"compression must be None, one of {NAMES} or a OneBitCompression, received "
        f"{compression!r}"
    )
