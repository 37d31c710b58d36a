"""Utilities shared by the tests: golden cases, optimizers, state comparison."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FLAVORS = ("keras3", "tf_keras")
BACKENDS = {"op": "require", "twin": "off"}
# A float32 implementation against float64 results.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def load_golden(name: str) -> list[dict]:
    return json.loads((TESTS / "golden" / f"{name}.json").read_text())


def golden_hyper(case: dict) -> dict:
    """Constructor arguments of a golden case."""
    short = {"lr": "learning_rate", "eps": "epsilon"}
    hyper = {short.get(key, key): value for key, value in case["hyper"].items()}
    if "scalar_range" in hyper:
        hyper["scalar_range"] = tuple(hyper["scalar_range"])
    return {"hashing": "murmur3", **hyper}


def golden_cases() -> list:
    """One pytest parameter for each golden case, with its name as the id."""
    import pytest

    return [pytest.param(c, id=c["name"]) for c in load_golden("basis_adam")]


def active_flavor() -> str:
    """The flavour that `tf.keras` has in this process."""
    return "tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras3"


def make_optimizer(flavor: str | None = None, **kwargs):
    """BasisAdam of a flavour (by default the active one)."""
    from tf_basis import optimizers

    return optimizers.for_flavor(flavor or active_flavor()).BasisAdam(**kwargs)


def keras_of(flavor: str):
    """The Keras module of a flavour."""
    if flavor == "tf_keras":
        import tf_keras

        return tf_keras
    import keras

    return keras


def make_variable(value, flavor: str | None = None, name: str = "table", plain=False):
    """A float32 variable: keras.Variable on Keras 3 unless `plain`."""
    import tensorflow as tf

    value = np.asarray(value, np.float32)
    if plain or (flavor or active_flavor()) == "tf_keras":
        return tf.Variable(value, name=name)
    import keras

    return keras.Variable(value, name=name)


def make_slices(indices, values, shape, index_dtype="int64"):
    """IndexedSlices from numpy; an empty batch keeps the row width."""
    import tensorflow as tf

    values = np.asarray(values, np.float32).reshape(-1, *shape[1:])
    return tf.IndexedSlices(
        tf.constant(values),
        tf.constant(np.asarray(indices).reshape(-1), index_dtype),
        tf.constant(shape, index_dtype),
    )


def to_numpy(variable) -> np.ndarray:
    """A copy of a variable of any flavour."""
    value = getattr(variable, "value", variable)
    return np.array((value() if callable(value) else value).numpy())


class TableRun:
    """One optimizer and one compressed table, stepped with sparse gradients."""

    def __init__(self, theta, flavor=None, function=False, plain=False, **kwargs):
        import tensorflow as tf

        self.variable = make_variable(theta, flavor, plain=plain)
        self.shape = tuple(self.variable.shape)
        self.optimizer = make_optimizer(flavor, tables=[self.variable], **kwargs)
        self.optimizer.build([self.variable])
        # Batches differ in size: let the second trace serve them all.
        traced = tf.function(self._apply_one, reduce_retracing=True)
        self._apply = traced if function else self._apply_one

    def _apply_one(self, gradient):
        self.optimizer.apply_gradients([(gradient, self.variable)])

    def step(self, indices, values, index_dtype="int64"):
        self._apply(make_slices(indices, values, self.shape, index_dtype))

    def step_dense(self, gradient):
        import tensorflow as tf

        self._apply(tf.constant(gradient, tf.float32))

    @property
    def theta(self) -> np.ndarray:
        return to_numpy(self.variable)

    def state(self) -> dict[str, np.ndarray]:
        """theta and every array of the table's state."""
        return state_of(self.optimizer, self.variable)


def assert_state(state: dict, expected: dict, hyper, users) -> None:
    """Compare theta and all state arrays with expected values.

    `users` are the buckets whose rows use the first moment: the state holds only
    those rows of it, the expected values hold every bucket.
    """
    fields = {"theta", "second_moment", "bucket_steps"}
    fields |= {"first_moment"} if hyper.momentum != "none" else set()
    fields |= {"row_energy"} if hyper.invariant_scalar == "energy" else set()
    fields |= {"scalar"} if hyper.invariant_scalar == "learned" else set()
    assert set(state) == fields
    for field in fields:
        wanted = np.asarray(expected[field])
        if field == "first_moment":
            wanted = wanted.reshape(-1, state["theta"].shape[1])[users]
        assert state[field].shape == wanted.shape, field
        np.testing.assert_allclose(state[field], wanted, err_msg=field, **TOLERANCE)


def assert_matches_reference(run: TableRun, reference) -> None:
    """Compare theta and every state array of a run with a numpy reference."""
    users = reference.buckets_with_first_moment()
    assert_state(run.state(), vars(reference), reference.hyper, users)


def energy_scalar(state: dict, buckets, owners, hyper) -> np.ndarray:
    """s of every row recomputed from saved state; exact for rows just touched."""
    steps = np.maximum(state["bucket_steps"], 1)
    v_hat = np.asarray(state["second_moment"], np.float64)
    if hyper.bias_correction:
        v_hat = v_hat / (1 - hyper.beta_2 ** steps[:, None])
    q = np.asarray(state["row_energy"], np.float64)
    ratio = np.mean(v_hat, axis=1)[buckets] / np.where(q > 0, q, 1)
    scalar = np.where(q > 0, np.clip(np.sqrt(ratio), *hyper.scalar_range), 1.0)
    return np.where(owners, 1.0, scalar)


def assert_same_bits(left: dict, right: dict) -> None:
    """Two states are equal to the bit (NaN equal to itself)."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        a, b = np.asarray(value), np.asarray(right[key])
        assert a.dtype == b.dtype and a.shape == b.shape, key
        assert a.tobytes() == b.tobytes(), f"{key} differs"


def assert_within_ulps(left: dict, right: dict, ulps: int = 1) -> None:
    """Float arrays differ by at most `ulps` units in the last place."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        if np.issubdtype(value.dtype, np.floating):
            np.testing.assert_array_max_ulp(value, right[key], maxulp=ulps)
        else:
            np.testing.assert_array_equal(value, right[key])


def state_digest(arrays: dict) -> str:
    """Hash of names, shapes and bytes of a dict of arrays."""
    digest = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        digest.update(f"{key}{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def variables_of(optimizer) -> list:
    """Every variable of an optimizer of any flavour, in order of creation."""
    own = optimizer.variables
    return list(own() if callable(own) else own)


def optimizer_arrays(optimizer, variables=()) -> dict[str, np.ndarray]:
    """Values of all variables of an optimizer, and of some others."""
    everything = [*variables_of(optimizer), *variables]
    return {f"{i:03d}": to_numpy(v) for i, v in enumerate(everything)}


def state_of(optimizer, variable) -> dict[str, np.ndarray]:
    """A compressed variable and its state."""
    table = optimizer.table_state(variable)
    return {"theta": to_numpy(variable), **{k: np.array(v) for k, v in table.items()}}


def is_compressed(optimizer, variable) -> bool:
    """Whether a variable of a built optimizer has bucket state."""
    try:
        optimizer.table_state(variable)
    except ValueError:
        return False
    return True


def random_batch(rng, n_rows: int, dim: int, size: int):
    """Ids with many duplicates and gradients of very different scales."""
    skewed = (n_rows * rng.random(size) ** 2).astype(np.int64)
    scale = 10.0 ** rng.uniform(-2, 1, (size, 1))
    return skewed, (rng.normal(size=(size, dim)) * scale).astype(np.float32)


def make_click_model(optimizer, run_eagerly=False, jit_compile=False, seed=0):
    """A click model of the active flavour: a large table, a small one, a tower."""
    import tensorflow as tf

    keras = tf.keras
    rng = np.random.default_rng(seed)
    inputs = keras.Input((3,), dtype="int32")
    large = keras.layers.Embedding(12_000, 8)(inputs)
    small = keras.layers.Embedding(500, 4)(inputs % 500)
    joined = keras.layers.Concatenate()([large, small])
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(joined))
    outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
    model = keras.Model(inputs, outputs)
    model.set_weights([rng.normal(size=w.shape) * 0.3 for w in model.get_weights()])
    model.compile(
        optimizer,
        "binary_crossentropy",
        run_eagerly=run_eagerly,
        jit_compile=jit_compile,
    )
    return model


def batches_of(start: int, stop: int, size: int = 64) -> list:
    """Batches `start` to `stop` of a fixed stream of click data."""
    batches = []
    for number in range(start, stop):
        rng = np.random.default_rng([number, size])
        x = (12_000 * rng.random((size, 3)) ** 3).astype(np.int32)
        y = (x.sum(axis=1, keepdims=True) % 3 == 0).astype(np.float32)
        batches.append((x, y))
    return batches


def run_python(source: str, *args: str, check=True, **env: str):
    """Run Python source in a new process that can import the tests' helpers."""
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        **env,
    }
    result = subprocess.run(
        [sys.executable, "-c", source, *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result
