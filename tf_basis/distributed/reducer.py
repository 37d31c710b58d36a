"""Gradients of a step, reduced over all ranks: what optimizer and tape both use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.distributed import control, rows
from tf_basis.distributed.channel import Channel, Feedback, name_of
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.exchange import NewVariable
from tf_basis.distributed.metadata import Metadata
from tf_basis.distributed.policy import Way, kind_of
from tf_basis.distributed.watch import Watch, watched
from tf_basis.distributed.world import World


class Spec(NamedTuple):
    """A variable whose gradient is reduced.

    `leave` is set where its optimizer exchanges for itself: its gradient is checked
    and weighted, and stays this rank's own.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    leave: bool = False

    def described(self, way: Way) -> str:
        """For messages."""
        how = f"{way.bits} bits every {way.interval} {way.group}".rstrip()
        how = "exchanged by its own optimizer" if self.leave else how
        return f"{self.path} {self.shape} {self.dtype}, {how}"


class Reduction(NamedTuple):
    """What `GradientReducer.reduce` returns.

    Attributes:
      gradients: reduced, in the order given; None where none was given.
      due: for each gradient whether its variable takes a step: True, or a tensor that
        is equal on all ranks (interval > 1).
      control: what the ranks told each other; where `control.go` is False the
        gradients are zeros and nothing has changed.
    """

    gradients: list
    due: list
    control: control.Control


class GradientReducer:
    """Averages dense gradients in flat buffers and IndexedSlices as rows.

    All ranks must make it, and call `reduce`, in the same order.

    Args:
      specs: the variables, in the order in which gradients will be given.
      compression: bits, intervals and guards.
      world: the ranks.
      name: names the collectives.
      variables: makes residuals, accumulators and counters.
      timeout: seconds before a waiting rank ends the job; None: waits for ever.
      settings: further ones that must be equal on all ranks.

    Raises:
      ValueError: on every rank, where variables, shapes or policies differ.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        compression: OneBitCompression,
        world: World,
        name: str,
        variables: NewVariable,
        timeout: float | None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.specs, self.compression = list(specs), compression
        self.world, self.name = world, name
        policy = compression.policy
        self.ways = [policy.way(s.path, s.shape) for s in specs]
        with watched(world, f"{name}_agreement", timeout):
            control.agree(
                world,
                name,
                described(compression, settings or {})
                + [s.described(w) for s, w in zip(specs, self.ways)],
            )
        self.watch = Watch(world, name, timeout)
        self.channels: list[Channel] = []
        feedback = compression.feedback
        check_delay(feedback, zip([s.path for s in self.specs], self.ways))
        kept = {w for w in self.ways if w.bits < 16 or w.interval > 1 or feedback.delay}
        for way in sorted(kept):
            members = [
                i
                for i, (s, w) in enumerate(zip(specs, self.ways))
                if w == way and not s.leave and not self._only_rows(s, w)
            ]
            if members:
                self.channels.append(self._channel(way, members, variables))
        self.metadata: Metadata | None = None
        if feedback.measures:
            self.metadata = Metadata(
                self.channels,
                feedback.adaptive_rate,
                feedback.adaptive_bits,
                name,
                variables,
            )
        self._fixed = {m for c in self.channels for m in c.members}
        self._steps = variables(f"{name}_steps", 1, tf.int64)
        self._skipped = variables(f"{name}_skipped_steps", 1, tf.int64)

    def _only_rows(self, spec: Spec, way: Way) -> bool:
        """Whether it has a channel for the sake of `delay` alone, which rows have not.

        What waits for its exchange would be as large as the table, and exchanged whole.
        """
        needed = way.bits < 16 or way.interval > 1
        return not needed and kind_of(spec.path, spec.shape) == "embedding"

    def _channel(
        self, way: Way, members: list[int], variables: NewVariable, wait: bool = True
    ) -> Channel:
        """`wait`: whether it is delayed where the compression says so."""
        shapes = [self.specs[m].shape for m in members]
        name = name_of(self.name, way)
        feedback = self.compression.feedback
        if feedback.delay and not wait:
            name, feedback = f"{name}_at_once", feedback._replace(delay=0)
        return Channel(members, shapes, way, feedback, self.world, name, variables)

    @property
    def residuals(self) -> list[tf.Variable]:
        """What belongs to this rank alone: never broadcast it."""
        return [v for c in self.channels for v in c.residuals]

    @property
    def skipped_steps(self) -> tf.Tensor:
        """Steps skipped because a gradient was not finite on some rank."""
        return tf.reshape(self._skipped, [])

    def reduce(
        self,
        gradients: Sequence[Any],
        weight: Any = 1.0,
        factor: float = 1.0,
        extras: Sequence[tf.Tensor] = (),
    ) -> Reduction:
        """The mean over ranks of each gradient.

        Args:
          gradients: tensors, IndexedSlices or None, one for each variable.
          weight: of this rank in the mean.
          factor: by which results are multiplied.
          extras: further numbers for `Control.extras`.
        """
        delayed = self._delayed()
        more = [] if self.metadata is None else self.metadata.numbers()
        gradients, told = control.before_step(
            self.world,
            self.name,
            [s.path for s in self.specs],
            gradients,
            self.watch,
            weight,
            factor,
            [*extras, *more],
        )
        if self.metadata is not None:
            self.metadata.update(told.extras[:, len(extras) :])
            told = told._replace(extras=told.extras[:, : len(extras)])
        with tf.control_dependencies(self.watch.begin([told.go])):
            reduced = self._reduced(gradients, told, delayed)
        self.watch.end(reduced)
        due: list = [True] * len(gradients)
        for channel in self.channels:
            when = channel.due(tf.reshape(self._steps, []))
            for member in channel.members:
                due[member] = when
        went = tf.reshape(tf.cast(told.go, tf.int64), [1])
        self._steps.assign_add(went)
        self._skipped.assign_add(1 - went)
        return Reduction(reduced, due, told)

    def _delayed(self) -> list[tf.Tensor]:
        """Means of the gradients of the step before, of each channel.

        Nothing here waits for the gradients of this step: it goes on beside them.
        """
        if not self.compression.feedback.delay:
            return []
        step = tf.reshape(self._steps, [])
        means: list[tf.Tensor] = []
        with tf.control_dependencies(self.watch.begin()):
            for channel in self.channels:
                with tf.control_dependencies(means[-1:]):
                    means.append(channel.mean([tf.identity(channel.pending)], step))
        self.watch.end(means)
        return means

    def _reduced(
        self, gradients: list, told: control.Control, delayed: list[tf.Tensor]
    ) -> list:
        """All exchanges, in one branch that every rank takes alike."""
        travel = [
            i
            for i, (g, s) in enumerate(zip(gradients, self.specs))
            if g is not None and not s.leave
        ]
        if not travel:
            return gradients
        sliced = [i for i in travel if isinstance(gradients[i], tf.IndexedSlices)]

        def nothing():
            for channel, mean in zip(self.channels, delayed):
                channel.pending.assign(mean)  # exchanged once more: nothing is lost
            return [_zeros(gradients[i]) for i in travel]

        def everything():
            done = self._dense_means(gradients, travel, delayed)
            with tf.control_dependencies([done[i] for i in sorted(done)][-1:]):
                means = rows.mean(
                    [gradients[i] for i in sliced],
                    tf.gather(told.rows, sliced, axis=1) if sliced else told.rows,
                    self.world,
                    self.name,
                    self.compression.sparse_values,
                )
            done.update(zip(sliced, means))
            return [_like(done[i], gradients[i]) for i in travel]

        results = tf.cond(told.go, everything, nothing)
        out = list(gradients)
        for i, result in zip(travel, results):
            spec = self.specs[i]
            dtype = tf.as_dtype(spec.dtype)
            if isinstance(result, tf.IndexedSlices):
                values = tf.cast(
                    tf.reshape(result.values, [-1, *spec.shape[1:]]), dtype
                )
                shape = gradients[i].dense_shape  # the table may have grown
                if shape is None:
                    shape = tf.constant(spec.shape, tf.int64)
                shape = tf.cast(shape, tf.int64)
                out[i] = tf.IndexedSlices(values, result.indices, shape)
            else:
                out[i] = tf.cast(tf.reshape(result, spec.shape), dtype)
        return out

    def _dense_means(
        self, gradients: list, travel: list[int], delayed: list[tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """One collective after the other: their order decides how they are summed."""
        step = tf.reshape(self._steps, [])
        dense = [
            i
            for i in travel
            if isinstance(gradients[i], tf.Tensor) and i not in self._fixed
        ]
        plain = []
        for way in sorted({self.ways[i] for i in dense}):
            members = [i for i in dense if self.ways[i] == way]
            plain.append(self._channel(way, members, _no_variables, wait=False))
        done: dict[int, tf.Tensor] = {}
        before: list[tf.Tensor] = []
        for number, channel in enumerate([*self.channels, *plain]):
            pieces = channel.pieces(gradients)
            if number < len(delayed):
                mean = delayed[number]
                channel.delay(pieces)
            else:
                with tf.control_dependencies(before):
                    mean = channel.mean(pieces, step)
            before = [mean]
            for member, part in zip(channel.members, channel.split(mean)):
                if isinstance(gradients[member], tf.Tensor):
                    done[member] = part
        return done


def described(compression: OneBitCompression, settings: Mapping[str, Any]) -> list[str]:
    """A line for each setting, for ranks to compare."""
    everything = {**compression.get_config(), **settings}
    return [f"{name}={value}" for name, value in everything.items()]


def check_delay(feedback: Feedback, ways: Iterable[tuple[str, Way]]) -> None:
    """Raises ValueError where something that is delayed has an interval.

    Args:
      feedback: of the compression.
      ways: of the variables, with their paths.
    """
    for path, way in ways:
        if feedback.delay and way.interval > 1:
            raise ValueError(
                f"interval must be 1 with delay={feedback.delay}, received "
                f"{way.interval} for {path}"
            )


def _no_variables(name: str, *spec: Any) -> tf.Variable:
    raise AssertionError(f"a plain channel has no state, asked for {name}")


def _zeros(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.zeros(gradient.shape)
    return tf.IndexedSlices(gradient.values[:0], gradient.indices[:0])


def _like(result: Any, gradient: Any) -> Any:
    """As `_zeros` has it: a condition's two results must have one structure."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(result.values, result.indices)
    return tf.reshape(result, gradient.shape)
