"""Shadow rows of a table against the exact rule, and the errors they measure."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from diagnostics_helpers import (
    DIM,
    LEARNED,
    ROWS,
    batches,
    errors_of,
    train,
    trained,
    with_shadows,
)
from reference.adam import LazyAdam

from tf_basis import diagnostics
from tf_basis.diagnostics import tables


def test_shadow_rows_are_lazy_adam():
    data = list(batches(12))
    optimizer, table, shadows = with_shadows(data=data)
    exact = LazyAdam(np.zeros((ROWS, DIM)), 0.01, 0.9, 0.999, 1e-8)
    for ids, values in data:
        exact.step(ids, values)
    known = shadows.known_of(tables.tables_of(optimizer)[0])
    rows = known["rows"]
    # Of the first steps, and no row twice.
    assert len(set(rows)) == 16 and set(rows) <= set(data[0][0])
    assert set(np.argsort(-np.bincount(data[0][0]))[:2]) <= set(rows)  # frequent ones
    np.testing.assert_array_equal(known["counts"], exact.row_steps[rows])
    np.testing.assert_allclose(known["first"], exact.m[rows], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(known["second"], exact.v[rows], rtol=1e-5)
    again = with_shadows(data=data)[2]
    np.testing.assert_array_equal(again.rows_of("table"), rows)
    # A dense gradient has all rows.
    shadows.attach()
    optimizer.apply_gradients([(tf.ones([ROWS, DIM]), table)])
    shadows.detach()
    exact.step(np.arange(ROWS), np.ones((ROWS, DIM)))
    later = shadows.known_of(tables.tables_of(optimizer)[0])
    np.testing.assert_allclose(later["second"], exact.v[rows], rtol=1e-5)


def test_errors_are_those_of_the_formulas():
    data = list(batches(20))
    optimizer, table, shadows = with_shadows(data=data, exclusive_rows=3)
    exact = LazyAdam(np.zeros((ROWS, DIM)), 0.01, 0.9, 0.999, 1e-8)
    for ids, values in data:
        exact.step(ids, values)
    found = errors_of(optimizer, shadows)
    state, buckets = optimizer.table_state(table), optimizer.buckets(table)
    by_row = found["by_row"]
    for i, row in enumerate(by_row["rows"]):
        b, c = buckets[row], exact.row_steps[row]
        hat = state["second_moment"][b] / (1 - 0.999 ** state["bucket_steps"][b])
        ids, values = next((i, v) for i, v in reversed(data) if row in i)
        g = values[ids == row].sum(axis=0)
        root = np.sqrt(exact.v[row] / (1 - 0.999**c))
        s = np.sqrt(hat.mean() / state["row_energy"][row]) if row >= 3 else 1.0
        s = np.clip(s, 0.1, 10)
        mine = np.sqrt(hat) / s
        expected = np.linalg.norm(mine - root) / np.linalg.norm(root)
        assert by_row["second_moment_error"][i] == pytest.approx(expected, abs=2e-5)
        assert by_row["scalars"][i] == pytest.approx(s, rel=1e-5)
        if row >= 3:  # both take the gradient: it follows no first moment
            u, exactly = g / (mine + 1e-8), g / (root + 1e-8)
            expected = np.linalg.norm(u - exactly) / np.linalg.norm(exactly)
            assert by_row["update_error"][i] == pytest.approx(expected, abs=1e-4)
        else:
            assert by_row["update_error"][i] < 1e-5
    settled = np.array(by_row["steps"]) >= 10
    assert found["settled"] == settled.sum() > 1
    median = np.median(np.array(by_row["update_error"])[settled])
    assert found["update_error"]["median"] == pytest.approx(median)


OWNERS = {
    "adam": ("BasisAdam", {}),
    "shared": ("BasisAdam", {**LEARNED, "scalar_learning_rate": 1e-9}),
    "stale": ("BasisAdam", {"stale_decay": True, "row_clipnorm": 0.5}),
    "adagrad": ("BasisAdagrad", {"initial_accumulator_value": 0.1}),
    "sgd": ("BasisSGD", {"momentum": 0.9, "nesterov": True}),
    "momentum": ("BasisSGD", {"momentum": 0.9, "momentum_mode": "shared"}),
}


@pytest.mark.parametrize("case", OWNERS)
def test_error_is_0_for_owners_and_large_where_many_share(case):
    kind, settings = OWNERS[case]
    settings = {**settings, "data": list(batches(7))}
    optimizer, _, shadows = with_shadows(kind, num_buckets=ROWS, **settings)
    alone = errors_of(optimizer, shadows)
    assert alone["update_error"]["max"] < 1e-5 and alone["rows"] == 16
    if kind == "BasisSGD":
        assert "second_moment_error" not in alone
    else:
        assert alone["second_moment_error"]["max"] < 1e-5
    optimizer, _, shadows = with_shadows(kind, num_buckets=2, **settings)
    crowded = errors_of(optimizer, shadows)["update_error"]
    if case == "sgd":  # where rows do not follow what they share
        assert crowded["max"] < 1e-5
    else:
        assert crowded["median"] > 0.05


def test_rows_with_a_past_start_from_what_they_see():
    optimizer, table = trained("BasisAdagrad", steps=8, num_buckets=ROWS)
    fresh = diagnostics.ShadowRows(optimizer, rows=8)
    with fresh.attached():
        train(optimizer, table, data=batches(1, seed=5))
        fresh.adopt()
        train(optimizer, table, data=batches(8, seed=6))
    assert errors_of(optimizer, fresh)["update_error"]["max"] < 1e-5
    # What a report takes when none are given: those that are attached.
    assert "shadows" not in diagnostics.report(optimizer).tables[0]
    with fresh.attached():
        assert diagnostics.report(optimizer).tables[0]["shadows"]["rows"] == 8
