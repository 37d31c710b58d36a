"""Plans and byte budgets: what is planned is what the variables then take."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import make_variable, to_numpy, variables_of
from hypothesis import given
from hypothesis import strategies as st

import tf_basis
from tf_basis import optimizers

SHAPES = {"a/embeddings": (3000, 16), "b/embeddings": (900, 8), "c/embeddings": (40, 4)}
LEARNED = {"momentum": "shared", "invariant_scalar": "learned"}
# Arguments that BasisAdam and `plan` have in common.
MODES = {
    "default": {},
    "shared": {"momentum": "shared"},
    "learned": LEARNED,
    "no scalar": {"momentum": "none", "invariant_scalar": None},
    "exclusive": {"exclusive_rows": 7},
    "listed": {"exclusive_rows": [5, 2, 30]},
    "found": {"exclusive_rows": "auto"},
    "stale": {"stale_decay": True},
    "low": {"moment_dtype": "bfloat16", "energy_dtype": "log8"},
    "half": {"moment_dtype": "float16", "energy_dtype": "bfloat16"},
    "frequency": {**LEARNED, "scalar_frequency_power": 0.5},
}


def variables_like(shapes, flavor) -> list:
    return [
        make_variable(np.zeros(shape), flavor, name=name.replace("/", "_"))
        for name, shape in shapes.items()
    ]


def built(kind="BasisAdam", flavor="keras3", shapes=SHAPES, **arguments):
    """A built optimizer, and the bytes of its variables by table."""
    variables = variables_like(shapes, flavor)
    make = getattr(optimizers.for_flavor(flavor), kind)
    optimizer = make(tables=variables, **arguments)
    optimizer.build(variables)
    sizes = optimizer.state_bytes()
    sizes.pop("total")
    return optimizer, list(sizes.values())


def buckets_of(optimizer) -> list[int]:
    return [layout.mapping.num_buckets for layout in optimizer._basis.layouts.values()]


def planned(shapes=SHAPES, **arguments):
    return tf_basis.plan(shapes, min_rows=1, **arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [{}, {"num_buckets": 50}, {"state_budget": "60kB"}])
def test_plan_is_what_the_variables_take(mode, size, flavor):
    plan = planned(**MODES[mode], **size)
    optimizer, sizes = built(flavor=flavor, **MODES[mode], **size)
    assert [t.bytes for t in plan.tables] == sizes
    assert [t.buckets for t in plan.tables] == buckets_of(optimizer)
    # Nothing but the tables' state, their layouts, the step and the rate is held.
    held = sum(to_numpy(v).nbytes for v in variables_of(optimizer))
    held -= optimizer._basis.fingerprint.numpy().nbytes
    assert 0 <= held - plan.total <= 16


@pytest.mark.parametrize("kind", ["BasisAdam", "BasisSGD", "BasisAdagrad"])
@pytest.mark.parametrize("mode", ["exclusive", "shared", "none"])
def test_plans_of_the_other_optimizers(kind, mode, flavor):
    common = {"num_buckets": 50, "exclusive_rows": 7, "moment_dtype": "bfloat16"}
    modes = {
        "BasisAdam": {"momentum": mode},
        "BasisSGD": {"momentum": 0.9, "momentum_mode": mode},
        "BasisAdagrad": {},
    }
    plan = planned(optimizer=kind, momentum=mode, **common)
    optimizer, sizes = built(kind, flavor, **common, **modes[kind])
    assert [t.bytes for t in plan.tables] == sizes
    assert [t.buckets for t in plan.tables] == buckets_of(optimizer)
    plain = planned(optimizer="BasisSGD", momentum="none", **common)
    assert [t.bytes for t in plain.tables] == built("BasisSGD", flavor, **common)[1]


def test_plan_names_what_it_cannot_plan():
    with pytest.raises(ValueError, match=r"optimizer must be one of .*'Adam'"):
        planned(optimizer="Adam")
    with pytest.raises(ValueError, match="received the optimizer"):
        tf_basis.plan(tf_basis.BasisAdam())
    with pytest.raises(ValueError, match="no_such_table"):
        planned(table_settings={"no_such_table": {"num_buckets": 3}})
    with pytest.raises(ValueError, match="bucket in the table, received"):
        planned({"a": (3000, 16)}, state_budget=9)


@pytest.mark.parametrize("kind", ["BasisAdam", "BasisSGD", "BasisAdagrad"])
def test_budget_is_kept_and_used(kind, flavor):
    shared = {"momentum": 0.9, "momentum_mode": "shared"}
    momentum = shared if kind == "BasisSGD" else {}
    budget = 40_000
    optimizer, sizes = built(kind, flavor, state_budget=budget, **momentum)
    assert 0.95 * budget <= sum(sizes) <= budget
    again, _ = built(kind, flavor, state_budget="40 kB", **momentum)
    assert buckets_of(again) == buckets_of(optimizer)


def test_plan_of_a_model():
    keras = tf.keras
    inputs = keras.Input((1,), dtype="int32")
    large = keras.layers.Embedding(12_000, 8)(inputs)
    small = keras.layers.Embedding(500, 4)(inputs)
    joined = keras.layers.Concatenate()([large, small])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    optimizer = tf_basis.BasisAdam(state_budget="64KiB")
    optimizer.build(model.trainable_variables)
    plan = tf_basis.plan(model, state_budget="64KiB")
    (table,) = plan.tables
    assert (table.n_rows, table.dim) == (12_000, 8)
    assert optimizer.state_bytes()[table.path] == table.bytes == plan.total
    assert tf_basis.plan(model.trainable_variables, state_budget=2**16) == plan
    both = tf_basis.plan(model, tables="embedding")
    assert [t.n_rows for t in both.tables] == [12_000, 500]
    with pytest.raises(ValueError, match="match the path of at least one"):
        tf_basis.plan(model, tables="user")
    with pytest.raises(ValueError, match="model_or_shapes must be a built model"):
        tf_basis.plan(keras.Sequential([keras.layers.Dense(3)]))


SIZES = st.tuples(st.integers(2, 5000), st.integers(1, 64))


@given(
    shapes=st.lists(SIZES, min_size=1, max_size=6),
    share=st.floats(0, 1.1),
    exclusive=st.integers(0, 30),
    momentum=st.sampled_from(["exclusive", "shared", "none"]),
)
def test_budget_rules(shapes, share, exclusive, momentum):
    modes = {"exclusive_rows": exclusive, "momentum": momentum}
    least = planned(shapes, num_buckets=None, compression_ratio=1e9, **modes)
    most = planned(shapes, compression_ratio=1, **modes)
    budget = int(least.total + share * (most.total - least.total))
    plan = planned(shapes, state_budget=budget, **modes)
    assert plan.total <= budget
    tables = 2 if momentum == "shared" else 1
    levels = []
    for t, low, high in zip(plan.tables, least.tables, most.tables):
        assert low.buckets <= t.buckets <= high.buckets == t.n_rows
        bucket = 4 * t.dim * tables + 4
        if low.buckets < t.buckets < t.n_rows - 1:
            shared = t.bytes - low.bytes + bucket
            levels.append((shared / t.n_rows / t.dim, bucket / t.n_rows / t.dim))
    # The tables that no limit holds get the same bytes for each number, rounded down.
    for level, _ in levels:
        assert all(level < other + bucket * (1 + 1e-6) for other, bucket in levels)
    # What is left over is less than a bucket for each table, if one could use it.
    if any(t.buckets < t.n_rows - 1 for t in plan.tables) and share > 0:
        assert budget - plan.total < sum(4 * t.dim * tables + 4 for t in plan.tables)


def test_what_a_small_table_cannot_use_goes_to_the_others():
    shapes = {"tiny": (10, 4), "large": (10_000, 4)}
    modes = {"momentum": "none", "exclusive_rows": 9}  # tiny: ten owners, all fixed
    tiny, large = planned(shapes, state_budget=100_000, **modes).tables
    assert tiny.buckets == 10
    assert 100_000 - 20 < tiny.bytes + large.bytes <= 100_000


def test_a_table_that_cannot_afford_owners_leaves_the_rest_to_others():
    # Where all rows own their bucket first moments appear at once: a leap for the wide
    # table, at a level at which the narrow one still grows.
    shapes = {"wide": (4000, 64), "narrow": (600_000, 1)}
    leap = 4000 * 64 * 4
    before = planned(shapes, num_buckets=3999, stale_decay=True).tables[0].bytes
    wide_buckets = set()
    least = before + 7_200_000
    for budget in range(least, least + leap + 200_000, leap // 20):
        plan = planned(shapes, state_budget=budget, stale_decay=True)
        wide_buckets.add(plan.tables[0].buckets)
        assert budget - 2000 < plan.total <= budget
    assert wide_buckets == {3999, 4000}


def test_impossible_budget_names_the_smallest(flavor):
    least = 4 * (3000 + 900 + 40) + 3 * 4 + 4 * (16 + 8 + 4)
    for budget in (1, least - 1, "1KB"):
        words = f"state_budget must be at least {least} bytes.*received {budget!r}"
        with pytest.raises(ValueError, match=words):
            planned(state_budget=budget)
        with pytest.raises(ValueError, match=words):
            built(flavor=flavor, state_budget=budget)
    assert planned(state_budget=least).total == least
    assert buckets_of(built(flavor=flavor, state_budget=least)[0]) == [1, 1, 1]


def test_tables_with_sizes_of_their_own_keep_them(flavor):
    settings = {"^a": {"num_buckets": 200}, "^b": {"moment_dtype": "bfloat16"}}
    plan = planned(state_budget=35_000, table_settings=settings)
    a, b, c = plan.tables
    assert a.buckets == 200
    assert 0.95 * 35_000 < plan.total <= 35_000
    assert c.buckets == 40 or b.buckets > 3 * c.buckets
    _, sizes = built(flavor=flavor, state_budget=35_000, table_settings=settings)
    assert sizes == [t.bytes for t in plan.tables]
    all_own = {"^": {"compression_ratio": 10}}
    own = planned(state_budget=100_000, table_settings=all_own)
    assert [t.buckets for t in own.tables] == [300, 90, 4]
    with pytest.raises(ValueError, match=f"at least {own.total} bytes"):
        planned(state_budget=own.total - 1, table_settings=all_own)


@pytest.mark.parametrize("kind", ["BasisAdam", "BasisSGD", "BasisAdagrad"])
@pytest.mark.parametrize("size", [{"compression_ratio": 50}, {"num_buckets": 9}])
def test_budget_and_another_size_exclude_each_other(kind, size, flavor):
    ((name, value),) = size.items()
    words = f"state_budget decides.*{name} must keep.*received {name}={value}"
    make = getattr(optimizers.for_flavor(flavor), kind)
    with pytest.raises(ValueError, match=words):
        make(state_budget="1MB", **size)
    with pytest.raises(ValueError, match=words):
        planned(state_budget="1MB", **size)
    make(state_budget=None, **size)


@pytest.mark.parametrize("kind", ["BasisAdam", "BasisSGD", "BasisAdagrad"])
def test_config_round_trip(kind, flavor):
    variables = variables_like(SHAPES, flavor)
    make = getattr(optimizers.for_flavor(flavor), kind)
    optimizer = make(tables="embeddings", state_budget="50kB")
    optimizer.build(variables)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert config["state_budget"] == "50kB"
    again = type(optimizer).from_config(config)
    again.build(variables)
    assert buckets_of(again) == buckets_of(optimizer)


def test_shapes_stand_for_tables():
    shapes = {"user": (20_000, 8), "kernel": (512, 64), "bias": (64,)}
    assert [t.path for t in tf_basis.plan(shapes).tables] == ["user"]
    chosen = tf_basis.plan(shapes, tables="user|kernel", compression_ratio=50)
    assert [t.buckets for t in chosen.tables] == [400, 11]
    listed = tf_basis.plan([(20_000, 8), tf.TensorShape([30_000, 4])])
    assert [t.path for t in listed.tables] == ["table_0", "table_1"]
    for bad in ({"user": 5}, {"user": (2.5, 3)}, {3: (9, 3)}, {"user": (-5, 3)}, 7):
        with pytest.raises(ValueError, match="model_or_shapes must"):
            tf_basis.plan(bad)


def test_nothing_is_built():
    plan = tf_basis.plan({"huge": (10**12, 128)}, state_budget="8TB")
    assert plan.total <= 8 * 10**12 and plan.tables[0].buckets > 10**9


def test_table_and_dict():
    plan = planned(state_budget=40_000)
    lines = str(plan).splitlines()
    assert lines[0].split()[:4] == ["table", "rows", "dim", "buckets"]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[1].split()[:3] == ["a/embeddings", "3,000", "16"]
    assert lines[-1] == "budget: 40,000 bytes"
    numbers = json.loads(json.dumps(plan.as_dict()))
    assert numbers["total"] == plan.total == sum(t["bytes"] for t in numbers["tables"])
    first = numbers["tables"][0]
    assert first["ratio"] == first["bytes"] / (8 * 3000 * 16)
    assert str(tf_basis.plan({"small": (5, 2)})) == "no table would be compressed"
