"""The examples' features: order, rows, weights, and that none sees the future."""

from __future__ import annotations

import sys

import numpy as np
from helpers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import movielens_data as data
import movielens_features as features
from movielens_helpers import make_log, random_log, write


def test_split_is_by_time_and_ties_keep_their_order(tmp_path):
    ratings = [(str(i), "1", 3, (i * 7) % 10) for i in range(50)]
    log = data.load(write(tmp_path, "u.data", ratings))
    wanted = sorted(range(50), key=lambda i: (i * 7) % 10)  # sorted is stable
    assert log.user.tolist() == [str(i) for i in wanted]
    assert log.n_train == 40
    assert log.time[:40].max() <= log.time[40:].min()


def test_rows_are_in_frequency_order_of_the_training_part():
    items = ["a"] * 2 + ["b"] * 5 + ["c"] * 3 + ["d"] * 9
    log = make_log([(f"u{i}", item, 4, i) for i, item in enumerate(items)])
    made = features.make_features(log, 10)
    column = made.rows[:, made.fields.index("item")]
    # in training: b 5, c 3, a 2; d is unknown, although it is frequent later
    assert column[2] < column[7] < column[0]
    unknown = made.fields.index("item")
    assert set(column[10:]) == {unknown}


def test_every_row_is_used_and_order_follows_the_counts(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    there = made.weights[: log.n_train] > 0
    used = np.bincount(made.rows[: log.n_train][there], minlength=made.n_rows)
    assert len(used) == made.n_rows == sum(made.counts)
    known = used[len(made.fields) :]
    assert (known > 0).all()
    assert (np.diff(known) <= 0).all()
    assert made.rows.min() >= 0 and made.rows.max() < made.n_rows
    assert made.left_out == []


def test_weights_of_a_field_sum_to_one(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    for f in range(len(made.fields)):
        total = made.weights[:, made.slot_field == f].sum(1)
        np.testing.assert_allclose(total, 1, rtol=1e-6)
    genre = made.slot_field == made.fields.index("genre")
    for row, item in zip(made.weights, log.item, strict=True):
        genres = log.items.get(item, ((), None))[0]
        kept = min(len(genres), features.GENRE_SLOTS)
        assert np.count_nonzero(row[genre]) == max(kept, 1)


def test_same_row_means_same_value(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    field = made.fields.index("item x occupation")
    column = made.rows[:, made.slot_field == field][:, 0]
    jobs = [log.users.get(u, (None,) * 3)[2] for u in log.user]
    pairs = [f"{i}/{j}" if j else None for i, j in zip(log.item, jobs, strict=True)]
    seen = set(pairs[: log.n_train]) - {None}
    assert None in pairs and set(pairs) - seen
    rows = {p: {r for r, q in zip(column, pairs, strict=True) if q == p} for p in seen}
    assert all(len(r) == 1 and r != {field} for r in rows.values())
    assert len(set().union(*rows.values())) == len(seen)
    assert {r for r, p in zip(column, pairs, strict=True) if p not in seen} == {field}


def test_crosses_need_their_parts(rng):
    log = random_log(rng)
    without_users = make_log(
        zip(log.user, log.item, log.rating, log.time, strict=True), {}, log.items
    )
    made = features.make_features(without_users, log.n_train)
    assert "item x occupation" in made.left_out and "user x genre" in made.fields
    without_items = make_log(
        zip(log.user, log.item, log.rating, log.time, strict=True), log.users
    )
    other = features.make_features(without_items, log.n_train)
    assert "user x genre" in other.left_out and "item x occupation" in other.fields
    everything = features.make_features(log, log.n_train)
    for part in (made, other):
        assert set(part.fields) | set(part.left_out) == set(everything.fields)
        assert not set(part.fields) & set(part.left_out)


def test_history_counts_strictly_earlier_ratings(rng):
    size = 300
    group, liked = rng.integers(0, 9, size), rng.integers(0, 2, size).astype(float)
    time = rng.integers(0, 60, size)
    found = features.earlier(group, time, liked)
    for i in range(size):
        before = (group == group[i]) & (time < time[i])
        assert found[i].tolist() == [before.sum(), liked[before].sum()]


def test_features_see_no_future(rng):
    log = random_log(rng)
    n_train = log.n_train
    before = features.make_features(log, n_train)
    log.rating[n_train:] = 6 - log.rating[n_train:]
    log.user[n_train:] = "stranger"
    after = features.make_features(log, n_train)
    np.testing.assert_array_equal(before.rows[:n_train], after.rows[:n_train])
    assert before.counts == after.counts


def test_cross_is_one_code_per_combination(rng):
    columns = [rng.integers(-1, 6, 500) for _ in range(3)]
    found = features.cross(*columns)
    combinations = list(zip(*columns, strict=True))
    codes = {}
    for combination, code in zip(combinations, found, strict=True):
        if -1 in combination:
            assert code == -1
        else:
            assert codes.setdefault(combination, code) == code >= 0
    assert len(set(codes.values())) == len(codes)


def test_forget_users_changes_their_fields_only(rng):
    log = random_log(rng)
    made = features.make_features(log, log.n_train)
    hidden = features.forget_users(made, 0.5, seed=3)
    np.testing.assert_array_equal(hidden, features.forget_users(made, 0.5, seed=3))
    assert (hidden != features.forget_users(made, 0.5, seed=4)).any()
    of_user = np.array(["user" in made.fields[f] for f in made.slot_field])
    np.testing.assert_array_equal(hidden[:, ~of_user], made.rows[:, ~of_user])
    forgotten = (hidden[:, of_user] == made.slot_field[of_user]).all(1)
    assert 0.4 < forgotten.mean() < 0.65
    np.testing.assert_array_equal(hidden[~forgotten], made.rows[~forgotten])
