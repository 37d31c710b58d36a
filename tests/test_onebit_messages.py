"""Scales that are given, packed messages, statistics, steps alone: op, twin, numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from reference import onebit_options
from reference import quantize as reference

from tf_basis.distributed import quantize
from tf_basis.distributed.quantize import WIDTHS
from tf_basis.ops import loader, onebit_ops, packing_ops
from tf_basis.ops.onebit_ops import Scales, Target
from tf_basis.rules import quantize as rule

widths = pytest.mark.parametrize("bits", WIDTHS)
SIZES = [(0, 8), (1, 8), (7, 8), (77, 24), (300, 64), (5000, 2048)]
sizes = pytest.mark.parametrize("elements, block", SIZES)


def variable(values) -> tf.Variable:
    return tf.Variable(np.asarray(values, np.float32))


def scales_of(rng, elements: int, bits: int, block: int) -> np.ndarray:
    """For each block as many as bits, the smaller one first."""
    found = np.abs(rng.normal(size=[-(-elements // block), bits]))
    return np.sort(found, axis=1).astype(np.float32).reshape(-1)


def nearest(u: np.ndarray, scales: np.ndarray, bits: int, block: int) -> np.ndarray:
    """What numpy makes of u in blocks whose scales are given."""
    out = np.zeros_like(u, np.float64)
    for i, part in enumerate(reference.blocks_of(len(u), block)):
        own = [float(s) for s in scales[i * bits : (i + 1) * bits]]
        out[part] = onebit_options.nearest(u[part].astype(np.float64), own, bits)
    return out.astype(np.float32)


@widths
@sizes
def test_given_scales(backend, bits, elements, block, rng):
    form = {"bits": bits, "block": block}
    before, values = rng.normal(size=(2, elements)).astype(np.float32)
    residual, scales = variable(before), scales_of(rng, elements, bits, block)
    message, _ = quantize.quantize(residual, values, scales=tf.constant(scales), **form)
    u = values + before
    q = nearest(u, scales, bits, block)
    restored = quantize.dequantize(message, elements, **form).numpy()
    np.testing.assert_array_equal(restored, q)
    np.testing.assert_array_equal(residual.numpy(), u - q)
    mean = variable(before)
    both = tf.concat([message, message], 0)
    reply = quantize.average(mean, both, workers=2, scales=tf.constant(scales), **form)
    expected = nearest(q + before, scales, bits, block)
    restored = quantize.dequantize(reply, elements, **form).numpy()
    np.testing.assert_array_equal(restored, expected)


@widths
@sizes
def test_statistics(backend, bits, elements, block, rng):
    form = {"bits": bits, "block": block}
    before, values = rng.normal(size=(2, elements)).astype(np.float32)
    residual = variable(before)
    message, _ = quantize.quantize(residual, values, **form)
    u = (values + before).astype(np.float64)
    q, _ = reference.quantize(u, bits, block)
    expected = [u.sum(), (u**2).sum(), ((u - q) ** 2).sum()]
    found = quantize.statistics(residual, message, **form)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@widths
@pytest.mark.parametrize("with_scales", [True, False])
def test_packed_messages(backend, bits, with_scales, rng):
    elements, block = [300, 0, 41], 64
    form = {"bits": bits, "block": block}
    messages, known = [], []
    for count in elements:
        residual = variable(np.zeros(count))
        values = rng.normal(size=count).astype(np.float32)
        messages.append(quantize.quantize(residual, values, **form)[0])
        known.append(rule.split(messages[-1], count, **form)[0])
    message, known = tf.concat(messages, 0), tf.concat(known, 0)
    pack = tf.function(packing_ops.pack)
    packed, lengths, scales = pack(message, tf.constant(with_scales), elements, **form)
    np.testing.assert_array_equal(scales, known)
    codes = [rule.code_bytes(n, **form) for n in elements]
    if not with_scales:
        assert lengths.numpy().tolist() == [5 + c for c in codes]
    assert int(tf.reduce_sum(lengths)) == packed.shape[0]
    # Scales that came along outrank those known.
    told = known if not with_scales else tf.zeros_like(known)
    restored, found = packing_ops.unpack(packed, told, elements, **form)
    np.testing.assert_array_equal(restored, message)
    np.testing.assert_array_equal(found, known)


def test_scales_are_deflated_where_that_makes_them_shorter(rng):
    form = {"bits": 1, "block": 8}
    alike, random = np.ones(8000), rng.normal(size=8000) * 10 ** rng.normal(size=8000)
    sizes = {}
    for name, values in {"alike": alike, "random": random}.items():
        message, _ = quantize.quantize(variable(np.zeros(8000)), values, **form)
        for ops in ("require", "off"):
            with loader.use(ops):
                packed, _, _ = packing_ops.pack(
                    message, tf.constant(True), [8000], **form
                )
                sizes[name, ops] = packed.shape[0]
                if ops == "require":
                    restored, _ = packing_ops.unpack(
                        packed, tf.zeros([1000]), [8000], **form
                    )
                    np.testing.assert_array_equal(restored, message)
    assert sizes["alike", "require"] < sizes["random", "require"] <= 5 + 1000 * 5
    assert sizes["alike", "off"] == sizes["random", "off"] == 5 + 1000 * 5
    assert sizes["alike", "require"] < 1200


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda p: p[:-1], "packed must hold 1 whole segments"),
        (lambda p: p[:3], "packed must hold 1 whole segments"),
        (lambda p: tf.concat([p, [0]], 0), "packed must end with its last segment"),
        (lambda p: tf.concat([[7], p[1:]], 0), "kinds 0 to 2, received kind 7"),
        (lambda p: tf.concat([[2], p[1:]], 0), "no zlib stream|whole segments"),
        (lambda p: tf.reshape(p, [1, -1]), "packed must be of rank 1"),
    ],
)
def test_packed_messages_that_are_none(change, words):
    with loader.use("require"):
        library = loader.compiled()
    message, _ = quantize.quantize(variable(np.zeros(40)), np.ones(40), bits=1, block=8)
    form = {"elements": [40], "bits": 1, "block": 8}
    packed, _, _ = library.tf_basis_pack_message(message, False, **form)
    packed = change(tf.cast(packed, tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        library.tf_basis_unpack_message(
            tf.cast(packed, tf.uint8), tf.zeros([5]), **form
        )


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_steps_alone(backend, function, rng):
    """Against float64; the variables leave gaps and one of them decays."""
    n = 70
    m, g, u = rng.normal(size=(3, n)).astype(np.float32)
    v = np.where(rng.random(n) < 0.2, 0, rng.random(n)).astype(np.float32)
    first, second, drift = variable(m), variable(v), variable(u)
    a, b = variable(rng.normal(size=(5, 4))), variable(rng.normal(size=30))
    starts = [np.array(a), np.array(b)]
    targets = [Target(a, 3, True), Target(b, 30, False)]
    scales = Scales(*map(tf.constant, (0.05, 1.5, 0.01)), 1e-3)

    def step(g):
        pieces = [g[:10], g[10:10], g[10:]]
        onebit_ops.step_local(
            first, second, drift, pieces, targets, scales, beta=0.8, block=16
        )

    (tf.function(step) if function else step)(tf.constant(g))
    m, g, u, v = (x.astype(np.float64) for x in (m, g, u, v))
    m = 0.8 * m + 0.2 * g
    change = np.where(v > 0, 0.05 * m / (1.5 * np.sqrt(v) + 1e-3), 0)
    np.testing.assert_allclose(first.numpy(), m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(drift.numpy(), u + 0.05 * m, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(second.numpy(), v.astype(np.float32))
    moved = starts[0] * 0.99 - change[3:23].reshape(5, 4)
    np.testing.assert_allclose(a.numpy(), moved, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        b.numpy(), starts[1] - change[30:60], rtol=1e-5, atol=1e-5
    )


def test_the_twin_of_a_step_alone_gives_the_same_bits(rng):
    given = rng.normal(size=(5, 100)).astype(np.float32)
    results = []
    for ops in ("require", "off"):
        with loader.use(ops):
            first, second, drift, x = map(variable, given[:4])
            second.assign(tf.abs(second))
            scales = Scales(*map(tf.constant, (0.05, 1.5, 0.01)), 1e-3)
            for _ in range(6):
                onebit_ops.step_local(
                    first,
                    second,
                    drift,
                    [tf.constant(given[4])],
                    [Target(x, 0, True)],
                    scales,
                    beta=0.9,
                    block=32,
                )
            results.append([v.numpy().tobytes() for v in (first, drift, x)])
    assert results[0] == results[1]


def test_the_ops_check_what_reaches_them():
    with loader.use("require"):
        library = loader.compiled()
    one, two = variable([1.0]), variable([1.0, 2.0])
    x = variable([1.0, 2.0])
    form = {"bits": 1, "block": 8}
    message = tf.zeros([5], tf.uint8)
    step = {"starts": [0], "decayed": [False], "epsilon": 1e-3, "keep": 0.9}
    step |= {"take": 0.1, "block": 8}
    for words, call in {
        "scales must have the shape \\[1\\], received \\[2\\]": lambda: (
            library.tf_basis_quantize_blocks(
                two.handle, [[1.0, 2.0]], [], [[1.0, 2.0]], **form
            )
        ),
        "message must have the shape \\[5\\]": lambda: (
            library.tf_basis_message_statistics(two.handle, message[:4], **form)
        ),
        "with_scales must be a scalar": lambda: library.tf_basis_pack_message(
            message, [True], elements=[2], **form
        ),
        "elements must be in": lambda: library.tf_basis_pack_message(
            message, True, elements=[-1], **form
        ),
        "drift must have the shape \\[2\\]": lambda: library.tf_basis_step_local(
            x.handle,
            two.handle,
            one.handle,
            [[1.0, 2.0]],
            1.0,
            1.0,
            0.0,
            [],
            **{**step, "starts": [], "decayed": []},
        ),
        "values must have 2 elements, received 1": lambda: library.tf_basis_step_local(
            x.handle,
            two.handle,
            variable([0.0, 0.0]).handle,
            [[1.0]],
            1.0,
            1.0,
            0.0,
            [variable([0.0]).handle],
            **step,
        ),
    }.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            call()
    np.testing.assert_array_equal(two.numpy(), [1.0, 2.0])
