"""An optimizer on real ranks, step by step beside the float64 reference."""

from __future__ import annotations

import hashlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import to_numpy
from horovod_pairs import new
from reference import onebit_options as reference

import tf_basis
from tf_basis import distributed

ALL = [(".*", 1)]
SIZE, ELEMENTS, BLOCK = 2, 50, 16


def gradients(step: int, elements: int = ELEMENTS) -> np.ndarray:
    """Of all ranks, of another size in every step."""
    rng = np.random.default_rng([7, step])
    scale = 1 + np.abs(np.sin(step))
    return rng.normal(scale=scale, size=[SIZE, elements]).astype(np.float32)


def digest(*arrays) -> str:
    joined = b"".join(np.ascontiguousarray(to_numpy(a)).tobytes() for a in arrays)
    return hashlib.sha256(joined).hexdigest()


def follow(make, expected, *, steps=12, weights=None, bad=(), wrap=False, each=None):
    """An optimizer's variable against the reference after every step.

    `bad`: (step, rank) whose gradient is not finite. `wrap`: the optimizer is inside a
    DistributedOptimizer(BasisAdam), which has a table beside it.
    """
    start = np.linspace(-1, 1, ELEMENTS).astype(np.float32)
    variable, table = new(start, "tower"), new(np.ones((12, 4)), "table")
    optimizer = inner = make()
    variables = [variable]
    if wrap:
        optimizer = tf_basis.BasisAdam(
            0.01, tables=["table"], compression_ratio=2.0, dense_optimizer=inner
        )
        optimizer = distributed.DistributedOptimizer(optimizer)
        inner = optimizer.dense_optimizer
        variables = [table, variable]
    optimizer.build(variables)

    @tf.function
    def apply(gradient):
        given = [gradient]
        if wrap:
            rows = tf.IndexedSlices(
                tf.ones([2, 4]) * gradient[0], tf.constant([hvd.rank(), 5]), [12, 4]
            )
            given = [rows, gradient]
        optimizer.apply_gradients(list(zip(given, variables)))

    worst, digests, apart = 0.0, [], []
    for step in range(steps):
        given = gradients(step)
        for when, rank in bad:
            if when == step:
                given[rank, 3] = np.inf
        step_weights = None if weights is None else weights[step]
        if weights is not None:
            optimizer.step_weight.assign(float(step_weights[hvd.rank()]))
        apply(tf.constant(given[hvd.rank()]))
        expected.step(given, step_weights)
        mine = to_numpy(variable)
        worst = max(worst, np.abs(mine - expected.theta[hvd.rank()]).max())
        apart.append(inner.apart)
        if not inner.apart:
            digests.append(digest(variable))
        if each is not None:
            each(step, inner, expected)
    return {
        "worst": float(worst),
        "digests": digests,
        "apart": apart,
        "skipped": int(optimizer.skipped_steps),
        "moved": float(np.abs(to_numpy(variable) - start).max()),
    }


SETTINGS = {"block": BLOCK, "epsilon": 1e-3, "beta_1": 0.8, "beta_2": 0.99}


def one_bit(**more):
    policy, rate = more.pop("policy", ALL), more.pop("rate", 0.02)
    decay = more.get("weight_decay", 0.0)
    make = lambda: distributed.OneBitAdam(  # noqa: E731
        rate, warmup_steps=3, policy=policy, **SETTINGS, **more
    )
    names = {"local_steps_doubling": "doubling"}
    known = {names.get(k, k): v for k, v in more.items()}
    known["weight_decay"] = decay
    start = np.linspace(-1, 1, ELEMENTS).astype(np.float32)
    return make, reference.OneBitAdam(
        start, SIZE, rate=rate, warmup=3, **SETTINGS, **known
    )
