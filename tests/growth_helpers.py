"""Tables of any optimizer for the tests of growth, and the rules of moving by loops."""

from __future__ import annotations

import numpy as np
from helpers import make_slices, make_variable, random_batch, state_of, to_numpy

N_ROWS, DIM = 120, 3

# Name -> (class, arguments) whose states hold different slots in different formats.
CASES = {
    "adam": ("BasisAdam", {}),
    "adam-shared": ("BasisAdam", {"momentum": "shared"}),
    "adam-murmur3": ("BasisAdam", {"momentum": "shared", "hashing": "murmur3"}),
    "adam-double": ("BasisAdam", {"momentum": "shared", "hashing": "double"}),
    "adam-leading": ("BasisAdam", {"exclusive_rows": 5}),
    "adam-listed": ("BasisAdam", {"exclusive_rows": [70, 3, 51]}),
    "adam-plain": (
        "BasisAdam",
        {"momentum": "shared", "bias_correction": False, "invariant_scalar": None},
    ),
    "adam-learned": (
        "BasisAdam",
        {
            "momentum": "shared",
            "invariant_scalar": "learned",
            "scalar_frequency_power": 0.5,
            "scalar_learning_rate": 0.1,
        },
    ),
    "adam-stale": ("BasisAdam", {"momentum": "shared", "stale_decay": True}),
    "adam-bfloat16": (
        "BasisAdam",
        {
            "exclusive_rows": 5,
            "moment_dtype": "bfloat16",
            "energy_dtype": "log8",
        },
    ),
    "adam-float16": ("BasisAdam", {"momentum": "shared", "moment_dtype": "float16"}),
    "sgd": ("BasisSGD", {"momentum": 0.9, "momentum_mode": "shared"}),
    "adagrad": ("BasisAdagrad", {"initial_accumulator_value": 0.25}),
}
BUCKET_SLOTS = {"bucket_steps", "first_moment", "second_moment", "last_step"}


class Table:
    """One compressed table of any optimizer, trained eagerly."""

    def __init__(self, case: str, num_buckets: int, flavor=None, seed=0, **more):
        from tf_basis import optimizers
        from tf_basis.adapters import flavor as flavors

        kind, arguments = CASES[case]
        self.flavor = flavor or flavors.active()
        self.rng = np.random.default_rng(seed)
        theta = self.rng.normal(size=(N_ROWS, DIM))
        self.variable = make_variable(theta, flavor)
        arguments = {"learning_rate": 0.05, "num_buckets": num_buckets, **arguments}
        classes = optimizers.for_flavor(self.flavor)
        self.optimizer = getattr(classes, kind)(
            tables=[self.variable], **{**arguments, **more}
        )
        self.optimizer.build([self.variable])

    def train(self, steps: int, n_rows: int = N_ROWS):
        for _ in range(steps):
            self.step(*random_batch(self.rng, n_rows, DIM, 15))
        return self

    def step(self, ids, values) -> None:
        slices = make_slices(ids, values, tuple(self.variable.shape))
        self.optimizer.apply_gradients([(slices, self.variable)])

    @property
    def buckets(self) -> np.ndarray:
        """[N, H]"""
        found = self.optimizer.buckets(self.variable)
        return found.reshape(len(found), -1)

    def state(self) -> dict[str, np.ndarray]:
        return state_of(self.optimizer, self.variable)

    def iterations(self) -> int:
        return int(to_numpy(self.optimizer.iterations))


def bias(optimizer, name: str, steps) -> np.ndarray:
    """1 - beta^steps, or 1 without bias correction."""
    if not getattr(optimizer, "bias_correction", False):
        return np.ones(np.shape(steps))
    beta = optimizer.beta_1 if name == "first_moment" else optimizer.beta_2
    return 1 - beta ** np.asarray(steps, np.float64)


def aged_by_hand(table: Table, state: dict) -> dict:
    """With stale decay: what the buckets' state is at the current step."""
    if "last_step" not in state:
        return state
    state = {k: np.array(v, np.float64) for k, v in state.items()}
    for b, steps in enumerate(state["bucket_steps"]):
        missed = table.iterations() - state["last_step"][b] if steps else 0
        state["bucket_steps"][b] += missed
        state["first_moment"][b] *= table.optimizer.beta_1**missed
        state["second_moment"][b] *= table.optimizer.beta_2**missed
    return state


def mixed_by_hand(table: Table, state: dict, old: np.ndarray, new: np.ndarray):
    """Shared buckets after a re-hash, bucket by bucket and row by row, in float64.

    Gives name -> {bucket: value} for the buckets in which rows of several meet.
    """
    state = aged_by_hand(table, state)
    names = ("first_moment", "second_moment")
    # The first moments of owners alone never mix.
    moments = [n for n in names if len(state.get(n, ())) > old.max()]
    result = {name: {} for name in [*moments, "bucket_steps"]}
    for bucket in range(new.max() + 1):
        rows = np.flatnonzero((new == bucket).any(axis=1))
        # A row with two buckets passes each on by its own hash.
        sources, weight = [], []
        for row in rows:
            at = np.flatnonzero(new[row] == bucket)
            sources += list(old[row, at])
            weight += [1 / len(at)] * len(at)
        if len(set(sources)) < 2:
            continue
        weight = np.array(weight)
        steps = state["bucket_steps"][sources]
        mean = np.rint(np.average(steps, weights=weight))
        mean = max(mean, 1) if steps.any() else 0
        result["bucket_steps"][bucket] = mean
        for name in moments:
            values = state[name][sources].astype(np.float64)
            total = (values * weight[:, None]).sum(axis=0)
            seen = (bias(table.optimizer, name, steps) * weight).sum()
            hat = total / seen if seen else total * 0
            result[name][bucket] = hat * bias(table.optimizer, name, mean)
    return result
