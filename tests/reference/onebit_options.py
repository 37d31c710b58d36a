"""Options of the 1-bit exchange in float64 numpy, for any number of simulated ranks."""

from __future__ import annotations

import numpy as np

from reference.quantize import blocks_of, quantize_block


def nearest(u: np.ndarray, scales: list[float], bits: int) -> np.ndarray:
    """What a block stands for whose scales are given."""
    scale = scales[0]
    if bits == 2:
        scale = np.where(np.abs(u) >= (scales[0] + scales[1]) / 2, scales[1], scales[0])
    return np.where(u >= 0, scale, -scale)


class Exchange:
    """Both stages, whose scales travel every `interval`-th time; one or two bits.

    `sums` are those of all ranks in the last exchange: u, u², (u − q)².
    """

    def __init__(self, elements, ranks, block, interval=1, bits=1) -> None:
        self.worker, self.server = np.zeros([ranks, elements]), np.zeros(elements)
        self.block, self.interval, self.bits, self.age = block, interval, bits, 0
        self.scales: dict = {}
        self.sums = np.zeros(3)

    def quantised(self, who, u: np.ndarray) -> np.ndarray:
        out = np.empty_like(u)
        for i, part in enumerate(blocks_of(len(u), self.block)):
            key = (who, i, self.bits)
            if self.age % self.interval == 0:
                out[part], self.scales[key], _ = quantize_block(u[part], self.bits)
            else:
                out[part] = nearest(u[part], self.scales[key], self.bits)
        return out

    def average(self, given: np.ndarray) -> np.ndarray:
        u = given + self.worker
        q = np.array([self.quantised(r, each) for r, each in enumerate(u)])
        self.worker = u - q
        self.sums = np.array([u.sum(), (u**2).sum(), (self.worker**2).sum()])
        if len(given) == 1:
            self.age += 1
            return q[0]
        a = q.mean(axis=0) + self.server
        result = self.quantised("owner", a)
        self.server = a - result
        self.age += 1
        return result


class OneBitAdam:
    """One flat variable; gradients and weights are given for all ranks."""

    def __init__(
        self,
        theta,
        ranks,
        *,
        rate,
        warmup,
        block,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        weight_decay=0.0,
        delay=0,
        staleness_decay=1.0,
        local_steps=1,
        doubling=None,
        amplitude_interval=1,
        adaptive_rate=None,
        adaptive_bits=None,
    ) -> None:
        n = len(theta)
        self.theta = np.tile(theta.astype(np.float64), [ranks, 1])
        self.m, self.v = np.zeros([ranks, n]), np.zeros(n)
        self.exchange = Exchange(n, ranks, block, amplitude_interval)
        self.adaptive_rate, self.adaptive_bits = adaptive_rate, adaptive_bits
        self.factor, self.error, self.streak = 1.0, 0.0, 0
        self.full_rate, self.warmup, self.decay = rate, warmup, weight_decay
        self.b1, self.b2, self.epsilon = beta_1, beta_2, epsilon
        self.delay, self.staleness = delay, staleness_decay
        self.pending = np.zeros([ranks, n])
        self.local_steps, self.doubling = local_steps, doubling
        self.t = self.since = 0

    @property
    def rate(self) -> float:
        return self.full_rate * self.factor

    def step(self, gradients: np.ndarray, weights=None) -> None:
        ranks = len(gradients)
        self._hear()
        weights = np.ones(ranks) if weights is None else np.asarray(weights)
        if self.local_steps > 1 and self.t >= self.warmup:
            self._alone(gradients, weights)
            return
        if not np.isfinite(gradients).all():
            if self.delay:
                self._exchange_pending(put_back=True)
            return
        scaled = gradients * (weights * ranks / weights.sum())[:, None]
        if self.delay:
            self._exchange_pending()
            self.pending = scaled * self.staleness
        else:
            self._together(scaled)

    def _hear(self) -> None:
        """What the exchange of the step before says of itself."""
        (_, squares, errors), self.exchange.sums = self.exchange.sums, np.zeros(3)
        if squares == 0:
            return
        new = errors / squares
        if self.adaptive_rate:
            kept = self.adaptive_rate["smoothing"]
            old = self.error or new
            self.error = kept * old + (1 - kept) * new
            self.factor = max(self.adaptive_rate["floor"], 1 - self.error)
        if self.adaptive_bits:
            wide = self.exchange.bits == 2
            low, high = (self.adaptive_bits[k] for k in ("lower_below", "raise_above"))
            self.streak = self.streak + 1 if (new < low if wide else new > high) else 0
            if self.streak == self.adaptive_bits["patience"]:
                self.streak, self.exchange.age = 0, 0
                self.exchange.bits = 1 if wide else 2

    def _exchange_pending(self, put_back=False) -> None:
        if self.t < self.warmup:
            mean = self.pending.mean(axis=0)
            if put_back:
                self.pending[:] = mean
                return
            self.t += 1
            self._exactly(mean)
            return
        m = self.exchange.average(self.b1 * self.m + (1 - self.b1) * self.pending)
        if put_back:
            self.pending[:] = (m - self.b1 * self.m) / (1 - self.b1)
            return
        self.t += 1
        self._frozen(m)

    def _together(self, g: np.ndarray) -> None:
        self.t += 1
        if self.t <= self.warmup:
            self._exactly(g.mean(axis=0))
        else:
            self._frozen(self.exchange.average(self.b1 * self.m + (1 - self.b1) * g))

    def _exactly(self, g: np.ndarray) -> None:
        self.m[:] = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        root = np.sqrt(self.v / (1 - self.b2**self.t)) + self.epsilon
        change = self.m / (1 - self.b1**self.t) / root
        self.theta -= self.rate * self.decay * self.theta + self.rate * change

    def _divisor(self) -> np.ndarray:
        divisor = np.sqrt(self.v / (1 - self.b2**self.warmup)) + self.epsilon
        return np.where(self.v > 0, divisor, np.inf)

    def _frozen(self, m: np.ndarray) -> None:
        self.m[:] = m
        change = self.m / (1 - self.b1**self.t) / self._divisor()
        self.theta -= self.rate * self.decay * self.theta + self.rate * change

    # ---- alone -----------------------------------------------------------------------

    def _alone(self, gradients: np.ndarray, weights: np.ndarray) -> None:
        if self.since == 0:
            self.anchor, self.u = self.theta.copy(), np.zeros_like(self.theta)
            self.scales, self.kept, self.weights = 0.0, 1.0, np.zeros(len(weights))
        done = self.t - self.warmup  # steps since the warm-up, before this one
        self.t += 1
        self.since += 1
        c = self.rate / (1 - self.b1**self.t)
        self.scales += c
        self.kept *= 1 - self.rate * self.decay
        for rank, g in enumerate(gradients):
            if not np.isfinite(g).all() or weights[rank] == 0:
                continue
            self.weights[rank] += weights[rank]
            self.m[rank] = self.b1 * self.m[rank] + (1 - self.b1) * g
            self.u[rank] += c * self.m[rank]
            self.theta[rank] -= (
                self.rate * self.decay * self.theta[rank]
                + c * self.m[rank] / self._divisor()
            )
        interval = self.local_steps
        if self.doubling:  # looked at when the step has been counted
            interval = min(interval, 2 ** ((done + 1) // self.doubling))
        if self.since >= interval:
            self.synchronize()

    def synchronize(self) -> None:
        ranks = len(self.theta)
        factors = self.weights * ranks / self.weights.sum()
        mean = self.exchange.average(self.u / self.scales * factors[:, None])
        self.m[:] = mean
        self.theta = self.anchor * self.kept - self.scales * mean / self._divisor()
        self.since = 0
