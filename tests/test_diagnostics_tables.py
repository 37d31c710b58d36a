"""Reports on tables against plain numpy, and their forms."""

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
from diagnostics_helpers import LEARNED, ROWS, built, trained, with_shadows
from helpers import ROOT

import tf_basis
from tf_basis import diagnostics, moments
from tf_basis.diagnostics import tables
from tf_basis.diagnostics.distribution import QUANTILES, Distribution

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


# ---- the report -----------------------------------------------------------------


def test_a_report_is_json_a_page_and_histograms(tmp_path):
    optimizer, _, shadows = with_shadows(steps=8, num_buckets=2, **LEARNED)
    found = diagnostics.report(optimizer, shadows)
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["step"] == 8 and again["state_bytes"] == found.state_bytes
    assert again["tables"][0]["path"] == "table"
    assert again["advice"][0]["code"] == "few_buckets"
    shown = str(found)
    for name in ("scalars", "scalars_crowded"):
        spread = again["tables"][0][name]
        assert "/".join(f"{spread[p]:.3g}" for p in ("p10", "p50", "p90")) in shown
    for name in ("first_moment", "second_moment"):
        spread = again["tables"][0][name]
        assert f"{spread['min']:.3g}/{spread['max']:.3g}" in shown
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
