"""`grow_rows`: old rows keep buckets and state, new rows start afresh."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from growth_helpers import BUCKET_SLOTS, CASES, DIM, N_ROWS, Table
from helpers import (
    assert_matches_reference,
    assert_same_bits,
    keras_of,
    make_optimizer,
    make_variable,
    optimizer_arrays,
    random_batch,
    state_of,
    to_numpy,
    variables_of,
)
from reference.basis_adam import BasisAdamTable, Hyper

MORE = 50


def replace_table(table: Table, more: int = MORE, **arguments) -> None:
    """A new variable with more rows takes the table's place."""
    old = table.variable
    rows = table.rng.normal(size=(more, DIM))
    value = np.concatenate([to_numpy(old), rows.astype(np.float32)])
    table.variable = make_variable(value, table.flavor)
    table.optimizer.grow_rows(old, table.variable, **arguments)


@pytest.mark.parametrize("case", [*CASES, "adam-consistent"])
def test_old_rows_keep_buckets_and_state(flavor, case):
    more = {"hashing": "consistent"} if case == "adam-consistent" else {}
    table = Table("adam" if more else case, 15, flavor, **more).train(10)
    before, old = table.state(), table.buckets
    replace_table(table)
    after, new = table.state(), table.buckets
    np.testing.assert_array_equal(new[:N_ROWS], old)
    owners = {"adam-leading": 5, "adam-listed": 3, "adam-bfloat16": 5}.get(case, 0)
    assert new[N_ROWS:].min() >= owners and new.max() == 14
    starts = {"scalar": 1.0, "row_energy": 0.25 if case == "adagrad" else 0.0}
    for name, value in after.items():
        kept = value[: len(before[name])]
        assert kept.tobytes() == before[name].tobytes(), name
        if name in BUCKET_SLOTS:
            assert len(value) == len(before[name])
        elif name != "theta":
            assert len(value) == N_ROWS + MORE
            assert set(value[N_ROWS:]) == {np.float32(starts.get(name, 0))}
    if case == "adam":  # balanced: the new rows among themselves
        load = np.bincount(new[N_ROWS:, 0])
        assert load.max() - load.min() <= 1
    table.train(3, N_ROWS + MORE)


@pytest.mark.parametrize("hashing", ["balanced", "murmur3"])
def test_training_goes_on_as_the_reference(backend, flavor, hashing):
    arguments = {"learning_rate": 0.05, "hashing": hashing, "exclusive_rows": 5}
    table = Table("adam-leading", 15, flavor, hashing=hashing)
    reference = BasisAdamTable(
        to_numpy(table.variable), Hyper(num_buckets=15, **arguments)
    )
    for n_rows in (N_ROWS, N_ROWS + MORE):
        if n_rows > N_ROWS:
            replace_table(table)
            theta = to_numpy(table.variable).astype(np.float64)
            theta[:N_ROWS] = reference.theta
            larger = BasisAdamTable(
                theta, Hyper(num_buckets=15, **arguments), table.buckets[:, 0]
            )
            for name in ("first_moment", "second_moment", "bucket_steps"):
                setattr(larger, name, getattr(reference, name))
            larger.row_energy[:N_ROWS] = reference.row_energy
            larger.scalar[:N_ROWS] = reference.scalar
            reference = larger
        for _ in range(8):
            batch = random_batch(table.rng, n_rows, DIM, 20)
            table.step(*batch)
            reference.step(*batch)
        assert_matches_reference(table, reference)


def test_growing_again_and_splitting_then():
    table = Table("adam-leading", 15).train(8)
    replace_table(table)
    replace_table(table, 30)
    assert (len(table.buckets), table.buckets.max()) == (N_ROWS + MORE + 30, 14)
    table.train(8, len(table.buckets))
    before, old = table.state(), table.buckets[:, 0]
    table.optimizer.resize(table.variable, factor=2)
    after, new = table.state(), table.buckets[:, 0]
    np.testing.assert_array_equal(np.where(new > 14, new - 10, new), old)
    np.testing.assert_array_equal(
        after["second_moment"], before["second_moment"][[*range(15), *range(5, 15)]]
    )
    twin = make_optimizer(table.flavor).from_config(table.optimizer.get_config())
    twin.build([table.variable])
    np.testing.assert_array_equal(twin.buckets(table.variable), new)
    assert [tuple(v.shape) for v in variables_of(twin)] == [
        tuple(v.shape) for v in variables_of(table.optimizer)
    ]


def test_size_may_change_with_the_rows():
    table, other = Table("adam", 15).train(8), Table("adam", 15).train(8)
    replace_table(table, num_buckets=24)
    replace_table(other)
    other.optimizer.resize(other.variable, num_buckets=24)
    assert_same_bits(table.state(), other.state())
    assert table.optimizer.get_config() == other.optimizer.get_config()


@pytest.mark.parametrize(
    "settings, given, owners, buckets",
    [
        ({"num_buckets": None, "compression_ratio": 1}, None, 170, 170),
        ({"num_buckets": 10**6}, None, 170, 170),
        ({"num_buckets": 140}, None, 120, 140),
        ({"num_buckets": 120}, 130, 120, 130),
        ({"num_buckets": 140, "exclusive_rows": 128}, None, 128, 140),
        ({"num_buckets": None, "exclusive_rows": 119}, None, 120, 121),
    ],
    ids=str,
)
def test_tables_whose_rows_all_owned_a_bucket(settings, given, owners, buckets):
    """Former owners stay owners; new rows own a bucket if the settings say so."""
    table = Table("adam", **{"num_buckets": None, **settings}).train(10)
    before = table.state()
    assert len(before["bucket_steps"]) == N_ROWS
    replace_table(table, num_buckets=given)
    after, new = table.state(), table.buckets[:, 0]
    assert len(after["bucket_steps"]) == buckets
    np.testing.assert_array_equal(new[:owners], np.arange(owners))
    if owners < 170:
        assert set(new[owners:]) == set(range(owners, buckets))
    for name in ("first_moment", "second_moment", "bucket_steps", "theta"):
        np.testing.assert_array_equal(after[name][:N_ROWS], before[name])
        assert name == "theta" or not after[name][N_ROWS:].any()
    assert len(after["first_moment"]) == owners
    table.train(3, 170)
    twin = make_optimizer(table.flavor).from_config(table.optimizer.get_config())
    twin.build([table.variable])
    np.testing.assert_array_equal(twin.buckets(table.variable), new)
    replace_table(table, 10)
    np.testing.assert_array_equal(table.buckets[:170, 0], new)


def test_all_owners_without_room_is_an_error():
    table = Table("adam", N_ROWS).train(2)
    before = table.state()
    with pytest.raises(ValueError, match=r"num_buckets must be given and above 120"):
        replace_table(table)
    assert set(before) == {"theta", *table.optimizer.table_state("table")}


def test_a_budget_stays_divided_as_it_was(flavor):
    tables = [make_variable(np.zeros((n, 4)), flavor, f"t{n}") for n in (400, 900)]
    optimizer = make_optimizer(flavor, tables=tables, state_budget="12KB")
    optimizer.build(tables)
    sizes = [len(optimizer.table_state(t)["bucket_steps"]) for t in tables]
    new = make_variable(np.zeros((500, 4)), flavor, "t400")
    optimizer.grow_rows(tables[0], new)
    twin = type(optimizer).from_config(optimizer.get_config())
    twin.build([new, tables[1]])
    for each in (optimizer, twin):
        state = [each.table_state(t) for t in (new, tables[1])]
        assert [len(s["bucket_steps"]) for s in state] == sizes


def test_errors(flavor):
    keras = keras_of(flavor)
    table = make_variable(np.zeros((40, 2)), flavor, "user_table")
    small = make_variable(np.zeros((4, 2)), flavor, "small")
    other = make_variable(np.zeros((40, 2)), flavor, "user_aux")
    optimizer = make_optimizer(
        flavor,
        tables="user",
        num_buckets=9,
        table_settings={"user_a": {"seed": 3}},
        dense_optimizer=keras.optimizers.SGD(0.1),
    )
    with pytest.raises(ValueError, match="no state yet"):
        optimizer.grow_rows(table, table)
    optimizer.build([table, small, other])
    before = {**optimizer_arrays(optimizer), **state_of(optimizer, table)}

    def new(*shape, name="user_table"):
        return make_variable(np.zeros(shape), flavor, name)

    for pair, words in [
        ((table, new(39, 2)), "or more rows, received 'user_table': float32"),
        ((table, new(50, 3)), "type and shape"),
        ((table, new(50, 2, 1)), "type and shape"),
        ((new(40, 2, name="other"), table), "built with, received 'other'"),
        ((table, new(50, 2, name="item_table")), "treat as they do 'user_table'"),
        ((table, new(50, 2, name="user_a")), "treat as they do 'user_table'"),
        ((small, new(5, 2, name="small")), "a dense_optimizer has its state"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.grow_rows(*pair)
    half = tf.Variable(np.zeros((50, 2), np.float16), name="user_table")
    with pytest.raises(ValueError, match="float16"):
        optimizer.grow_rows(table, half)
    after = {**optimizer_arrays(optimizer), **state_of(optimizer, table)}
    assert_same_bits(after, before)
    optimizer.grow_rows(table, new(50, 2))
