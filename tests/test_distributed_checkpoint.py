"""Distributed checkpoints on real ranks: killed, resumed, cut for other numbers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import active_flavor
from horovod_helpers import need_horovod
from horovod_nursery import Nursery

KINDS = ["BasisAdam", "BasisSGD", "BasisAdagrad", "OneBitAdam", "pair", "accumulating"]
QUICK = ["accumulating"]  # tables, interval, clipping and accumulation in one


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    need_horovod()
    made = Nursery("checkpoint", tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


def check_resumes(nursery, folder, kinds, save_at, steps):
    common = {"directory": str(folder), "kinds": kinds, "steps": steps, "timeout": 900}
    whole = nursery.run("straight", 2, save_at=save_at, **common)
    parts = nursery.run("resumed", 2, **common)
    for rank in range(2):
        for kind in kinds:
            assert parts[rank][kind] == whole[rank][kind], (rank, kind)
    for kind in kinds:  # or it would not matter whose residuals are restored
        assert whole[0][kind]["local"] != whole[1][kind]["local"]
        assert whole[0][kind]["state"] == whole[1][kind]["state"]


def test_a_new_process_goes_on_to_the_same_bits(nursery, tmp_path):
    check_resumes(nursery, tmp_path, QUICK, save_at=7, steps=11)


@pytest.mark.long
def test_fifty_steps_and_fifty_more_are_a_hundred(nursery, tmp_path):
    check_resumes(nursery, tmp_path, KINDS, save_at=50, steps=100)


def check_files_resume(nursery, folder, kinds, formats, save_at, steps):
    common = {"directory": str(folder), "kinds": kinds, "formats": formats}
    common |= {"save_at": save_at, "steps": steps, "timeout": 1500}
    whole = nursery.run("straight", 2, **common)
    parts = nursery.run("resumed_from_files", 2, **common)
    for rank in range(2):
        for kind in kinds:
            for how in formats:
                assert parts[rank][f"{kind} {how}"] == whole[rank][kind], (kind, how)


@pytest.mark.long
def test_files_after_fifty_steps_and_fifty_more_are_a_hundred(nursery, tmp_path):
    formats = ["export", "keras", "weights", "checkpoint"]
    if active_flavor() == "tf_keras":
        formats.append("saved_model")
    check_files_resume(nursery, tmp_path, KINDS, formats, 50, 100)


def check_survives_kills(nursery, folder, kills, steps, seconds):
    """Runs killed at random moments; the last one is left to finish."""
    rng = np.random.default_rng(kills)
    common = {"steps": steps, "every": 2, "timeout": 200}
    undisturbed = nursery.run("chain", 2, directory=str(folder / "whole"), **common)
    killed = folder / "killed"
    for _ in range(kills):
        doomed = [[0], [1], [0, 1]][rng.integers(3)]
        after = rng.uniform(0, seconds)
        nursery.run(
            "chain", 2, directory=str(killed), kill=doomed, after=after, **common
        )
    result = nursery.run("chain", 2, directory=str(killed), **common)
    assert result[0]["begin"] > 0
    for mine, whole in zip(result, undisturbed):
        assert {**mine, "begin": 0} == whole


def test_runs_that_are_killed_end_at_the_same_bits(nursery, tmp_path):
    check_survives_kills(nursery, tmp_path, kills=2, steps=60, seconds=0.7)


@pytest.mark.long
def test_thirty_runs_that_are_killed_end_at_the_same_bits(nursery, tmp_path):
    check_survives_kills(nursery, tmp_path, kills=30, steps=600, seconds=0.7)


def owed(ranks) -> dict[str, np.ndarray]:
    """mean e_w + e_s, and the mean of gradients that wait for their interval."""
    by_kind = [
        {kind: value.astype(np.float64) for kind, value in rank["locals"]}
        for rank in ranks
    ]
    mean = np.mean([r["worker"] for r in by_kind], axis=0)
    server = np.concatenate([r["server"] for r in by_kind])
    return {
        "exchange": mean + (server if len(server) else 0.0),
        "waiting": np.mean([r["mean"] for r in by_kind], axis=0),
    }


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_what_is_owed_stays_on_another_number_of_ranks(nursery, tmp_path, ranks):
    folder = str(tmp_path)
    saved = nursery.run("owed", 2, directory=folder, steps=8, restore=False)
    cut = nursery.run("owed", ranks, directory=folder, steps=0, restore=True)
    before, after = owed(saved), owed(cut)
    for what, value in before.items():
        assert np.abs(value).max() > 0
        # Each residual was rounded to float32 once.
        np.testing.assert_allclose(
            after[what], value, atol=2**-22 * np.abs(value).max()
        )
    for rank, result in enumerate(cut):
        assert result["shared"] == saved[0]["shared"]
        assert result["info"]["ranks"] == 2 and result["info"]["step"] == 8
        assert result["info"]["extra"] == {"at": [1, 2]}
        assert len(result["said"]) == (rank == 0)
    assert "written by 2 ranks: residuals" in cut[0]["said"][0]
    assert f"cut anew for {ranks} ranks" in cut[0]["said"][0]


def test_what_one_rank_finds_all_ranks_hear(nursery, tmp_path):
    for rank, result in enumerate(nursery.run("spoiled", 2, directory=str(tmp_path))):
        assert result["error"].startswith("DamagedCheckpointError: rank 1: ")
        assert "rank-00001.bin must have the SHA-256 of its manifest" in result["error"]
        assert result["same"] and result["step"] == 1
        assert len(result["said"]) == (rank == 0)
        for unequal in ["step must be equal on all ranks", "0 on rank 0, 1 on rank 1"]:
            assert unequal in result["unequal"]
        assert result["refused"].startswith(("OSError: rank 1: ", "RuntimeError"))
        # The third has no manifest.
        assert result["left"] == [f"checkpoint-0000000{n}" for n in (1, 2, 3)]


def test_untrained_variables_are_those_of_the_rank(nursery, tmp_path):
    for ranks in (2, 3):
        for rank, got in enumerate(
            nursery.run("untrained", ranks, directory=str(tmp_path))
        ):
            assert got["mean"] == [rank if rank < 2 else 0, 5.0]
            assert got["bias"] == [4.0]
            assert "moving_mean" in got["own"][0]
            if active_flavor() == "keras3":  # the seed of the dropout
                assert len(got["own"]) == 2
