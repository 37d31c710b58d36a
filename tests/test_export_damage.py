"""Damaged and foreign exports: an error, and nothing changed; or the very state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from export_helpers import arrays_of, make_model, train
from helpers import (
    ROOT,
    TESTS,
    active_flavor,
    assert_same_bits,
    make_click_model,
    make_optimizer,
    state_digest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_basis
from tf_basis import checksums


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A trained model, its export, and another model with other state."""
    model, other = make_model("inside"), make_model("inside")
    path = tmp_path_factory.mktemp("exported") / "export"
    tf_basis.export_saved_model(train(model, 0, 2), path)
    return model, path, train(other, 5, 7)


def restores_or_changes_nothing(exported, path) -> bool:
    model, _, other = exported
    before = arrays_of(other)
    try:
        tf_basis.restore_optimizer(other, path)
    except ValueError:
        assert_same_bits(before, arrays_of(other))
        return False
    assert_same_bits(arrays_of(model), arrays_of(other))
    other.optimizer.iterations.assign(99)  # so that the next one has to restore it
    return True


def files_of(path) -> list:
    return sorted(f.relative_to(path) for f in path.rglob("*") if f.is_file())


FILES = 5  # an export with one shard and no assets


def damaged(exported, folder, number, kind, place, bit):
    """A copy of the export in which one file is flipped, cut, lengthened or gone."""
    path = folder / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(exported[1], path)
    files = files_of(path)
    assert len(files) == FILES
    file = path / files[number]
    data = bytearray(file.read_bytes())
    at = int(place * len(data))
    if kind == "flip":
        data[at] ^= 1 << bit
    elif kind == "cut":
        del data[at:]
    elif kind == "longer":
        data += bytes([bit])
    file.write_bytes(data)
    if kind == "gone":
        file.unlink()
    return path, str(files[number])


def check_damage(exported, folder, *damage):
    path, name = damaged(exported, folder, *damage)
    same = restores_or_changes_nothing(exported, path)
    if damage[1] in ("cut", "gone"):
        assert not same, name


DAMAGE = (
    st.integers(0, FILES - 1),
    st.sampled_from(["flip", "flip", "flip", "cut", "longer", "gone"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 7),
)


@settings(max_examples=40)
@given(*DAMAGE)
def test_damage_is_found(exported, tmp_path, number, kind, place, bit):
    check_damage(exported, tmp_path, number, kind, place, bit)


@pytest.mark.long
@settings(max_examples=3000)
@given(*DAMAGE)
def test_any_damage_is_found(exported, tmp_path, number, kind, place, bit):
    check_damage(exported, tmp_path, number, kind, place, bit)


def test_values_that_were_changed_with_their_crc_are_found(exported, tmp_path):
    """Another checkpoint in the place of the values: TensorFlow reads it well."""
    _, whole, other = exported
    path = tmp_path / "export"
    tf_basis.export_saved_model(other, path)
    shutil.copytree(path / "variables", tmp_path / "foreign")
    shutil.rmtree(path)
    shutil.copytree(whole, path)
    for name in os.listdir(tmp_path / "foreign"):
        if ".data-" in name:
            shutil.copy(tmp_path / "foreign" / name, path / "variables" / name)
    assert not restores_or_changes_nothing(exported, path)


def rewritten(whole, path, **changes):
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    content = json.loads((path / "tf_basis.json").read_text())
    content.pop("sha256")
    content = {**content, **changes}
    content["sha256"] = checksums.of_json(content)
    (path / "tf_basis.json").write_text(json.dumps(content))
    return path


def test_foreign_exports_are_refused(exported, tmp_path):
    _, whole, other = exported
    path = tmp_path / "export"
    assert restores_or_changes_nothing(exported, rewritten(whole, path))
    flavor = {"keras3": "tf_keras", "tf_keras": "keras3"}[active_flavor()]
    for changes, words in [
        ({"format_version": 2}, "format version 1, .* received 2"),
        ({"format": "else"}, "is not the tf_basis.json of"),
        ({"flavor": flavor}, f"'{flavor}', received '{active_flavor()}'"),
        ({"tables": []}, r"must have the tables of the saved state, \[\], received"),
    ]:
        rewritten(whole, path, **changes)
        with pytest.raises(ValueError, match=words):
            tf_basis.restore_optimizer(other, path)
        assert not restores_or_changes_nothing(exported, path)
    for text in ("[1, 2]", "{}", "null", "\x00"):
        (path / "tf_basis.json").write_text(text)
        assert not restores_or_changes_nothing(exported, path)
    shutil.rmtree(path)
    tf.saved_model.save(tf.Module(), str(path))
    with pytest.raises(ValueError, match="must be a directory that export_saved_model"):
        tf_basis.restore_optimizer(other, path)
    with pytest.raises(ValueError, match="must be a directory that export_saved_model"):
        tf_basis.restore_optimizer(other, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="migrate must be True or False"):
        tf_basis.restore_optimizer(other, whole, migrate="yes")


def test_another_model_or_optimizer_is_refused(exported):
    _, whole, _ = exported
    with pytest.raises(ValueError, match=r"optimizer of the export.*\['BasisAdam'\]"):
        tf_basis.restore_optimizer(make_click_model(make_optimizer()), whole)
    layers, optimizer = tf.keras.layers, make_model("inside").optimizer
    optimizer = type(optimizer).from_config(optimizer.get_config())
    model = tf.keras.Sequential([tf.keras.Input((3,)), layers.Embedding(12_000, 8)])
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"variables of this kind|of shape"):
        tf_basis.restore_optimizer(model, whole)


EXPORT_FOR_EVER = """
import itertools, sys
import export_helpers, helpers, tf_basis
model = export_helpers.make_model("inside")
for i in itertools.count():
    export_helpers.train(model, i, i + 1)
    print(i, helpers.state_digest(export_helpers.arrays_of(model)), flush=True)
    tf_basis.export_saved_model(model, sys.argv[1], overwrite=True)
"""


@pytest.mark.long
def test_kills_at_any_moment_leave_a_whole_export(exported, tmp_path, rng):
    path, other = tmp_path / "export", exported[2]
    for _ in range(6):
        with (tmp_path / "log").open("w") as log:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
            }
            command = [sys.executable, "-c", EXPORT_FOR_EVER, str(path)]
            child = subprocess.Popen(command, stdout=log, env=environment)
        while len((tmp_path / "log").read_text().splitlines()) < 3:
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1.5))
        child.kill()
        child.wait()
        lines = (tmp_path / "log").read_text().splitlines()
        digests = [line.split()[1] for line in lines if len(line.split()) == 2]
        tf_basis.restore_optimizer(other, path)
        # Whole, and of the last export that ended or the one that was under way.
        assert state_digest(arrays_of(other)) in digests[-2:]
