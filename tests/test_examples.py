"""The examples end to end on a small generated MovieLens, and their error messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, active_flavor

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import comparison  # noqa: E402

OPTIMIZERS = [
    "Keras Adam",
    "BasisAdam 10:1",
    "BasisAdam 100:1",
    "original rule 100:1",
]
keras3_only = pytest.mark.skipif(
    active_flavor() != "keras3",
    reason="a Keras 3 example: it runs in the suite's Keras 3 process",
)


def run_example(name, *args, **env):
    """Runs an example as a user would."""
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
        **env,
    }
    if "TF_USE_LEGACY_KERAS" not in env:
        environment.pop("TF_USE_LEGACY_KERAS", None)
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    """u.data, u.user and u.item with 1,500 ratings in which users and items differ."""
    folder = tmp_path_factory.mktemp("movielens")
    rng = np.random.default_rng(0)
    users, items = rng.normal(size=40), rng.normal(size=60)
    lines = []
    for second in range(1500):
        user, item = rng.integers(40), rng.integers(60)
        taste = users[user] + items[item] + rng.normal() * 0.5
        rating = int(np.clip(np.round(3.4 + taste), 1, 5))
        lines.append(f"{user + 1}\t{item + 1}\t{rating}\t{second}")
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    people = [f"{u + 1}|{15 + u}|{'MF'[u % 2]}|job{u % 5}|12345" for u in range(40)]
    (folder / "u.user").write_text("\n".join(people) + "\n")
    films = []
    for i in range(60):
        flags = "|".join("1" if g in (i % 19, i % 7) else "0" for g in range(19))
        films.append(f"{i + 1}|Film {i}|01-Jan-{1950 + i % 50}||url|{flags}")
    (folder / "u.item").write_text("\n".join(films) + "\n")
    return folder / "u.data"


@pytest.fixture(scope="module")
def ctr_run(movielens, tmp_path_factory):
    """One whole run of the main example: its process and its JSON."""
    target = tmp_path_factory.mktemp("out") / "result.json"
    done = run_example(
        "movielens_ctr.py", "--data", movielens, "--seeds", 2, "--epochs", 2,
        "--batch-size", 100, "--learning-rate", 0.01, "--json", target,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(target.read_text())


# ---- the main example ---------------------------------------------------------


@keras3_only
def test_ctr_prints_one_table(ctr_run):
    done, result = ctr_run
    lines = done.stdout.splitlines()
    # In a log an epoch is one line: 4 optimizers, 2 seeds, 2 epochs.
    assert sum(" - loss: " in line for line in lines) == 16
    head = next(i for i, line in enumerate(lines) if line.startswith("optimizer "))
    for column in ("rate", "AUC", "log-loss", "bytes", "ms/step"):
        assert column in lines[head]
    table = lines[head + 1 : head + 5]
    for line, name, found in zip(table, OPTIMIZERS, result["optimizers"], strict=True):
        assert line.startswith(name) and found["optimizer"] == name
        assert f"{found['auc']:.4f} ± {found['auc_spread']:.4f}" in line
        assert f"{found['log_loss']:.4f}" in line
        assert f"{found['state_bytes']:,}" in line
    assert "1,500 ratings, the first 1,200 to train on" in done.stdout
    assert "12/12" in done.stdout  # Keras' progress bar: 1,200 in batches of 100
    assert "no such information" not in done.stdout


@keras3_only
def test_ctr_json_holds_every_run(ctr_run):
    _, result = ctr_run
    assert result["table_rows"] == sum(result["fields"].values()) > 1000
    assert result["left_out"] == [] and "item x occupation" in result["fields"]
    assert (result["epochs"], result["batch_size"]) == (2, 100)
    runs = result["runs"]
    assert [(r["optimizer"], r["seed"]) for r in runs] == [
        (name, seed) for seed in (0, 1) for name in OPTIMIZERS
    ]
    for run in runs:
        assert 0.5 < run["auc"] < 1, run  # users and items differ: all models learn
        assert 0 < run["log_loss"] < 2 and run["ms_per_step"] > 0
        assert run["learning_rate"] == 0.01
    for line in result["optimizers"]:
        own = [r for r in runs if r["optimizer"] == line["optimizer"]]
        values = [r["auc"] for r in own]
        assert line["auc"] == pytest.approx(np.mean(values))
        assert line["auc_spread"] == pytest.approx(np.std(values, ddof=1))
    gains = [runs[2]["auc"] - runs[0]["auc"], runs[6]["auc"] - runs[4]["auc"]]
    assert result["auc_gain_100"] == pytest.approx(gains)
    assert result["claim_holds"] is bool(np.mean(gains) >= -0.002)


@keras3_only
def test_ctr_state_bytes_are_those_of_the_tables(ctr_run):
    _, result = ctr_run
    rows = result["table_rows"]
    adam, ten, hundred, original = (r["state_bytes"] for r in result["optimizers"])
    assert adam == 2 * rows * 16 * 4
    for found, ratio, moments in ((ten, 10, 1), (hundred, 100, 1), (original, 100, 2)):
        buckets = -(-rows // ratio)
        # moments and a step count per bucket (4 or 8 bytes), a scalar per row
        least = buckets * (moments * 16 * 4 + 4) + rows * 4
        assert least <= found <= least + buckets * 4


@keras3_only
def test_ctr_says_whether_the_claim_holds(ctr_run):
    done, result = ctr_run
    line = done.stdout.strip().splitlines()[-1]
    assert "minus Keras Adam" in line and "mean over 2 seeds" in line
    assert line.endswith(": holds") is result["claim_holds"]


@pytest.mark.long
@keras3_only
def test_ctr_without_side_information(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "ratings.csv"
    lines = ["userId,movieId,rating,timestamp"]
    lines += [f"u{rng.integers(9)},{rng.integers(20)},{rng.integers(1, 6)},{t}"
              for t in range(200)]  # fmt: skip
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode())
    target = tmp_path / "result.json"
    done = run_example(
        "movielens_ctr.py", "--data", path, "--seeds", 1, "--json", target
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no such information beside the ratings: age" in done.stdout
    result = json.loads(target.read_text())
    assert list(result["fields"]) == ["user", "item", "history", "item x history"]
    assert "user x genre" in result["left_out"]
    rates = [line["learning_rate"] for line in result["optimizers"]]
    assert all(rate in (1e-4, 3e-4, 1e-3, 3e-3) for rate in rates)
    assert all(0 <= line["auc"] <= 1 for line in result["optimizers"])


@keras3_only
def test_ctr_bad_line_is_one_clear_error(movielens, tmp_path):
    lines = movielens.read_text().splitlines()
    lines[700] = lines[700].replace("\t", " ")
    (tmp_path / "u.data").write_text("\n".join(lines))
    done = run_example("movielens_ctr.py", "--data", tmp_path / "u.data")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and f"{tmp_path / 'u.data'}:701: expected 4" in error[0]


@keras3_only
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("no.csv", None, "no such file"),
        ("ratings.parquet", "x", "unknown format '.parquet'"),
        ("ratings.csv", "", "the header must name userId"),
        ("u.data", "", "holds no ratings"),
        ("u.data", "1\t1\t9\t1\n", r"u.data:1: rating must lie in [0.5, 5], got 9"),
        ("u.data", "1\t1\t5\t1\n", "the training part (0 of 1 ratings) must hold"),
        ("u.data", "1\t1\t5\t1\n1\t2\t1\t1\n" * 8 + "1\t1\t5\t2\n" * 4, "the test"),
    ],
)
def test_ctr_errors_exit_with_2(tmp_path, capsys, name, text, said):
    import movielens_ctr

    if text is not None:
        (tmp_path / name).write_text(text)
    assert movielens_ctr.main(["--data", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err
    assert err.count("\n") == 1


@keras3_only
@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "0"],
        ["--epochs", "-1"],
        ["--batch-size", "many"],
        ["--learning-rate", "nan"],
        ["--json", "no/such/folder/result.json"],
    ],
)
def test_ctr_bad_arguments(capsys, arguments):
    import movielens_ctr

    with pytest.raises(SystemExit) as stop:
        movielens_ctr.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@keras3_only
def test_ctr_says_that_it_wants_keras_3():
    done = run_example("movielens_ctr.py", TF_USE_LEGACY_KERAS="1")
    assert done.returncode == 2
    assert "this example is for Keras 3" in done.stderr
    assert "Traceback" not in done.stderr


@keras3_only
def test_same_seed_gives_same_model_and_batches(movielens):
    import movielens_ctr
    import movielens_data
    import movielens_features

    log = movielens_data.load(movielens)
    made = movielens_features.make_features(log, log.n_train)
    models = [movielens_ctr.make_model(made, seed) for seed in (3, 3, 4)]
    table = [m.get_layer("table").embeddings.numpy() for m in models]
    np.testing.assert_array_equal(table[0], table[1])
    assert (table[0] != table[2]).any()

    def order(seed):
        arrays = (np.arange(50), np.arange(50), np.arange(50))
        batches = movielens_ctr.Batches(arrays, 8, seed)
        passes = []
        for _ in range(2):
            passes.append(np.concatenate([batches[i][1] for i in range(len(batches))]))
            batches.on_epoch_end()
        return np.array(passes)

    np.testing.assert_array_equal(order(3), order(3))
    assert (order(3) != order(4)).any()
    first, second = order(3)
    assert (first != second).any()
    assert sorted(first) == sorted(second) == list(range(50))


@pytest.mark.long
@keras3_only
def test_training_again_gives_the_same_scores(movielens, capsys):
    import argparse

    import movielens_ctr
    import movielens_data
    import movielens_features

    log = movielens_data.load(movielens)
    made = movielens_features.make_features(log, log.n_train)
    args = argparse.Namespace(batch_size=200, epochs=1)
    data = (made, log.label, log.n_train, 1500, 5, args)
    runs = [movielens_ctr.train("BasisAdam 100:1", 0.01, *data) for _ in range(2)]
    assert runs[0]["auc"] == runs[1]["auc"]
    assert runs[0]["log_loss"] == runs[1]["log_loss"]


@keras3_only
def test_optimizers_are_what_their_names_say():
    import movielens_ctr

    import tf_basis

    assert list(movielens_ctr.LEARNING_RATES) == OPTIMIZERS
    assert set(movielens_ctr.LEARNING_RATES.values()) <= set(movielens_ctr.CANDIDATES)
    made = [movielens_ctr.make_optimizer(name, 0.1) for name in OPTIMIZERS]
    assert type(made[0]) is movielens_ctr.keras.optimizers.Adam
    assert {type(optimizer) for optimizer in made[1:]} == {tf_basis.BasisAdam}
    config = [optimizer.get_config() for optimizer in made]
    assert [c["compression_ratio"] for c in config[1:]] == [10, 100, 100]
    assert config[3].items() >= movielens_ctr.ORIGINAL.items()
    for ours in config[1:3]:
        assert ours["momentum"] == "exclusive"
        assert ours["invariant_scalar"] == "energy"


@keras3_only
def test_tune_looks_at_the_training_part_only(movielens, monkeypatch, capsys):
    import movielens_ctr
    import movielens_data

    calls = []

    def fake(name, rate, features, label, n_train, n_end, seed, args):
        calls.append((name, rate, n_train, n_end, seed))
        return {"auc": 0.5 + (rate == best[name]) * 0.1 + seed * 0.01}

    rates = movielens_ctr.CANDIDATES
    best = dict(zip(OPTIMIZERS, rates, strict=True))
    monkeypatch.setattr(movielens_ctr, "train", fake)
    log = movielens_data.load(movielens)
    args = movielens_ctr.parse(["--seeds", "2"])
    assert movielens_ctr.tune(log, args) == best
    assert {call[2:4] for call in calls} == {(1080, 1200)}
    assert len(calls) == len(OPTIMIZERS) * len(rates) * 2
    assert capsys.readouterr().out.count("validation AUC of") == 4


# ---- scores -------------------------------------------------------------------


def test_auc_is_the_share_of_pairs_in_order(rng):
    label = rng.integers(0, 2, 200).astype(np.float32)
    score = rng.integers(0, 20, 200) / 7.0  # many ties
    ones, zeros = score[label > 0][:, None], score[label == 0][None]
    wanted = np.mean((ones > zeros) + 0.5 * (ones == zeros))
    assert comparison.auc(label, score) == pytest.approx(wanted, abs=1e-12)
    assert comparison.auc(label, label) == 1 and comparison.auc(label, -label) == 0
    with pytest.raises(ValueError, match="both labels"):
        comparison.auc(np.ones(4), score[:4])


def test_log_loss_is_cross_entropy_and_stays_finite(rng):
    label, logit = rng.integers(0, 2, 50).astype(float), rng.normal(size=50)
    p = 1 / (1 + np.exp(-logit))
    wanted = -np.mean(label * np.log(p) + (1 - label) * np.log(1 - p))
    assert comparison.log_loss(label, logit) == pytest.approx(wanted)
    assert comparison.log_loss(np.array([0.0]), np.array([900.0])) == 900


def test_claim_is_about_the_mean(capsys):
    assert comparison.print_claim([-0.003, 0.0], 0.002) is True
    assert comparison.print_claim([-0.005, 0.0], 0.002) is False
    out = capsys.readouterr().out
    assert out.count("DOES NOT HOLD") == 1
    assert "-0.0025, mean over 2 seeds (-0.0050 to +0.0000)" in out
