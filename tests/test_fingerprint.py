"""State of another table layout, hash or seed is refused in every format of Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from growth_helpers import N_ROWS, Table
from helpers import (
    assert_same_bits,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
    to_numpy,
    variables_of,
)

from tf_basis import hashing
from tf_basis.optimizers import fingerprint

BASE = {"num_buckets": 12, "exclusive_rows": [70, 3, 51], "momentum": "shared"}
# Settings that leave all shapes as they are -> the words of the refusal.
SAME_SHAPES = {
    "seed": ({"seed": 3}, "has seed 3 here, 0 there"),
    "hashing": ({"hashing": "murmur3"}, "hashing 'murmur3' here, 'balanced' there"),
    "owners": ({"exclusive_rows": [70, 3, 52]}, r"owner_list \d+ here, \d+ there"),
    "more owners": ({"exclusive_rows": 4}, "exclusive_rows 4 here, 3 there"),
    "moments": ({"moment_dtype": "float16"}, "'float16' here, 'float32' there"),
    "energies": ({"energy_dtype": "log8"}, "energy_dtype 'log8' here, 'float32'"),
    "scalar": (
        {"invariant_scalar": "learned"},
        "invariant_scalar 'learned' here, 'energy' there",
    ),
}


def make_table(flavor=None, **changes) -> Table:
    settings = {**BASE, **changes}
    settings["table_settings"] = {"": {"seed": settings.pop("seed", 0)}}
    return Table("adam", flavor=flavor, **settings)


def readers(optimizer, path) -> dict:
    """Every way in which Keras or TensorFlow reads what `optimizer` holds."""
    store = {}
    optimizer.save_own_variables(store)
    weights = [to_numpy(v) for v in variables_of(optimizer)]
    written = tf.train.Checkpoint(optimizer=optimizer).write(path)
    return {
        "store": lambda other: other.load_own_variables(store),
        "weights": lambda other: other.set_weights(weights),
        "checkpoint": lambda other: tf.train.Checkpoint(optimizer=other).read(written),
    }


@pytest.mark.parametrize("name", SAME_SHAPES)
def test_state_with_the_same_shapes_is_refused(name, flavor, tmp_path):
    table = make_table(flavor=flavor).train(2)
    changes, words = SAME_SHAPES[name]
    other = make_table(flavor=flavor, **changes)
    shapes = [
        [tuple(v.shape) for v in variables_of(t.optimizer)] for t in (table, other)
    ]
    assert shapes[0] == shapes[1]
    before = optimizer_arrays(other.optimizer)
    for way, read in readers(table.optimizer, str(tmp_path / "ckpt")).items():
        expected = (ValueError, f"cannot take this state.*{words}")
        if way == "checkpoint" and name in ("moments", "energies"):
            # TensorFlow looks at the types first, and says both.
            expected = (tf.errors.InvalidArgumentError, "expected dtype .* original")
        with pytest.raises(expected[0], match=expected[1]):
            read(other.optimizer)
        if way != "checkpoint":  # which assigns one variable after the other
            assert_same_bits(before, optimizer_arrays(other.optimizer))
        read(make_table(flavor=flavor).optimizer)


def test_a_checkpoint_that_waits_is_refused_when_it_is_built(flavor, tmp_path):
    table = make_table(flavor=flavor).train(1)
    path = tf.train.Checkpoint(optimizer=table.optimizer).write(str(tmp_path / "ckpt"))
    for seed in (0, 3):
        config = make_table(flavor=flavor, seed=seed).optimizer.get_config()
        other = type(table.optimizer).from_config(config)
        tf.train.Checkpoint(optimizer=other).read(path).expect_partial()
        if seed:
            with pytest.raises(ValueError, match="has seed 3 here, 0 there"):
                other.build([table.variable])
        else:
            other.build([table.variable])
            states = [optimizer_arrays(o) for o in (table.optimizer, other)]
            assert_same_bits(*states)


def test_other_optimizers_tables_and_versions_are_refused(flavor, monkeypatch):
    optimizer = make_table(flavor=flavor, momentum="none").optimizer
    own = optimizer._fingerprint()
    for saved, words in [
        (own[:0], "format version 1, received none"),
        (np.array([2, *own[1:]]), "format version 1, received 2"),
        (np.array([own[0], 2, *own[2:]]), "of a BasisAdagrad with 1 tables, this is"),
        (np.array([own[0], 9, *own[2:]]), r"of a unknown \(9\) with 1 tables"),
        (own[:2], "BasisAdam with 0 tables, this is a BasisAdam with 1 tables"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer._check_fingerprint(saved)
    monkeypatch.setattr(hashing, "FORMAT_VERSION", 2)
    with pytest.raises(ValueError, match="hash_version 2 here, 1 there"):
        optimizer._check_fingerprint(own)


def test_where_every_row_owns_its_bucket_the_hash_does_not_matter(flavor):
    own = {"num_buckets": N_ROWS, "exclusive_rows": 0}
    table = make_table(flavor=flavor, **own).train(1)
    other = make_table(flavor=flavor, hashing="murmur3", seed=4, **own)
    weights = [to_numpy(v) for v in variables_of(table.optimizer)]
    other.optimizer.set_weights(weights)
    assert not np.array_equal(
        other.optimizer._fingerprint(), table.optimizer._fingerprint()
    )


def test_it_follows_resize_and_growth(flavor):
    table = make_table(flavor=flavor, exclusive_rows=5).train(1)
    table.optimizer.resize(table.variable, num_buckets=31)
    fresh = make_table(flavor=flavor, exclusive_rows=5, num_buckets=31)
    found = [to_numpy(t.optimizer._basis.fingerprint) for t in (table, fresh)]
    np.testing.assert_array_equal(*found)
    new = tf.Variable(np.zeros((N_ROWS + 9, 3), np.float32), name="table")
    table.optimizer.tables = ("table",)
    table.optimizer.grow_rows(table.variable, new)
    grown = to_numpy(table.optimizer._basis.fingerprint)
    np.testing.assert_array_equal(grown, table.optimizer._fingerprint())
    assert grown[2] == N_ROWS + 9 and grown[2 + fingerprint._FIELDS.index("domains")]


def test_files_of_models_are_refused(tmp_path, monkeypatch):
    model = make_click_model(make_optimizer(num_buckets=20), run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_click_model(make_optimizer(num_buckets=20, seed=7))
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match="has seed 7 here, 0 there"):
        other.load_weights(tmp_path / "model.weights.h5")
    monkeypatch.setattr(hashing, "FORMAT_VERSION", 2)
    with pytest.raises(ValueError, match="hash_version 2 here, 1 there"):
        tf.keras.models.load_model(tmp_path / "model.keras")
