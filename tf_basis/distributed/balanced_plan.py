"""Batch sizes of all ranks: how they are chosen, and from which step on they hold."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence


def apportion(
    total: int, shares: Sequence[float], minimum: int = 1, maximum: int | None = None
) -> list[int]:
    """Integers in proportion to `shares`, within bounds, whose sum is `total`.

        x_i = clip(λ·share_i, minimum, maximum)   with λ such that Σ x_i = total

    rounded down; what is missing goes to the largest remainders, of equal ones to the
    first. Plain float64 arithmetic in one order: equal on all ranks.

    Args:
      total: the sum, from `minimum` to `maximum` times the number of shares.
      shares: above 0.
      minimum: of each.
      maximum: of each. Default None: `total`.

    Example:

    >>> apportion(100, [1.0, 2.0, 1.0])
    [25, 50, 25]
    >>> apportion(100, [1.0, 2.0, 1.0], maximum=40)
    [30, 40, 30]
    """
    most = total if maximum is None else maximum

    def sized(scale: float) -> list[float]:
        return [min(max(scale * s, minimum), most) for s in shares]

    low, high = 0.0, total / min(shares)
    for _ in range(200):  # until the two are neighbours
        middle = (low + high) / 2
        if math.fsum(sized(middle)) < total:
            low = middle
        else:
            high = middle
    exact = sized(high)
    # What is a whole number but for the last bits is one.
    sizes = [math.floor(x + 1e-6) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] - exact[i], i))
    missing = total - sum(sizes)
    for i in order:
        if missing > 0 and sizes[i] < most:
            sizes[i] += 1
            missing -= 1
    return sizes


class Plan:
    """The sizes of every step, asked by the pipeline and changed by the training loop.

    A pipeline runs ahead of the training, on each rank as far as it gets. A change
    must therefore begin at a step that no rank's pipeline has reached: while the ranks
    agree on one (`held`), pipelines wait with what they would begin. The loop, which
    holds them, waits for other ranks' loops alone, never for a pipeline, so that
    nothing waits in a circle.

    Steps count from 0 in each iterator; only the last iterator that was begun goes on.

    Args:
      sizes: of all ranks, of the first steps.

    Attributes:
      sizes: as decided last.
      iterator: the number of the last one that was begun, from 1; 0: none yet.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._free = threading.Condition()
        self._held = False
        self.iterator, self._given = 0, 0
        self._before: list[int] = self.sizes  # of the steps until `_change`
        self._change = 0

    def take(self, iterator: int, available: int, rank: int) -> tuple[int, list[int]]:
        """Begins as many steps as there are examples for.

        Args:
          iterator: 0 for a new one, or what the last call returned.
          available: examples that this rank has.
          rank: whose sizes.

        Returns:
          The iterator, and this rank's sizes of these steps.

        Raises:
          RuntimeError: another iterator has been begun since.
        """
        with self._free:
            self._free.wait_for(lambda: not self._held)
            if iterator == 0:
                self.iterator += 1
                self._given, self._change = 0, 0
                iterator = self.iterator
            if iterator != self.iterator:
                raise RuntimeError(
                    "tf_basis: the batches of a BalancedBatch can be read by one "
                    "iterator at a time, and a newer one has been begun"
                )
            taken = []
            while True:
                sizes = self._before if self._given < self._change else self.sizes
                if sizes[rank] > available:
                    return iterator, taken
                taken.append(sizes[rank])
                available -= sizes[rank]
                self._given += 1

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """While no step can be begun; gives how many have been, -1 without iterator."""
        with self._free:
            self._held = True
            given = self._given if self.iterator else -1
        try:
            yield given
        finally:
            with self._free:
                self._held = False
                self._free.notify_all()

    def change(self, step: int, sizes: Sequence[int]) -> None:
        """`sizes` hold from `step` on, which no rank has begun; while `held`."""
        self._before, self._change, self.sizes = self.sizes, step, list(sizes)
