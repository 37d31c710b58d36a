"""clipnorm, clipvalue, global_clipnorm: the dense computation, on rows alone."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BACKENDS,
    FLAVORS,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    random_batch,
    state_of,
    to_numpy,
)
from sparse_helpers import dense_of, nothing_made_dense

ROWS, DIM = 30, 3
CLIPPING = [{"clipnorm": 0.7}, {"clipvalue": 0.2}, {"global_clipnorm": 0.7}]
BY_NAME = pytest.mark.parametrize("clipping", CLIPPING, ids=lambda c: next(iter(c)))


class Run:
    """Two tables and a dense variable under one optimizer."""

    def __init__(self, flavor, **kwargs):
        shapes = {"first": (ROWS, DIM), "second": (ROWS // 2, 2), "dense": (4,)}
        self.variables = [
            make_variable(np.ones(shape), flavor, name)
            for name, shape in shapes.items()
        ]
        self.optimizer = make_optimizer(
            flavor, tables=["first", "second"], num_buckets=5, **kwargs
        )
        self.optimizer.build(self.variables)

    def step(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def state(self):
        states = {"dense": to_numpy(self.variables[-1])}
        for name, table in zip("ab", self.variables, strict=False):
            state = state_of(self.optimizer, table)
            states.update({name + key: value for key, value in state.items()})
        return states


def clip(gradients, clipnorm=None, clipvalue=None, global_clipnorm=None):
    """What Keras does to dense gradients, in float64."""
    if clipvalue:
        return [np.clip(g, -clipvalue, clipvalue) for g in gradients]
    norms = [np.linalg.norm(g) for g in gradients]
    if clipnorm:
        factors = [min(1.0, clipnorm / n) if n else 1.0 for n in norms]
    else:
        norm = np.linalg.norm(norms)
        factors = [min(1.0, global_clipnorm / norm) if norm else 1.0] * 3
    return [g * f for g, f in zip(gradients, factors, strict=True)]


def batches(rng):
    """Lists of (ids, values) of both tables and a dense gradient; small and large."""
    for size, scale in ((20, 1.0), (7, 0.01), (0, 1.0), (40, 10.0)):
        first = random_batch(rng, ROWS, DIM, size)
        second = random_batch(rng, ROWS // 2, 2, size // 2)
        dense = scale * rng.normal(size=4)
        yield [(ids, scale * values) for ids, values in (first, second)], dense


def as_slices(rows, dense, variables):
    slices = [
        make_slices(ids, values, tuple(v.shape))
        for (ids, values), v in zip(rows, variables, strict=False)
    ]
    return [*slices, tf.constant(dense, tf.float32)]


def clipped_slices(rows, dense, variables, clipping):
    """Clipped as dense arrays, then cut back to the rows that were touched."""
    arrays = [
        dense_of(ids, values, tuple(v.shape))
        for (ids, values), v in zip(rows, variables, strict=False)
    ]
    *arrays, dense = clip([*arrays, dense], **clipping)
    touched = [np.unique(ids) for ids, _ in rows]
    rows = [(ids, a[ids]) for ids, a in zip(touched, arrays, strict=True)]
    return as_slices(rows, dense, variables)


def assert_close(run, reference):
    state = run.state()
    for key, value in reference.state().items():
        np.testing.assert_allclose(state[key], value, rtol=2e-5, atol=1e-7, err_msg=key)


@BY_NAME
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
def test_clipping_equals_the_dense_computation(flavor, backend, clipping, jit_compile):
    if jit_compile and backend == "op":
        pytest.skip("XLA takes the twin")
    rng = np.random.default_rng(3)
    run, reference = Run(flavor, **clipping), Run(flavor)
    step = tf.function(run.step, jit_compile=jit_compile) if jit_compile else run.step
    changed = 0
    for rows, dense in batches(rng):
        gradients = clipped_slices(rows, dense, reference.variables, clipping)
        reference.step(gradients)
        with nothing_made_dense():
            step(as_slices(rows, dense, run.variables))
        assert_close(run, reference)
        original = np.concatenate([dense, *(v.ravel() for _, v in rows)])
        changed += np.any(original != 0)
    assert changed == 4
    free = Run(flavor)
    for rows, dense in batches(np.random.default_rng(3)):
        free.step(as_slices(rows, dense, free.variables))
    assert np.any(
        np.abs(free.state()["arow_energy"] - run.state()["arow_energy"]) > 0.01
    )


@BY_NAME
def test_clipping_of_accumulated_gradients(flavor, backend, clipping):
    """The mean is clipped, not its parts."""
    rng = np.random.default_rng(4)
    run = Run(flavor, gradient_accumulation_steps=2, **clipping)
    reference = Run(flavor)
    made = list(batches(rng))
    for first, second in (made[:2], made[2:]):
        for rows, dense in (first, second):
            with nothing_made_dense():
                run.step(as_slices(rows, dense, run.variables))
        rows = [
            (np.concatenate([i, j]), np.concatenate([v, w]) / 2)
            for (i, v), (j, w) in zip(first[0], second[0], strict=True)
        ]
        dense = (first[1] + second[1]) / 2
        reference.step(clipped_slices(rows, dense, reference.variables, clipping))
        assert_close(run, reference)


@BY_NAME
def test_keras_agrees_on_dense_gradients(flavor, clipping):
    """Keras's clipping of the same gradients, made dense, leaves the same rows."""
    rng = np.random.default_rng(6)
    run = Run(flavor, **clipping)
    keras_optimizer = keras_of(flavor).optimizers.SGD(1.0, **clipping)
    rows, dense = next(batches(rng))
    ours = run.optimizer._clip_gradients(as_slices(rows, dense, run.variables))
    arrays = [
        dense_of(ids, values, tuple(v.shape)).astype(np.float32)
        for (ids, values), v in zip(rows, run.variables, strict=False)
    ]
    theirs = keras_optimizer._clip_gradients(
        [*map(tf.constant, arrays), tf.constant(dense, tf.float32)]
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(a), tf.convert_to_tensor(b), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("flavor", FLAVORS)
def test_two_clipping_arguments_are_an_error(flavor):
    with pytest.raises(ValueError, match="only one of") as error:
        make_optimizer(flavor, clipnorm=1.0, clipvalue=0.5)
    for part in ("clipnorm", "1.0", "clipvalue", "0.5"):
        assert part in str(error.value)


def test_a_nan_is_not_clipped_away(flavor):
    """As in Keras, it shows in all gradients that are clipped together."""
    from tf_basis.ops import loader

    for mode in BACKENDS.values():
        with loader.use(mode):
            run = Run(flavor, global_clipnorm=1.0)
            rows = [([1, 1], [[np.nan] * 3, [1.0] * 3]), ([], [])]
            run.step(as_slices(rows, np.ones(4), run.variables))
            assert np.all(np.isnan(run.state()["dense"]))
