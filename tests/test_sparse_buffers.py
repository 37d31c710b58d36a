"""What gradient accumulation keeps, when it must not, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from accumulation_helpers import DIM, ROWS, STEPS, Run, batches, mean_of
from helpers import (
    assert_same_bits,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    random_batch,
    to_numpy,
    variables_of,
)


def test_buffer_holds_the_rows_of_each_batch(flavor, backend):
    run = Run(flavor, gradient_accumulation_steps=STEPS)
    dense = np.zeros(4, np.float32)
    run.step([7, 2, 7], [[1, 2, 3], [4, 5, 6], [10, 20, 30]], dense)
    rows, values = run.buffer()
    np.testing.assert_array_equal(rows, [7, 2, 7])
    np.testing.assert_array_equal(values, [[1, 2, 3], [4, 5, 6], [10, 20, 30]])
    run.step([2, 30], np.ones((2, 3)), dense)
    rows, values = run.buffer()
    np.testing.assert_array_equal(rows, [7, 2, 7, 2, 30])
    np.testing.assert_array_equal(values[3:], 1)
    run.step([], [], dense)
    rows, values = run.buffer()
    assert rows.shape == (0,) and values.shape == (0, 3)
    energy = run.optimizer.table_state(run.table)["row_energy"]
    assert set(np.flatnonzero(energy)) == {2, 7, 30}
    np.testing.assert_allclose(energy[30], 1 / 9)


def test_duplicates_are_summed_before_the_buffer_gets_long(flavor, backend, rng):
    """After 8 of 20 batches it holds each row once, and the update is the same."""
    run, reference = Run(flavor, gradient_accumulation_steps=20), Run(flavor)
    made, lengths = [], []
    for _ in range(20):
        ids, values = random_batch(rng, ROWS, DIM, 50)
        made.append((ids, values, rng.normal(size=4).astype(np.float32)))
        run.step(*made[-1])
        rows, _ = run.buffer()
        lengths.append(rows.size)
        if len(made) in (8, 16):
            touched = np.unique(np.concatenate([ids for ids, _, _ in made]))
            np.testing.assert_array_equal(rows, touched)
    assert max(lengths) <= ROWS + 7 * 50 and lengths[-1] == 0
    reference.step(*mean_of(made))
    for key, value in reference.state().items():
        np.testing.assert_allclose(
            run.state()[key], value, rtol=5e-5, atol=2e-6, err_msg=key
        )


@pytest.mark.parametrize("kind", ["BasisSGD", "BasisAdagrad"])
def test_the_other_optimizers_accumulate_too(flavor, backend, kind, rng):
    run = Run(flavor, kind=kind, gradient_accumulation_steps=STEPS, clipnorm=1.0)
    reference = Run(flavor, kind=kind, clipnorm=1.0)
    made = batches(rng, 2 * STEPS)
    for batch in made:
        run.step(*batch)
    for group in (made[:STEPS], made[STEPS:]):
        reference.step(*mean_of(group))
    for key, value in reference.state().items():
        np.testing.assert_allclose(
            run.state()[key], value, rtol=2e-5, atol=2e-6, err_msg=key
        )


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


def test_rows_that_grow_between_updates(flavor, backend):
    """The old rows' gradients are kept, and new rows may join them."""
    run = Run(flavor, gradient_accumulation_steps=2)
    dense = np.ones(4, np.float32)
    run.step([1, 2], np.ones((2, DIM)), dense)
    values = np.concatenate([to_numpy(run.table), np.ones((10, DIM))])
    grown = make_variable(values, flavor, "table")
    run.optimizer.grow_rows(run.table, grown)
    slices = make_slices([1, ROWS + 5], np.ones((2, DIM)), (ROWS + 10, DIM))
    run.optimizer.apply_gradients([(slices, grown), (tf.ones(4), run.dense)])
    energy = run.optimizer.table_state(grown)["row_energy"]
    np.testing.assert_allclose(energy[[1, 2, ROWS + 5]], [1, 0.25, 0.25])
    assert np.count_nonzero(energy) == 3


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
