"""Gradient accumulation in which the gradients of compressed tables stay slices.

Keras gives every variable an accumulator of the variable's size.  Here a table has
a buffer of rows instead, to which each batch appends; duplicates are summed now and
then, so that it holds at most the distinct rows and a few batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.adapters import tracking
from tf_basis.ops import dispatch
from tf_basis.rules.grouping import sum_duplicates

Gradient = tf.Tensor | tf.IndexedSlices

_BATCHES_BETWEEN_SUMS = 8  # sorting costs more than appending


class RowBuffer(NamedTuple):
    """The gradients so far of one table."""

    indices: tf.Variable  # [None] int64
    values: tf.Variable  # [None, d] float32


class GradientAccumulator:
    """Turns `steps` gradients of each variable into one update with their mean.

    A variable without a gradient in some of the steps counts as zero there, and is
    updated only where the last of the steps has a gradient for it, as in Keras.

    Args:
      steps: gradients per update.
      sums: for each variable of the optimizer its accumulator: a `RowBuffer` for a
        compressed table, else a variable of the same shape.
      batches: gives how many gradients came before this one since the last update.
      counter: a variable with that number, where nothing else counts.
    """

    def __init__(
        self,
        steps: int,
        sums: Sequence[RowBuffer | tf.Variable],
        batches: Callable[[], tf.Tensor],
        counter: tf.Variable | None = None,
    ) -> None:
        self.steps = steps
        self.sums = list(sums)
        self.batches = batches
        self.counter = counter

    def step(
        self,
        strategy: tf.distribute.Strategy,
        numbers: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        gradients: Sequence[Gradient],
        update: Callable[[list[Gradient]], object],
    ) -> None:
        """Takes one batch's gradients: adds them up, or updates with the mean.

        Args:
          strategy: the distribution strategy of the variables.
          numbers: which variables the gradients belong to: positions in `sums`.
          shapes: of those variables.
          gradients: already summed over the replicas.
          update: called in replica context with the means, in the same order.

        Raises:
          ValueError: a table's gradient is to be compiled by XLA.
        """
        self._refuse_xla()
        sums = [self.sums[n] for n in numbers]

        # A condition may not contain a switch to the cross-replica context, so the
        # switch comes first.
        def across_replicas(distribution, gradients):
            number = self.batches() + 1

            def add():
                for accumulated, shape, gradient in zip(sums, shapes, gradients):
                    self._add(distribution, accumulated, shape, gradient, number)
                if self.counter is not None:
                    self.counter.assign_add(1)

            def apply():
                def in_replica(gradients):
                    update(
                        [
                            self._mean(accumulated, shape, gradient)
                            for accumulated, shape, gradient in zip(
                                sums, shapes, gradients
                            )
                        ]
                    )

                if tf.distribute.in_cross_replica_context():
                    distribution.extended.call_for_each_replica(
                        in_replica, args=(gradients,)
                    )
                else:
                    in_replica(gradients)
                self._reset(distribution)

            tf.cond(number >= self.steps, apply, add)

        tf.__internal__.distribute.interim.maybe_merge_call(
            across_replicas, strategy, list(gradients)
        )

    def _refuse_xla(self) -> None:
        if dispatch.in_xla() and any(isinstance(s, RowBuffer) for s in self.sums):
            raise ValueError(
                "gradient_accumulation_steps must be None where XLA compiles the step "
                "(jit_compile=True): it would have to know how many rows of a "
                "compressed table have a gradient, received "
                f"gradient_accumulation_steps={self.steps}"
            )

    def _add(self, distribution, accumulated, shape, gradient, number) -> None:
        def add_rows(values, indices, gradient):
            rows = _appended(indices, values, shape, gradient)
            if self.steps > _BATCHES_BETWEEN_SUMS:
                rows = tf.cond(
                    number % _BATCHES_BETWEEN_SUMS == 0,
                    lambda: sum_duplicates(rows, padded=False),
                    lambda: rows,
                )
            indices.assign(rows.indices)
            values.assign(rows.values)

        def add_dense(total, gradient):
            total.assign(total + tf.convert_to_tensor(gradient))

        update = distribution.extended.update
        if isinstance(accumulated, RowBuffer):
            others = (accumulated.indices, gradient)
            update(accumulated.values, add_rows, args=others, group=False)
        else:
            update(accumulated, add_dense, args=(gradient,), group=False)

    def _mean(self, accumulated, shape, gradient) -> Gradient:
        if isinstance(accumulated, RowBuffer):
            total = sum_duplicates(
                _appended(*accumulated, shape, gradient), padded=False
            )
            values = total.values / self.steps
            return tf.IndexedSlices(values, total.indices, total.dense_shape)
        # In the order of Keras, so that the bits agree with it.
        return (tf.convert_to_tensor(gradient) + accumulated) / self.steps

    def _reset(self, distribution) -> None:
        """Forgets all sums, of variables without a gradient too."""

        def clear(variable):
            zeros = tf.zeros_like(variable)
            variable.assign(zeros if variable.shape.is_fully_defined() else zeros[:0])

        for variable in tf.nest.flatten(self.sums):
            distribution.extended.update(variable, clear, group=False)
        if self.counter is not None:
            self.counter.assign(0)


class AccumulationMixin:
    """Builds the accumulator of an optimizer that has `gradient_accumulation_steps`."""

    _accumulator: GradientAccumulator | None = None

    def _create_accumulator(
        self,
        variables: Sequence,
        batches: Callable[[], tf.Tensor],
        counter: tf.Variable | None = None,
    ) -> None:
        """Called by the adapter once, after the slots; see `GradientAccumulator`."""
        name = "gradient_accumulator"

        def new(variable: Any) -> RowBuffer | tf.Variable:
            shape = tuple(variable.shape)
            if self._var_key(variable) in self._basis.layouts:
                return RowBuffer(
                    self._add_rows(variable, f"{name}_rows", (), tf.int64),
                    self._add_rows(variable, name, shape[1:], tf.float32),
                )
            dtype = tf.as_dtype(variable.dtype)
            return self._add_slot(variable, name, shape, dtype, 0.0)

        self._accumulator = GradientAccumulator(
            self.gradient_accumulation_steps, map(new, variables), batches, counter
        )

    def _accumulate(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence,
        update: Callable[[list[Gradient]], object],
    ) -> None:
        """Adds the gradients up, or calls `update` with the means."""
        self._accumulator.step(
            self._distribution_strategy,
            [tracking.index_of(self, v) for v in variables],
            [tuple(v.shape) for v in variables],
            gradients,
            update,
        )


def _appended(indices, values, shape, gradient) -> tf.IndexedSlices:
    """The rows of the buffer and of one more gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        more_indices, more_values = gradient.indices, gradient.values
    else:  # a dense gradient touches every row
        more_indices, more_values = tf.range(shape[0], dtype=tf.int64), gradient
    more_values = tf.reshape(tf.cast(more_values, values.dtype), [-1, shape[1]])
    return tf.IndexedSlices(
        tf.concat([values, more_values], axis=0),
        tf.concat([indices, tf.cast(more_indices, indices.dtype)], axis=0),
        tf.constant(shape, tf.int64),
    )
