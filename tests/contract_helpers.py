"""The one list of optimizers that keep the contracts, and a problem for each."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers import make_variable, optimizer_arrays, random_batch, state_of

from tf_basis import optimizers

ORIGINAL = {
    "momentum": "shared",
    "invariant_scalar": "learned",
    "scalar_rule": "gradient",
    "collision_reduce": "sequential",
    "bias_correction": False,
}
LEARNED = {"invariant_scalar": "learned", "scalar_learning_rate": 0.01}
LOW = {"moment_dtype": "bfloat16", "energy_dtype": "log8"}
ADAM, ADAGRAD, SGD = (
    {"learning_rate": rate, "num_buckets": 12} for rate in (0.05, 0.4, 0.1)
)
MOMENTUM = {**SGD, "learning_rate": 0.03, "momentum": 0.8}
# The one list: a name, a class and its arguments.
CASES = {
    "adam": ("BasisAdam", ADAM),
    "adam-owners": ("BasisAdam", {**ADAM, "exclusive_rows": 6}),
    "adam-listed": ("BasisAdam", {**ADAM, "exclusive_rows": [11, 3, 17]}),
    "adam-auto": ("BasisAdam", {**ADAM, "exclusive_rows": "auto"}),
    "adam-lazy": ("BasisAdam", {**ADAM, "num_buckets": 1000}),
    "adam-shared": ("BasisAdam", {**ADAM, "momentum": "shared", "epsilon": 1e-5}),
    "adam-none-unscaled": (
        "BasisAdam",
        {**ADAM, "momentum": "none", "invariant_scalar": None},
    ),
    "adam-original": ("BasisAdam", {**ADAM, **ORIGINAL}),
    "adam-sign": (
        "BasisAdam",
        {**ADAM, **LEARNED, "momentum": "shared", "scalar_rule": "sign"},
    ),
    "adam-log-frequency": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "scalar_rule": "log",
            "scalar_frequency_power": 0.5,
        },
    ),
    "adam-sum": ("BasisAdam", {**ADAM, "collision_reduce": "sum", "beta_2": 0.99}),
    "adam-double": ("BasisAdam", {**ADAM, "hashing": "double", "exclusive_rows": 2}),
    "adam-consistent": ("BasisAdam", {**ADAM, "hashing": "consistent", "seed": 5}),
    "adam-stale": ("BasisAdam", {**ADAM, "stale_decay": True, "exclusive_rows": 6}),
    "adam-low": ("BasisAdam", {**ADAM, **LOW, "exclusive_rows": 3}),
    "adam-half": ("BasisAdam", {**ADAM, "moment_dtype": "float16"}),
    "adam-decayed": ("BasisAdam", {**ADAM, "weight_decay": 1e-3, "row_clipnorm": 3.0}),
    "adagrad": ("BasisAdagrad", ADAGRAD),
    "adagrad-started": (
        "BasisAdagrad",
        {**ADAGRAD, "initial_accumulator_value": 0.1, "hashing": "murmur3"},
    ),
    "adagrad-low-double": ("BasisAdagrad", {**ADAGRAD, **LOW, "hashing": "double"}),
    "adagrad-auto": ("BasisAdagrad", {**ADAGRAD, "exclusive_rows": "auto"}),
    "sgd": ("BasisSGD", SGD),
    "sgd-momentum": ("BasisSGD", {**MOMENTUM, "exclusive_rows": 6}),
    "sgd-nesterov": (
        "BasisSGD",
        {**MOMENTUM, "nesterov": True, "momentum_mode": "shared"},
    ),
    "sgd-learned": (
        "BasisSGD",
        {**MOMENTUM, **LEARNED, "momentum_mode": "shared", "moment_dtype": "bfloat16"},
    ),
}
ROWS, DIM = 40, 3


class Problem:
    """An optimizer with one table and one dense variable."""

    def __init__(self, name, flavor, shape=(ROWS, DIM), optimizer=None, **more):
        rng = np.random.default_rng(0)
        self.table = make_variable(rng.normal(size=shape), flavor, "table")
        self.dense = make_variable(rng.normal(size=(5,)), flavor, "dense")
        if optimizer is None:
            kind, arguments = CASES[name]
            make = getattr(optimizers.for_flavor(flavor), kind)
            optimizer = make(tables="^table", **{**arguments, **more})
        self.optimizer = optimizer
        self.variables = [self.table, self.dense]
        self.optimizer.build(self.variables)
        self.shape = shape

    def apply(self, values, indices):
        slices = tf.IndexedSlices(values, indices, self.shape)
        gradient = 0.1 * tf.convert_to_tensor(self.dense)
        self.optimizer.apply_gradients([(slices, self.table), (gradient, self.dense)])

    def step(self, batch):
        indices, values = batch
        values = np.asarray(values, np.float32).reshape(-1, self.shape[1])
        self.apply(tf.constant(values), tf.constant(np.asarray(indices, np.int64)))
        return self

    def train(self, start, stop):
        for number in range(start, stop):
            rng = np.random.default_rng(number)
            self.step(random_batch(rng, *self.shape, 30))
        return self

    def table_arrays(self):
        return state_of(self.optimizer, self.table)

    def arrays(self):
        return optimizer_arrays(self.optimizer, self.variables)
