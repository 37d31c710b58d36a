"""Resized tables in files: config, .keras, checkpoints, weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from growth_helpers import N_ROWS, Table
from helpers import (
    active_flavor,
    assert_same_bits,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
    run_python,
    state_digest,
    variables_of,
)
from test_saving import RESUME_SOURCE, arrays_of, train

import tf_basis

KINDS = {
    "default": {},
    "exclusive": {"exclusive_rows": 40, "moment_dtype": "bfloat16"},
    "owners": {"num_buckets": 12_000},
}


def table_of(model):
    (table,) = [v for v in model.trainable_variables if v.shape[0] == 12_000]
    return table


def make_resized(kind: str, size: int = 300):
    """Trained, resized in between, and trained again."""
    arguments = {"learning_rate": 0.02, **KINDS[kind]}
    model = train(make_click_model(make_optimizer(**arguments)), 0, 3)
    model.optimizer.resize(table_of(model), num_buckets=size)
    tf_basis.retrace(model)
    return train(model, 3, 5)


def assert_resumes(model, restored) -> None:
    assert_same_bits(arrays_of(model), arrays_of(restored))
    train(model, 5, 7)
    train(restored, 5, 7)
    assert_same_bits(arrays_of(model), arrays_of(restored))


@pytest.mark.parametrize("kind", KINDS)
def test_keras_file_resumes_to_the_same_bits(kind, tmp_path):
    model = make_resized(kind)
    path = str(tmp_path / "model.keras")
    model.save(path)
    restored = tf.keras.models.load_model(path)
    assert (
        len(restored.optimizer.table_state(table_of(restored))["bucket_steps"]) == 300
    )
    assert_resumes(model, restored)
    for each in (model, restored):  # and once more from there
        each.optimizer.resize(table_of(each), factor=2)
        tf_basis.retrace(each)
    assert_resumes(model, restored)


@pytest.mark.long
def test_keras_file_resumes_in_a_new_process(tmp_path):
    model = make_resized("exclusive")
    path = str(tmp_path / "model.keras")
    model.save(path)
    expected = state_digest(arrays_of(train(model, 5, 7)))
    assert run_python(RESUME_SOURCE, path, "5", "7").stdout.split()[-1] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_objects_from_before_save_the_new_variables(kind, tmp_path):
    arguments = {"learning_rate": 0.02, **KINDS[kind]}
    model = train(make_click_model(make_optimizer(**arguments)), 0, 2)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    old_path = checkpoint.write(str(tmp_path / "old"))
    model.optimizer.resize(table_of(model), num_buckets=300)
    tf_basis.retrace(model)
    train(model, 2, 5)
    path = checkpoint.write(str(tmp_path / "new"))
    names = [n for n, _ in tf.train.list_variables(path)]
    assert len(names) == len(set(names))
    expected = arrays_of(model)
    train(model, 5, 6)
    checkpoint.read(path).assert_existing_objects_matched()
    assert_same_bits(arrays_of(model), expected)

    # A new optimizer reads it once it has the size.
    other = make_click_model(make_optimizer(**arguments))
    other.optimizer.build(other.trainable_variables)
    other.optimizer.resize(table_of(other), num_buckets=300)
    checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    checkpoint.read(path).assert_existing_objects_matched()
    assert_resumes(model, other)
    with pytest.raises(ValueError, match=r"buckets 300 here|incompatible tensor"):
        checkpoint.read(old_path)


@pytest.mark.skipif(active_flavor() != "keras3", reason="tf_keras saves no optimizer")
def test_weights_file_resumes(tmp_path):
    model = make_resized("default")
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    other = make_resized("default")
    train(other, 20, 21)
    other.load_weights(path)
    assert_resumes(model, other)
    plain = train(make_click_model(make_optimizer(learning_rate=0.02)), 0, 1)
    with pytest.raises(ValueError, match="cannot take this state"):
        plain.load_weights(path)


def test_config_says_what_changed_and_nothing_else(flavor):
    variable = tf.Variable(np.zeros((90, 2), np.float32), name="table")
    optimizer = make_optimizer(flavor, tables="table", num_buckets=9)
    optimizer.build([variable])
    before = optimizer.get_config()
    assert "table_growth" not in before
    optimizer.resize(variable, num_buckets=13)
    config = optimizer.get_config()
    assert config.pop("table_growth") == {"table": {"num_buckets": 13}}
    assert config == before
    config = json.loads(json.dumps(optimizer.get_config()))
    twin = type(optimizer).from_config(config)
    assert twin.get_config() == optimizer.get_config()
    twin.build([tf.Variable(np.zeros((90, 2), np.float32), name="table")])
    shapes = [[tuple(v.shape) for v in variables_of(o)] for o in (twin, optimizer)]
    assert shapes[0] == shapes[1]
    assert_same_bits(optimizer_arrays(twin), optimizer_arrays(optimizer))


def test_config_of_another_model_is_an_error(flavor):
    def table(n_rows, name):
        return tf.Variable(np.zeros((n_rows, 2), np.float32), name=name)

    optimizer = make_optimizer(flavor, tables="user|item", num_buckets=9)
    old = table(90, "user")
    optimizer.build([old])
    optimizer.grow_rows(old, table(99, "user"))
    config = optimizer.get_config()
    other = type(optimizer).from_config(config)
    with pytest.raises(ValueError, match=r"must have the 99 rows .* received 90"):
        other.build([table(90, "user")])
    other = type(optimizer).from_config(config)
    with pytest.raises(ValueError, match=r"received \['user'\]; the tables are"):
        other.build([table(99, "item")])


def test_variables_keep_their_places(flavor):
    table = Table("adam-leading", 15, flavor).train(3)
    before = variables_of(table.optimizer)
    table.optimizer.resize(table.variable, num_buckets=31)
    after = variables_of(table.optimizer)
    fresh = Table("adam-leading", 31, flavor)
    shapes = [tuple(v.shape) for v in after]
    assert shapes == [tuple(v.shape) for v in variables_of(fresh.optimizer)]
    kept = [a is b for a, b in zip(before, after, strict=True)]
    assert kept == [tuple(v.shape)[:1] != (31,) for v in after]
    assert optimizer_arrays(table.optimizer)
    table.optimizer.resize(table.variable, num_buckets=N_ROWS)
    fresh = Table("adam-leading", N_ROWS, flavor)
    shapes = [tuple(v.shape) for v in variables_of(table.optimizer)]
    assert shapes == [tuple(v.shape) for v in variables_of(fresh.optimizer)]
