"""Config round trips, and resuming from saved files to the same bits."""

from __future__ import annotations

import copy
import inspect
import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_same_bits,
    batches_of,
    keras_of,
    make_click_model,
    make_optimizer,
    make_variable,
    optimizer_arrays,
    run_python,
    state_digest,
)

# Every argument of the signature with a value that is not its default.
ARGUMENTS = {
    "learning_rate": 0.25,
    "beta_1": 0.5,
    "beta_2": 0.75,
    "epsilon": 1e-4,
    "compression_ratio": 12.5,
    "num_buckets": 17,
    "exclusive_rows": 3,
    "tables": "user|item",
    "min_rows": 77,
    "momentum": "shared",
    "invariant_scalar": "learned",
    "scalar_decay": 0.5,
    "scalar_range": (0.25, 4.0),
    "scalar_rule": "sign",
    "scalar_learning_rate": 0.125,
    "scalar_frequency_power": 0.5,
    "collision_reduce": "sum",
    "bias_correction": False,
    "hashing": "murmur3",
    "seed": 12345,
    "moment_dtype": "bfloat16",
    "energy_dtype": "log8",
    "stale_decay": True,
    "table_settings": {"user": {"seed": 5, "exclusive_rows": [8, 2]}},
    "weight_decay": 0.0625,
    "row_clipnorm": 2.5,
    "clipnorm": 1.5,
    "name": "another_name",
}
# Only one clipping argument may be given at a time, so these come one by one.
SEPARATE = [
    {"clipvalue": 0.5},
    {"global_clipnorm": 0.75},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 7},
    {"loss_scale_factor": 8.0},
    {"gradient_accumulation_steps": 3},
    {"invariant_scalar": None},
    {"state_budget": "256MB"},
    {"exclusive_rows": [4, 2, 11]},
    {"exclusive_rows": "auto"},
]
KERAS3_ONLY = {"loss_scale_factor", "gradient_accumulation_steps"}


def arguments_of(flavor: str) -> dict:
    """Arguments of BasisAdam's signature with their defaults."""
    signature = inspect.signature(type(make_optimizer(flavor)).__init__)
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }


def round_trip(optimizer):
    """Through JSON, by class and by registered name; both must agree."""
    config = json.loads(json.dumps(optimizer.get_config()))
    return type(optimizer).from_config(config)


def simple(value):
    """Tuples and lists are one thing to JSON; float32 rates keep seven digits."""
    if isinstance(value, list | tuple):
        return [simple(v) for v in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_config_round_trip_of_every_argument(flavor):
    signature = arguments_of(flavor)
    covered = set(ARGUMENTS) | {k for case in SEPARATE for k in case}
    # `jit_compile` belongs to tf_keras alone; the others have tests of their own.
    elsewhere = {"dense_optimizer", "row_frequencies", "jit_compile"}
    assert set(signature) - covered <= elsewhere
    for name, value in ARGUMENTS.items():
        assert signature[name] != value, f"{name} is tested with its default"
    optimizer = make_optimizer(flavor, **ARGUMENTS)
    restored = round_trip(optimizer)
    for config in (optimizer.get_config(), restored.get_config()):
        for name, value in ARGUMENTS.items():
            assert simple(config[name]) == simple(value), name
    assert restored.get_config() == optimizer.get_config()


@pytest.mark.parametrize("case", SEPARATE, ids=lambda c: "-".join(c))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_config_round_trip_of_separate_arguments(flavor, case):
    if flavor == "tf_keras" and KERAS3_ONLY & set(case):
        pytest.skip("tf_keras does not have this argument")
    optimizer = make_optimizer(flavor, **case)
    restored = round_trip(optimizer)
    assert {k: restored.get_config()[k] for k in case} == case
    assert restored.get_config() == optimizer.get_config()


def test_row_frequencies_are_kept_as_the_rows_they_choose(flavor):
    optimizer = make_optimizer(
        flavor, exclusive_rows=2, row_frequencies=np.array([1, 9, 3, 9, 0])
    )
    for each in (optimizer, round_trip(optimizer)):
        assert simple(each.get_config()["exclusive_rows"]) == [1, 3]


@pytest.mark.parametrize("kind", ["AdamW", "schedule", "tables"])
def test_config_round_trip_of_objects(flavor, kind):
    optimizers = keras_of(flavor).optimizers
    schedule = optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    variable = make_variable(np.zeros((30, 2)), flavor, "user_table")
    arguments = {
        "AdamW": {"dense_optimizer": optimizers.AdamW(0.03125, weight_decay=0.5)},
        "schedule": {"learning_rate": schedule},
        "tables": {"tables": [variable, "item_table"], "num_buckets": 3},
    }[kind]
    optimizer = make_optimizer(flavor, **arguments)
    restored = optimizers.deserialize(optimizers.serialize(optimizer))
    assert type(restored) is type(optimizer)
    config = restored.get_config()
    assert json.dumps(config) == json.dumps(optimizer.get_config())
    if kind == "tables":
        path = getattr(variable, "path", "user_table")
        assert list(config["tables"]) == [path, "item_table"]
    elif kind == "AdamW":
        text = json.dumps(config["dense_optimizer"])
        assert "AdamW" in text and "0.03125" in text and "0.5" in text
    else:
        assert "ExponentialDecay" in json.dumps(config["learning_rate"])


def make_saved_optimizer(kind: str):
    """Optimizers whose state covers what a file must hold."""
    extra = {
        "default": {},
        "exclusive": {"exclusive_rows": 40},
        "learned": {
            "momentum": "shared",
            "invariant_scalar": "learned",
            "scalar_learning_rate": 0.1,
        },
        "dense_optimizer": {
            "dense_optimizer": tf.keras.optimizers.SGD(0.05, momentum=0.9)
        },
        "schedule": {
            "learning_rate": tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        },
    }[kind]
    return make_optimizer(**{"learning_rate": 0.02, **extra})


def train(model, start: int, stop: int):
    for x, y in batches_of(start, stop):
        model.train_on_batch(x, y)
    return model


def arrays_of(model) -> dict:
    return optimizer_arrays(model.optimizer, model.weights)


def print_resumed(path: str, start: int, stop: int) -> None:
    """In a new process: load, go on training, print the hash of everything."""
    model = train(tf.keras.models.load_model(path), start, stop)
    print(state_digest(arrays_of(model)))


RESUME_SOURCE = """
import sys
import tf_basis
import test_saving
test_saving.print_resumed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
KINDS = ("default", "exclusive", "learned", "dense_optimizer", "schedule")


@pytest.mark.parametrize("kind", KINDS)
def test_keras_file_resumes_to_the_same_bits(kind, tmp_path):
    model = train(make_click_model(make_saved_optimizer(kind)), 0, 4)
    path = str(tmp_path / "model.keras")
    model.save(path)
    saved = arrays_of(model)
    restored = tf.keras.models.load_model(path)
    assert type(restored.optimizer) is type(model.optimizer)
    assert_same_bits(saved, arrays_of(restored))
    train(model, 4, 7)
    train(restored, 4, 7)
    assert_same_bits(arrays_of(model), arrays_of(restored))
    assert state_digest(saved) != state_digest(arrays_of(model))


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize("kind", ["exclusive", "dense_optimizer", "schedule"])
def test_a_model_that_was_never_trained(kind, tmp_path):
    """Keras builds the optimizer when it loads the file of one that was not built."""
    model, path = (
        make_click_model(make_saved_optimizer(kind)),
        str(tmp_path / "m.keras"),
    )
    model.save(path)
    restored = tf.keras.models.load_model(path)
    for each in (model, restored):
        train(each, 0, 3)
    assert_same_bits(arrays_of(model), arrays_of(restored))
    with pytest.raises(ValueError, match="cannot take this state"):
        restored.load_weights(path)  # what it has learned would be lost, in part


def test_tables_given_as_variables_are_found_again(tmp_path):
    """The config keeps paths, and the variables of a loaded model have them."""
    model = make_click_model("sgd")
    tables = [v for v in model.trainable_variables if v.shape[0] == 500]
    optimizer = make_optimizer(tables=tables, num_buckets=20, learning_rate=0.02)
    model.compile(optimizer, "binary_crossentropy")
    train(model, 0, 3)
    path = str(tmp_path / "model.keras")
    model.save(path)
    restored = train(tf.keras.models.load_model(path), 3, 5)
    train(model, 3, 5)
    assert_same_bits(arrays_of(model), arrays_of(restored))
    (table,) = [v for v in restored.trainable_variables if v.shape[0] == 500]
    state = restored.optimizer.table_state(table)
    assert state["second_moment"].shape == (20, 4)


@pytest.mark.parametrize(
    "kind", ["exclusive", pytest.param("dense_optimizer", marks=pytest.mark.long)]
)
def test_keras_file_resumes_in_a_new_process(kind, tmp_path):
    model = train(make_click_model(make_saved_optimizer(kind)), 0, 3)
    path = str(tmp_path / "model.keras")
    model.save(path)
    expected = state_digest(arrays_of(train(model, 3, 5)))
    output = run_python(RESUME_SOURCE, path, "3", "5").stdout
    assert output.split()[-1] == expected


def test_op_and_twin_share_the_file_format(tmp_path):
    """A file written with the op loads where only the twin can run."""
    from tf_basis.ops import loader

    path = str(tmp_path / "model.keras")
    with loader.use("require"):
        model = train(make_click_model(make_saved_optimizer("exclusive")), 0, 3)
        model.save(path)
    with loader.use("off"):
        restored = tf.keras.models.load_model(path)
    assert_same_bits(arrays_of(model), arrays_of(restored))


@pytest.mark.parametrize("kind", ["exclusive", "dense_optimizer"])
def test_checkpoint_restores_optimizer_state(kind, tmp_path):
    model = train(make_click_model(make_saved_optimizer(kind)), 0, 3)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "ckpt"))
    other = train(make_click_model(make_saved_optimizer(kind)), 10, 11)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(
        path
    ).assert_existing_objects_matched()
    assert_same_bits(arrays_of(model), arrays_of(other))
    train(model, 3, 5)
    train(other, 3, 5)
    assert_same_bits(arrays_of(model), arrays_of(other))


@pytest.mark.parametrize("kind", ["exclusive", "dense_optimizer"])
def test_weights_file_restores_optimizer_state(kind, tmp_path):
    model = train(make_click_model(make_saved_optimizer(kind)), 0, 3)
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    other = train(make_click_model(make_saved_optimizer(kind)), 10, 11)
    other.load_weights(path)
    assert_same_bits(arrays_of(model), arrays_of(other))


def test_copies_of_a_new_optimizer():
    """copy.deepcopy goes through config and state; tf_keras's optimizers refuse it."""
    optimizer = make_optimizer("keras3", learning_rate=0.25, num_buckets=7)
    other = copy.deepcopy(optimizer)
    assert other.get_config() == optimizer.get_config()
    assert other is not optimizer
