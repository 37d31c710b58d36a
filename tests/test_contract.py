"""Contracts that every optimizer of the family keeps, whatever its arguments."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from contract_helpers import CASES, DIM, ROWS, Problem
from helpers import (
    BACKENDS,
    assert_same_bits,
    keras_of,
    make_slices,
    make_variable,
    to_numpy,
    variables_of,
)

from tf_basis import optimizers
from tf_basis.ops import loader

pytestmark = pytest.mark.filterwarnings("ignore:.*scalar.*:UserWarning")

case = pytest.mark.parametrize("case", CASES)


# ---- learning ----------------------------------------------------------------------

# Rows that follow the first moment of strangers learn little: with these arguments a
# problem is learnt where no rows meet, and must get no worse where they do.
SHARING = [
    name
    for name, (_, arguments) in CASES.items()
    if "shared" in (arguments.get("momentum"), arguments.get("momentum_mode"))
]


def assert_learns(name, flavor, loss_of, shapes, batches, steps, share):
    """The loss falls below `share` of what it was."""
    problem = flavor, loss_of, shapes, batches, steps
    if name in SHARING:
        before, after = train_toy(name, *problem)
        assert after < before
    more = {"num_buckets": 1000} if name in SHARING else {}
    before, after = train_toy(name, *problem, **more)
    assert after < share * before


def train_toy(name, flavor, loss_of, shapes, batches, steps, **more):
    """Start and end loss over all batches, after `steps` of them in turn."""
    rng = np.random.default_rng(3)
    variables = [
        make_variable(0.1 * rng.normal(size=shape), flavor, key)
        for key, shape in shapes.items()
    ]
    kind, arguments = CASES[name]
    make = getattr(optimizers.for_flavor(flavor), kind)
    optimizer = make(tables="table", **{**arguments, **more})
    optimizer.build(variables)
    native = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    batches = [tf.constant(b) for b in batches]

    @tf.function
    def fit():
        for i in tf.range(steps):
            batch = [b[i % len(b)] for b in batches]
            with tf.GradientTape() as tape:
                loss = loss_of(*native, *batch)
            gradients = tape.gradient(loss, native)
            optimizer.apply_gradients(zip(gradients, variables))

    def total():
        count = len(batches[0])
        return np.mean(
            [float(loss_of(*native, *(b[i] for b in batches))) for i in range(count)]
        )

    before = total()
    fit()
    return before, total()


@case
def test_learns_a_quadratic(flavor, case):
    """Rows of different scales move to their targets."""
    rng = np.random.default_rng(1)
    target = tf.constant(rng.normal(size=(ROWS, DIM)), tf.float32)
    ids = rng.permuted(np.tile(np.arange(ROWS), (10, 1)), axis=1)[:, :30]

    def loss_of(table, ids):
        error = tf.gather(table, ids) - tf.gather(target, ids)
        return 0.5 * tf.reduce_sum(tf.square(error))

    shapes = {"table": (ROWS, DIM)}
    assert_learns(case, flavor, loss_of, shapes, [ids], 200, share=0.05)


@case
def test_learns_a_matrix_factorisation(flavor, case):
    rng = np.random.default_rng(2)
    users, items = rng.integers(0, 30, (8, 60)), rng.integers(0, 20, (8, 60))
    left, right = rng.normal(size=(30, 2)), rng.normal(size=(20, 2))
    scores = np.sum(left[users] * right[items], axis=-1).astype(np.float32)

    def loss_of(user_table, item_table, users, items, scores):
        products = tf.gather(user_table, users) * tf.gather(item_table, items)
        error = tf.reduce_sum(products, axis=-1) - scores
        return 0.1 * tf.reduce_sum(tf.square(error))

    shapes = {"user_table": (30, 4), "item_table": (20, 4)}
    batches = [users, items, scores]
    assert_learns(case, flavor, loss_of, shapes, batches, 240, share=0.2)


@case
def test_learns_a_logistic_regression(flavor, case):
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 60, (8, 50, 4))
    weights = 2 * rng.normal(size=60)
    labels = (weights[ids].sum(-1) + 0.5 > 0).astype(np.float32)

    def loss_of(table, bias, ids, labels):
        logits = tf.reduce_sum(tf.gather(table, ids), axis=[1, 2]) + bias[0]
        return 0.1 * tf.reduce_sum(
            tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        )

    shapes = {"table": (60, 1), "bias": (1,)}
    assert_learns(case, flavor, loss_of, shapes, [ids, labels], 200, share=0.7)


# ---- gradients ---------------------------------------------------------------------


@case
def test_duplicates_equal_their_sum(flavor, backend, case):
    """Exact numbers, so that only the meaning of a duplicate can differ."""
    many, few = Problem(case, flavor), Problem(case, flavor)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        indices = rng.integers(0, ROWS, 50)
        values = rng.integers(-64, 64, (50, DIM)) / 64
        many.step((indices, values))
        rows, position = np.unique(indices, return_inverse=True)
        sums = np.zeros((len(rows), DIM))
        np.add.at(sums, position, values)
        few.step((rows, sums))
    assert len(rows) < 40
    assert_same_bits(many.arrays(), few.arrays())


@case
def test_order_of_a_batch_does_not_matter(flavor, case):
    one, other = Problem(case, flavor), Problem(case, flavor)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        indices = rng.integers(0, ROWS, 50)
        values = rng.integers(-64, 64, (50, DIM)) / 64
        order = rng.permutation(50)
        one.step((indices, values))
        other.step((indices[order], values[order]))
    assert_same_bits(one.arrays(), other.arrays())


@case
def test_dense_gradient_equals_slices_of_all_rows(flavor, case):
    one, other = Problem(case, flavor), Problem(case, flavor)
    for seed in range(3):
        values = np.random.default_rng(seed).normal(size=(ROWS, DIM))
        gradient = tf.constant(values, tf.float32)
        one.optimizer.apply_gradients([(gradient, one.table)])
        slices = make_slices(np.arange(ROWS), values, (ROWS, DIM))
        other.optimizer.apply_gradients([(slices, other.table)])
    assert_same_bits(one.arrays(), other.arrays())


@case
def test_empty_batch_changes_nothing_but_iterations(flavor, backend, case):
    problem = Problem(case, flavor).train(0, 2)
    before, steps = problem.arrays(), int(problem.optimizer.iterations.numpy())
    empty = make_slices([], np.zeros((0, DIM)), (ROWS, DIM))
    problem.optimizer.apply_gradients([(empty, problem.table)])
    after = problem.arrays()
    assert int(problem.optimizer.iterations.numpy()) == steps + 1
    changed = [k for k, v in after.items() if not np.array_equal(v, before[k])]
    (counter,) = changed
    assert before[counter] == steps and after[counter] == steps + 1


@case
def test_bad_index_is_an_error_that_changes_nothing(flavor, backend, case):
    problem = Problem(case, flavor).train(0, 2)
    before = problem.arrays()
    for bad in (-1, ROWS):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as error:
            problem.step(([3, bad, 5], np.ones((3, DIM))))
        for part in ("table", str(bad), str(ROWS)):
            assert part in str(error.value)
        assert_same_bits(before, problem.arrays())


# ---- functions, variables, schedules -----------------------------------------------


@case
def test_variables_keep_their_dtypes_and_shapes(flavor, case):
    problem = Problem(case, flavor)

    def kinds():
        return [
            (str(tf.as_dtype(v.dtype)), tuple(v.shape))
            for v in [*variables_of(problem.optimizer), *problem.variables]
        ]

    before = kinds()
    problem.train(0, 2)
    tf.function(problem.apply)(tf.ones((4, DIM)), tf.constant([1, 2, 2, 30]))
    assert kinds() == before
    used = Counter(dtype.split("'")[1] for dtype, _ in before)
    arguments = CASES[case][1]
    if "moment_dtype" in arguments:
        assert used[arguments["moment_dtype"]] > 0
    assert (used["uint8"] > 0) == (arguments.get("energy_dtype") == "log8")
    for value in problem.arrays().values():
        assert np.all(np.isfinite(value.astype(np.float64)))


@case
def test_no_trace_after_the_first_step(flavor, case):
    problem, traces = Problem(case, flavor), []

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, DIM), tf.float32),
            tf.TensorSpec((None,), tf.int64),
        ]
    )
    def step(values, indices):
        traces.append(1)
        problem.apply(values, indices)

    counts = []
    for size in (5, 9, 0, 1, 30):
        step(tf.ones((size, DIM)), tf.range(size, dtype=tf.int64))
        counts.append(len(traces))
    # One trace; tf_keras may trace a second time to make its variables.
    assert counts[0] <= 2 and counts[-1] == counts[0]


@case
def test_function_equals_eager(flavor, case):
    eager, graph = Problem(case, flavor), Problem(case, flavor)
    graph.apply = tf.function(graph.apply, reduce_retracing=True)
    # The table and its state: Keras's dense rules differ in the last bit in a graph.
    assert_same_bits(*(p.train(0, 4).table_arrays() for p in (eager, graph)))


@case
def test_op_equals_twin(case):
    arrays = []
    for mode in BACKENDS.values():
        with loader.use(mode):
            arrays.append(Problem(case, "keras3").train(0, 4).arrays())
    assert_same_bits(*arrays)


@case
def test_constant_schedule_equals_constant_rate(flavor, case):
    schedules = keras_of(flavor).optimizers.schedules
    rate = CASES[case][1]["learning_rate"]
    constant = schedules.PiecewiseConstantDecay([2], [rate, rate])
    fixed = Problem(case, flavor).train(0, 4)
    scheduled = Problem(case, flavor, learning_rate=constant).train(0, 4)
    assert_same_bits(fixed.table_arrays(), scheduled.table_arrays())
    np.testing.assert_array_equal(to_numpy(fixed.dense), to_numpy(scheduled.dense))


# ---- saving ------------------------------------------------------------------------


def again(optimizer, how: str, flavor: str):
    """A new optimizer from the config of another one, by way of JSON."""
    if how == "class":
        return type(optimizer).from_config(
            json.loads(json.dumps(optimizer.get_config()))
        )
    module = keras_of(flavor).optimizers
    return module.deserialize(json.loads(json.dumps(module.serialize(optimizer))))


@case
@pytest.mark.parametrize("how", ["class", "serialized"])
def test_config_round_trip(flavor, case, how):
    one = Problem(case, flavor)
    other = again(one.optimizer, how, flavor)
    assert type(other) is type(one.optimizer)
    assert other.get_config() == one.optimizer.get_config()
    for name, value in CASES[case][1].items():
        found = other.get_config()[name]
        assert found == (pytest.approx(value) if isinstance(value, float) else value)
    restored = Problem(case, flavor, optimizer=other)
    assert_same_bits(one.train(0, 3).arrays(), restored.train(0, 3).arrays())


def resume(one: Problem, case: str, flavor: str) -> Problem:
    """A new problem with another past, and the variables of the first."""
    other = Problem(case, flavor, optimizer=again(one.optimizer, "class", flavor))
    other.train(7, 9)
    for source, target in zip(one.variables, other.variables):
        target.assign(to_numpy(source))
    return other


@case
def test_saves_and_resumes_from_a_store(flavor, case):
    one, store = Problem(case, flavor).train(0, 3), {}
    one.optimizer.save_own_variables(store)
    store = {key: np.array(value) for key, value in store.items()}
    other = resume(one, case, flavor)
    other.optimizer.load_own_variables(store)
    assert_same_bits(one.arrays(), other.arrays())
    assert_same_bits(one.train(3, 6).arrays(), other.train(3, 6).arrays())


@case
def test_saves_and_resumes_from_a_checkpoint(flavor, case, tmp_path):
    one = Problem(case, flavor).train(0, 3)
    path = tf.train.Checkpoint(optimizer=one.optimizer).write(str(tmp_path / "ckpt"))
    other = resume(one, case, flavor)
    status = tf.train.Checkpoint(optimizer=other.optimizer).read(path)
    status.assert_existing_objects_matched()
    assert_same_bits(one.arrays(), other.arrays())
    assert_same_bits(one.train(3, 6).arrays(), other.train(3, 6).arrays())
