"""Two float64 neighbours of BasisAdam: Keras's dense Adam and a lazy Adam."""

from __future__ import annotations

import numpy as np

from .basis_adam import sum_duplicates


class KerasAdam:
    """Keras Adam on a dense variable: one step count, epsilon beside sqrt(v)."""

    def __init__(self, theta, learning_rate, beta_1, beta_2, epsilon):
        self.theta = np.array(theta, np.float64)
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.m = np.zeros_like(self.theta)
        self.v = np.zeros_like(self.theta)
        self.steps = 0

    def step(self, gradient) -> None:
        gradient = np.asarray(gradient, np.float64)
        self.steps += 1
        root = np.sqrt(1 - self.beta_2**self.steps)
        alpha = self.learning_rate * root / (1 - self.beta_1**self.steps)
        self.m += (gradient - self.m) * (1 - self.beta_1)
        self.v += (gradient * gradient - self.v) * (1 - self.beta_2)
        self.theta -= self.m * alpha / (np.sqrt(self.v) + self.epsilon)


class LazyAdam:
    """Adam on touched rows only: duplicates summed, one step count per row."""

    def __init__(self, theta, learning_rate, beta_1, beta_2, epsilon):
        self.theta = np.array(theta, np.float64)
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.m = np.zeros_like(self.theta)
        self.v = np.zeros_like(self.theta)
        self.row_steps = np.zeros(len(self.theta), np.int64)

    def step(self, indices, values) -> None:
        rows, grads = sum_duplicates(indices, values)
        self.row_steps[rows] += 1
        steps = self.row_steps[rows][:, None]
        self.m[rows] = self.beta_1 * self.m[rows] + (1 - self.beta_1) * grads
        self.v[rows] = self.beta_2 * self.v[rows] + (1 - self.beta_2) * grads**2
        m_hat = self.m[rows] / (1 - self.beta_1**steps)
        v_hat = self.v[rows] / (1 - self.beta_2**steps)
        self.theta[rows] -= self.learning_rate * m_hat / (np.sqrt(v_hat) + self.epsilon)
