"""gradient_accumulation_steps: the update of the mean gradient, from slices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_same_bits,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    optimizer_arrays,
    random_batch,
    state_of,
    to_numpy,
    variables_of,
)
from sparse_helpers import dense_of, nothing_made_dense

ROWS, DIM, STEPS = 40, 3, 3


class Run:
    """A table and a dense variable under one optimizer."""

    def __init__(self, flavor, function=False, **kwargs):
        rng = np.random.default_rng(5)
        self.flavor = flavor
        self.table = make_variable(rng.normal(size=(ROWS, DIM)), flavor, "table")
        self.dense = make_variable(rng.normal(size=(4,)), flavor, "dense")
        self.variables = [self.table, self.dense]
        kwargs = {"num_buckets": 6, "learning_rate": 0.1, **kwargs}
        self.optimizer = make_optimizer(flavor, tables=[self.table], **kwargs)
        self.optimizer.build(self.variables)
        traced = tf.function(self._apply, reduce_retracing=True)
        self.apply = traced if function else self._apply

    def _apply(self, slices, dense):
        gradients = [slices, dense]
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def step(self, ids, values, dense):
        with nothing_made_dense():
            self.apply(make_slices(ids, values, (ROWS, DIM)), tf.constant(dense))

    def arrays(self):
        return optimizer_arrays(self.optimizer, self.variables)

    def state(self):
        return {**state_of(self.optimizer, self.table), "dense": to_numpy(self.dense)}

    def buffer(self):
        """Rows and values of the accumulated slices."""
        rows, values = (
            to_numpy(v)
            for v in variables_of(self.optimizer)
            if "accumulator" in v.name and "table" in v.name
        )
        return rows, values


def batches(rng, count):
    """Batches of different sizes with many duplicates; one is empty."""
    made = []
    for number in range(count):
        size = 0 if number == 4 else 10 + 7 * number
        ids, values = random_batch(rng, ROWS, DIM, size)
        made.append((ids, values, rng.normal(size=4).astype(np.float32)))
    return made


def mean_of(group):
    """The mean gradient of a few batches as rows, and of the dense variable."""
    ids = np.concatenate([ids for ids, _, _ in group])
    rows = np.unique(ids)
    total = sum(dense_of(i, v, (ROWS, DIM)) for i, v, _ in group)
    dense = np.sum([d for _, _, d in group], axis=0, dtype=np.float32)
    return rows, total[rows] / len(group), dense / np.float32(len(group))


def schedule_of(flavor):
    schedules = keras_of(flavor).optimizers.schedules
    return schedules.PiecewiseConstantDecay([1, 4, 6], [0.1, 0.05, 0.2, 0.01])


CASES = {
    "default": {},
    "exclusive": {"exclusive_rows": 3},
    "shared": {"momentum": "shared", "invariant_scalar": None},
    "clipnorm": {"clipnorm": 0.3},
    "clipvalue": {"clipvalue": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.3},
    "weight_decay": {"weight_decay": 0.1},
}


@pytest.mark.parametrize(
    "name, function",
    [*((name, False) for name in CASES), ("exclusive", True), ("clipnorm", True)],
)
def test_update_is_that_of_the_mean(flavor, backend, name, function, rng):
    """Nine batches make three updates; seven of other batches change nothing."""
    run = Run(flavor, function, gradient_accumulation_steps=STEPS, **CASES[name])
    reference = Run(flavor, function, **CASES[name])
    made = batches(rng, 9)
    for number, batch in enumerate(made, 1):
        before = run.state()
        run.step(*batch)
        assert int(to_numpy(tf.convert_to_tensor(run.optimizer.iterations))) == (
            number // STEPS
        )
        if number % STEPS:
            assert_same_bits(before, run.state())
            continue
        reference.step(*mean_of(made[number - STEPS : number]))
        state, expected = run.state(), reference.state()
        for key, value in expected.items():
            np.testing.assert_allclose(
                state[key], value, rtol=2e-5, atol=2e-6, err_msg=key
            )
        assert np.any(
            before["table" if "table" in before else "theta"] != state["theta"]
        )


def test_learning_rate_schedules_count_batches(flavor, backend, rng):
    """As in Keras 3: the update takes the rate of its last batch."""
    schedule = schedule_of(flavor)
    run = Run(flavor, gradient_accumulation_steps=STEPS, learning_rate=schedule)
    reference = Run(flavor)
    made = batches(rng, 9)
    for number in range(0, 9, STEPS):
        group = made[number : number + STEPS]
        for batch in group:
            run.step(*batch)
        reference.optimizer.learning_rate = float(schedule(number + STEPS - 1))
        reference.step(*mean_of(group))
        np.testing.assert_allclose(
            run.state()["theta"], reference.state()["theta"], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(run.state()["dense"], reference.state()["dense"])


@pytest.mark.parametrize("name", ["default", "clipnorm", "weight_decay", "schedule"])
def test_dense_variables_follow_keras_to_the_bit(flavor, name, rng):
    """Both flavours do what Keras 3's own Adam does when it accumulates."""
    arguments = {"learning_rate": 0.1, "gradient_accumulation_steps": STEPS}
    arguments.update(CASES.get(name, {}))
    values = rng.normal(size=(4,))
    ours, theirs = make_variable(values, flavor), make_variable(values, "keras3")
    schedules = [{}, {}]
    if name == "schedule":
        schedules = [{"learning_rate": schedule_of(f)} for f in (flavor, "keras3")]
    basis = make_optimizer(flavor, **{**arguments, **schedules[0]})
    adam = keras_of("keras3").optimizers.Adam(
        epsilon=1e-8, **{**arguments, **schedules[1]}
    )
    for _ in range(10):
        gradient = tf.constant(rng.normal(size=4), tf.float32)
        basis.apply_gradients([(gradient, ours)])
        adam.apply_gradients([(gradient, theirs)])
        if flavor == "keras3" or name != "clipnorm":
            np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
        else:  # tf_keras rounds its clipping in another way
            np.testing.assert_allclose(to_numpy(ours), to_numpy(theirs), rtol=1e-6)
    assert np.any(to_numpy(ours) != values.astype(np.float32))


def test_buffer_holds_each_touched_row_once(flavor, backend):
    run = Run(flavor, gradient_accumulation_steps=STEPS)
    dense = np.zeros(4, np.float32)
    run.step([7, 2, 7], [[1, 2, 3], [4, 5, 6], [10, 20, 30]], dense)
    rows, values = run.buffer()
    np.testing.assert_array_equal(rows, [2, 7])
    np.testing.assert_array_equal(values, [[4, 5, 6], [11, 22, 33]])
    run.step([2, 30, 2], np.ones((3, 3)), dense)
    rows, values = run.buffer()
    np.testing.assert_array_equal(rows, [2, 7, 30])
    np.testing.assert_array_equal(values, [[6, 7, 8], [11, 22, 33], [1, 1, 1]])
    run.step([], [], dense)
    rows, values = run.buffer()
    assert rows.shape == (0,) and values.shape == (0, 3)
    assert set(np.flatnonzero(run.optimizer.table_state(run.table)["row_energy"])) == {
        2,
        7,
        30,
    }


def test_no_accumulator_has_the_size_of_the_table(flavor):
    run = Run(flavor, gradient_accumulation_steps=STEPS)
    plain = Run(flavor)
    sizes = [
        sum(to_numpy(v).size for v in variables_of(r.optimizer)) for r in (run, plain)
    ]
    counter = 1 if flavor == "tf_keras" else 0
    assert sizes[0] - sizes[1] == 4 + counter  # the dense variable's accumulator


def test_dense_optimizer_steps_once_per_update(flavor, backend, rng):
    optimizers = keras_of(flavor).optimizers
    schedule = optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    inner = optimizers.SGD(schedule)
    run = Run(flavor, gradient_accumulation_steps=STEPS, dense_optimizer=inner)
    expected = to_numpy(run.dense).astype(np.float64)
    made = batches(rng, 7)
    for number, batch in enumerate(made, 1):
        run.step(*batch)
        if number % STEPS == 0:
            mean = np.mean([d for _, _, d in made[number - STEPS : number]], axis=0)
            expected -= (0.5 if number == STEPS else 0.25) * mean
        np.testing.assert_allclose(to_numpy(run.dense), expected, rtol=1e-5)
    assert int(to_numpy(inner.iterations)) == 2


def test_a_table_without_a_gradient_in_some_batches(flavor, backend):
    """It counts as zero there; without one in the last batch it is left out."""
    run = Run(flavor, gradient_accumulation_steps=2, clipvalue=0.5)
    start = to_numpy(run.table)
    dense = tf.ones(4)
    slices = make_slices([1], [[1.0, 1, 1]], (ROWS, DIM))
    run.optimizer.apply_gradients([(dense, run.dense)])
    run.optimizer.apply_gradients([(slices, run.table), (dense, run.dense)])
    state = run.optimizer.table_state(run.table)
    np.testing.assert_allclose(state["row_energy"][1], 0.25)  # half of the gradient
    moved = to_numpy(run.table)
    assert np.any(moved[1] != start[1])
    run.optimizer.apply_gradients([(slices, run.table), (dense, run.dense)])
    run.optimizer.apply_gradients([(dense, run.dense)])
    np.testing.assert_array_equal(to_numpy(run.table), moved)
    assert run.buffer()[0].size == 0


def test_dense_gradient_of_a_table(flavor, backend, rng):
    """It touches every row, as it does without accumulation."""
    first, second = rng.normal(size=(2, ROWS, DIM)).astype(np.float32)
    run = Run(flavor, gradient_accumulation_steps=2)
    plain = Run(flavor)
    dense = tf.zeros(4)
    for gradient in (first, second):
        run.apply(tf.constant(gradient), dense)
    plain.apply(tf.constant((first + second) / np.float32(2)), dense)
    np.testing.assert_allclose(
        to_numpy(run.table), to_numpy(plain.table), rtol=1e-5, atol=1e-6
    )


def test_the_same_steps_give_the_same_bits(flavor, backend, rng):
    made = batches(rng, 8)
    runs = [Run(flavor, True, gradient_accumulation_steps=STEPS) for _ in range(2)]
    for run in runs:
        for batch in made:
            run.step(*batch)
    assert_same_bits(runs[0].arrays(), runs[1].arrays())


def test_op_and_twin_give_the_same_bits(flavor, rng):
    from tf_basis.ops import loader

    made, arrays = batches(rng, 7), []
    for mode in ("require", "off"):
        with loader.use(mode):
            run = Run(flavor, gradient_accumulation_steps=STEPS, clipnorm=0.5)
            for batch in made:
                run.step(*batch)
            arrays.append(run.arrays())
    assert_same_bits(*arrays)


def test_bad_index_leaves_everything_as_it_was(flavor, backend):
    run = Run(flavor, gradient_accumulation_steps=2)
    dense = np.ones(4, np.float32)
    run.step([1, 2], np.ones((2, DIM)), dense)
    before = run.arrays()
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=str(ROWS)):
            run.step([1, ROWS], np.ones((2, DIM)), dense)
        assert_same_bits(before, run.arrays())


def test_xla_is_refused_when_the_step_is_traced(flavor):
    run = Run(flavor, gradient_accumulation_steps=2)
    step = tf.function(run._apply, jit_compile=True)
    with pytest.raises(ValueError, match="gradient_accumulation_steps") as error:
        step(make_slices([1], np.ones((1, DIM)), (ROWS, DIM)), tf.ones(4))
    for part in ("XLA", "jit_compile", "2"):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [0, 1, -2, 2.5, "3", True])
def test_bad_number_of_steps(flavor, value):
    with pytest.raises(ValueError, match="gradient_accumulation_steps") as error:
        make_optimizer(flavor, gradient_accumulation_steps=value)
    assert repr(value) in str(error.value)
