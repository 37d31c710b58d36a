"""OneBitAdam on one process: golden values, reference, warm-up, errors, saving."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import keras_of, load_golden, make_variable, to_numpy
from reference import onebit_adam as reference

from tf_basis import BasisAdam, distributed
from tf_basis.adapters import flavor as flavors
from tf_basis.distributed import DistributedOptimizer

CASES = [c for c in load_golden("onebit_adam") if c["workers"] == 1]


def make(flavor, **arguments):
    return distributed.for_flavor(flavor).OneBitAdam(**arguments)


def applier(optimizer, variables):
    @tf.function
    def apply(*gradients):
        optimizer.apply_gradients(list(zip(gradients, variables)))

    return apply


@pytest.mark.parametrize("case", CASES, ids=[c["moments"] for c in CASES])
def test_golden(flavor, backend, case):
    theta = make_variable(np.array(case["theta0"], np.float32), flavor, "theta")
    names = ("learning_rate", "beta_1", "beta_2", "epsilon")
    names += ("warmup_steps", "total_steps", "moments", "block")
    optimizer = make(flavor, policy=[(".*", 1)], **{n: case[n] for n in names})
    optimizer.build([theta])
    apply = applier(optimizer, [theta])
    for step in case["steps"]:
        apply(tf.constant(step["gradients"][0], tf.float32))
        np.testing.assert_allclose(to_numpy(theta), step["theta"], atol=1e-4)
        first, second = optimizer._exchange.moments[0]
        np.testing.assert_allclose(first, step["first_moment"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(second, step["second_moment"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("moments", ["frozen", "corrected"])
@pytest.mark.parametrize("clip_value", [None, 0.02])
def test_reference(flavor, moments, clip_value):
    """Several variables, decay, resets, an interval: against float64 numpy."""
    rng = np.random.default_rng(3)
    shapes = {"kernel": (9, 8), "other_kernel": (5, 7), "bias": (6,), "gamma": (5,)}
    start = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    variables = [make_variable(v, flavor, n) for n, v in start.items()]
    arguments = {
        "learning_rate": 0.03,
        "beta_1": 0.8,
        "beta_2": 0.95,
        "epsilon": 1e-4,
        "warmup_steps": 4,
        "total_steps": 20,
        "moments": moments,
        "block": 16,
        "clip_value": clip_value,
        "reset_interval": 7,
        "weight_decay": 0.1,
    }
    policy = [("kernel", 1), ("bias", 32), ("gamma", 32, 3)]
    optimizer = make(flavor, policy=policy, **arguments)
    optimizer.build(variables)
    apply = applier(optimizer, variables)
    twin = reference.OneBitAdam(start, policy, **arguments)
    for _ in range(20):
        gradients = {
            n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()
        }
        apply(*[tf.constant(g) for g in gradients.values()])
        twin.step([gradients])
        for variable, name in zip(variables, start):
            np.testing.assert_allclose(
                to_numpy(variable), twin.theta[name], atol=2e-5, err_msg=name
            )


def test_warm_up_is_adam(flavor):
    """Before it ends the steps are those of Adam, with ε added to √v̂."""
    keras = keras_of(flavor)
    values = np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32)
    ours, theirs = (make_variable(values, flavor, "kernel") for _ in range(2))
    optimizer = make(flavor, learning_rate=0.1, epsilon=1e-30, warmup_steps=5)
    adam = keras.optimizers.Adam(0.1, epsilon=1e-30)
    for each, variable in ((optimizer, ours), (adam, theirs)):
        each.build([variable])
        apply = applier(each, [variable])
        for step in range(5):
            g = np.random.default_rng([1, step]).normal(size=(40, 40))
            apply(tf.constant(g, tf.float32))
    np.testing.assert_allclose(to_numpy(ours), to_numpy(theirs), rtol=1e-4, atol=1e-5)


def test_default_warmup(flavor):
    kernel = make_variable(np.ones((4, 4), np.float32), flavor, "kernel")
    for arguments, last in [
        ({}, 500),
        ({"total_steps": 2000}, 200),
        ({"total_steps": 3}, 1),
        ({"total_steps": 2000, "warmup_steps": 7}, 7),
    ]:
        optimizer = make(flavor, **arguments)
        optimizer.build([kernel])
        assert int(optimizer.frozen_at) == last


def test_automatic_warmup_waits_for_the_variance(flavor):
    """With gradients of constant size v settles; while they grow it does not."""
    ends = []
    for growth in (1.0, 1.5):
        kernel = make_variable(np.ones((8, 8), np.float32), flavor, "kernel")
        optimizer = make(
            flavor, beta_2=0.9, warmup_steps="auto", policy=[(".*", 1)], block=16
        )
        optimizer.build([kernel])
        apply = applier(optimizer, [kernel])
        for step in range(80):
            apply(tf.fill((8, 8), growth ** min(step, 60)))
        ends.append(int(optimizer.frozen_at))
    # v reaches 96 % of its limit after ln(0.04)/ln(0.9) = 31 steps; looks every 10.
    assert 20 < ends[0] <= 50
    assert ends[1] > 60 or ends[1] == 0


def test_rows_are_applied_as_dense_gradients(flavor):
    """IndexedSlices with duplicates, beside a dense gradient of the same kind."""
    tables = [
        [make_variable(np.ones((6, 3), np.float32), flavor, n) for n in ("a", "b")]
        for _ in range(2)
    ]
    for variables, dense in zip(tables, (True, False)):
        optimizer = make(flavor, learning_rate=0.1, policy=[(".*", 32)])
        optimizer.build(variables)
        values, ids = tf.ones([4, 3]), tf.constant([1, 1, 4, 0])
        slices = tf.IndexedSlices(values, ids, tf.constant([6, 3], tf.int64))
        apply = applier(optimizer, variables)
        for _ in range(3):
            first = tf.convert_to_tensor(slices) if dense else slices
            apply(first, tf.ones([6, 3]))
    for left, right in zip(*tables):
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


def test_a_variable_without_a_gradient_keeps_its_value(flavor):
    first, second = (
        make_variable(np.ones((40, 40), np.float32), flavor, n)
        for n in ("a_kernel", "b_kernel")
    )
    optimizer = make(flavor, learning_rate=0.1, warmup_steps=1)
    optimizer.build([first, second])
    apply = applier(optimizer, [first, second])
    for _ in range(2):
        apply(tf.ones((40, 40)), tf.ones((40, 40)))
    kept = to_numpy(second)
    applier(optimizer, [first])(tf.ones((40, 40)))
    np.testing.assert_array_equal(to_numpy(second), kept)
    assert np.all(to_numpy(first) < kept)


def test_elements_without_a_variance_rest(flavor):
    """A unit that was dead in the warm-up must not leap when its block is quantised."""
    kernel = make_variable(np.ones((40, 40), np.float32), flavor, "kernel")
    optimizer = make(flavor, learning_rate=0.1, warmup_steps=2)
    optimizer.build([kernel])
    apply = applier(optimizer, [kernel])
    gradient = np.ones((40, 40), np.float32)
    gradient[:, 7] = 0
    for step in range(4):
        gradient[0, 7] = 1e-3 * (step > 1)
        apply(tf.constant(gradient))
    np.testing.assert_array_equal(to_numpy(kernel)[:, 7], 1.0)
    assert np.all(to_numpy(kernel)[:, :7] < 1.0)


def test_steps_that_are_not_finite_are_skipped(flavor):
    kernel = make_variable(np.ones((40, 40), np.float32), flavor, "kernel")
    optimizer = make(flavor, learning_rate=0.1, warmup_steps=1, weight_decay=0.5)
    optimizer.build([kernel])
    apply = applier(optimizer, [kernel])
    for value in (1.0, 2.0, float("nan"), float("inf"), 1e38):
        before = to_numpy(kernel)
        apply(tf.fill((40, 40), value))
        assert np.array_equal(before, to_numpy(kernel)) == (value not in (1.0, 2.0))
    assert int(optimizer.skipped_steps) == 3
    assert int(tf.convert_to_tensor(optimizer.iterations)) == 5


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"beta_1": 1.0}, r"beta_1 must be a number in \[0, 1\), received 1.0"),
        ({"warmup_steps": 0}, "warmup_steps must be None, 'auto' or an integer.* 0"),
        ({"warmup_steps": "soon"}, "warmup_steps must be .* received 'soon'"),
        ({"total_steps": 0}, "total_steps must be None or an integer .* 0"),
        ({"moments": "thawed"}, "moments must be one of 'frozen', 'corrected'"),
        ({"gamma": [0.5, 1.0]}, r"gamma must be a list of .* in \[0, 1\)"),
        ({"boundaries": [0.5]}, "gamma must have one number more than boundaries"),
        ({"moments": "corrected"}, "total_steps must be given where .*'corrected'"),
        ({"clipnorm": 1.0}, "clipnorm must be None: .*clip_value.*received 1.0"),
        ({"block": 100}, "block must be an integer that is a multiple of 8.* 100"),
        ({"timeout": 0}, "timeout must be None or a number above 0.* 0"),
    ],
)
def test_bad_arguments(flavor, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(flavor, **arguments)


def test_config_round_trip(flavor):
    optimizer = make(
        flavor,
        learning_rate=0.02,
        moments="corrected",
        total_steps=900,
        policy=[("top/", 2), distributed.NORMALIZATION_EVERY_10],
        clip_value=2.0,
        timeout=None,
        weight_decay=0.01,
    )
    adapter = flavors.load_adapter(flavor)
    again = adapter.deserialize(adapter.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert again.compression.policy.way("top/kernel", (64, 64)).bits == 2


def test_it_is_left_alone_by_the_wrapper(flavor):
    optimizer = make(flavor)
    assert DistributedOptimizer(optimizer, "onebit") is optimizer


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"local_steps": 3}], ids=str)
def test_a_model_of_tables_alone(options):
    """Nothing is left for it, and it does nothing."""
    keras = tf.keras
    model = keras.Sequential(
        [keras.Input((1,), dtype="int32"), keras.layers.Embedding(50, 1)]
    )
    model.add(keras.layers.Flatten())
    inner = distributed.OneBitAdam(0.01, statistics=True, **options)
    optimizer = BasisAdam(0.01, tables="embedding", dense_optimizer=inner)
    model.compile(DistributedOptimizer(optimizer), "mse")
    start = to_numpy(model.trainable_variables[0])
    model.fit(np.arange(20)[:, None], np.ones([20, 1]), batch_size=10, verbose=0)
    assert np.abs(to_numpy(model.trainable_variables[0]) - start)[:20].min() > 0
    assert model.optimizer.quantization_statistics == {}
