"""Exports: they serve without the package, and training goes on from them."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import tensorflow as tf
from export_helpers import (
    SUBCLASSED_INPUTS,
    Subclassed,
    arrays_of,
    make_list_model,
    make_model,
    make_named_model,
    random_inputs,
    train,
)
from helpers import (
    active_flavor,
    assert_same_bits,
    make_click_model,
    make_optimizer,
    run_python,
    to_numpy,
)

import tf_basis
from tf_basis import replacing

SERVE = """
import sys
class Hidden:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "tf_basis":
            raise ImportError(name)
sys.meta_path.insert(0, Hidden())
import numpy as np, tensorflow as tf
folder = sys.argv[1]
given = np.load(folder + "/inputs.npz")
for name in sys.argv[2:]:
    serve = tf.saved_model.load(f"{folder}/{name}").signatures["serving_default"]
    names = serve.structured_input_signature[1]
    outputs = serve(**{n: tf.constant(given[n]) for n in names})
    for key, value in outputs.items():
        print(name, key, value.numpy().tobytes().hex())
assert "tf_basis" not in sys.modules
"""


def test_signatures_serve_where_the_package_is_hidden(tmp_path, rng):
    given = random_inputs(rng)
    np.savez(tmp_path / "inputs.npz", **given)
    subclassed = Subclassed()
    subclassed({k: given[k] for k in SUBCLASSED_INPUTS})
    models = {
        "named": (make_named_model(), {k: given[k] for k in ("user", "price")}),
        "list": (make_list_model(), [given["word"], given["number_1"]]),
        "subclassed": (subclassed, {k: given[k] for k in SUBCLASSED_INPUTS}),
    }
    expected = []
    for name, (model, x) in models.items():
        model.compile(make_optimizer(tables="embeddings", num_buckets=2), "mse")
        inputs = SUBCLASSED_INPUTS if name == "subclassed" else None
        if active_flavor() == "tf_keras":
            inputs = None
        tf_basis.export_saved_model(model, tmp_path / name, inputs=inputs)
        x = tf.nest.map_structure(tf.constant, x)
        # Traced too: eager products are not always rounded alike on tf_keras.
        y = tf.function(lambda x, model=model: model(x, training=False))(x)
        key = {"list": "out"}.get(name, "output_1")
        outputs = y if isinstance(y, dict) else {key: y}
        expected += [(name, k, v.numpy()) for k, v in outputs.items()]
    lines = run_python(SERVE, str(tmp_path), *models).stdout.splitlines()
    served = {tuple(k): bytes.fromhex(v) for *k, v in map(str.split, lines)}
    assert served.keys() == {(name, key) for name, key, _ in expected}
    for name, key, value in expected:
        assert served[name, key] == value.tobytes(), (name, key)


KINDS = ["adam", "sgd", "inside"] + [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in ("adagrad", "onebit", "distributed", "loss_scale", "keras")
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:use_ema leaves compressed tables out")
def test_training_goes_on_to_the_same_bits(kind, tmp_path):
    model = train(make_model(kind), 0, 4)
    tf_basis.export_saved_model(model, tmp_path / "export")
    other = make_model(kind)
    tf_basis.restore_optimizer(other, tmp_path / "export")
    assert_same_bits(arrays_of(model), arrays_of(other))
    train(model, 4, 7)
    train(other, 4, 7)
    assert_same_bits(arrays_of(model), arrays_of(other))


def test_random_layers_and_assigned_rates_go_on_too(tmp_path, rng):
    x = {k: v for k, v in random_inputs(rng).items() if k in ("user", "price")}
    y = {"click/rate": np.zeros((7, 1)), "score": np.ones((7, 2))}

    def step(model):
        model.train_on_batch(x, y)
        return arrays_of(model)

    models = [make_named_model(), make_named_model()]
    for model in models:
        losses = {"click/rate": "mse", "score": "mse"}
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.5)
        model.compile(optimizer, losses, run_eagerly=True)
    step(models[0])
    models[0].optimizer.learning_rate = 0.03
    tf_basis.export_saved_model(models[0], tmp_path / "export")
    step(models[1])
    tf_basis.restore_optimizer(models[1], tmp_path / "export")
    rate = to_numpy(tf.convert_to_tensor(models[1].optimizer.learning_rate))
    assert rate == np.float32(0.03)
    if active_flavor() == "keras3":  # tf_keras keeps no seeds of dropout
        assert_same_bits(step(models[0]), step(models[1]))


def test_the_manifest_tells_people_what_is_there(tmp_path):
    optimizer = make_optimizer(
        learning_rate=0.25, exclusive_rows=[7, 3], seed=9, hashing="murmur3"
    )
    model = make_click_model(optimizer)
    tf_basis.export_saved_model(model, tmp_path / "a")
    content = json.loads((tmp_path / "a" / "tf_basis.json").read_text())
    assert content["versions"]["tensorflow"] == tf.__version__
    assert content["flavor"] == active_flavor()
    assert content["optimizer"]["classes"] == ["BasisAdam"]
    config = content["optimizer"]["config"]["config"]
    assert config["learning_rate"] == 0.25 and config["seed"] == 9
    (table,) = content["tables"]
    assert table["rows"] == 12_000 and table["buckets"] == 120 and table["dim"] == 8
    assert table["exclusive_rows"] == [7, 3] and table["seed"] == 9
    assert table["hashing"] == "murmur3" and table["moment_dtype"] == "float32"
    slots = {e.get("slot") for e in content["optimizer_variables"]}
    assert {"second_moment", "row_energy", "bucket_steps"} <= slots
    assert list(content["signature"]["inputs"].values()) == [
        {"shape": [None, 3], "dtype": "int32"}
    ]


def test_an_existing_export_is_replaced_only_if_asked(tmp_path):
    model = make_named_model()
    path = tmp_path / "export"
    tf_basis.export_saved_model(model, path, include_optimizer=False)
    before = (path / "saved_model.pb").stat().st_ino
    with pytest.raises(ValueError, match="overwrite=True"):
        tf_basis.export_saved_model(model, path, include_optimizer=False)
    assert (path / "saved_model.pb").stat().st_ino == before
    tf_basis.export_saved_model(model, path, include_optimizer=False, overwrite=True)
    assert (path / "saved_model.pb").stat().st_ino != before
    assert os.listdir(tmp_path) == ["export"]
    names = [n for n, _ in tf.train.list_variables(str(path / "variables/variables"))]
    assert not [n for n in names if n.startswith("optimizer")]
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="include_optimizer=True"):
        tf_basis.restore_optimizer(model, path)


@pytest.mark.parametrize("moment", ["write", "exchange", "remove"])
def test_a_killed_process_leaves_the_previous_directory(moment, tmp_path, monkeypatch):
    path = tmp_path / "export"
    with replacing.new_directory(path, False) as directory:
        (directory / "file").write_text("old")

    def kill(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()  # it touches files only
    if child == 0:
        if moment == "exchange":
            replacing._exchange = kill
        if moment == "remove":
            replacing.shutil.rmtree = kill
        with replacing.new_directory(path, True) as directory:
            (directory / "file").write_text("new")
            if moment == "write":
                kill()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    expected = "new" if moment == "remove" else "old"
    assert (path / "file").read_text() == expected
    assert len(os.listdir(tmp_path)) == 2
    with replacing.new_directory(path, True) as directory:
        (directory / "file").write_text("newer")
    assert (path / "file").read_text() == "newer" and os.listdir(tmp_path) == ["export"]


def test_what_cannot_be_exported(tmp_path):
    path = tmp_path / "export"
    with pytest.raises(ValueError, match="model must be a model of Keras"):
        tf_basis.export_saved_model(tf.Module(), path)
    model = Subclassed()
    with pytest.raises(ValueError, match="must have been called"):
        tf_basis.export_saved_model(model, path, include_optimizer=False)
    with pytest.raises(ValueError, match="must be compiled"):
        tf_basis.export_saved_model(make_named_model(), path)
    with pytest.raises(ValueError, match="include_optimizer must be True or False"):
        tf_basis.export_saved_model(make_named_model(), path, "yes")
    if active_flavor() == "keras3":
        model({k: tf.zeros([2, *s.shape[1:]]) for k, s in SUBCLASSED_INPUTS.items()})
        with pytest.raises(ValueError, match="inputs must be given for a subclassed"):
            tf_basis.export_saved_model(model, path, include_optimizer=False)
    inputs = [tf.keras.Input((1,), name="a-b"), tf.keras.Input((1,), name="a_b")]
    twice = tf.keras.Model(inputs, tf.keras.layers.Add()(inputs))
    with pytest.raises(ValueError, match="differ in letters and digits"):
        tf_basis.export_saved_model(twice, path, include_optimizer=False)
    sparse = tf.keras.Input((4,), sparse=True, name="sparse")
    model = tf.keras.Model(sparse, tf.keras.layers.Dense(1)(sparse))
    with pytest.raises(ValueError, match="neither sparse nor ragged"):
        tf_basis.export_saved_model(model, path, include_optimizer=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a directory"):
        tf_basis.export_saved_model(
            make_named_model(), tmp_path / "file", False, overwrite=True
        )
    assert not path.exists()
