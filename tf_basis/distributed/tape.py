"""A gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed import auto, watch
from tf_basis.distributed.exchange import new_variable
from tf_basis.distributed.reducer import GradientReducer, Spec
from tf_basis.distributed.world import World, unique_name

_reducers: dict[Any, tuple] = {}


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`; `gradient` returns the mean over all ranks.

    Dense gradients travel in flat buffers and IndexedSlices as rows, as in
    `DistributedOptimizer`. Do not use both. Make it in every step, as Horovod's own:
    residuals belong to the variables and the settings, and live on.

    Args:
      tape: the tape that recorded the step.
      compression: None or `"none"` (default): float32; `"fp16"`; `"onebit"`; a
        `OneBitCompression` with settings of your own, all of whose intervals are 1; or
        `"auto"`: see `DistributedOptimizer`.
      process_set: a Horovod process set with this rank. Default: all ranks.
      timeout: seconds that an exchange may wait for other ranks before the job is ended
        with a message that names them. Default 600; None: for ever.

    Attributes:
      finite: after `gradient`: whether the gradients of all ranks were finite, a
        boolean tensor that is equal on all ranks. Where they were not, the gradients
        returned are zeros: skip the step with `tf.cond(tape.finite, ...)`.

    Raises:
      ValueError: an argument breaks its rule; at the first `gradient`, on every rank:
        the ranks' variables, shapes or policies differ.

    Example:

    >>> x = tf.Variable(3.0)
    >>> with tf.GradientTape() as tape:
    ...     y = x * x
    >>> float(DistributedGradientTape(tape).gradient(y, x))
    6.0

    Reference: Sergeev and Del Balso 2018, "Horovod".
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        compression: Any = None,
        *,
        process_set: Any = None,
        timeout: float | None = watch.DEFAULT_TIMEOUT,
    ) -> None:
        if not hasattr(tape, "gradient"):
            raise ValueError(f"tape must be a tf.GradientTape, received {tape!r}")
        hyperparameters.check("timeout", timeout, watch.TIMEOUT_RULE)
        self._tape = tape
        self._compression = auto.named(compression)
        rate = auto.adaptive_rate(self._compression)
        if rate is not None:
            raise ValueError(
                "adaptive_rate must be None with a tape, which has no learning rate, "
                f"received {rate}"
            )
        self._process_set, self._timeout = process_set, timeout
        self.finite: tf.Tensor | None = None

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._tape.__exit__(*details)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, weight: Any = 1.0
    ) -> Any:
        """The tape's gradient, averaged over the ranks.

        Args:
          target: what to differentiate.
          sources: a structure of variables; the same on all ranks.
          output_gradients: see `tf.GradientTape.gradient`.
          weight: of this rank's gradients in the mean: its number of examples where
            batches differ in size, 0 where it has no data left. Default 1.

        Raises:
          ValueError: `weight` is no number.
          tf.errors.InvalidArgumentError: on every rank, where some rank's weight is
            below 0 or not finite, or the kinds of gradients differ.
        """
        if not _is_number(weight):
            raise ValueError(f"weight must be a number, received {weight!r}")
        gradients = self._tape.gradient(target, sources, output_gradients)
        variables = tf.nest.flatten(sources)
        reduction = self._reducer(variables).reduce(
            tf.nest.flatten(gradients), weight=weight
        )
        self.finite = reduction.control.go
        return tf.nest.pack_sequence_as(gradients, reduction.gradients)

    def _reducer(self, variables: list) -> GradientReducer:
        sent = self._compression
        settings = sent if isinstance(sent, str) else str(sent.get_config())
        key = (settings, tuple(id(v) for v in variables), id(self._process_set))
        found = _reducers.get(key)
        if found is not None:
            return found[0]
        specs = [
            Spec(
                getattr(v, "path", None) or v.name.split(":")[0],
                tuple(v.shape),
                tf.as_dtype(v.dtype).name,
            )
            for v in variables
        ]
        world, name = World(self._process_set), unique_name("tape")
        compression, _ = auto.settle(sent, specs, world, name, self._timeout)
        policy = compression.policy
        for spec in specs:
            if policy.way(spec.path, spec.shape).interval > 1:
                raise ValueError(
                    "interval must be 1 with a tape, which cannot keep a variable from "
                    f"taking a step, received {policy.way(spec.path, spec.shape)} for "
                    f"{spec.path}"
                )
        reducer = GradientReducer(
            specs,
            compression,
            world,
            name,
            new_variable,
            self._timeout,
        )
        # The variables are kept, so that their ids stay theirs.
        _reducers[key] = (reducer, variables, self._process_set)
        return reducer


def _is_number(weight: Any) -> bool:
    try:
        tensor = tf.convert_to_tensor(weight)
    except (TypeError, ValueError):
        return False
    return (tensor.dtype.is_floating or tensor.dtype.is_integer) and (
        tensor.shape.rank == 0
    )
