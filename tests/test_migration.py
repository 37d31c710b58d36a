"""The moments of Keras's Adam in buckets, and back."""

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
    to_numpy,
    variables_of,
)
from migration_helpers import DIM, KINDS, N_ROWS, UNSEEN, moments_of, trained_adam


@pytest.mark.parametrize("kind", KINDS)
def test_what_buckets_get(flavor, kind):
    adam, table, bias = trained_adam(flavor)
    optimizer = make_optimizer(flavor, tables=[table], **KINDS[kind])
    optimizer.load_adam(adam, [table, bias])
    state = optimizer.table_state(table)
    buckets = optimizer.buckets(table).reshape(N_ROWS, -1)
    hyper = KINDS[kind]
    m, v = (x.astype(np.float64) for x in moments_of(adam))
    unbias = [1.0, 1.0]
    if kind == "plain":
        unbias = [1 - 0.9**20, 1 - 0.999**20]
    owners = {"owners": N_ROWS, "exclusive": 5, "listed": 3, "low": 5}.get(kind, 0)
    tolerance = 2.0**-8 if kind == "low" else 1e-6
    for bucket in range(hyper["num_buckets"]):
        rows = np.flatnonzero((buckets == bucket).any(axis=1))
        seen = rows[rows < UNSEEN]
        assert state["bucket_steps"][bucket] == (20 if len(seen) else 0)
        for name, moment, factor in zip(
            ("first_moment", "second_moment"), (m, v), unbias, strict=True
        ):
            if bucket >= len(state[name]):
                continue
            wanted = moment[seen].mean(axis=0) / factor if len(seen) else 0
            if name == "first_moment" and kind == "auto":
                wanted = 0  # who leads is not known yet
            np.testing.assert_allclose(state[name][bucket], wanted, tolerance, 1e-30)
    owned = buckets[:, 0] < owners
    if "row_energy" in state:
        energy = np.where(owned, 0, v.mean(axis=1) / (1 - 0.999**20))
        rtol = 0.1 if kind == "low" else 1e-5
        np.testing.assert_allclose(state["row_energy"], energy, rtol)
    if kind == "learned":
        assert set(state["scalar"]) == {1}
        wanted = np.where(np.arange(N_ROWS) < UNSEEN, 20, 0)
        np.testing.assert_array_equal(state["row_steps"], wanted)
    if kind == "stale":
        assert set(state["last_step"]) == {20}
    assert int(to_numpy(optimizer.iterations)) == 20
    dense = [to_numpy(x) for x in variables_of(optimizer) if x.shape == (3,)]
    wanted = [to_numpy(x) for x in variables_of(adam) if x.shape == (3,)]
    for left, right in zip(dense, wanted, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("kind", ["shared", "exclusive", "double", "low"])
def test_first_step_is_as_long_as_with_adams_second_moment(backend, flavor, kind):
    """Of a shared row: lr * |g| over the root of Adam's v^ of that row."""
    adam, table, bias = trained_adam(flavor)
    hyper = {**KINDS[kind], "momentum": "exclusive", "scalar_range": (1e-3, 1e3)}
    optimizer = make_optimizer(flavor, learning_rate=0.01, tables=[table], **hyper)
    optimizer.load_adam(adam, [table, bias])
    _, v = moments_of(adam)
    v_hat = v.astype(np.float64).mean(axis=1) / (1 - 0.999**20)
    buckets = optimizer.buckets(table).reshape(N_ROWS, -1)
    rows = [r for r in range(6, UNSEEN) if not {r} & {9, 50}]
    # As large as what v^ says, so that the step changes no energy.
    gradient = np.sqrt(v_hat)[:, None] * np.ones((1, DIM))
    before = to_numpy(table)
    slices = make_slices(rows, gradient[rows], (N_ROWS, DIM))
    optimizer.apply_gradients([(slices, table)])
    moved = np.sqrt(np.mean((before - to_numpy(table))[rows] ** 2, axis=1))
    # What the bucket adds is how the row's step differs from column to column.
    shared = optimizer.table_state(table)["second_moment"][buckets[rows]].min(axis=1)
    shape = np.sqrt(np.mean(shared.mean(axis=1, keepdims=True) / shared, axis=1))
    # Steps of the 8-bit logarithm are 19 % of the energy, 9 % of its root.
    np.testing.assert_allclose(moved, 0.01 * shape, 0.1 if kind == "low" else 1e-4)


def test_next_steps_are_adams_where_rows_own_buckets(backend, flavor):
    adam, table, bias = trained_adam(flavor, epsilon=1e-12)
    twin = make_variable(to_numpy(table), flavor, "twin")
    optimizer = make_optimizer(
        flavor, learning_rate=0.01, epsilon=1e-12, tables=[twin], num_buckets=N_ROWS
    )
    same = keras_of(flavor).optimizers.Adam(0.01, epsilon=1e-12)
    other = make_variable(to_numpy(bias), flavor, "other")
    same.build([twin, other])
    for target, source in zip(variables_of(same), variables_of(adam), strict=True):
        target.assign(to_numpy(source))
    optimizer.load_adam(same, [twin, other])
    rng = np.random.default_rng(4)
    for _ in range(3):
        gradients = [rng.normal(size=(N_ROWS, DIM)), rng.normal(size=3)]
        gradients = [tf.constant(g, tf.float32) for g in gradients]
        adam.apply_gradients(zip(gradients, [table, bias], strict=True))
        optimizer.apply_gradients(zip(gradients, [twin, other], strict=True))
    seen = slice(UNSEEN)  # a lazy row starts with a bias correction of its own
    np.testing.assert_allclose(to_numpy(twin)[seen], to_numpy(table)[seen], 1e-5, 1e-6)
    np.testing.assert_array_equal(to_numpy(other), to_numpy(bias))


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_there_and_back_is_exact_where_rows_own_buckets(flavor, steps):
    adam, table, bias = trained_adam(flavor, steps)
    adam.build([table, bias])
    arguments = {"beta_1": 0.8, "beta_2": 0.99}  # other betas are converted
    for extra in ({}, arguments):
        optimizer = make_optimizer(
            flavor,
            learning_rate=0.01,
            tables=[table],
            num_buckets=N_ROWS,
            epsilon=1e-7,
            **extra,
        )
        optimizer.load_adam(adam, [table, bias])
        back = optimizer.to_adam()
        assert type(back) is keras_of(flavor).optimizers.Adam
        left, right = optimizer_arrays(adam), optimizer_arrays(back)
        if not extra:
            assert_same_bits(left, right)
            config = back.get_config()
            wanted = adam.get_config()
            assert {**config, "name": 0} == {**wanted, "name": 0}
        elif steps:  # converted to the moments of other betas, and no further
            t = steps
            m, v = moments_of(adam)
            m2, v2 = moments_of(back)
            np.testing.assert_allclose(m2 / (1 - 0.8**t), m / (1 - 0.9**t), 1e-5, 1e-9)
            np.testing.assert_allclose(
                v2 / (1 - 0.99**t), v / (1 - 0.999**t), 1e-5, 1e-9
            )


@pytest.mark.parametrize("kind", ["shared", "exclusive", "listed", "momentum", "auto"])
def test_there_and_back_keeps_the_scale_of_every_row(flavor, kind):
    adam, table, bias = trained_adam(flavor)
    optimizer = make_optimizer(flavor, tables=[table], **KINDS[kind])
    optimizer.load_adam(adam, [table, bias])
    (m, v), (m2, v2) = moments_of(adam), moments_of(optimizer.to_adam())
    np.testing.assert_allclose(
        v2[:UNSEEN].mean(axis=1), v[:UNSEEN].mean(axis=1), rtol=1e-5
    )
    owned = optimizer.buckets(table) < {"exclusive": 5, "listed": 3}.get(kind, 0)
    np.testing.assert_allclose(v2[owned], v[owned], rtol=1e-6)
    np.testing.assert_allclose(m2[owned], m[owned], rtol=1e-6)
    if kind == "momentum":
        state = optimizer.table_state(table)
        wanted = state["first_moment"][optimizer.buckets(table)]
        np.testing.assert_allclose(m2, wanted, rtol=1e-5)
    else:
        assert not m2[~owned].any()


@pytest.mark.parametrize("kind", KINDS)
def test_to_adam_goes_on_with_the_lengths_of_steps(flavor, kind):
    """After lazy training: v^ of a row is V^ of its bucket over its scalar squared."""
    rng = np.random.default_rng(2)
    table = make_variable(rng.normal(size=(N_ROWS, DIM)), flavor, "table")
    optimizer = make_optimizer(
        flavor, learning_rate=0.01, tables=[table], **KINDS[kind]
    )
    optimizer.build([table])
    for _ in range(25):
        batch = make_slices(*random_batch(rng, N_ROWS, DIM, 15), (N_ROWS, DIM))
        optimizer.apply_gradients([(batch, table)])
    state = optimizer.table_state(table)
    buckets = optimizer.buckets(table).reshape(N_ROWS, -1)
    _, v = moments_of(optimizer.to_adam())
    steps = state["bucket_steps"].astype(np.float64)
    second = state["second_moment"].astype(np.float64)
    if kind == "stale":
        missed = np.where(steps > 0, 25 - state["last_step"], 0)
        steps += missed
        second *= (0.999**missed)[:, None]
    corrected = second if kind == "plain" else second / _safe(1 - 0.999**steps)[:, None]
    hat = corrected[buckets].min(axis=1)
    owned = buckets[:, 0] < {"owners": N_ROWS, "exclusive": 5, "low": 5}.get(kind, 0)
    owned |= np.isin(np.arange(N_ROWS), [9, 50, 105]) & (kind == "listed")
    scalar = np.ones(N_ROWS)
    if kind == "learned":
        scalar = state["scalar"]
    elif kind != "plain":
        energy = state["row_energy"]
        scalar = np.sqrt(hat.mean(axis=1) / _safe(energy))
        scalar = np.where((energy > 0) & ~owned, np.clip(scalar, 0.1, 10), 1)
    if kind == "auto":
        leaders = np.arange(N_ROWS) == state["leader"][buckets[:, 0]]
        scalar[leaders & (state["leader_votes"][buckets[:, 0]] >= 8)] = 1
    wanted = hat / scalar[:, None] ** 2 * (1 - 0.999**25)
    np.testing.assert_allclose(v, wanted, 1e-5, 1e-30)


def _safe(x):
    return np.where(x > 0, x, 1)
