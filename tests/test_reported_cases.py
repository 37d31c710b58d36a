"""What users of other optimizers reported as bugs: each a test with the right value."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from contract_helpers import CASES
from family_helpers import FamilyRun, assert_matches
from helpers import (
    ROOT,
    TESTS,
    active_flavor,
    assert_same_bits,
    make_slices,
    make_variable,
    optimizer_arrays,
    state_of,
    to_numpy,
    variables_of,
)
from reference.adam import KerasAdam
from reference.basis_family import FamilyTable
from reference.hashing import bucket_of_row

from tf_basis import engine, optimizers
from tf_basis.ops import loader
from tf_basis.rules import adam
from tf_basis.tables import table_layout

pytestmark = pytest.mark.filterwarnings("ignore:.*scalar.*:UserWarning")
KINDS = ("BasisAdam", "BasisAdagrad", "BasisSGD")


def make(kind, flavor=None, **arguments):
    return getattr(optimizers.for_flavor(flavor or active_flavor()), kind)(**arguments)


# ---- duplicate ids before a squared accumulator -------------------------------------


@pytest.mark.parametrize("kind, scale", [("BasisAdagrad", 1.0), ("BasisAdam", 0.001)])
def test_duplicates_are_summed_before_they_are_squared(backend, flavor, kind, scale):
    """(1 + 3)^2 = 16, neither 1 + 9 nor two steps."""
    run = FamilyRun(kind, np.zeros((9, 2)), flavor, num_buckets=9, learning_rate=0.5)
    run.step([7, 7, 3], [[1.0, 2.0], [3.0, -2.0], [5.0, 1.0]])
    state = run.state()
    wanted = np.zeros((9, 2))
    wanted[7], wanted[3] = [16.0, 0.0], [25.0, 1.0]
    np.testing.assert_allclose(state["second_moment"], scale * wanted, rtol=1e-5)
    theta = np.zeros((9, 2))
    theta[7], theta[3] = [-0.5, 0.0], [-0.5, -0.5]
    np.testing.assert_allclose(state["theta"], theta, atol=1e-5)
    assert state["bucket_steps"].sum() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_are_summed_for_small_tables_too(flavor, kind):
    """A table that is not compressed: slices equal the dense gradient."""
    momentum = {"momentum": 0.9} if kind == "BasisSGD" else {}
    results = []
    for dense in (False, True):
        table = make_variable(np.ones((6, 2)), flavor, "embeddings")
        optimizer = make(kind, flavor, learning_rate=0.1, **momentum)
        optimizer.build([table])
        for _ in range(3):
            values = np.arange(8).reshape(4, 2) / 4
            slices = make_slices([4, 1, 4, 4], values, (6, 2))
            gradient = tf.convert_to_tensor(slices) if dense else slices
            optimizer.apply_gradients([(gradient, table)])
        results.append(optimizer_arrays(optimizer, [table]))
    assert_same_bits(*results)
    assert np.all(results[0][max(results[0])][4] != 1)


# ---- an empty gradient in the last partial batch ------------------------------------


class MaskedMean(tf.keras.Model):
    """Scores bags of ids; id 0 is padding and never looked up."""

    def __init__(self):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(60, 4)
        self.score = tf.keras.layers.Dense(1)

    def call(self, ids):
        given = ids > 0
        owner = tf.where(given)[:, 0]
        vectors = self.embedding(tf.boolean_mask(ids, given))
        bags = tf.math.unsorted_segment_sum(vectors, owner, tf.shape(ids)[0])
        return self.score(bags)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_with_an_empty_last_batch(backend, kind):
    """Two batches with ids and a last one of a single row of padding."""
    ids = np.array([[1, 2, 2], [3, 0, 0], [59, 1, 0], [2, 0, 7], [0, 0, 0]], np.int32)
    labels = np.arange(5, dtype=np.float32)
    models = []
    for count in (5, 4):
        model = MaskedMean()
        model(ids)
        rng = np.random.default_rng(1)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        optimizer = make(kind, tables="embeddings", num_buckets=8, learning_rate=0.1)
        model.compile(optimizer, "mse")
        history = model.fit(
            ids[:count], labels[:count], batch_size=2, shuffle=False, verbose=0
        )
        assert np.isfinite(history.history["loss"]).all()
        models.append(model)
    last, without = models
    assert int(last.optimizer.iterations.numpy()) == 3
    assert int(without.optimizer.iterations.numpy()) == 2
    states = [state_of(model.optimizer, model.embedding.embeddings) for model in models]
    assert_same_bits(*states)
    assert states[0]["bucket_steps"].sum() > 0
    assert np.any(to_numpy(last.score.bias) != to_numpy(without.score.bias))


# ---- slot variables lost on load ----------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_keras_file_holds_every_state_variable(case, tmp_path):
    kind, arguments = CASES[case]
    keras = tf.keras
    inputs = keras.Input((3,), dtype="int32")
    vectors = keras.layers.Embedding(40, 3)(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(vectors))
    model = keras.Model(inputs, outputs)
    model.compile(make(kind, tables="embeddings", **arguments), "mse")
    rng = np.random.default_rng(2)
    # Row 1 comes in each step: where leaders are found, it becomes one.
    x = np.c_[np.ones(80), rng.integers(0, 40, (80, 2))].astype(np.int32)
    model.fit(x, rng.normal(size=80), batch_size=8, shuffle=False, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    saved, found = (variables_of(m.optimizer) for m in (model, loaded))
    assert len(saved) == len(found)
    for one, other in zip(saved, found):
        assert_same_bits({one.name: to_numpy(one)}, {one.name: to_numpy(other)})
    tables = [m.layers[1].embeddings for m in (model, loaded)]
    states = [m.optimizer.table_state(t) for m, t in zip((model, loaded), tables)]
    assert_same_bits(*states)
    for name, value in states[0].items():  # nothing was saved before it was used
        if value.size == 0 or (case == "adam-lazy" and name == "row_energy"):
            continue  # owners have no energy
        assert np.any(value != (1.0 if name == "scalar" else 0)), name


# ---- a bucket's bias correction after 10,000 idle steps -----------------------------

IDLE = 10_000
ADAM = {"learning_rate": 0.05, "num_buckets": 3, "exclusive_rows": 2}


def idle(run: FamilyRun, reference: FamilyTable, real: bool) -> None:
    """10,000 steps in which only row 0, which owns its bucket, comes."""
    values = np.full((1, 2), 0.5, np.float32)
    if not real:
        run.optimizer.iterations.assign_add(IDLE)
        reference.steps += IDLE
        return
    gradient = make_slices([0], values, run.shape)

    @tf.function
    def loop():
        for _ in tf.range(IDLE):
            run.optimizer.apply_gradients([(gradient, run.variable)])

    loop()
    for _ in range(IDLE):
        reference.step([0], values)


@pytest.mark.parametrize("stale_decay", [False, True])
@pytest.mark.parametrize("momentum", ["exclusive", "shared"])
@pytest.mark.parametrize("real", [False, True], ids=["counted", "real"])
def test_bias_correction_after_idle_steps(backend, stale_decay, momentum, real):
    if real and (backend == "twin" or momentum == "shared"):
        pytest.skip("ten thousand steps are taken once, by the op")
    arguments = {**ADAM, "stale_decay": stale_decay, "momentum": momentum}
    theta = np.ones((8, 2))
    run = FamilyRun("BasisAdam", theta, **arguments)
    reference = FamilyTable("BasisAdam", theta, **arguments)
    batch = [1, 5, 6], np.array([[1.0, -2.0], [0.5, 0.25], [3.0, 1.0]])
    for _ in range(3):
        run.step(*batch)
        reference.step(*batch)
    idle(run, reference, real)
    for _ in range(2):
        before = run.theta[1].copy()
        run.step(*batch)
        reference.step(*batch)
        if real:  # 10,000 float32 steps of row 0 are not what is compared
            reference.theta[0] = run.theta[0]
            for field in ("first_moment", "second_moment"):
                getattr(reference, field)[0] = run.state()[field][0]
        assert_matches(run, reference)
        move = np.abs(run.theta[1] - before)
        # Owner row 1 follows M-hat: as ever, or what one gradient in 10,000 gives.
        share = 0.1 / np.sqrt(0.001) if stale_decay else 1.0
        assert np.all(move < 3 * 0.05 * share) and np.all(move > 0.05 * share / 3)
    steps = run.state()["bucket_steps"]
    assert steps[1] == 5 + (IDLE if stale_decay else 0)


def test_stale_decay_has_the_moments_of_adam(backend):
    """Rows with state of their own: what Keras's dense Adam has after idle steps."""
    run = FamilyRun(
        "BasisAdam",
        np.zeros((4, 2)),
        num_buckets=4,
        learning_rate=0.05,
        stale_decay=True,
    )
    adam = KerasAdam(np.zeros((4, 2)), 0.05, 0.9, 0.999, 1e-8)
    values = np.array([[1.0, -2.0], [0.5, 0.25]])
    run.step([0, 1], values)
    adam.step(np.r_[values, np.zeros((2, 2))])
    for _ in range(50):  # row 0 is idle
        run.step([1], values[1:])
        adam.step(np.r_[[[0, 0]], values[1:], np.zeros((2, 2))])
    run.step([0, 1], values)
    adam.step(np.r_[values, np.zeros((2, 2))])
    state = run.state()
    np.testing.assert_allclose(state["first_moment"], adam.m, rtol=1e-5)
    np.testing.assert_allclose(state["second_moment"], adam.v, rtol=1e-5)
    np.testing.assert_array_equal(state["bucket_steps"], [52, 52, 0, 0])


def test_step_counts_stop_at_the_end_of_int32(backend):
    """They do not wrap to a negative count, which would turn the correction."""
    run = FamilyRun("BasisAdam", np.zeros((4, 2)), num_buckets=4, learning_rate=0.05)
    run.step([1], [[1.0, 1.0]])
    (counts,) = [v for v in variables_of(run.optimizer) if "bucket_steps" in v.name]
    counts.assign([0, 2**31 - 2, 0, 0])
    for _ in range(3):
        run.step([1], [[1.0, 1.0]])
    state = run.state()
    assert state["bucket_steps"][1] == 2**31 - 1
    assert np.all(np.isfinite(state["theta"])) and np.all(state["theta"][1] < 0)


# ---- int32 overflow in row * dim ----------------------------------------------------


@pytest.fixture(scope="module")
def large_table(tmp_path_factory):
    """A program that steps a table of 4.6e9 elements in memory that is never used."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        pytest.skip(f"no C++ compiler {command[0]}")
    program = tmp_path_factory.mktemp("cc") / "large_table"
    source, include = TESTS / "cc" / "large_table.cc", ROOT / "tf_ops" / "cc"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", str(include)]
    subprocess.run([*command, *flags, str(source), "-o", str(program)], check=True)

    def run(num_buckets, dtype):
        done = subprocess.run(
            [program, str(num_buckets), dtype], capture_output=True, text=True
        )
        if done.returncode == 77:
            pytest.skip(f"no address space for the table: {done.stderr}")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_buckets", [2**28 + 1000003, 2 * 10**8])
def test_rows_behind_int32_in_the_op(large_table, num_buckets, dtype):
    """The last rows of the table, and those of 2^31 and 2^32 elements."""
    found = large_table(num_buckets, dtype)
    n_rows, rows = found["n_rows"], found["rows"]
    assert max(r["row"] for r in rows) * 17 > 2**32 and found["strays"] == 0
    shared = num_buckets < n_rows
    reference = FamilyTable(
        "BasisAdam",
        np.zeros((2 * len(rows), 17)),
        2 * len(rows),
        learning_rate=0.125,
        beta_1=0.75,
        beta_2=0.875,
        epsilon=1e-3,
        momentum="shared",
        invariant_scalar=None,
    )
    gradients = np.outer(np.arange(1, len(rows) + 1), np.arange(-8, 9)) / 16
    reference.step(np.arange(len(rows)), gradients)
    rtol = 2**-7 if dtype == "bfloat16" else 1e-5
    buckets = set()
    for i, row in enumerate(rows):
        bucket = bucket_of_row(row["row"], n_rows, num_buckets, 0, "balanced", 5)
        assert row["bucket"] == bucket and row["bucket_steps"] == 1
        buckets.add(bucket)
        for field in ("first_moment", "second_moment"):
            wanted = getattr(reference, field)[i]
            np.testing.assert_allclose(row[field], wanted, rtol=rtol, err_msg=field)
        # The energy scalar is 1: one row a bucket, and its own energy.
        np.testing.assert_allclose(row["theta"], reference.theta[i], rtol=3 * rtol)
        energy = np.mean(gradients[i] ** 2) if shared else 0.0
        assert row["row_energy"] == pytest.approx(energy, rel=1e-5)
    assert len(buckets) == len(rows)


@pytest.mark.parametrize(
    "dtype", ["int32", pytest.param("int64", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("hashing", ["balanced", "murmur3", "double", "consistent"])
def test_rows_behind_int32_in_the_twin(dtype, hashing):
    """The graph of a step on a large table, never run: all rows go by int64."""
    n_rows, dim = 2**28 + 11, 17
    layout = table_layout(
        "table",
        (n_rows, dim),
        compression_ratio=10.0,
        num_buckets=None,
        exclusive_rows=5,
        hashing=hashing,
        seed=0,
        momentum="exclusive",
    )
    rule = adam.bucket_rule(0.9, 0.999, 0.99, invariant_scalar="energy")

    def stand_in(shape, kind):  # of any length, so that none is allocated
        start = tf.zeros((1, *shape[1:]), kind)
        return tf.Variable(start, shape=(None, *shape[1:]))

    table = stand_in((n_rows, dim), tf.float32)
    slots = {
        name: stand_in(shape, kind)
        for name, (shape, kind, _) in engine.slot_specs(layout, rule).items()
    }

    @tf.function
    def step(indices, values):
        gradient = tf.IndexedSlices(values, indices, (n_rows, dim))
        rate, number = tf.constant(0.1, tf.float64), tf.constant(1, tf.int64)
        engine.step_table(rule, layout, table, slots, gradient, rate, number)

    with loader.use("off"):
        concrete = step.get_concrete_function(
            tf.TensorSpec([None], dtype), tf.TensorSpec([None, dim], tf.float32)
        )
    names = ("ResourceGather", "ResourceScatterUpdate")
    addressed = [op for op in concrete.graph.get_operations() if op.type in names]
    assert len(addressed) == 2 * (1 + len(slots))
    for op in addressed:
        assert op.inputs[1].dtype == tf.int64, op.name


# ---- the learned scalar --------------------------------------------------------------

# Two rows of one bucket: the same directions, ten times apart in size.
TARGET = np.array([[1.0, -2.0, 0.5], [0.2, -0.3, 0.1]])
COLLISION = {
    "BasisAdam": {"learning_rate": 0.05, "momentum": "shared"},
    "BasisSGD": {"learning_rate": 0.1, "momentum": 0.5, "momentum_mode": "shared"},
}
RATES = {"gradient": 5.0, "sign": 0.05, "log": 0.2}


@pytest.mark.parametrize("kind", COLLISION)
@pytest.mark.parametrize("rule", RATES)
def test_a_learned_scalar_beats_none_on_a_collision(backend, flavor, kind, rule):
    """In the same 60 steps, and as the reference has it."""
    losses = {}
    learned = {"scalar_rule": rule, "scalar_learning_rate": RATES[rule]}
    for scalar in (None, "learned"):
        arguments = {"num_buckets": 1, "invariant_scalar": scalar, **COLLISION[kind]}
        arguments |= learned if scalar else {}
        run = FamilyRun(kind, np.zeros((2, 3)), flavor, function=True, **arguments)
        reference = FamilyTable(kind, np.zeros((2, 3)), **arguments)
        for _ in range(60):
            run.step([0, 1], run.theta - TARGET)
            reference.step([0, 1], reference.theta - TARGET)
        losses[scalar] = 0.5 * np.sum((run.theta - TARGET) ** 2)
        wanted = 0.5 * np.sum((reference.theta - TARGET) ** 2)
        assert losses[scalar] == pytest.approx(wanted, rel=0.02)
    assert losses["learned"] < 0.8 * losses[None]
