"""Reports on tables against plain numpy, their shadow rows, and their advice."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, make_slices
from reference.adam import LazyAdam

import tf_basis
from tf_basis import diagnostics, moments
from tf_basis.diagnostics import advice, tables
from tf_basis.diagnostics.distribution import QUANTILES, Distribution
from tf_basis.diagnostics.measures import measure

ROWS, DIM = 400, 4
LEARNED = {"invariant_scalar": "learned", "momentum": "shared"}
CASES = {
    "adam": ("BasisAdam", {"exclusive_rows": 5, "scalar_range": (0.7, 1.5)}),
    "murmur3": ("BasisAdam", {"hashing": "murmur3", "moment_dtype": "bfloat16"}),
    "double": ("BasisAdam", {"hashing": "double", "energy_dtype": "log8"}),
    "auto": ("BasisAdam", {"exclusive_rows": "auto"}),
    "learned": ("BasisAdam", {**LEARNED, "scalar_learning_rate": 50.0}),
    "original": ("BasisAdam", {**LEARNED, "bias_correction": False}),
    "adagrad": ("BasisAdagrad", {"initial_accumulator_value": 0.1}),
    "sgd": (
        "BasisSGD",
        {"momentum": 0.9, "momentum_mode": "shared", "nesterov": True},
    ),
    "stale": ("BasisAdam", {"stale_decay": True, "row_clipnorm": 1.0}),
}


def batches(steps, rows=ROWS, size=60, seed=0):
    """Batches with duplicates, a few rows in most of them; rows differ in scale."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(rows, 1)))
    for _ in range(steps):
        ids = (rng.zipf(1.2, size) - 1) % rows
        yield ids, rng.normal(size=(size, DIM)) * scale[ids]


def built(kind="BasisAdam", rows=ROWS, **settings):
    table = tf.Variable(tf.zeros([rows, DIM]), name="table")
    settings = {"num_buckets": 20, **settings}
    optimizer = getattr(tf_basis, kind)(0.01, tables=[table], **settings)
    optimizer.build([table])
    return optimizer, table


def train(optimizer, table, steps=30, data=None):
    shape = tuple(table.shape)
    for ids, values in data or batches(steps, shape[0]):
        gradient = make_slices(ids, values, shape)
        optimizer.apply_gradients([(gradient, table)])


def trained(kind="BasisAdam", steps=30, **settings):
    optimizer, table = built(kind, **settings)
    train(optimizer, table, steps)
    return optimizer, table


# ---- numbers --------------------------------------------------------------------


def plain_scalars(optimizer, table, settings):
    """Scalars of the rows that share and were seen, and their buckets, by numpy."""
    state, buckets = optimizer.table_state(table), optimizer.buckets(table)
    buckets = buckets.reshape(ROWS, -1)
    steps = state["bucket_steps"]
    if "row_energy" not in state:
        seen = (steps[buckets] > 0).all(axis=1)
        return state["scalar"][seen], buckets[seen]
    second = state["second_moment"].astype(np.float64)
    if getattr(optimizer, "bias_correction", False):
        second /= np.maximum(1 - 0.999 ** steps[:, None].astype(np.float64), 1e-30)
    mean = second[buckets].min(axis=1).mean(axis=1)
    exclusive = settings.get("exclusive_rows", 0)
    if exclusive != "auto":
        owner = buckets[:, 0] < exclusive
    else:
        leads = state["leader"][buckets[:, 0]] == np.arange(ROWS)
        owner = leads & (state["leader_votes"][buckets[:, 0]] >= 8)
    energy = state["row_energy"].astype(np.float64)
    seen = ~owner & (energy > 0)
    scalars = np.sqrt(mean[seen] / energy[seen])
    limits = settings.get("scalar_range", (0.1, 10.0))
    if isinstance(optimizer, tf_basis.BasisAdagrad):
        limits = (0.0, np.inf)
    return np.clip(scalars, *limits), buckets[seen]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(moments, "_CHUNK_NUMBERS", 64 * 8 * 8)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_numpy(case, small_blocks, monkeypatch):
    kind, settings = CASES[case]
    optimizer, table = trained(kind, steps=8, **settings)
    largest = [0]
    read = tables.Slot.__getitem__

    def watched(self, rows):
        values = read(self, rows)
        largest[0] = max(largest[0], values.size)
        return values

    monkeypatch.setattr(tables.Slot, "__getitem__", watched)
    found = diagnostics.report(optimizer).tables[0]
    assert largest[0] <= 64 * 8  # by blocks, of a table of 1600 numbers
    state, buckets = optimizer.table_state(table), optimizer.buckets(table)
    owners = optimizer._basis.layouts[optimizer._var_key(table)].mapping.owners
    pairs = np.sort(buckets.reshape(ROWS, -1), axis=1)
    load = np.bincount(pairs[:, 0], minlength=20)
    if pairs.shape[1] > 1:
        load += np.bincount(pairs[pairs[:, 0] != pairs[:, 1], 1], minlength=20)
    shared = load[owners:]
    assert found["load"] == {
        "min": shared.min(),
        "mean": pytest.approx(shared.mean()),
        "max": shared.max(),
        "std": pytest.approx(shared.std()),
        "empty": (shared == 0).sum(),
        "shared_buckets": 20 - owners,
    }
    steps = state["bucket_steps"]
    assert found["touched"]["buckets"] == (steps > 0).sum()
    assert found["touched"]["steps_max"] == steps.max()
    assert found["touched"]["steps_mean"] == pytest.approx(steps.mean())
    assert found["compression"] == ROWS / 20 and found["rows"] == ROWS
    assert found["state_bytes"] == optimizer.state_bytes()["total"]
    assert found["state_bytes"] == sum(found["bytes_by_slot"].values())
    for name in ("first_moment", "second_moment"):
        if len(state.get(name, ())):
            values, numbers = state[name], found[name]
            assert numbers["count"] == values.size
            assert numbers["min"] == values.min() and numbers["max"] == values.max()
            assert numbers["mean"] == pytest.approx(values.mean(dtype=np.float64))
            assert numbers["zeros"] == pytest.approx((values == 0).mean())
            used = values[steps[: len(values)] > 0]
            assert numbers["zeros_touched"] == pytest.approx((used == 0).mean())
        else:
            assert name not in found
    if optimizer.invariant_scalar is None:
        assert "scalars" not in found
        return
    scalars, at = plain_scalars(optimizer, table, settings)
    compare(found["scalars"], scalars)
    low, high = found["scalars"]["range"]
    assert found["scalars"]["at_low"] == pytest.approx(
        (scalars <= np.float32(low * (1 + 1e-6))).mean()
    )
    top = np.inf if high is None else high
    assert found["scalars"]["at_high"] == pytest.approx(
        (scalars >= top * 0.9999).mean()
    )
    kept = max(round(0.01 * len(shared)), 1)
    for name, counts in (("scalars_crowded", load), ("scalars_touched", steps)):
        limit = max(np.sort(counts[owners:])[-kept], 1)
        top = (counts >= limit) & (np.arange(20) >= owners)
        compare(found[name], scalars[top[at].any(axis=1)])


def compare(numbers, values):
    assert numbers["count"] == len(values)
    assert numbers["mean"] == pytest.approx(values.mean(), rel=1e-5)
    assert numbers["std"] == pytest.approx(values.std(), rel=1e-4, abs=1e-7)
    assert numbers["min"] == pytest.approx(values.min(), rel=1e-6)
    assert numbers["max"] == pytest.approx(values.max(), rel=1e-6)
    for q in QUANTILES:
        low = np.quantile(values, q, method="lower")
        assert numbers[f"p{round(q * 100):02d}"] == pytest.approx(low, rel=0.01)


def test_a_distribution_counts_signs_zeros_and_what_is_not_finite(rng):
    values = np.concatenate([rng.normal(size=900), np.zeros(50), [np.nan, np.inf]])
    spread = Distribution()
    for part in np.array_split(values.astype(np.float32), 7):
        spread.add(part)
    finite = values[:950]
    numbers = spread.as_dict()
    assert numbers["non_finite"] == 2 and numbers["count"] == 950
    assert numbers["zeros"] == pytest.approx(50 / 950)
    for q in QUANTILES:
        expected = np.quantile(finite, q, method="lower")
        assert numbers[f"p{round(q * 100):02d}"] == pytest.approx(expected, rel=0.01)
    for most in (5, 1000):
        bins = np.array(spread.buckets(most))
        assert bins[:, 2].sum() == 950 and len(bins) <= most
        assert bins[0, 0] == numbers["min"] and bins[-1, 1] == numbers["max"]
        for left, right, count in bins if most == 5 else ():
            inside = (finite >= left) & (finite <= right)
            assert abs(inside.sum() - count) <= 50  # zero is an edge of its own
    assert Distribution().as_dict()["mean"] is None


# ---- shadow rows ----------------------------------------------------------------


def with_shadows(kind="BasisAdam", data=None, steps=30, count=16, **settings):
    optimizer, table = built(kind, **settings)
    with diagnostics.ShadowRows(optimizer, rows=count).attached() as shadows:
        train(optimizer, table, steps, data)
    return optimizer, table, shadows


def errors_of(optimizer, shadows):
    return diagnostics.report(optimizer, shadows).tables[0]["shadows"]


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


# ---- advice ---------------------------------------------------------------------


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
    assert "200 rows share a bucket" in text and "momentum='exclusive'" in text
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


# ---- the report -----------------------------------------------------------------


def test_a_report_is_json_a_page_and_histograms(tmp_path):
    optimizer, _, shadows = with_shadows(steps=8, num_buckets=2, **LEARNED)
    found = diagnostics.report(optimizer, shadows)
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["step"] == 8 and again["state_bytes"] == found.state_bytes
    assert again["tables"][0]["path"] == "table"
    assert again["advice"][0]["code"] == "few_buckets"
    page = tmp_path / "report.html"
    found.to_html(page)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 6
    assert "few_buckets" in text and "load.mean" in text
    # Nothing from elsewhere: the name of a namespace is the only address.
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|src=|nan", text)
    found.to_tensorboard(tmp_path / "logs", 30)
    (file,) = (tmp_path / "logs").glob("*")
    read = {
        value.tag: value
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    bins = tf.make_ndarray(read["tables/table/scalars"].tensor)
    assert bins[:, 2].sum() == found.tables[0]["scalars"]["count"]
    plugin = read["tables/table/scalars"].metadata.plugin_data.plugin_name
    assert plugin == "histograms" and "tables/table/update_error" in read


def test_examples_in_docstrings():
    names = {"tf": tf, **vars(tf_basis), **vars(diagnostics)}
    for module in (diagnostics.report.__module__, diagnostics.ShadowRows.__module__):
        result = doctest.testmod(sys.modules[module], extraglobs=names)
        assert result.attempted >= 4 and result.failed == 0


@pytest.mark.long
def test_the_benchmark_measures(tmp_path):
    path = ROOT / "benchmarks" / "diagnostics.py"
    out = tmp_path / "found.json"
    arguments = ["--rows", "5000", "--batch", "64", "--steps", "4", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(out.read_text())
    assert found["buckets"] == 1250 and found["step_with_shadows_ms"] > 0
    assert "peak" in done.stdout and "with 64 shadow rows" in done.stdout


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda o: diagnostics.report(None), "optimizer must be BasisAdam, .* None"),
        (
            lambda o: diagnostics.report(tf_basis.BasisAdam(0.1)),
            "must have its state: call build",
        ),
        (lambda o: diagnostics.report(o, 3), "shadows must be None, .* received 3"),
        (lambda o: diagnostics.ShadowRows(o, 0), "rows must be .* at least 1"),
        (lambda o: diagnostics.ShadowRows(o, seed=-1), "seed must be"),
        (
            lambda o: diagnostics.ShadowRows(o).rows_of("x"),
            r"path must be one of \['table'\], received 'x'",
        ),
    ],
)
def test_bad_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(built()[0])
