"""OneBitAdam in float64 numpy, for any number of simulated ranks."""

from __future__ import annotations

import re

import numpy as np


def quantised(u: np.ndarray, block: int) -> np.ndarray:
    out = np.empty_like(u)
    for start in range(0, len(u), block):
        part = u[start : start + block]
        out[start : start + block] = np.abs(part).mean() * np.where(part >= 0, 1, -1)
    return out


class Exchange:
    """Two stages, with the residuals of all ranks; server errors in element order."""

    def __init__(self, elements, ranks, block, clip_value=None, reset_interval=None):
        self.worker = np.zeros([ranks, elements])
        self.server = np.zeros(elements)
        self.block, self.clip_value = block, clip_value
        self.reset_interval = reset_interval

    def average(self, given: list[np.ndarray], turn: int) -> np.ndarray:
        if self.reset_interval and (turn + 1) % self.reset_interval == 0:
            mean = np.mean(given + self.worker, axis=0) + self.server
            self.worker[:], self.server[:] = 0, 0
            return mean
        sent = []
        for rank, value in enumerate(given):
            u = value + self.worker[rank]
            if self.clip_value is not None:
                u = np.clip(u, -self.clip_value, self.clip_value)
            sent.append(quantised(u, self.block))
            self.worker[rank] = u - sent[-1]
        if len(given) == 1:
            return sent[0]
        a = np.mean(sent, axis=0) + self.server
        result = quantised(a, self.block)
        self.server = a - result
        return result


class OneBitAdam:
    """Variables by name; `policy` lists (pattern, bits of 1 or 32, interval)."""

    def __init__(
        self,
        start: dict[str, np.ndarray],
        policy,
        *,
        learning_rate,
        beta_1,
        beta_2,
        epsilon,
        warmup_steps,
        total_steps,
        moments,
        block,
        clip_value,
        reset_interval,
        weight_decay,
        ranks=1,
    ) -> None:
        self.theta = {n: v.astype(np.float64) for n, v in start.items()}
        self.rate, self.epsilon, self.decay = learning_rate, epsilon, weight_decay
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.warmup, self.total, self.moments = warmup_steps, total_steps, moments
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name in start:
            rule = next(r for r in policy if re.search(r[0], name))
            way = (rule[1], rule[2] if len(rule) > 2 else 1)
            self.groups.setdefault(way, []).append(name)
        self.state = {}
        for way, names in self.groups.items():
            n = sum(start[name].size for name in names)
            exchange = Exchange(n, ranks, block, clip_value, reset_interval)
            pending = np.zeros([ranks, n])
            self.state[way] = [np.zeros(n), np.zeros(n), exchange, pending]
        self.t = 0

    def step(self, gradients: list[dict[str, np.ndarray]]) -> None:
        self.t += 1
        for way, names in self.groups.items():
            (bits, interval), state = way, self.state[way]
            for rank, given in enumerate(gradients):
                flat = [given[n].astype(np.float64).ravel() for n in names]
                state[3][rank] += np.concatenate(flat)
            if self.t % interval:
                continue
            mine, state[3] = list(state[3] / interval), np.zeros_like(state[3])
            delta = self.rate * self.direction(state, bits, mine, self.t // interval)
            parts = np.split(delta, np.cumsum([self.theta[n].size for n in names])[:-1])
            for name, part in zip(names, parts):
                theta = self.theta[name]
                theta -= self.rate * self.decay * theta
                theta -= part.reshape(theta.shape)

    def direction(self, state, bits, mine, t) -> np.ndarray:
        m, v, exchange, _ = state
        b1, b2 = self.beta_1, self.beta_2
        if bits == 32 or t <= self.warmup:
            g = np.mean(mine, axis=0)
            m[:] = b1 * m + (1 - b1) * g
            v[:] = b2 * v + (1 - b2) * g * g
            return (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + self.epsilon)
        if self.moments == "frozen":
            m[:] = exchange.average([b1 * m + (1 - b1) * g for g in mine], t - 1)
            root = np.sqrt(v / (1 - b2**self.warmup))
            return (m / (1 - b1**t)) / (root + self.epsilon)
        g = exchange.average(mine, t - 1)
        done = t / self.total
        gamma = 0.9 if done <= 0.1 else 0.5 if done <= 0.8 else 0.1
        m[:] = gamma * m + (1 - gamma) * g
        v[:] = gamma * v + (1 - gamma) * g * g
        return m / (np.sqrt(v) + self.epsilon)
