"""Cases of the whole family, and runs of one optimizer on one table."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers import (
    TOLERANCE,
    TableRun,
    active_flavor,
    make_variable,
    random_batch,
)

from tf_basis import optimizers

# At least one argument of each case is not its default.
ADAM = {"learning_rate": 0.05, "beta_1": 0.8, "beta_2": 0.97, "num_buckets": 9}
SGD = {"learning_rate": 0.05, "momentum": 0.8, "num_buckets": 9}
ADAGRAD = {"learning_rate": 0.05, "num_buckets": 9}
SHARED_SGD = {**SGD, "momentum_mode": "shared"}
LEARNED = {"invariant_scalar": "learned", "scalar_learning_rate": 0.02}
LISTED = {"exclusive_rows": [17, 3, 25]}
FREQUENCIES = [float(r * 7 % 13) for r in range(40)]
RULES = ("gradient", "sign", "log")
REDUCES = ("mean", "sum", "sequential")

CASES = {
    # BasisSGD
    "sgd-plain": ("BasisSGD", {**SGD, "momentum": 0.0}),
    **{
        f"sgd-{mode}-{reduce}-{'nesterov' if nesterov else 'plain'}": (
            "BasisSGD",
            {
                **SGD,
                "exclusive_rows": 3,
                "momentum_mode": mode,
                "collision_reduce": reduce,
                "nesterov": nesterov,
            },
        )
        for mode in ("exclusive", "shared", "none")
        for reduce in REDUCES
        for nesterov in (False, True)
    },
    **{
        f"sgd-learned-{rule}": (
            "BasisSGD",
            {**SHARED_SGD, **LEARNED, "scalar_rule": rule},
        )
        for rule in RULES
    },
    "sgd-learned-nesterov": (
        "BasisSGD",
        {**SHARED_SGD, **LEARNED, "nesterov": True},
    ),
    "sgd-decayed": ("BasisSGD", {**SHARED_SGD, "weight_decay": 0.1}),
    "sgd-clipped": ("BasisSGD", {**SHARED_SGD, "row_clipnorm": 0.7}),
    "sgd-one-to-one": ("BasisSGD", {**SGD, "num_buckets": 40}),
    # BasisAdagrad
    **{
        f"adagrad-{scalar}-{reduce}-{start}": (
            "BasisAdagrad",
            {
                **ADAGRAD,
                "exclusive_rows": 2,
                "invariant_scalar": scalar,
                "collision_reduce": reduce,
                "initial_accumulator_value": start,
            },
        )
        for scalar in ("energy", None)
        for reduce in REDUCES
        for start in (0.0, 0.3)
    },
    "adagrad-decayed": (
        "BasisAdagrad",
        {**ADAGRAD, "weight_decay": 0.1, "row_clipnorm": 0.7, "epsilon": 1e-3},
    ),
    "adagrad-one-to-one": ("BasisAdagrad", {**ADAGRAD, "num_buckets": 41}),
    # Hashes
    **{
        f"adam-{hashing}-{momentum}-{reduce}": (
            "BasisAdam",
            {
                **ADAM,
                "hashing": hashing,
                "momentum": momentum,
                "collision_reduce": reduce,
                "exclusive_rows": 2,
                "seed": 6,
            },
        )
        for hashing in ("double", "consistent")
        for momentum in ("exclusive", "shared", "none")
        for reduce in REDUCES
    },
    **{
        f"adam-double-learned-{rule}": (
            "BasisAdam",
            {
                **ADAM,
                **LEARNED,
                "hashing": "double",
                "momentum": "shared",
                "scalar_rule": rule,
            },
        )
        for rule in RULES
    },
    "adam-double-raw": (
        "BasisAdam",
        {**ADAM, "hashing": "double", "momentum": "shared", "bias_correction": False},
    ),
    "adam-double-two-shared-buckets": (
        "BasisAdam",
        {**ADAM, "hashing": "double", "num_buckets": 4, "exclusive_rows": 2},
    ),
    "adam-double-one-shared-bucket": (
        "BasisAdam",
        {**ADAM, "hashing": "double", "num_buckets": 4, "exclusive_rows": 3},
    ),
    "adagrad-double": (
        "BasisAdagrad",
        {**ADAGRAD, "hashing": "double", "initial_accumulator_value": 0.1},
    ),
    "sgd-double": ("BasisSGD", {**SHARED_SGD, "hashing": "double", "nesterov": True}),
    "sgd-double-learned": ("BasisSGD", {**SHARED_SGD, **LEARNED, "hashing": "double"}),
    # Owners from a list, and from frequencies
    **{
        f"adam-listed-{hashing}": (
            "BasisAdam",
            {**ADAM, **LISTED, "hashing": hashing, "seed": 8},
        )
        for hashing in ("balanced", "murmur3", "double", "consistent")
    },
    "adagrad-listed": ("BasisAdagrad", {**ADAGRAD, **LISTED}),
    "sgd-listed": ("BasisSGD", {**SGD, **LISTED}),
    "adam-listed-one-to-one": ("BasisAdam", {**ADAM, **LISTED, "num_buckets": 40}),
    "adam-frequencies": (
        "BasisAdam",
        {**ADAM, "row_frequencies": FREQUENCIES, "exclusive_rows": 4},
    ),
    # Leaders
    **{
        f"adam-auto-{momentum}-{reduce}": (
            "BasisAdam",
            {
                **ADAM,
                "exclusive_rows": "auto",
                "momentum": momentum,
                "collision_reduce": reduce,
            },
        )
        for momentum in ("exclusive", "none")
        for reduce in REDUCES
    },
    "adam-auto-raw": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "bias_correction": False},
    ),
    "adam-auto-unscaled": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "invariant_scalar": None},
    ),
    "adam-auto-stale": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "stale_decay": True},
    ),
    "adam-auto-consistent": (
        "BasisAdam",
        {**ADAM, "exclusive_rows": "auto", "hashing": "consistent"},
    ),
    "adagrad-auto": (
        "BasisAdagrad",
        {**ADAGRAD, "exclusive_rows": "auto", "initial_accumulator_value": 0.1},
    ),
    "sgd-auto": ("BasisSGD", {**SGD, "exclusive_rows": "auto"}),
    "sgd-auto-nesterov": (
        "BasisSGD",
        {**SGD, "exclusive_rows": "auto", "nesterov": True, "stale_decay": True},
    ),
    # Stale decay
    **{
        f"adam-stale-{momentum}-{reduce}": (
            "BasisAdam",
            {
                **ADAM,
                "stale_decay": True,
                "momentum": momentum,
                "collision_reduce": reduce,
                "exclusive_rows": 2,
            },
        )
        for momentum in ("exclusive", "shared", "none")
        for reduce in REDUCES
    },
    "adam-stale-raw": (
        "BasisAdam",
        {**ADAM, "stale_decay": True, "momentum": "shared", "bias_correction": False},
    ),
    "adam-stale-double": (
        "BasisAdam",
        {**ADAM, "stale_decay": True, "momentum": "shared", "hashing": "double"},
    ),
    **{
        f"adam-stale-learned-{rule}": (
            "BasisAdam",
            {
                **ADAM,
                **LEARNED,
                "stale_decay": True,
                "momentum": "shared",
                "scalar_rule": rule,
            },
        )
        for rule in RULES
    },
    "sgd-stale": ("BasisSGD", {**SHARED_SGD, "stale_decay": True}),
    # The learned scalar by frequency
    **{
        f"adam-frequency-{rule}-{power}": (
            "BasisAdam",
            {
                **ADAM,
                **LEARNED,
                "momentum": "shared",
                "scalar_rule": rule,
                "scalar_frequency_power": power,
            },
        )
        for rule in RULES
        for power in (0.5, 1.0)
    },
    "adam-frequency-double": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "hashing": "double",
            "scalar_frequency_power": 0.7,
        },
    ),
    "adam-frequency-sequential": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "collision_reduce": "sequential",
            "scalar_frequency_power": 0.7,
        },
    ),
    "adam-frequency-stale": (
        "BasisAdam",
        {
            **ADAM,
            **LEARNED,
            "momentum": "shared",
            "stale_decay": True,
            "scalar_frequency_power": 0.7,
        },
    ),
    "sgd-frequency": (
        "BasisSGD",
        {**SHARED_SGD, **LEARNED, "scalar_frequency_power": 1.0},
    ),
}


def touching_every_mode(cases: dict) -> list[str]:
    """The first cases that have between them every value of every argument."""
    seen, chosen = set(), []
    for name, (kind, arguments) in cases.items():
        values = {(kind, key, repr(value)) for key, value in arguments.items()}
        if values - seen:
            seen |= values
            chosen.append(name)
    return chosen


class FamilyRun(TableRun):
    """One optimizer of the family and one compressed table."""

    def __init__(self, kind, theta, flavor=None, function=False, **kwargs):
        flavor = flavor or active_flavor()
        self.variable = make_variable(theta, flavor)
        self.shape = tuple(self.variable.shape)
        make = getattr(optimizers.for_flavor(flavor), kind)
        self.optimizer = make(tables=[self.variable], **kwargs)
        self.optimizer.build([self.variable])
        traced = tf.function(self._apply_one, reduce_retracing=True)
        self._apply = traced if function else self._apply_one


def assert_matches(run: TableRun, reference) -> None:
    """theta and all state arrays of a run are those of a numpy reference."""
    actual, wanted = run.state(), reference.state()
    assert set(actual) == set(wanted)
    for field, value in wanted.items():
        assert actual[field].shape == value.shape, field
        if actual[field].dtype.kind == "i":
            np.testing.assert_array_equal(actual[field], value, err_msg=field)
        else:
            np.testing.assert_allclose(actual[field], value, err_msg=field, **TOLERANCE)


def hot_batch(rng, n_rows: int, dim: int, size: int, hot):
    """A batch in which some rows come nearly always: buckets find leaders."""
    _, values = random_batch(rng, n_rows, dim, size)
    others = rng.integers(0, n_rows, size)
    return np.where(rng.random(size) < 0.6, rng.choice(hot, size), others), values
