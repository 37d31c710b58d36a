"""gradient_accumulation_steps: the update of the mean gradient, from slices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from accumulation_helpers import STEPS, Run, batches, mean_of
from helpers import (
    assert_same_bits,
    keras_of,
    make_optimizer,
    make_variable,
    to_numpy,
)


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
