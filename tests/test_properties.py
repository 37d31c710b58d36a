"""Properties over random shapes, bits and hyperparameters: op, twin and invariants."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from family_helpers import FamilyRun
from helpers import BACKENDS, assert_same_bits, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_basis.distributed.quantize import (
    dequantize,
    message_bytes,
    quantize,
    statistics,
)
from tf_basis.ops import loader, packing_ops

SEEDS = st.integers(0, 2**32 - 1)
RATES = st.floats(0, 0.999)


@st.composite
def vectors(draw):
    """Values of many sizes, and how they are cut and coded."""
    elements, block = draw(st.integers(0, 200)), 8 * draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(SEEDS))
    values = rng.normal(size=(2, elements)) * 10.0 ** rng.uniform(-3, 3, elements)
    values[:, rng.random(elements) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    return values.astype(np.float32), {"bits": draw(st.sampled_from([1, 2]))} | {
        "block": block
    }


def check_messages(vector, clip):
    (values, before), form = vector
    elements, results = len(values), []
    for mode in BACKENDS.values():
        with loader.use(mode):
            residual = tf.Variable(before)
            message, clipped = quantize(residual, values, clip_value=clip, **form)
            decoded = dequantize(message, elements, **form).numpy()
            sums = statistics(residual, message, **form).numpy()
        results.append((message.numpy(), residual.numpy(), decoded, int(clipped)))
        u = values + before
        wanted = np.sum(np.abs(u) > clip) if clip is not None else 0
        assert int(clipped) == wanted
        u = u if clip is None else np.clip(u, -np.float32(clip), np.float32(clip))
        assert len(message) == message_bytes(elements, **form)
        np.testing.assert_array_equal(residual.numpy(), u - decoded)
        # Two bits know two magnitudes a block, one bit one.
        blocks = np.split(
            np.abs(decoded), range(form["block"], elements, form["block"])
        )
        assert all(len(np.unique(b)) <= form["bits"] for b in blocks)
        exact = decoded.astype(float) + residual.numpy()
        scale = np.sum(np.abs(exact)) + 1e-30
        np.testing.assert_allclose(sums[0], exact.sum(), atol=1e-5 * scale)
        np.testing.assert_allclose(sums[1], np.sum(exact**2), rtol=1e-4, atol=1e-30)
    for left, right in zip(*results):
        np.testing.assert_array_equal(left, right)


MESSAGES = (vectors(), st.none() | st.floats(2**-10, 128, width=32))


@settings(max_examples=8)
@given(*MESSAGES)
def test_messages(vector, clip):
    check_messages(vector, clip)


@pytest.mark.long
@settings(max_examples=2000)
@given(*MESSAGES)
def test_many_messages(vector, clip):
    check_messages(vector, clip)


def check_packing(counts, form, seed, with_scales):
    rng = np.random.default_rng(seed)
    length = sum(message_bytes(n, **form) for n in counts)
    message = tf.constant(rng.integers(0, 256, length), tf.uint8)
    for mode in BACKENDS.values():
        with loader.use(mode):
            packed, sizes, scales = packing_ops.pack(
                message, tf.constant(with_scales), counts, **form
            )
            back, found = packing_ops.unpack(packed, scales, counts, **form)
        assert int(tf.reduce_sum(sizes)) == len(packed)
        assert back.numpy().tobytes() == message.numpy().tobytes()
        assert found.numpy().tobytes() == scales.numpy().tobytes()


FORMS = st.fixed_dictionaries(
    {"bits": st.sampled_from([1, 2]), "block": st.sampled_from([8, 24, 64])}
)
PACKED = (
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    FORMS,
    SEEDS,
    st.booleans(),
)


@settings(max_examples=5)
@given(*PACKED)
def test_packing(counts, form, seed, with_scales):
    check_packing(counts, form, seed, with_scales)


@pytest.mark.long
@settings(max_examples=1000)
@given(*PACKED)
def test_much_packing(counts, form, seed, with_scales):
    check_packing(counts, form, seed, with_scales)


@st.composite
def rules(draw):
    """BasisAdam with any hyperparameters on a table of any shape."""
    n_rows, dim = draw(st.integers(2, 40)), draw(st.integers(1, 9))
    buckets = draw(st.integers(1, n_rows - 1))
    hashing = draw(st.sampled_from(["balanced", "murmur3", "double", "consistent"]))
    scalar = draw(st.sampled_from(["energy", "learned", None]))
    modes = ["shared"] if scalar == "learned" else ["exclusive", "shared", "none"]
    formats = st.sampled_from(["float32", "bfloat16", "float16"])
    return (n_rows, dim), {
        "num_buckets": buckets,
        "exclusive_rows": draw(st.integers(0, buckets - 1)),
        "hashing": hashing,
        "invariant_scalar": scalar,
        "momentum": draw(st.sampled_from(modes)),
        "moment_dtype": draw(formats),
        "energy_dtype": draw(st.sampled_from(["float32", "bfloat16", "log8"])),
        "collision_reduce": draw(st.sampled_from(["mean", "sum", "sequential"])),
        "learning_rate": draw(st.floats(1e-6, 1)),
        "beta_1": draw(RATES),
        "beta_2": draw(RATES),
        "epsilon": draw(st.floats(1e-7, 1e-1)),
        "weight_decay": draw(st.none() | st.floats(1e-3, 0.5)),
        "seed": draw(SEEDS),
    }


def check_steps(rule, seed):
    (n_rows, dim), arguments = rule
    states = []
    for mode in BACKENDS.values():
        rng = np.random.default_rng(seed)
        theta = rng.normal(size=(n_rows, dim)).astype(np.float32)
        with loader.use(mode):
            run = FamilyRun("BasisAdam", theta, **arguments)
            for _ in range(2):
                batch = random_batch(rng, n_rows, dim, int(rng.integers(0, 30)))
                untouched = np.setdiff1d(np.arange(n_rows), batch[0])
                before = run.theta
                run.step(*batch)
                np.testing.assert_array_equal(run.theta[untouched], before[untouched])
        states.append(run.state())
    assert_same_bits(*states)
    for name, value in states[0].items():
        assert not np.isnan(np.asarray(value, np.float64)).any(), name


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=3)
@given(rules(), SEEDS)
def test_steps(rule, seed):
    check_steps(rule, seed)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=400)
@given(rules(), SEEDS)
def test_many_steps(rule, seed):
    check_steps(rule, seed)
