"""What a report on tables advises."""

from __future__ import annotations

import numpy as np
from diagnostics_helpers import (
    DIM,
    LEARNED,
    ROWS,
    batches,
    built,
    train,
    trained,
    with_shadows,
)

from tf_basis import diagnostics
from tf_basis.diagnostics import advice, tables
from tf_basis.diagnostics.measures import measure


def codes(optimizer, shadows=None) -> set[str]:
    return {each.code for each in diagnostics.report(optimizer, shadows).advice}


def test_a_healthy_table_needs_nothing():
    optimizer, table = built(num_buckets=100)
    rng = np.random.default_rng(1)
    data = [
        (rng.integers(0, ROWS, 200), rng.normal(size=(200, DIM))) for _ in range(40)
    ]
    with diagnostics.ShadowRows(optimizer).attached() as shadows:
        train(optimizer, table, data=data)
    found = diagnostics.report(optimizer, shadows)
    assert found.advice == [] and "nothing to do" in str(found)
    assert found.tables[0]["shadows"]["settled"] > 50


def test_few_buckets_and_large_errors_are_named():
    optimizer, _, shadows = with_shadows(steps=40, num_buckets=2, **LEARNED)
    assert codes(optimizer, shadows) == {"few_buckets", "collision_error"}
    text = str(diagnostics.report(optimizer, shadows))
    assert "200 rows share a bucket" in text and "GrowBuckets" in text
    assert "momentum='exclusive'" in text
    optimizer, _ = trained(
        steps=2, num_buckets=4, hashing="double"
    )  # 100 rows, counted twice
    assert "few_buckets" not in codes(optimizer)


def test_bad_balance_is_named():
    # No hash of the package is so bad: what it would look like.
    optimizer, _ = trained(steps=5)
    (table,) = tables.tables_of(optimizer)
    numbers = measure(table).numbers
    assert advice.advise(table, numbers) == []
    numbers["load"] |= {"min": 1, "max": 101}
    (found,) = advice.advise(table, numbers)
    assert found.code == "bad_balance" and "hashing='balanced'" in found.message


def test_scalars_that_swing_or_stand_still_are_named(monkeypatch):
    monkeypatch.setattr(advice, "STEPS_TO_MOVE", 12)
    high = {**LEARNED, "scalar_learning_rate": 1000.0}
    assert "scalar_rate_high" in codes(trained(**high)[0])
    low = {**LEARNED, "scalar_learning_rate": 1e-6}
    assert codes(trained(steps=15, **low)[0]) == {"scalar_rate_low"}
    good = {**LEARNED, "scalar_learning_rate": 0.3}
    assert codes(trained(steps=15, **good)[0]) == set()
    narrow = trained(scalar_range=(0.95, 1.05))[0]
    assert codes(narrow) == {"scalars_at_limits"}

    def record(scalars, kind="learned"):
        by_row = {"rows": [7, 9], "scalars": scalars}
        return {"path": "t", "invariant_scalar": kind, "shadows": {"by_row": by_row}}

    back = [record([1.0, 2.0]), record([2.0, 1.0]), record([1.2, 1.8])]
    assert [a.code for a in advice.swing(back)] == ["scalar_rate_high"]
    on = [record([1.0, 2.0]), record([2.0, 1.0]), record([2.4, 0.8])]
    assert advice.swing(on) == [] == advice.swing(back[:2])
    assert advice.swing([*back[:2], record([1.2, 1.8], "energy")]) == []


def test_an_epsilon_too_small_for_the_format_is_named():
    data = [(i, v * 1e-4) for i, v in batches(8)]
    half = {"moment_dtype": "float16"}
    optimizer, table = built(**half)
    train(optimizer, table, data=data)
    assert "epsilon_small" in codes(optimizer)
    assert "set epsilon to 0.000244" in str(diagnostics.report(optimizer))
    for settings, factor in (
        ({**half, "epsilon": 1e-3}, 1),
        (half, 1e4),
        ({"moment_dtype": "bfloat16"}, 1),
    ):
        optimizer, table = built(**settings)
        train(optimizer, table, data=[(i, v * factor) for i, v in data])
        assert "epsilon_small" not in codes(optimizer)


def test_moments_that_are_not_finite_are_named():
    optimizer, table = built()
    train(optimizer, table, data=[([3], np.full((1, DIM), np.nan))])
    assert "non_finite" in codes(optimizer)
