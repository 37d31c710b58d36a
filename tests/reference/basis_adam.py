"""Float64 BasisAdam on one table, one row and one bucket at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .hashing import bucket_of_rows


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one compressed table, with the package's defaults."""

    num_buckets: int
    learning_rate: float = 1e-3
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    exclusive_rows: int = 0
    momentum: str = "exclusive"
    invariant_scalar: str | None = "energy"
    scalar_decay: float = 0.99
    scalar_range: tuple[float, float] = (0.1, 10.0)
    scalar_rule: str = "gradient"
    scalar_learning_rate: float = 1e-4
    collision_reduce: str = "mean"
    bias_correction: bool = True
    hashing: str = "balanced"
    seed: int = 0
    weight_decay: float | None = None
    row_clipnorm: float | None = None


def sum_duplicates(indices, values) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids in ascending order and the sum of the values of each."""
    indices = np.asarray(indices, np.int64).reshape(-1)
    values = np.asarray(values, np.float64)
    rows, position = np.unique(indices, return_inverse=True)
    sums = np.zeros((len(rows), *values.shape[1:]))
    np.add.at(sums, position, values)
    return rows, sums


class BasisAdamTable:
    """State and update of one compressed table theta[N, d]."""

    def __init__(self, theta, hyper: Hyper, buckets=None):
        self.hyper = hyper
        self.theta = np.array(theta, np.float64)
        n_rows, dim = self.theta.shape
        if buckets is None:
            buckets = bucket_of_rows(
                range(n_rows),
                n_rows,
                hyper.num_buckets,
                hyper.exclusive_rows,
                hyper.hashing,
                hyper.seed,
            )
        self.bucket = np.asarray(buckets, np.int64)
        count = min(hyper.num_buckets, n_rows)
        one_to_one = hyper.num_buckets >= n_rows
        self.owners = np.arange(n_rows) < (
            n_rows if one_to_one else hyper.exclusive_rows
        )
        self.first_moment = np.zeros((count, dim))
        self.second_moment = np.zeros((count, dim))
        self.bucket_steps = np.zeros(count, np.int64)
        self.row_energy = np.zeros(n_rows)
        self.scalar = np.ones(n_rows)

    def buckets_with_first_moment(self) -> np.ndarray:
        """Buckets whose rows read the first moment under this momentum mode."""
        count = len(self.bucket_steps)
        if self.hyper.momentum == "shared":
            return np.arange(count)
        if self.hyper.momentum == "none":
            return np.arange(0)
        return np.unique(self.bucket[self.owners])

    def uses_first_moment(self, row: int) -> bool:
        if self.hyper.momentum == "exclusive":
            return bool(self.owners[row])
        return self.hyper.momentum == "shared"

    def step(self, indices, values, learning_rate: float | None = None) -> None:
        """Apply one sparse gradient (ids may repeat, in any order)."""
        h = self.hyper
        lr = h.learning_rate if learning_rate is None else learning_rate
        rows, grads = sum_duplicates(indices, values)
        if h.row_clipnorm is not None:
            grads = np.stack([self._clip(g) for g in grads]) if len(grads) else grads
        if h.invariant_scalar == "learned":
            for row, grad in zip(rows, grads, strict=True):
                self._learn_scalar(row, grad, lr)
        for bucket in np.unique(self.bucket[rows]):
            self._update_bucket(bucket, grads[self.bucket[rows] == bucket])
        for row, grad in zip(rows, grads, strict=True):
            self._update_row(row, grad, lr)

    def step_dense(self, gradient, learning_rate: float | None = None) -> None:
        """A dense gradient touches every row."""
        self.step(np.arange(len(self.theta)), gradient, learning_rate)

    def _clip(self, grad: np.ndarray) -> np.ndarray:
        norm = np.sqrt(np.sum(grad * grad))
        limit = self.hyper.row_clipnorm
        return grad * (limit / norm) if norm > limit else grad

    def _corrected(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """M-hat and V-hat of one bucket."""
        m, v = self.first_moment[bucket], self.second_moment[bucket]
        if not self.hyper.bias_correction:
            return m, v
        steps = int(self.bucket_steps[bucket])
        return m / (1 - self.hyper.beta_1**steps), v / (1 - self.hyper.beta_2**steps)

    def _learn_scalar(self, row: int, grad: np.ndarray, lr: float) -> None:
        """The learned rule reads the moments as they were before this step."""
        h, bucket = self.hyper, self.bucket[row]
        if self.bucket_steps[bucket] == 0 or not self.uses_first_moment(row):
            return
        m_hat, v_hat = self._corrected(bucket)
        u = m_hat / (np.sqrt(v_hat) + h.epsilon)
        a = float(u @ grad)
        s = self.scalar[row]
        if h.scalar_rule == "gradient":
            s += h.scalar_learning_rate * lr * a
        elif h.scalar_rule == "sign":
            s += h.scalar_learning_rate * np.sign(a)
        elif h.scalar_rule == "log":
            norms = np.linalg.norm(u) * np.linalg.norm(grad)
            s *= np.exp(h.scalar_learning_rate * a / (norms + 1e-30))
        else:
            raise ValueError(f"unknown scalar_rule {h.scalar_rule!r}")
        self.scalar[row] = np.clip(s, *h.scalar_range)

    def _update_bucket(self, bucket: int, grads: np.ndarray) -> None:
        """`grads` are those of the bucket's touched rows, ascending by row."""
        h = self.hyper
        if h.collision_reduce == "sequential":
            pairs = [(g, g * g) for g in grads]
        else:
            reduce = {"mean": np.mean, "sum": np.sum}[h.collision_reduce]
            pairs = [(reduce(grads, axis=0), reduce(grads * grads, axis=0))]
        for first, second in pairs:
            m, v = self.first_moment[bucket], self.second_moment[bucket]
            self.bucket_steps[bucket] += 1
            self.first_moment[bucket] = h.beta_1 * m + (1 - h.beta_1) * first
            self.second_moment[bucket] = h.beta_2 * v + (1 - h.beta_2) * second

    def _row_scalar(self, row: int, grad: np.ndarray, v_hat: np.ndarray) -> float:
        h = self.hyper
        if h.invariant_scalar == "learned":
            return self.scalar[row]
        if h.invariant_scalar is None or self.owners[row]:
            return 1.0
        energy, q = np.mean(grad * grad), self.row_energy[row]
        q = energy if q == 0 else h.scalar_decay * q + (1 - h.scalar_decay) * energy
        self.row_energy[row] = q
        return 1.0 if q == 0 else np.clip(np.sqrt(np.mean(v_hat) / q), *h.scalar_range)

    def _update_row(self, row: int, grad: np.ndarray, lr: float) -> None:
        h = self.hyper
        m_hat, v_hat = self._corrected(self.bucket[row])
        s = self._row_scalar(row, grad, v_hat)
        if h.invariant_scalar == "energy":
            self.scalar[row] = s
        direction = m_hat if self.uses_first_moment(row) else grad
        if h.weight_decay is not None:
            self.theta[row] -= lr * h.weight_decay * self.theta[row]
        self.theta[row] -= lr * s * direction / (np.sqrt(v_hat) + h.epsilon)
