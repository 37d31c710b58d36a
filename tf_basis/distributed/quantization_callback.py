"""How well bits say the gradients, in the course of `fit`."""

from __future__ import annotations

import functools
import os
from typing import Any

from tf_basis import hyperparameters
from tf_basis.adapters import keras_modules
from tf_basis.distributed.residuals import exchangers
from tf_basis.distributed.scalars import ScalarWriter
from tf_basis.distributed.world import World


class QuantizationStatisticsMixin:
    """Records `quantization_statistics` of the optimizer in `fit`.

    The numbers are of all ranks and equal on them: no rank waits for another here.

    Args:
      every: batches between two records, at least 1. Default 100.
      log_dir: a folder for TensorBoard, which rank 0 writes: a scalar for each group
        and number. Default None.
      logs: whether the numbers are added to the logs of each epoch. Default True.

    Attributes:
      history: a dict for each record: `batch` and `groups`, by name of the group; none
        while nothing has been quantised, as in a warm-up.

    Raises:
      ValueError: an argument breaks its rule; at the start of `fit`: no optimizer of
        the model keeps statistics.

    Example:

    >>> callbacks = [QuantizationStatistics(every=10)]
    """

    def __init__(
        self, every: int = 100, *, log_dir: Any = None, logs: bool = True
    ) -> None:
        super().__init__()
        for name, value, rule in [
            ("every", every, hyperparameters.count),
            ("log_dir", log_dir, hyperparameters.optional_folder),
            ("logs", logs, hyperparameters.flag),
        ]:
            hyperparameters.check(name, value, rule)
        self.every, self.log_dir, self.logs = every, log_dir, logs
        self.history: list[dict[str, Any]] = []
        self._writer: ScalarWriter | None = None
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del batch, logs
        self._batches += 1
        if self._batches == 1:
            self._begin()
        if self._batches % self.every == 0:
            self._record()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it."""
        del epoch
        if self.logs and logs is not None and self.history:
            logs.update(_flat(self.history[-1]["groups"]))

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it."""
        del logs
        if self._writer is not None:
            self._writer.flush()

    def _begin(self) -> None:
        """When the first step has built the optimizer."""
        parts = [part.metadata for _, part in exchangers(self.model.optimizer)]
        if not any(metadata and metadata.channels for metadata in parts):
            raise ValueError(
                "compression must keep statistics for QuantizationStatistics: "
                "statistics=True, adaptive_bits or adaptive_rate, and variables that "
                "travel in 1 or 2 bits, received none in "
                f"{type(self.model.optimizer).__name__}"
            )
        if self.log_dir is not None and self._writer is None and World().rank == 0:
            self._writer = ScalarWriter(os.fspath(self.log_dir))

    def _groups(self) -> dict[str, dict[str, float]]:
        for owner, _ in exchangers(self.model.optimizer):
            found = owner.quantization_statistics
            if found:
                return found
        return {}

    def _record(self) -> None:
        groups = self._groups()
        if not groups:  # the warm-up travels in float32
            return
        self.history.append({"batch": self._batches, "groups": groups})
        if self._writer is not None:
            self._writer.write(_flat(groups), self._batches)


def _flat(groups: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        f"quantization/{group}/{name}": value
        for group, numbers in groups.items()
        for name, value in numbers.items()
    }


@functools.cache
def define(flavor_name: str) -> type:
    """`QuantizationStatistics` for one flavour of Keras."""
    base = keras_modules.keras_of(flavor_name).callbacks.Callback
    members = {"__doc__": QuantizationStatisticsMixin.__doc__, "__module__": __name__}
    return type("QuantizationStatistics", (QuantizationStatisticsMixin, base), members)
