"""Float64 BasisAdam, BasisSGD and BasisAdagrad with all options, on one table.

One row and one bucket at a time, from the formulas in `docs/basis_adam.md`.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from .basis_adam import sum_duplicates
from .hashing_family import most_frequent_rows, pairs_of_table

VOTES_TO_OWN, MOST_VOTES = 8, 64
LEAST_FLOAT16_EPSILON = 2.0**-12
LARGEST = float(np.finfo(np.float32).max)  # where state stops

_COMMON = {
    "exclusive_rows": 0,
    "row_frequencies": None,
    "scalar_decay": 0.99,
    "scalar_range": (0.1, 10.0),
    "scalar_rule": "gradient",
    "scalar_learning_rate": 1e-4,
    "scalar_frequency_power": 0.0,
    "collision_reduce": "mean",
    "bias_correction": True,
    "hashing": "balanced",
    "seed": 0,
    "moment_dtype": "float32",
    "energy_dtype": "float32",
    "stale_decay": False,
    "weight_decay": None,
    "row_clipnorm": None,
    "nesterov": False,
    "initial_accumulator_value": 0.0,
}
DEFAULTS = {
    "BasisAdam": {
        **_COMMON,
        "learning_rate": 1e-3,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-8,
        "momentum": "exclusive",
        "invariant_scalar": "energy",
    },
    "BasisAdagrad": {
        **_COMMON,
        "learning_rate": 1e-3,
        "epsilon": 1e-7,
        "invariant_scalar": "energy",
    },
    "BasisSGD": {
        **_COMMON,
        "learning_rate": 0.01,
        "momentum": 0.0,
        "momentum_mode": "exclusive",
        "invariant_scalar": None,
    },
}


class FamilyTable:
    """State and update of one compressed table theta[N, d]."""

    def __init__(self, kind: str, theta, num_buckets: int, **arguments):
        unknown = set(arguments) - set(DEFAULTS[kind])
        if unknown:
            raise ValueError(f"{kind} has no arguments {sorted(unknown)}")
        self.kind = kind
        h = self.h = SimpleNamespace(**{**DEFAULTS[kind], **arguments})
        self.mode = {
            "BasisAdam": lambda: h.momentum,
            "BasisAdagrad": lambda: "none",
            "BasisSGD": lambda: h.momentum_mode if h.momentum else "none",
        }[kind]()
        if kind != "BasisSGD" and h.moment_dtype == "float16":
            h.epsilon = max(h.epsilon, LEAST_FLOAT16_EPSILON)
        self.theta = np.array(theta, np.float64)
        n_rows, dim = self.theta.shape
        self.count = min(num_buckets, n_rows)
        self.led = h.exclusive_rows == "auto" and self.count < n_rows
        owners = 0 if h.exclusive_rows == "auto" else h.exclusive_rows
        if h.row_frequencies is not None:
            owners = most_frequent_rows(h.row_frequencies, owners)
        self.pairs = pairs_of_table(n_rows, self.count, owners, h.hashing, h.seed)
        if self.count == n_rows:
            self.owners = set(range(n_rows))
        else:
            self.owners = set(range(owners) if isinstance(owners, int) else owners)
        start = h.initial_accumulator_value
        self.steps = 0
        self.first_moment = np.zeros((self.count, dim))
        self.second_moment = np.full((self.count, dim), start)
        self.bucket_steps = np.zeros(self.count, np.int64)
        self.last_step = np.zeros(self.count, np.int64)
        self.leader = np.zeros(self.count, np.int64)
        self.leader_votes = np.zeros(self.count, np.int64)
        self.leader_steps = np.zeros(self.count, np.int64)
        self.row_energy = np.full(n_rows, start)
        self.scalar = np.ones(n_rows)
        self.row_steps = np.zeros(n_rows, np.int64)

    # ---- what the state holds -------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """theta and the arrays that the package keeps under these arguments."""
        fields = ["theta", "bucket_steps"]
        fields += ["second_moment"] if self.kind != "BasisSGD" else []
        fields += ["row_energy"] if self.h.invariant_scalar == "energy" else []
        learned = self.h.invariant_scalar == "learned"
        fields += ["scalar"] if learned else []
        fields += ["row_steps"] if learned and self.h.scalar_frequency_power else []
        fields += ["last_step"] if self.h.stale_decay else []
        fields += ["leader", "leader_votes", "leader_steps"] if self.led else []
        state = {field: getattr(self, field) for field in fields}
        if self.mode != "none":
            state["first_moment"] = self.first_moment[: self.first_moment_rows]
        return state

    @property
    def first_moment_rows(self) -> int:
        if self.mode == "shared" or (self.led and self.mode == "exclusive"):
            return self.count
        return len(self.owners) if self.mode == "exclusive" else 0

    def load(self, state: dict, steps: int) -> None:
        """Go on from the state of another implementation after `steps` steps."""
        self.steps = steps
        for field, value in state.items():
            target = getattr(self, field)
            target[: len(value)] = np.asarray(value).astype(target.dtype)

    # ---- one step -------------------------------------------------------------

    def step(self, indices, values, learning_rate=None, stored=None) -> None:
        """Apply one sparse gradient (ids may repeat, in any order).

        `stored` has the moments and energies after this step as another
        implementation rounded them: rows read these, `exact` keeps the others.
        """
        self.stored = stored or {}
        self.exact = {field: getattr(self, field).copy() for field in self.stored}
        lr = self.h.learning_rate if learning_rate is None else learning_rate
        self.steps += 1
        rows, grads = sum_duplicates(indices, values)
        grads = np.array([self._clip(g) for g in grads]).reshape(grads.shape)
        if self.h.invariant_scalar == "learned":
            for row, grad in zip(rows, grads, strict=True):
                self._learn_scalar(row, grad, lr)
        for bucket in np.unique(self.pairs[rows]):
            inside = np.any(self.pairs[rows] == bucket, axis=1)
            if self.h.stale_decay:
                self._catch_up(bucket)
            self._update_bucket(bucket, rows[inside], grads[inside])
            self._round("first_moment", bucket)
            self._round("second_moment", bucket)
        for row, grad in zip(rows, grads, strict=True):
            self._update_row(row, grad, lr)

    def _round(self, field: str, index: int) -> None:
        if field in self.stored and index < len(self.stored[field]):
            self.exact[field][index] = getattr(self, field)[index]
            getattr(self, field)[index] = self.stored[field][index]

    def _clip(self, grad: np.ndarray) -> np.ndarray:
        norm, limit = np.sqrt(np.sum(grad * grad)), self.h.row_clipnorm
        return grad * (limit / norm) if limit is not None and norm > limit else grad

    def _rate(self, moment: str) -> float:
        """What a step keeps of a moment."""
        if self.kind == "BasisAdagrad":
            return 1.0
        if self.kind == "BasisSGD":
            return self.h.momentum
        return self.h.beta_1 if moment == "first" else self.h.beta_2

    def _catch_up(self, bucket: int) -> None:
        """The steps missed since a bucket's first, as steps with a zero gradient."""
        seen = self.bucket_steps[bucket] > 0
        missed = self.steps - 1 - self.last_step[bucket] if seen else 0
        self.last_step[bucket] = self.steps
        self.first_moment[bucket] *= self._rate("first") ** missed
        self.second_moment[bucket] *= self._rate("second") ** missed
        self.bucket_steps[bucket] += missed
        self.leader_steps[bucket] += missed

    def _add(self, moment: str, bucket: int, value: np.ndarray) -> None:
        array = self.first_moment if moment == "first" else self.second_moment
        rate = self._rate(moment)
        weight = 1 - rate if self.kind == "BasisAdam" else 1.0
        array[bucket] = rate * array[bucket] + weight * value
        if moment == "second":
            array[bucket] = np.minimum(array[bucket], LARGEST)

    def _update_bucket(self, bucket: int, rows, grads) -> None:
        """`rows` of this bucket were touched, ascending; `grads` are theirs."""
        if self.led:
            self._vote(bucket, rows)
            own = grads[rows == self.leader[bucket]]
            if len(own):
                self.leader_steps[bucket] += 1
                self._add("first", bucket, own[0])
            if self.leader_votes[bucket] >= VOTES_TO_OWN:
                grads = own  # no others enter; without the leader, nobody
        if not len(grads):
            return
        squares = np.minimum(grads * grads, LARGEST)
        if self.h.collision_reduce == "sequential":
            pairs = list(zip(grads, squares, strict=True))
        else:
            reduce = {"mean": np.mean, "sum": np.sum}[self.h.collision_reduce]
            square = np.minimum(reduce(squares, axis=0), LARGEST)
            pairs = [(reduce(grads, axis=0), square)]
        for first, second in pairs:
            self.bucket_steps[bucket] += 1
            if not self.led:
                self._add("first", bucket, first)
            self._add("second", bucket, second)

    def _vote(self, bucket: int, rows) -> None:
        votes = self.leader_votes[bucket]
        if votes == 0:  # also where the leader itself comes again
            self.leader[bucket], votes = rows[0], 1
            self.leader_steps[bucket] = 0
            self.first_moment[bucket] = 0
        elif self.leader[bucket] in rows:
            votes = min(votes + 1, MOST_VOTES)
        else:
            votes -= 1
        self.leader_votes[bucket] = votes

    # ---- reading --------------------------------------------------------------

    def _owns(self, row: int) -> bool:
        bucket = self.pairs[row, 0]
        leads = self.led and self.leader[bucket] == row
        return row in self.owners or (
            leads and self.leader_votes[bucket] >= VOTES_TO_OWN
        )

    def _follows(self, row: int) -> bool:
        return self.mode == "shared" or (self.mode == "exclusive" and self._owns(row))

    def _unbiased(self, moment: str, bucket: int) -> np.ndarray:
        array = self.first_moment if moment == "first" else self.second_moment
        if self.kind != "BasisAdam" or not self.h.bias_correction:
            return array[bucket]
        led_first = self.led and moment == "first"
        steps = (self.leader_steps if led_first else self.bucket_steps)[bucket]
        return array[bucket] / (1 - self._rate(moment) ** float(steps))

    def _m_hat(self, row: int) -> np.ndarray:
        return np.mean([self._unbiased("first", b) for b in self.pairs[row]], axis=0)

    def _v_hat(self, row: int) -> np.ndarray:
        hats = [self._unbiased("second", b) for b in self.pairs[row]]
        return np.minimum(np.min(hats, axis=0), LARGEST)

    def _divisor(self, row: int):
        if self.kind == "BasisSGD":
            return 1.0
        return np.sqrt(self._v_hat(row)) + self.h.epsilon

    def _learn_scalar(self, row: int, grad: np.ndarray, lr: float) -> None:
        h, buckets = self.h, self.pairs[row]
        self.row_steps[row] += 1
        if np.any(self.bucket_steps[buckets] == 0) or not self._follows(row):
            return
        u = self._m_hat(row) / self._divisor(row)
        a = float(u @ grad)
        rate = h.scalar_learning_rate
        if h.scalar_frequency_power:
            share = self.row_steps[row] / (np.max(self.bucket_steps[buckets]) + 1)
            rate *= min(share, 1.0) ** -h.scalar_frequency_power
        if h.scalar_rule == "gradient":
            s = self.scalar[row] + rate * lr * a
        elif h.scalar_rule == "sign":
            s = self.scalar[row] + rate * np.sign(a)
        elif h.scalar_rule == "log":
            norms = np.linalg.norm(u) * np.linalg.norm(grad)
            s = self.scalar[row] * np.exp(rate * a / (norms + 1e-30))
        else:
            raise ValueError(f"unknown scalar_rule {h.scalar_rule!r}")
        self.scalar[row] = np.clip(s, *h.scalar_range)

    def _row_scalar(self, row: int, grad: np.ndarray) -> float:
        if self.h.invariant_scalar == "learned":
            return self.scalar[row]
        if self.h.invariant_scalar is None or row in self.owners:
            return 1.0
        energy, q = np.mean(grad * grad), self.row_energy[row]
        if self.kind == "BasisAdagrad":
            q += energy
        elif q == 0:
            q = energy
        else:
            q = self.h.scalar_decay * q + (1 - self.h.scalar_decay) * energy
        self.row_energy[row] = min(q, LARGEST)
        self._round("row_energy", row)
        q = self.row_energy[row]
        if q == 0 or self._owns(row):  # a leader may lose its bucket: q goes on
            return 1.0
        s = np.sqrt(np.mean(self._v_hat(row)) / q)
        return s if self.kind == "BasisAdagrad" else np.clip(s, *self.h.scalar_range)

    def _update_row(self, row: int, grad: np.ndarray, lr: float) -> None:
        s = self._row_scalar(row, grad)
        direction = grad
        if self._follows(row):
            direction = self._m_hat(row)
            if self.h.nesterov:
                direction = grad + self.h.momentum * direction
        if self.h.weight_decay is not None:
            self.theta[row] -= lr * self.h.weight_decay * self.theta[row]
        self.theta[row] -= lr * s * direction / self._divisor(row)
