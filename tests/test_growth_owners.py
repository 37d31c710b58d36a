"""`resize` where rows gain or lose a bucket of their own, or lead one."""

from __future__ import annotations

import numpy as np
import pytest
from growth_helpers import DIM, N_ROWS, Table, bias


@pytest.mark.parametrize("case", ["adam", "adam-double", "adam-bfloat16"])
def test_new_owners_keep_the_length_of_their_steps(case):
    """V^ of an owner is that of its bucket over the square of its energy scalar."""
    table = Table(case, 15, moment_dtype="float32", energy_dtype="float32").train(25)
    before, old = table.state(), table.buckets
    owned = old[:, 0] < {"adam-bfloat16": 5}.get(case, 0)
    assert table.optimizer.resize(table.variable, num_buckets=10**6) == N_ROWS
    after = table.state()
    np.testing.assert_array_equal(table.buckets[:, 0], np.arange(N_ROWS))
    steps = before["bucket_steps"][old]
    hats = (
        before["second_moment"][old]
        / bias(table.optimizer, "second_moment", np.maximum(steps, 1))[:, :, None]
    )
    hat = hats.min(axis=1)
    energy = before["row_energy"]
    ratio = np.mean(hat, axis=1) / np.where(energy > 0, energy, 1)
    scalar = np.where((energy > 0) & ~owned, np.clip(np.sqrt(ratio), 0.1, 10), 1)
    assert np.std(scalar) > 0.1
    mean_steps = np.rint(steps.mean(axis=1))
    np.testing.assert_array_equal(after["bucket_steps"], mean_steps)
    wanted = hat / scalar[:, None] ** 2
    wanted *= bias(table.optimizer, "second_moment", mean_steps)[:, None]
    np.testing.assert_allclose(after["second_moment"], wanted, 1e-5, 1e-30)
    np.testing.assert_array_equal(after["row_energy"], energy)
    table.train(3)


def test_owners_that_come_to_share_leave_their_energy():
    """Adagrad: the energies are what they were had the rows always shared."""
    alone, shared = Table("adagrad", N_ROWS).train(10), Table("adagrad", 15).train(10)
    assert not np.allclose(alone.state()["row_energy"], shared.state()["row_energy"])
    alone.optimizer.resize(alone.variable, num_buckets=15)
    np.testing.assert_allclose(
        alone.state()["row_energy"], shared.state()["row_energy"], 1e-5
    )


@pytest.mark.parametrize("case", ["adam", "adam-listed", "adam-bfloat16"])
def test_scale_of_every_row_survives_sharing_and_back(case):
    """From owners to 12 buckets and back: mean V^ of each row as it was."""
    table = Table(case, N_ROWS)
    size = np.exp(table.rng.uniform(-1, 1, (N_ROWS, 1)))  # within the scalar's range
    for _ in range(30):
        rows = table.rng.integers(0, N_ROWS - 9, 20)
        table.step(rows, size[rows] * table.rng.normal(size=(20, DIM)))

    def scales():
        state = table.state()
        seen = bias(table.optimizer, "second_moment", state["bucket_steps"])
        return state["second_moment"].mean(axis=1) / np.where(seen, seen, 1)

    before = scales()
    table.optimizer.resize(table.variable, num_buckets=12)
    table.optimizer.resize(table.variable, num_buckets=N_ROWS)
    after = scales()
    assert np.sum(before > 0) > 90 and np.sum(before == 0) >= 9
    seen = before > 0
    # A step of the 8-bit logarithm is 19 % wide.
    tolerance = 0.1 if case == "adam-bfloat16" else 1e-5
    np.testing.assert_allclose(after[seen], before[seen], tolerance)


@pytest.mark.parametrize("stale", [False, True], ids=["lazy", "stale"])
@pytest.mark.parametrize("size", [30, 22, 9, N_ROWS])
def test_leaders_take_their_votes_and_moments_along(size, stale):
    """exclusive_rows="auto": where two meet, the one with more votes goes on."""
    table = Table("adam", 15, exclusive_rows="auto", stale_decay=stale)
    for step in range(17):  # rows 0 to 19 come in every step, the others now and then
        rows = np.concatenate([np.arange(20), table.rng.integers(0, N_ROWS, 8)])
        if step > 13:  # most buckets are idle
            rows = np.arange(2)
        table.step(rows, table.rng.normal(size=(len(rows), DIM)))
    before = table.state()
    sources = np.flatnonzero(before["leader_votes"])
    leading = dict(zip(before["leader"][sources], sources, strict=True))
    assert len(leading) > 9 and before["leader_votes"].max() > 8
    table.optimizer.resize(table.variable, num_buckets=size)
    after, new = table.state(), table.buckets[:, 0]
    if stale and size != 30:  # what comes along is brought up to date
        missed = table.iterations() - before["last_step"]
        assert missed.max() == 3
        for name in ("leader_steps", "bucket_steps", "last_step"):
            before[name] = before[name] + missed
        before["first_moment"] *= (0.9**missed)[:, None].astype(np.float32)
        before["second_moment"] *= (0.999**missed)[:, None].astype(np.float32)
    if size == N_ROWS:  # all own their bucket, with the moment they had
        for row, source in leading.items():
            steps = before["leader_steps"][source]
            hat = before["first_moment"][source] / (1 - 0.9**steps)
            wanted = hat * (1 - 0.9 ** after["bucket_steps"][row])
            np.testing.assert_allclose(after["first_moment"][row], wanted, 1e-5)
        others = np.setdiff1d(np.arange(N_ROWS), list(leading))
        assert not after["first_moment"][others].any()
        return
    for bucket in range(size):
        rivals = [r for r in leading if new[r] == bucket]
        if not rivals:
            assert after["leader_votes"][bucket] == 0
            assert not after["first_moment"][bucket].any()
            continue
        row = min(rivals, key=lambda r: (-before["leader_votes"][leading[r]], r))
        assert after["leader"][bucket] == row
        names = {"leader_votes", "leader_steps", "first_moment"}
        if before["leader_votes"][leading[row]] >= 8:
            names |= {"second_moment", "bucket_steps", "last_step"}
        for name in names & set(after):
            np.testing.assert_allclose(
                after[name][bucket], before[name][leading[row]], 1e-6, err_msg=name
            )
    np.testing.assert_array_equal(after["row_energy"], before["row_energy"])
    table.train(3)
