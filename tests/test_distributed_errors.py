"""What the distributed part refuses before anything is exchanged, on one process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    keras_of,
    make_optimizer,
    make_variable,
    to_numpy,
    variables_of,
)

from tf_basis import distributed
from tf_basis.distributed import (
    DistributedGradientTape,
    OneBitCompression,
    OneBitExchange,
    Policy,
)
from tf_basis.distributed.compression import named
from tf_basis.distributed.world import World


def dataset(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: DistributedGradientTape(None), "tape must be a .* received None"),
        (
            lambda: DistributedGradientTape(tf.GradientTape(), timeout=-1),
            "timeout must be .* received -1",
        ),
        (lambda: named({}), r"compression must be None, one of .* received {}"),
        (lambda: named({"bits": 1}), "compression must be .* received {'bits': 1}"),
        (lambda: named(np.zeros(3)), "compression must be .* received array"),
        (lambda: named(3), "compression must be .* received 3"),
        (lambda: OneBitCompression(3), "policy must be None, a Policy, .* 3"),
        (lambda: OneBitCompression({"x": 1}), "policy must be .* received {'x': 1}"),
        (lambda: Policy(["bias"]), "rules must be a list of .* received 'bias'"),
        (
            lambda: distributed.even_batches(dataset([[1.0]], [1.0])),
            "dataset must have at least one batch .* rank 0",
        ),
        (lambda: distributed.average_metrics([1]), r"metrics must be a dict .* \[1\]"),
        (lambda: distributed.broadcast_variables(3), "variables must be a list .* 3"),
        (
            lambda: distributed.broadcast_variables(tf.Variable(1.0)),
            "variables must be a list .* received <tf.Variable",
        ),
        (lambda: distributed.any_rank(np.zeros(2)), "flag must be True or False"),
        (lambda: World(3), "process_set must be None where .* received 3"),
        (lambda: OneBitExchange(8, bits=True), "bits must be one of 1, 2, received T"),
        (lambda: OneBitExchange(8).average("a"), "values must be a tensor of numbers"),
        (lambda: OneBitExchange(8).average(None), "values must be .* received None"),
        (lambda: OneBitExchange(8).average([]), "values must have 8 elements .* 0 in"),
        (
            lambda: OneBitExchange(8).average(tf.ones([2, 4])),
            r"values must have the shape \[8\], received \(2, 4\)",
        ),
        (
            lambda: OneBitExchange(2).average([1.0, 2.0], into=tf.ones([2])),
            r"into must be a tf.Variable, received \w+ of shape \(2,\)$",
        ),
        (
            lambda: OneBitCompression().compress(tf.ones([8])),
            "OneBitCompression must be used inside a tf.function",
        ),
    ],
)
def test_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("policy", [3, {"x": 1}])
def test_bad_policy_of_the_optimizer(flavor, policy):
    with pytest.raises(ValueError, match="policy must be None, a Policy"):
        distributed.for_flavor(flavor).OneBitAdam(policy=policy)


def test_numbers_of_steps(flavor):
    make = distributed.for_flavor(flavor).OneBitAdam
    config = make(warmup_steps=np.int64(5), total_steps=np.int32(50)).get_config()
    assert type(config["warmup_steps"]) is type(config["total_steps"]) is int
    with pytest.warns(UserWarning, match="should be below total_steps.* 9 of 9"):
        make(warmup_steps=9, total_steps=9)


@pytest.mark.parametrize("weight", ["x", None, [1.0, 2.0], b"1"])
def test_weight_of_a_tape_must_be_a_number(weight):
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = variable * variable
    with pytest.raises(ValueError, match="weight must be a number, received"):
        DistributedGradientTape(tape).gradient(y, variable, weight=weight)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_below_zero_end_the_step(flavor, weight):
    """Each rank's weight is known to all, and the error says whose it was."""
    words = "weight .* must be a finite number of at least 0 on every rank"
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = variable * variable
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        DistributedGradientTape(tape).gradient(y, variable, weight=weight)
    kernel = make_variable(np.ones((4, 4), np.float32), flavor, "kernel")
    sgd = keras_of(flavor).optimizers.SGD(0.1)
    onebit = distributed.for_flavor(flavor).OneBitAdam(0.1)
    for optimizer in (distributed.DistributedOptimizer(sgd), onebit):
        optimizer.build([kernel])
        optimizer.step_weight.assign(weight)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            optimizer.apply_gradients([(tf.ones((4, 4)), kernel)])
    np.testing.assert_array_equal(to_numpy(kernel), 1.0)


def test_process_sets_reach_the_optimizer_inside(flavor):
    """It is no part of the config that the copy is made from."""
    one, other = object(), object()
    make = distributed.for_flavor(flavor).OneBitAdam

    def wrapped(inner, process_set):
        outer = make_optimizer(flavor, dense_optimizer=inner)
        return distributed.DistributedOptimizer(outer, process_set=process_set)

    for inner, outer in ((None, one), (one, one)):
        made = wrapped(make(process_set=inner), outer).dense_optimizer
        assert made._exchange.process_set is one
    alone = distributed.DistributedOptimizer(make(), process_set=one)
    assert alone._exchange.process_set is one
    for call in (
        lambda: wrapped(make(process_set=one), other),
        lambda: wrapped(make(process_set=one), None),
        lambda: distributed.DistributedOptimizer(
            make(process_set=one), process_set=other
        ),
    ):
        with pytest.raises(ValueError, match="process_set must be that of the OneBit"):
            call()


def test_residuals_of_other_ranks_start_from_zero(flavor):
    """What a file of another number of ranks holds does not fit."""
    kernel = make_variable(np.ones((40, 40), np.float32), flavor, "kernel")
    optimizer = distributed.for_flavor(flavor).OneBitAdam(0.1, warmup_steps=1)
    optimizer.build([kernel])
    for _ in range(3):
        optimizer.apply_gradients([(tf.random.normal((40, 40), seed=1), kernel)])
    worker, server = optimizer.residual_variables
    store = {str(i): to_numpy(v) for i, v in enumerate(variables_of(optimizer))}
    places = [i for i, v in store.items() if v.shape == server.shape]
    kept = worker.numpy()
    optimizer.load_own_variables(store)  # without a warning
    np.testing.assert_array_equal(worker, kept)
    store[places[-1]] = np.ones(800, np.float32)
    with pytest.warns(UserWarning, match="residuals start from zero: 800 numbers"):
        optimizer.load_own_variables(store)
    assert server.shape == (0,)
    np.testing.assert_array_equal(worker, kept)
