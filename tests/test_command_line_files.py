"""`tf-basis plan` and `report` of saved models and trainings, of both flavours."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor

import tf_basis
from tf_basis import __main__ as cli
from tf_basis import diagnostics, distributed

keras = tf.keras
ROWS = 300


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def model_of(optimizer, name="users"):
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,), dtype="int32", name="ids")
    table = keras.layers.Embedding(ROWS, 4, name=name)
    x = keras.layers.Flatten()(table(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile(optimizer, "mse")
    rows = np.random.default_rng(0).integers(0, ROWS, (64, 2))
    model.fit(rows.astype(np.int32), np.ones((64, 1)), 16, verbose=0)
    return model


def adam(**settings):
    return tf_basis.BasisAdam(1e-2, min_rows=10, **{"num_buckets": 2, **settings})


SETTINGS = {
    "num_buckets": 5,
    "exclusive_rows": [7, 3],
    "table_settings": {"users": {"scalar_range": (0.9, 1.1)}},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One model in every format, and its report."""
    folder = tmp_path_factory.mktemp("saved")
    model = model_of(adam(**SETTINGS))
    tf_basis.export_saved_model(model, folder / "export")
    tf_basis.export_saved_model(model, folder / "served", include_optimizer=False)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    expected = diagnostics.report(model.optimizer).as_dict()
    both = {"model": model, "optimizer": model.optimizer}
    tf.train.Checkpoint(**both).save(str(folder / "checkpoint" / "at"))
    distributed.save_checkpoint(folder / "ranks", model, 4)
    # Of the same model, with steps of its own.
    model.fit(np.zeros((32, 2), np.int32), np.ones((32, 1)), 16, verbose=0)
    model.save(folder / "fresh.keras")
    return folder, expected


# ---- plan ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["export", "served", "model.keras", "model.weights.h5"]
)
def test_plan_of_a_saved_model(name, saved, capsys):
    options = ["--min-rows", 100, "--compression-ratio", 10, "--json"]
    status, out, err = run(capsys, "plan", saved[0] / name, *options)
    assert status == 0, err
    (table,) = json.loads(out)["tables"]  # and not the moments
    assert (table["n_rows"], table["dim"], table["buckets"]) == (ROWS, 4, 30)
    if active_flavor() == "tf_keras" and name.startswith("model"):
        assert table["path"].endswith("/embedding")  # it writes no names of layers
    else:
        assert table["path"].startswith("users")
    status, out, _ = run(capsys, "plan", saved[0] / name)
    assert status == 0 and "no table would be compressed" in out
    told = "left out: 2 of 2 variables with two dimensions; the largest of them has 300"
    assert f"{told} rows, and --min-rows is 10,000" in out
    assert "optimizer and tables are set to is not known here" in out


@pytest.mark.long
def test_plan_of_a_plain_savedmodel(tmp_path, capsys):
    model = model_of(keras.optimizers.Adam())
    tf.saved_model.save(model, str(tmp_path / "plain"))
    options = ["--min-rows", 100, "--json"]
    status, out, err = run(capsys, "plan", tmp_path / "plain", *options)
    assert status == 0, err
    (table,) = json.loads(out)["tables"]
    assert (table["n_rows"], table["dim"]) == (ROWS, 4)


# ---- report ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["export", "model.keras"])
def test_report_of_a_file_is_that_of_the_optimizer(name, saved, tmp_path, capsys):
    folder, expected = saved
    page = tmp_path / "page.html"
    status, out, err = run(capsys, "report", folder / name, "--json", "--html", page)
    assert status == 0, err
    found = json.loads(out)
    assert found == json.loads(json.dumps(expected))
    assert [a["code"] for a in found["advice"]] == ["scalars_at_limits"]
    assert found["step"] == 4
    assert page.read_text("utf-8").count("<svg") >= 5
    status, out, _ = run(capsys, "report", folder / name, "--strict")
    assert status == 1 and "scalars_at_limits" in out


STATES = ("model.weights.h5", "checkpoint", "checkpoint/at-1", "ranks")


@pytest.mark.parametrize("name", STATES)
def test_report_of_state_without_a_config(name, saved, capsys):
    folder, expected = saved
    options = ["--model", folder / "fresh.keras", "--json"]
    status, out, err = run(capsys, "report", folder / name, *options)
    assert status == 0, err
    assert json.loads(out) == json.loads(json.dumps(expected))


@pytest.mark.long
def test_state_of_another_model_is_refused(saved, tmp_path, capsys):
    folder, _ = saved
    model_of(adam(num_buckets=9)).save(tmp_path / "other.keras")
    for name in STATES:
        options = ["--model", tmp_path / "other.keras"]
        status, out, err = run(capsys, "report", folder / name, *options)
        assert (status, out) == (1, "") and err
    status, _, err = run(capsys, "report", folder / "ranks", "--model", "x.h5")
    assert status == 1 and "model must be a .keras file, received 'x.h5'" in err


@pytest.mark.long
def test_report_of_the_optimizers_inside_another(tmp_path, capsys):
    inner = adam(num_buckets=20)
    model = model_of(distributed.DistributedOptimizer(inner))
    tf_basis.export_saved_model(model, tmp_path / "export")
    expected = diagnostics.report(model.optimizer)
    status, out, err = run(capsys, "report", tmp_path / "export", "--json")
    assert status == 0, err
    assert json.loads(out)["tables"] == json.loads(json.dumps(expected.tables))


def test_report_of_the_folder_one_is_in(saved, capsys, monkeypatch):
    folder, expected = saved
    monkeypatch.chdir(folder / "export")
    for here in (".", ""):
        status, out, err = run(capsys, "report", here, "--json")
        assert status == 0, err
        assert json.loads(out) == json.loads(json.dumps(expected))
    model = ["--model", folder / "fresh.keras"]
    for more in ([], model):
        status, _, err = run(capsys, "report", "/", *more)
        assert status == 1 and "path must be" in err and "'/'" in err
    monkeypatch.chdir(folder / "checkpoint")
    assert run(capsys, "report", ".", *model)[0] == 0


def test_a_flipped_bit_of_an_archive_is_damage(saved, tmp_path, capsys):
    content = bytearray((saved[0] / "model.keras").read_bytes())
    content[content.index(b"\x89HDF") + 5000] ^= 1
    (tmp_path / "flipped.keras").write_bytes(content)
    (tmp_path / "short.keras").write_bytes(content[:-30])
    for name, words in {
        "flipped": "is damaged: 'model.weights.h5' in it",
        "short": "is damaged, or no .keras file",
    }.items():
        status, out, err = run(capsys, "report", tmp_path / f"{name}.keras")
        assert (status, out) == (1, "") and words in err and "restore" not in err


def test_the_keras_that_wrote_a_file_is_named(tmp_path, capsys):
    keras3 = active_flavor() == "keras3"
    with zipfile.ZipFile(tmp_path / "other.keras", "w") as archive:
        version = "2.19.0" if keras3 else "3.12.0"
        archive.writestr("metadata.json", json.dumps({"keras_version": version}))
        archive.writestr("config.json", '{"class_name": "Unknown", "config": {}}')
    words = ["tf_keras: set", "Keras 3: unset"][not keras3] + " TF_USE_LEGACY_KERAS"
    status, out, err = run(capsys, "report", tmp_path / "other.keras")
    assert (status, out) == (1, "") and words in err and "docs/saving.md" not in err


def test_why_there_is_nothing_to_report_is_said(tmp_path, capsys):
    for name, optimizer, words in [
        ("small", tf_basis.BasisAdam(), "has 300 rows, and min_rows of the optimizer"),
        ("adam", keras.optimizers.Adam(), "without an optimizer of tf_basis, with Ad"),
    ]:
        model_of(optimizer).save(tmp_path / f"{name}.keras")
        page = tmp_path / f"{name}.html"
        file = tmp_path / f"{name}.keras"
        status, out, err = run(capsys, "report", file, "--html", page)
        assert (status, words in out + err) == (name == "adam", True), out + err
        if name == "small":
            text = page.read_text(encoding="utf-8")
            assert words in text and "Nothing to do" not in text


def test_what_has_no_tables_to_report_is_said(saved, tmp_path, capsys):
    folder, _ = saved
    for name, words in {
        "served": "include_optimizer=True",
        "checkpoint": "tf_basis.diagnostics.report(model.optimizer)",
        "model.weights.h5": "tf_basis.diagnostics.report(model.optimizer)",
        "none": "does not exist",
        ".": f"one export, received the directory '{folder}' with '{folder}/export', ",
    }.items():
        status, out, err = run(capsys, "report", folder / name)
        assert (status, out) == (1, "") and words in err
    page = tmp_path / "no" / "page.html"
    status, _, err = run(capsys, "report", folder / "export", "--html", page)
    assert status == 1 and "--html cannot be written" in err
