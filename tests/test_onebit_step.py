"""What OneBitAdam fuses: pieces and momentum quantised, and the step of a message."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import BACKENDS
from reference import quantize as reference

from tf_basis.distributed.quantize import WIDTHS, dequantize, message_bytes, quantize
from tf_basis.ops import loader, onebit_ops
from tf_basis.ops.onebit_ops import Scales, Target

widths = pytest.mark.parametrize("bits", WIDTHS)


def variable(values, dtype=tf.float32) -> tf.Variable:
    return tf.Variable(tf.cast(np.asarray(values, np.float32), dtype))


def cut(values: np.ndarray, sizes) -> list[tf.Tensor]:
    """The values in pieces; the first as a matrix of one column."""
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [tf.constant(p[:, None] if i == 0 else p) for i, p in enumerate(parts)]


# ---- pieces and momentum ----------------------------------------------------------

# Ends inside a block, inside a group of 16, at the end of a block; empty pieces.
SIZES = [(40,), (3, 37), (0, 16, 24), (5, 0, 0, 11, 24), (1,) * 40, (39, 1, 0)]


@widths
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pieces_equal_the_whole(backend, bits, sizes, rng):
    values, before = rng.normal(size=(2, 40)).astype(np.float32)
    form = {"bits": bits, "block": 16, "clip_value": 1.5}
    whole, pieces = variable(before), variable(before)
    wanted, clipped = quantize(whole, values, **form)
    message, count = quantize(pieces, cut(values, sizes), **form)
    np.testing.assert_array_equal(message, wanted)
    np.testing.assert_array_equal(pieces.numpy(), whole.numpy())
    assert int(count) == int(clipped) > 0


@widths
@pytest.mark.parametrize("elements, block", [(0, 8), (1, 8), (77, 24), (5000, 2048)])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_momentum(backend, bits, elements, block, function, rng):
    """The bits are those of the mix, made first; graphs must not add otherwise."""
    before, m, g = rng.normal(size=(3, elements)).astype(np.float32)
    residual, momentum = variable(before), variable(m)
    beta = np.float32(0.9), np.float32(1 - 0.9)

    def call(g):
        form = {"bits": bits, "block": block}
        return quantize(residual, g, momentum=momentum, beta=0.9, **form)

    message, _ = (tf.function(call) if function else call)(tf.constant(g))
    u = (beta[0] * m + beta[1] * g) + before
    q, wanted = reference.quantize(u, bits, block)
    assert message.numpy().tobytes() == wanted
    np.testing.assert_array_equal(residual.numpy(), u - q.astype(np.float32))
    np.testing.assert_array_equal(momentum.numpy(), m)


@pytest.mark.parametrize(
    "momentum, words",
    [
        (tf.Variable([1.0]), "momentum must have 2 elements, received 1"),
        (tf.Variable([1, 2]), "momentum must be a float32 variable.* int32"),
        (tf.constant([1.0, 2.0]), "momentum must be a tf.Variable"),
    ],
)
def test_bad_momentum(momentum, words):
    residual = variable([1.0, 2.0])
    with pytest.raises(ValueError, match=words):
        quantize(residual, [1.0, 2.0], bits=1, block=8, momentum=momentum)
    np.testing.assert_array_equal(residual.numpy(), [1.0, 2.0])


# ---- the step of a message --------------------------------------------------------

SCALES = Scales(tf.constant(0.03), tf.constant(4.0), tf.constant(0.01), 1e-3)


class Problem:
    """Variables with gaps between them; some decay, some have no variance."""

    sizes, starts, elements = (700, 1, 3000, 1299), (0, 704, 1000, 4000), 5300

    def __init__(self, bits, block, dtype=tf.float32):
        rng = np.random.default_rng(bits)
        self.form = {"bits": bits, "block": block}
        self.m = rng.normal(size=self.elements).astype(np.float32)
        self.message, _ = quantize(variable(0 * self.m), self.m, **self.form)
        v = rng.gamma(1, size=self.elements).astype(np.float32)
        v[rng.random(self.elements) < 0.2] = 0
        self.thetas = [rng.normal(size=(n,)).astype(np.float32) for n in self.sizes]
        self.first, self.second = variable(self.m * 7), variable(v)
        self.variables = [variable(t, dtype) for t in self.thetas]
        self.targets = [
            Target(x, s, decays=i % 2 == 0)
            for i, (x, s) in enumerate(zip(self.variables, self.starts))
        ]

    def step(self):
        args = self.first, self.second, self.message, self.targets, SCALES
        onebit_ops.step_frozen(*args, **self.form)

    def results(self):
        return [x.numpy() for x in (self.first, self.second, *self.variables)]


@widths
@pytest.mark.parametrize("block", [8, 24, 2048])
def test_step_equals_float64(backend, bits, block):
    problem = Problem(bits, block)
    q = dequantize(problem.message, problem.elements, **problem.form).numpy()
    v = problem.second.numpy().astype(np.float64)
    first, root, decay = (float(s) for s in SCALES[:3])
    delta = q * first / (np.sqrt(v) * root + SCALES.epsilon) * (v > 0)
    problem.step()
    np.testing.assert_array_equal(problem.first.numpy(), q)
    np.testing.assert_array_equal(problem.second.numpy(), v)
    for target, theta in zip(problem.targets, problem.thetas):
        part = delta[target.start : target.start + len(theta)]
        wanted = theta * (1 - decay * target.decays) - part
        moved = target.variable.numpy()
        np.testing.assert_allclose(moved, wanted, rtol=1e-5, atol=1e-6)
        assert np.any(theta != wanted)


@widths
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_op_and_twin_give_the_same_bits(bits, function):
    found = []
    for mode in BACKENDS.values():
        with loader.use(mode):
            problem = Problem(bits, 24)
            step = tf.function(problem.step) if function else problem.step
            for _ in range(3):
                step()
            found.append(problem.results())
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


def test_variables_of_other_types_take_the_twin(backend):
    """Arithmetic in float32, and rounded once a step."""
    exact, rounded = Problem(1, 24), Problem(1, 24, tf.bfloat16)
    for x, y in zip(exact.variables, rounded.variables):
        x.assign(tf.cast(y, tf.float32))
    exact.targets = [t._replace(decays=False) for t in exact.targets]
    rounded.targets = [t._replace(decays=False) for t in rounded.targets]
    exact.step()
    rounded.step()
    for x, y in zip(exact.variables, rounded.variables):
        np.testing.assert_allclose(
            tf.cast(y, tf.float32).numpy(), x.numpy(), rtol=2**-6, atol=2**-9
        )


def test_who_holds_the_old_values_keeps_them(backend):
    problem = Problem(1, 24)
    held = [x.read_value() for x in problem.variables]
    problem.step()
    for old, theta in zip(held, problem.thetas):
        np.testing.assert_array_equal(old.numpy(), theta)


def test_the_op_checks_what_reaches_it_directly():
    with loader.use("require"):
        op = loader.compiled().tf_basis_step_frozen
    first, second, theta = variable([1, 2]), variable([1, 1]), variable([5.0])
    good = {
        "first": first.handle,
        "second": second.handle,
        "message": tf.zeros([message_bytes(2, bits=1, block=8)], tf.uint8),
        "first_scale": 0.1,
        "root_scale": 1.0,
        "decay": 0.0,
        "variables": [theta.handle],
        "starts": [1],
        "decayed": [False],
        "epsilon": 1e-8,
        "bits": 1,
        "block": 8,
    }
    for bad, words in (
        ({"starts": [2]}, "starts must leave each variable room in 2 elements"),
        ({"starts": [-1]}, "starts must leave"),
        ({"starts": []}, "starts and decayed must have 1 entries, received 0 and 1"),
        ({"second": variable([1.0]).handle}, r"second must have the shape \[2\]"),
        ({"message": tf.zeros([9], tf.uint8)}, r"message must have the shape \[5\]"),
        ({"decay": [0.0]}, "must be a scalar"),
        ({"variables": [variable([1], tf.bfloat16).handle]}, "must be float"),
        ({"variables": [first.handle]}, "is passed twice"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            op(**good | bad)
    for x, values in ((first, [1, 2]), (second, [1, 1]), (theta, [5])):
        np.testing.assert_array_equal(x.numpy(), values)
    op(**good)
    np.testing.assert_array_equal(first.numpy(), [0, 0])
