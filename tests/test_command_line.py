"""`tf-basis`: help, doctor and plan; install-horovod is in test_install.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import tensorflow as tf
from helpers import ROOT, active_flavor

import tf_basis
from tf_basis import __main__ as cli
from tf_basis import distributed
from tf_basis.commands import checks, symptoms
from tf_basis.ops import loader


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


# ---- all commands ---------------------------------------------------------------


HEAVY = ("tensorflow", "keras", "tf_keras", "numpy", "horovod")
AS_SCRIPT = f"""
import sys
sys.argv = ["/somewhere/tf-basis"]
from tf_basis.__main__ import main
try:
    main(["plan", "--help"])
except SystemExit:
    assert "tf_basis.commands.plan" in sys.modules
    assert not set({HEAVY}) & set(sys.modules), "heavy"
"""


@pytest.mark.parametrize("how", [["-m", "tf_basis", "--help"], ["-c", AS_SCRIPT]])
def test_help_does_not_wait_for_tensorflow(how):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: " in done.stdout
    modules = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "tf_basis._process" in modules and not set(HEAVY) & modules


def test_each_command_says_what_it_does(capsys):
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert end.value.code == 0 and f"tf-basis {name}" in capsys.readouterr().out


# ---- doctor ---------------------------------------------------------------------


def test_doctor_says_that_all_is_well(capsys, monkeypatch):
    monkeypatch.setattr(checks, "_horovod", lambda: ("note", "not looked at"))
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    by_name = {check["name"]: check for check in found["checks"]}
    assert status == 0 and found["ok"]
    assert by_name["tensorflow"]["detail"].startswith(tf.__version__)
    name = {"keras3": "Keras 3", "tf_keras": "tf_keras"}[active_flavor()]
    assert by_name["tf.keras"]["detail"].startswith(f"is {name}")
    agree = "C++ op and plain TensorFlow agree"
    assert agree in by_name["self-test of steps"]["detail"]
    assert "3.2% of the bytes" in by_name["self-test of one bit"]["detail"]
    with loader.use("off"):
        status, out, _ = run(capsys, "doctor")
    assert status == 0 and "all is well" in out and "the mode is off" in out
    assert "in plain TensorFlow are finite" in out


def test_doctor_fails_where_a_check_does(capsys, monkeypatch):
    monkeypatch.setattr(checks, "_horovod", lambda: ("failed", "built for another"))
    true = checks._train

    def wrong(mode):
        found = true(mode)
        found["table"] += 1e-3 * (mode == "off")
        return found

    monkeypatch.setattr(checks, "_train", wrong)
    monkeypatch.setattr(checks, "_one_bit", lambda: 1 / 0)
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "3 of 10 checks failed" in out
    assert re.search(r"failed  self-test of steps +table .* differ by 0.001", out)
    assert "ZeroDivisionError" in out
    broken = {"loaded": False, "mode": "auto", "path": __file__, "reason": "too old"}
    monkeypatch.setattr(loader, "status", lambda: {**broken, "build_info": None})
    assert checks._ops() == ("failed", f"not used: too old; {loader.REBUILD}")
    monkeypatch.setattr(tf, "__version__", "2.15.1")
    assert checks._tensorflow()[0] == "failed"
    assert [c.name for c in checks.run_all()][-1] == "tensorflow"


@pytest.mark.parametrize("symptom", symptoms.SYMPTOMS)
def test_symptoms_have_causes_with_a_check(symptom, capsys):
    status, out, _ = run(capsys, "doctor", "--symptom", symptom, "--json")
    causes = json.loads(out)["causes"]
    assert status == 0 and len(causes) >= 3
    assert run(capsys, "doctor", "--symptom", symptom)[1].count("check:") == len(causes)
    if symptom == "low-accuracy":  # what one process may have comes first
        several = [c["cause"].startswith("on several ranks") for c in causes]
        assert several == sorted(several) and several.count(False) == 1
    # What the texts name is there.
    text = json.dumps(causes)
    for name in re.findall(r"distributed\.(\w+)", text):
        assert hasattr(distributed, name)
    for name in re.findall(r"--(\w[\w-]+)", text):
        assert name in ("force",)
    for part in re.findall(r"\b[a-z]+_[a-z_]+\b", text):
        assert part in KNOWN, part


SOURCES = [*(ROOT / "tf_basis").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
KNOWN = set(
    re.findall(
        r"\b[a-z]+_[a-z_]+\b",
        " ".join(p.read_text("utf-8") for p in SOURCES if p.name != "symptoms.py"),
    )
) | {"break_even"}


# ---- plan -----------------------------------------------------------------------


def test_plan_of_shapes(capsys):
    shapes = ["--table", "users=1_000_000x64", "--table", "items=20,000x8"]
    options = ["--state-budget", "30MB", "--moment-dtype", "bfloat16"]
    status, out, _ = run(capsys, "plan", *shapes, *options, "--json")
    expected = tf_basis.plan(
        {"users": (1_000_000, 64), "items": (20_000, 8)},
        state_budget="30MB",
        moment_dtype="bfloat16",
    )
    assert status == 0 and json.loads(out) == {**expected.as_dict(), "left_out": 0}
    status, out, _ = run(capsys, "plan", *shapes, *options)
    assert status == 0 and out.strip() == str(expected)
    more = ["--exclusive-rows", "7", "--momentum", "shared", "--invariant-scalar"]
    more += ["none", "--num-buckets", "50", "--optimizer", "BasisSGD", "--stale-decay"]
    status, out, _ = run(capsys, "plan", *shapes, *more, "--json")
    expected = tf_basis.plan(
        {"users": (1_000_000, 64), "items": (20_000, 8)},
        exclusive_rows=7,
        momentum="shared",
        invariant_scalar=None,
        num_buckets=50,
        optimizer="BasisSGD",
        stale_decay=True,
    )
    assert json.loads(out) == {**expected.as_dict(), "left_out": 0}


@pytest.mark.parametrize(
    "arguments, words, code",
    [
        ([], "give either a saved model or --table", 2),
        (["x.keras", "--table", "a=20000x4"], "give either a saved model or", 2),
        (["--table", "a=20000x4", "--table", "a=20000x4"], "each table once", 2),
        (["/no/such/file"], "'/no/such/file' does not exist", 1),
        (["--table", "a=20000x4", "--state-budget", "9"], "state_budget", 2),
        (["--table", "a=20000x4", "--momentum", "full"], "momentum must be one of", 2),
    ],
)
def test_what_plan_cannot_do_is_said(arguments, words, code, capsys):
    status, out, err = run(capsys, "plan", *arguments)
    assert (status, out) == (code, "") and err.startswith("tf-basis plan: ")
    assert words in err


def test_bad_usage_and_damaged_files(tmp_path, capsys):
    for shape in ("1000000", "0x64", "_x64", "1000000x0", "0x4x4"):
        with pytest.raises(SystemExit) as end:
            cli.main(["plan", "--table", f"users={shape}"])
        assert end.value.code == 2
        words = f"such as users=1000000x64, received 'users={shape}'"
        assert words in capsys.readouterr().err
    damaged = tmp_path / "damaged.keras"
    damaged.write_bytes(b"PK nothing")
    for command in ("plan", "report"):
        status, _, err = run(capsys, command, damaged)
        assert status == 1 and str(damaged) in err
        assert run(capsys, command, tmp_path)[0] == 1
    other = tmp_path / "x.txt"
    other.write_text("x")
    assert "MODEL must be a .keras" in run(capsys, "plan", other)[2]
