"""Half of the steps, saved, loaded in a new process, and the other half."""

from __future__ import annotations

import pytest
from helpers import active_flavor
from resume_helpers import FORMATS, KINDS, resume_elsewhere, save_halves

# Every format and every optimizer, but not every pair: that is long.
SAMPLE = {
    "adam": ["export", "weights"],
    "sgd": ["backup", "keras", "weights_checkpoint"],
    "adagrad": ["checkpoint"],
    "onebit": ["model_checkpoint", "export"],
}
if active_flavor() == "tf_keras":
    SAMPLE["adagrad"].append("saved_model")


def check(folder, sample: dict, *settings) -> None:
    ends = {k: save_halves(folder, k, names, *settings) for k, names in sample.items()}
    expected = {f"{k}/{name}": ends[k] for k, names in sample.items() for name in names}
    assert resume_elsewhere(folder, list(expected), *settings) == expected
    assert len(set(ends.values())) == len(ends)


def test_four_steps_and_four_more_are_eight(tmp_path):
    assert sorted({name for names in SAMPLE.values() for name in names}) == sorted(
        FORMATS
    )
    assert set(SAMPLE) == set(KINDS)
    check(tmp_path, SAMPLE, 2, 2, True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_and_fifty_more_are_a_hundred(kind, tmp_path):
    check(tmp_path, {kind: FORMATS}, 5, 10, False)
