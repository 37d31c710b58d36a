"""`resize`: split buckets inherit to the bit, others average, nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from growth_helpers import (
    BUCKET_SLOTS,
    CASES,
    DIM,
    N_ROWS,
    Table,
    mixed_by_hand,
)
from helpers import (
    TableRun,
    assert_matches_reference,
    assert_same_bits,
    make_variable,
    optimizer_arrays,
    random_batch,
    to_numpy,
)
from reference.basis_adam import BasisAdamTable, Hyper


@pytest.mark.parametrize(
    "case, factor", [*((c, 2) for c in CASES), ("adam-leading", 3), ("adam-double", 5)]
)
def test_split_buckets_inherit_to_the_bit(flavor, case, factor):
    table = Table(case, 15, flavor).train(12)
    owners = table.optimizer._basis.layouts[
        table.optimizer._var_key(table.variable)
    ].mapping.owners
    before, buckets = table.state(), table.buckets
    shared = 15 - owners
    assert table.optimizer.resize(table.variable, factor=factor) == (
        owners + factor * shared
    )
    after = table.state()
    # Where a row was, its new bucket came from.
    new = table.buckets
    hashed = new >= owners
    np.testing.assert_array_equal(hashed, buckets >= owners)
    np.testing.assert_array_equal(
        ((new - owners) % shared)[hashed], (buckets - owners)[hashed]
    )
    np.testing.assert_array_equal(new[~hashed], buckets[~hashed])
    assert len(np.unique(new)) > 15
    expected = {}
    for name, value in before.items():
        if name in BUCKET_SLOTS and len(value) == 15:
            parts = [value[:owners], *[value[owners:]] * factor]
            value = np.concatenate(parts)
        expected[name] = value
    assert_same_bits(after, expected)
    assert after["bucket_steps"].any()


@pytest.mark.parametrize("case", ["adam-shared", "adam-leading", "adam-double"])
def test_next_step_is_the_same_where_one_row_of_a_bucket_comes(backend, case):
    """Both halves hold what the whole held, so nothing changes but who shares."""
    grown, other = Table(case, 15).train(10), Table(case, 15).train(10)
    grown.optimizer.resize(grown.variable, factor=2)
    rows, seen = [], set()
    for row, buckets in enumerate(other.buckets):
        if not seen & set(buckets):
            rows.append(row)
            seen |= set(buckets)
    gradient = np.random.default_rng(5).normal(size=(len(rows), DIM))
    for table in (grown, other):
        table.step(rows, gradient)
    np.testing.assert_array_equal(to_numpy(grown.variable), to_numpy(other.variable))


@pytest.mark.parametrize("momentum", ["shared", "exclusive"])
@pytest.mark.parametrize("hashing", ["balanced", "murmur3"])
def test_training_goes_on_as_the_reference(backend, flavor, hashing, momentum, rng):
    """The reference gets the halves by hand; all values agree ten steps later."""
    arguments = {
        "hashing": hashing,
        "momentum": momentum,
        "exclusive_rows": 4,
        "learning_rate": 0.02,
        "beta_2": 0.9,
    }
    theta = rng.normal(size=(90, 3))
    run = TableRun(theta, flavor, num_buckets=10, **arguments)
    small = BasisAdamTable(theta, Hyper(num_buckets=10, **arguments))
    for _ in range(6):
        batch = random_batch(rng, 90, 3, 20)
        run.step(*batch)
        small.step(*batch)
    run.optimizer.resize(run.variable, num_buckets=16)
    large = BasisAdamTable(small.theta, Hyper(num_buckets=16, **arguments))
    for name in ("first_moment", "second_moment", "bucket_steps"):
        whole = getattr(small, name)
        setattr(large, name, np.concatenate([whole[:4], whole[4:], whole[4:]]))
    large.row_energy, large.scalar = small.row_energy, small.scalar
    np.testing.assert_array_equal(run.optimizer.buckets(run.variable), large.bucket)
    assert_matches_reference(run, large)
    for _ in range(10):
        batch = random_batch(rng, 90, 3, 20)
        run.step(*batch)
        large.step(*batch)
    assert_matches_reference(run, large)


@pytest.mark.parametrize("case", [c for c in CASES if "16" not in c])
def test_rehashed_buckets_hold_the_mean_over_their_rows(case):
    table = Table(case, 15).train(12)
    for size in (22, 9):
        before, old = table.state(), table.buckets
        table.optimizer.resize(table.variable, num_buckets=size)
        after, new = table.state(), table.buckets
        wanted = mixed_by_hand(table, before, old, new)
        assert wanted["bucket_steps"], "the sizes must mix buckets"
        for name, by_bucket in wanted.items():
            for bucket, value in by_bucket.items():
                if name == "first_moment" and bucket >= len(after[name]):
                    continue
                np.testing.assert_allclose(after[name][bucket], value, 1e-5, 1e-30)
        if "last_step" in after:
            mixed = list(wanted["bucket_steps"])
            assert set(after["last_step"][mixed]) == {table.iterations()}
        # Whose rows come from one old bucket: its state as it was.
        for bucket in set(new.ravel()) - set(wanted["bucket_steps"]):
            source = old[new == bucket][0]
            for name in BUCKET_SLOTS & set(after):
                if bucket < len(after[name]):
                    np.testing.assert_array_equal(
                        after[name][bucket], before[name][source]
                    )
        for name in set(after) - BUCKET_SLOTS:
            np.testing.assert_array_equal(after[name], before[name])
        table.train(3)


@pytest.mark.parametrize("case", ["adam-bfloat16", "adam-float16"])
def test_rehashed_moments_are_rounded_to_nearest(case):
    table = Table(case, 15, exclusive_rows=0, momentum="shared").train(12)
    before, old = table.state(), table.buckets
    table.optimizer.resize(table.variable, num_buckets=22)
    after = table.state()
    wanted = mixed_by_hand(table, before, old, table.buckets)
    ulp = {"adam-bfloat16": 2.0**-8, "adam-float16": 2.0**-11}[case]
    for name in ("first_moment", "second_moment"):
        for bucket, value in wanted[name].items():
            np.testing.assert_allclose(
                after[name][bucket], value, rtol=ulp, atol=2.0**-25
            )
    np.testing.assert_array_equal(after["row_energy"], before["row_energy"])
    table.train(3)


@pytest.mark.parametrize("case", [c for c in CASES if c != "adam-learned"])
def test_halving_takes_doubling_back(flavor, case):
    table = Table(case, 15, flavor).train(8)
    table.optimizer.resize(table.variable, factor=2)
    table.optimizer.resize(table.variable, num_buckets=15)
    untouched = Table(case, 15, flavor).train(8)
    wanted = untouched.state()
    # Buckets without a row (a hash may leave some) have nothing to give back.
    empty = np.setdiff1d(np.arange(15), untouched.buckets)
    for name in BUCKET_SLOTS & set(wanted):
        wanted[name][empty[empty < len(wanted[name])]] = 0
    if case != "adam-stale":  # where idle buckets are brought up to date
        assert_same_bits(table.state(), wanted)
    left, right = table.train(4).state(), untouched.train(4).state()
    np.testing.assert_allclose(left["theta"], right["theta"], 1e-6, 1e-7)


def test_consistent_hash_moves_few_rows_and_keeps_the_rest():
    table = Table("adam-shared", 20, hashing="consistent").train(12)
    before, old = table.state(), table.buckets[:, 0]
    table.optimizer.resize(table.variable, num_buckets=24)
    after, new = table.state(), table.buckets[:, 0]
    moved = old != new
    assert set(new[moved]) <= set(range(20, 24)) and 0 < moved.sum() < N_ROWS / 3
    for name in ("first_moment", "second_moment", "bucket_steps"):
        used = np.unique(new[~moved])
        np.testing.assert_array_equal(after[name][used], before[name][used])


def test_a_function_traced_before_fails(backend, flavor):
    """Else it would go on with state that nobody sees."""
    table = Table("adam-shared", 15, flavor)

    @tf.function
    def step():
        table.step([3, 8], np.ones((2, DIM)))

    step()
    table.optimizer.resize(table.variable, factor=2)
    state = table.state()
    with pytest.raises(tf.errors.InvalidArgumentError):
        step()
    assert_same_bits(table.state(), state)
    tf.function(lambda: table.step([3, 8], np.ones((2, DIM))))()
    assert table.state()["bucket_steps"].sum() == state["bucket_steps"].sum() + 2


def test_errors(flavor):
    from helpers import make_optimizer, make_variable

    variable = make_variable(np.zeros((40, 2)), flavor)
    optimizer = make_optimizer(
        flavor, tables=[variable], num_buckets=9, exclusive_rows=4
    )
    with pytest.raises(ValueError, match="no state yet"):
        optimizer.resize(variable, factor=2)
    small = make_variable(np.zeros((3, 2)), flavor, "small")
    optimizer.build([variable, small])
    before = optimizer_arrays(optimizer)
    for arguments, words in [
        ({}, "one of num_buckets and factor must be given"),
        ({"num_buckets": 9, "factor": 2}, "one of num_buckets and factor"),
        ({"factor": 0}, "factor must be a number above 0, received 0"),
        ({"num_buckets": 0}, "num_buckets must be .* received 0"),
        ({"num_buckets": 4}, "exclusive_rows=4, num_buckets=4 for 40 rows"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.resize(variable, **arguments)
    with pytest.raises(ValueError, match="must be a compressed table"):
        optimizer.resize(small, factor=2)

    @tf.function
    def inside():
        optimizer.resize(variable, factor=2)

    with pytest.raises(RuntimeError, match="eagerly"):
        inside()
    assert_same_bits(optimizer_arrays(optimizer), before)
    assert optimizer.resize(variable, factor=0.01) == 5
    with pytest.warns(UserWarning, match="limited to the 40 rows of .* received 41"):
        assert optimizer.resize(variable, num_buckets=41) == 40
    with pytest.raises(ValueError, match="give num_buckets"):
        optimizer.resize(variable, factor=0.5)


@pytest.mark.parametrize("change", ["resize", "grow_rows"])
def test_a_stale_function_says_what_to_do(backend, flavor, change):
    """It names the table and `retrace`, and changes nothing."""
    table = Table("adam", 15, flavor)

    def one_step(values):
        shape = tuple(table.variable.shape)
        slices = tf.IndexedSlices(values, tf.constant([3, 4]), shape)
        table.optimizer.apply_gradients([(slices, table.variable)])

    step, values = tf.function(one_step), tf.ones([2, DIM])
    step(values)
    variable = table.variable
    if change == "resize":
        table.optimizer.resize(variable, factor=2)
    else:
        table.variable = make_variable(np.zeros((N_ROWS + 5, DIM)), flavor)
        table.optimizer.grow_rows(variable, table.variable)
    before = {**table.state(), "old": to_numpy(variable)}
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        step(values)
    for part in ("table 'table'", "retrace", "resized or got rows"):
        assert part in str(error.value).replace("\\'", "'")  # as TensorFlow prints it
    assert_same_bits({**table.state(), "old": to_numpy(variable)}, before)
    tf.function(one_step)(values)
    assert table.state()["bucket_steps"].any()
