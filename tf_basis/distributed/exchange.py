"""The mean of one flat buffer over all ranks, in one or two bits per element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed import quantize
from tf_basis.distributed.amplitudes import Amplitudes
from tf_basis.distributed.world import World, unique_name
from tf_basis.ops import quantize_ops

NewVariable = Callable[[str, int, tf.DType], tf.Variable]

RULES = {
    "elements": hyperparameters.integer("of at least 0", lambda v: v >= 0),
    "block": hyperparameters.integer(
        "that is a multiple of 8, of at least 8", lambda v: v >= 8 and v % 8 == 0
    ),
    "bits": hyperparameters.choice(*quantize.WIDTHS),
    "clip_value": hyperparameters.real("above 0", lambda v: v > 0, optional=True),
    "amplitude_interval": hyperparameters.integer("of at least 1", lambda v: v >= 1),
    "adaptive": hyperparameters.flag,
    "statistics": hyperparameters.flag,
}


def new_variable(name: str, elements: int, dtype: tf.DType) -> tf.Variable:
    """A plain variable of zeros; optimizers pass functions that track theirs."""
    with tf.init_scope():
        return tf.Variable(tf.zeros([elements], dtype), trainable=False, name=name)


class OneBitExchange:
    r"""Averages flat float32 buffers over all ranks, with error feedback.

    The buffer is cut into blocks; rank j owns blocks [j·p, (j+1)·p), p = ⌈blocks/W⌉::

        worker:   u = g + e_w;  q(u) = mean|u| · (±1) in each block;  e_w ← u − q(u)
        stage 1:  every owner receives its blocks of all ranks (alltoall)
        owner:    a = mean over ranks of q(u) + e_s;  e_s ← a − q(a)
        stage 2:  every rank receives q(a) of all owners (allgather)

    Two collectives whatever the number of elements; every rank ends with the same
    bytes. Each rank sends 1/32 of what a ring allreduce of float32 sends, and 4
    bytes per block and stage. The sum of all results differs from the sum of the true
    means by the mean of the `worker_error`s and the `server_error`s, no more. On one
    rank there is no exchange and one quantisation, and `server_error` is empty.

    With two bits a block has two magnitudes: the means of `|u|` below its mean and from
    it on.

    With `amplitude_interval` k the magnitudes are computed anew, and travel, in every
    k-th exchange only, deflated where that makes them shorter; in between both sides
    use the last ones, and messages are the codes alone. What a stale magnitude gets
    wrong is fed back like all that a bit cannot say; but a block of zeros then stays
    zero only as long as its magnitude was zero.

    Args:
      elements: the length of the buffer.
      block: elements that share a scale, a multiple of 8. Default 2048. The last
        block may be short.
      bits: 1 (default) or 2 per element.
      clip_value: u is clipped to ±clip_value before it is quantised, and the excess
        dropped; `clipped` counts the elements. Default None.
      amplitude_interval: k. Default 1: magnitudes travel along every time.
      adaptive: whether it may change between one and two bits (`wide`).
      statistics: whether `sums` are kept, which reads residual and message once more.
      process_set: a Horovod process set with this rank. Default: all ranks.
      name: names the collectives; must be the same on all ranks and unique among what
        communicates at one time. Default: numbered in the order of construction.
      variables: makes the variables, `variables(name, elements, dtype)`.

    Attributes:
      worker_error: e_w, float32, shape [elements]; this rank's own.
      server_error: e_s of the blocks this rank owns, float32; this rank's own.
      clipped: how many elements were clipped on this rank, int64, shape [1]; None
        without `clip_value`.
      wide: 1 where two bits travel now, int64, shape [1], the same on all ranks; None
        unless `adaptive`.
      sums: of this rank's last exchange: Σu, Σu², Σ(u − q)² and the number of clipped
        elements, float64, shape [4]; None without `statistics`.
      age: exchanges since magnitudes travelled, int64, shape [1]; this rank's own, like
        `amplitudes`. None where they travel every time.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> exchange = OneBitExchange(4, block=8)
    >>> print(exchange.average(tf.constant([1.0, -3.0, 2.0, -2.0])).numpy())
    [ 2. -2.  2. -2.]
    >>> print(exchange.worker_error.numpy())
    [-1. -1.  0.  0.]

    Reference: Seide et al. 2014, "1-bit stochastic gradient descent"; Tang et al. 2021,
    "1-bit Adam" (the two stages).
    """

    def __init__(
        self,
        elements: int,
        block: int = 2048,
        *,
        bits: int = 1,
        clip_value: float | None = None,
        amplitude_interval: int = 1,
        adaptive: bool = False,
        statistics: bool = False,
        process_set=None,
        name: str | None = None,
        variables: NewVariable = new_variable,
        world: World | None = None,
    ) -> None:
        for argument, value in [
            ("elements", elements),
            ("block", block),
            ("bits", bits),
            ("clip_value", clip_value),
            ("amplitude_interval", amplitude_interval),
            ("adaptive", adaptive),
            ("statistics", statistics),
        ]:
            hyperparameters.check(argument, value, RULES[argument])
        self.elements, self.block, self.bits = elements, block, bits
        self.clip_value, self.amplitude_interval = clip_value, amplitude_interval
        self.world = world or World(process_set)
        self.name = name or unique_name("exchange")
        self.worker_error = variables("worker_error", elements, tf.float32)
        self.clipped = self.wide = self.sums = self.age = None
        if adaptive:
            self.wide = variables("wide", 1, tf.int64)
        self.follow_world(variables)
        if clip_value is not None:
            self.clipped = variables("clipped", 1, tf.int64)
        if statistics:
            self.sums = variables("sums", 4, tf.float64)

    @property
    def residuals(self) -> list[tf.Variable]:
        """What belongs to this rank alone; never broadcast it."""
        own = [v for v in (self.clipped, self.sums) if v is not None]
        return [self.worker_error, self.server_error, *own]

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of bits that may travel."""
        return (self.bits,) if self.wide is None else quantize.WIDTHS

    def follow_world(self, variables: NewVariable) -> None:
        """A new `server_error`, of zeros, for the ranks that the world has."""
        self._owned = owned_elements(self.elements, self.block, self.world.size)
        mine = self._owned[self.world.rank] if self.world.size > 1 else 0
        self.server_error = variables("server_error", mine, tf.float32)
        self.amplitudes: dict[int, Amplitudes] = {}
        if self.amplitude_interval > 1:
            self.amplitudes = {
                bits: Amplitudes(self._owned, self.world, bits, self.block)
                for bits in self.widths
            }
            # Not among the optimizer's variables: a file of one rank that all load
            # must not make them believe that they know each other's scales.
            self.age = new_variable(f"{self.name}_age", 1, tf.int64)

    def average(
        self,
        values: tf.Tensor | Sequence[tf.Tensor],
        finite: tf.Tensor | bool | None = None,
        into: tf.Variable | None = None,
    ) -> tf.Tensor:
        """The quantised mean over ranks of `values`; call it on all ranks.

        Args:
          values: float32, shape [elements], or a list of tensors of any shape that
            make it: they need not be put together first.
          finite: whether the values of ALL ranks are finite, when that has been agreed
            upon already. Default None: agreed here, by a sum of one number.
          into: a float32 variable, shape [elements], to keep the result in: a new
            tensor is new memory, which the system has to provide page by page in every
            step. Default None: a new tensor.

        Returns:
          Float32, shape [elements], the same bytes on every rank. NaN throughout where
          some rank's values were not finite; residuals are then left as they were.

        Raises:
          ValueError: `into` is not such a variable.
        """
        if into is not None:
            quantize.check_vector("into", into, self.elements)
        pieces = self._pieces(values)
        if finite is None:
            count = tf.add_n([quantize.count_unusable(p) for p in pieces])
            total = self.world.total(count, f"{self.name}/unusable")
            finite = tf.equal(total, 0)
        if finite is True:
            return self._average(pieces, into)

        def unusable() -> tf.Tensor:
            nan = tf.fill([self.elements], tf.constant(float("nan")))
            return nan if into is None else into.assign(nan, read_value=True)

        return tf.cond(finite, lambda: self._average(pieces, into), unusable)

    def _pieces(self, values: tf.Tensor | Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not isinstance(values, (list, tuple)):
            flat = _numbers(values)
            if not flat.shape.is_compatible_with([self.elements]):
                raise ValueError(
                    f"values must have the shape [{self.elements}], received "
                    f"{flat.shape}"
                )
            return [tf.ensure_shape(flat, [self.elements])]
        pieces = [_numbers(v) for v in values]
        sizes = [p.shape.num_elements() for p in pieces]
        if None not in sizes and sum(sizes) != self.elements:
            raise ValueError(
                f"values must have {self.elements} elements in all, received "
                f"{sum(sizes)} in {len(sizes)} tensors"
            )
        return pieces or [tf.zeros([0])]

    def _average(self, pieces: list[tf.Tensor], into: tf.Variable | None) -> tf.Tensor:
        def mean(bits: int) -> tf.Tensor:
            form = {"bits": bits, "block": self.block}
            message = self.message(pieces, bits=bits)
            if into is None:
                return quantize.dequantize(message, self.elements, **form)
            quantize_ops.dequantize_into(into, message, **form)
            return into.read_value()

        return self.with_bits(mean)

    def with_bits(self, exchange: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """`exchange(bits)` for the bits that travel now, which all ranks know."""
        if self.wide is None:
            return exchange(self.bits)
        wide = tf.equal(tf.reshape(self.wide, []), 1)
        return tf.cond(wide, lambda: exchange(2), lambda: exchange(1))

    def message(
        self,
        pieces: Sequence[tf.Tensor],
        momentum: tf.Variable | None = None,
        beta: float = 0.0,
        bits: int | None = None,
    ) -> tf.Tensor:
        """What `average` returns, as a message: see `quantize.quantize`.

        Values of all ranks must be finite. With a `momentum` m it is the mean over
        ranks of beta·m + (1 − beta)·values. `bits` are those of `with_bits`.
        """
        form = {"bits": bits or self.bits, "block": self.block}
        amplitudes = self.amplitudes.get(form["bits"])
        fresh = tf.constant(True)
        if amplitudes is not None:
            fresh = tf.equal(tf.reshape(self.age, []) % self.amplitude_interval, 0)

        def quantised(scales: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
            return quantize.quantize(
                self.worker_error,
                pieces,
                clip_value=self.clip_value,
                momentum=momentum,
                beta=beta,
                scales=scales,
                **form,
            )

        def averaged(scales: tf.Tensor | None) -> tf.Tensor:
            ranks = self.world.size
            return quantize.average(
                self.server_error, received, workers=ranks, scales=scales, **form
            )

        if amplitudes is None:
            message, clipped = quantised(None)
        else:
            message, clipped = amplitudes.choose(fresh, amplitudes.sent, quantised)
        self._record(message, clipped, form)
        names = f"{self.name}/scatter", f"{self.name}/gather"
        if self.world.size == 1:
            if amplitudes is not None:
                amplitudes.remember(message)
        elif amplitudes is None:
            splits = [quantize.message_bytes(n, **form) for n in self._owned]
            received = self.world.scatter(message, splits, names[0])
            message = self.world.gather(averaged(None), names[1])
        else:
            received = amplitudes.scatter(message, fresh, names[0])
            mine = amplitudes.choose(fresh, amplitudes.own_mean(), averaged)
            message = amplitudes.gather(mine, fresh, names[1])
        if amplitudes is not None:
            self.age.assign_add([1])
        message.set_shape([quantize.message_bytes(self.elements, **form)])
        return message

    def _record(
        self, message: tf.Tensor, clipped: tf.Tensor, form: dict[str, int]
    ) -> None:
        if self.clipped is not None:
            self.clipped.assign_add(tf.reshape(clipped, [1]))
        if self.sums is not None:
            sums = quantize.statistics(self.worker_error, message, **form)
            last = tf.reshape(tf.cast(clipped, tf.float64), [1])
            self.sums.assign(tf.concat([sums, last], 0))

    def flush(self, values: tf.Tensor | Sequence[tf.Tensor]) -> tf.Tensor:
        """The mean over ranks of `values` + `worker_error`, + `server_error`, exactly.

        In full precision; afterwards both residuals are zero. Nothing is lost.
        """
        flat = quantize_ops.joined(self._pieces(values))
        total = self.world.total(
            flat + tf.convert_to_tensor(self.worker_error), f"{self.name}/flush"
        )
        mean = total / self.world.size
        if self.world.size > 1:
            with tf.control_dependencies([mean]):
                owed = tf.identity(self.server_error)
            mean += self.world.gather(owed, f"{self.name}/flush_owed")
        with tf.control_dependencies([mean]):
            self.clear()
        return mean

    def clear(self) -> None:
        """Sets both residuals to zero: what they hold is lost."""
        for residual in (self.worker_error, self.server_error):
            residual.assign(tf.zeros_like(residual))


def _numbers(value: Any) -> tf.Tensor:
    """The value as float32."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        tensor = None
    if tensor is None or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise ValueError(
            "values must be a tensor of numbers or a list of them, received "
            f"{type(value).__name__}"
        )
    return tf.cast(tensor, tf.float32)


def owned_elements(elements: int, block: int, ranks: int) -> list[int]:
    """How many elements each rank owns: whole blocks, as evenly as ⌈blocks/W⌉ goes."""
    blocks = -(-elements // block)
    share = -(-blocks // ranks) * block
    return [max(0, min(elements - r * share, share)) for r in range(ranks)]
