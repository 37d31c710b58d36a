"""Files of distributed checkpoints: damaged, foreign, pruned; and the callback."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor, make_click_model, state_digest, to_numpy

import tf_basis
from tf_basis import checksums, distributed
from tf_basis.distributed import callbacks, snapshot

keras = tf.keras
SAVE, RESTORE = distributed.save_checkpoint, distributed.restore_checkpoint


def new_model(**settings):
    inner = distributed.OneBitAdam(
        0.01, warmup_steps=1, policy=distributed.Policy(min_elements=0)
    )
    optimizer = tf_basis.BasisAdam(
        0.01, moment_dtype="bfloat16", dense_optimizer=inner, **settings
    )
    model = make_click_model(optimizer, run_eagerly=True)
    callbacks.build(model.optimizer, model)
    return model


def values(model) -> str:
    everything = [*model.variables, *callbacks.optimizer_variables(model.optimizer)]
    return state_digest({f"{i:03d}": to_numpy(v) for i, v in enumerate(everything)})


def disturb(model, by=1.5):
    """Other values everywhere."""
    for variable in [*model.variables, *callbacks.optimizer_variables(model.optimizer)]:
        plain = distributed.broadcast.native(variable)
        plain.assign(
            tf.cast(tf.ones_like(plain), plain.dtype) * tf.cast(by, plain.dtype)
        )


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture
def saved(model, tmp_path):
    """Two checkpoints, and the digests of what they hold."""
    digests = []
    for step in (1, 2):
        disturb(model, step + 0.5)
        SAVE(tmp_path, model, step)
        digests.append(values(model))
    disturb(model, 7.5)
    return tmp_path, digests


def test_all_comes_back_to_the_bit(model, saved):
    folder, (_, second) = saved
    info = RESTORE(folder, model)
    assert values(model) == second
    assert info[1:] == (2, 0, 0, 1, {})
    manifest = json.loads(Path(info.path, "manifest.json").read_text())["content"]
    dtypes = {t["dtype"] for t in manifest["shared"]["tensors"]}
    assert dtypes >= {"bfloat16", "float32", "int64"}
    assert manifest["versions"]["tf_basis"] == tf_basis.__version__
    assert manifest["flavor"] == active_flavor()


DTYPES = ["bfloat16", "bool", "float16", "float64", "int8", "uint32", "uint64"]


def test_every_dtype_and_shape_comes_back(tmp_path, rng):
    bits = rng.integers(0, 256, 8 * 24, dtype=np.uint8)
    bits[-3:] = 1, 0, 1
    arrays = {}
    for name in DTYPES:
        dtype = tf.as_dtype(name).as_numpy_dtype
        values = (bits % 2 if name == "bool" else bits).view(dtype)[:24]
        for shape in [(2, 3, 4), (24,), (0, 5)]:
            arrays[f"{name} {shape}"] = values[: int(np.prod(shape))].reshape(shape)
        arrays[f"{name} ()"] = values[7].reshape(())
    tensors = [(name, lambda value=value: value) for name, value in arrays.items()]
    part = snapshot.write_part(tmp_path / "part.bin", tensors)
    snapshot.verify_part(tmp_path, part)
    with snapshot.PartReader(tmp_path, part) as reader:
        for number, (name, value) in reversed(list(enumerate(arrays.items()))):
            got = reader.read(number)
            assert (got.dtype, got.shape) == (value.dtype, value.shape), name
            assert got.tobytes() == value.tobytes()


def flip(path: Path, place: int = 20):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def rewrite(folder: Path, change):
    """Another manifest that says truly what it says."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    change(content)
    text = {"sha256": checksums.of_json(content), "content": content}
    (folder / "manifest.json").write_text(json.dumps(text))


DAMAGES = {
    "cut": (
        lambda f: (f / "shared.bin").write_bytes((f / "shared.bin").read_bytes()[:-3]),
        "shared.bin must have [0-9]+ bytes, as its manifest says, but it has [0-9]+",
    ),
    "flipped": (
        lambda f: flip(f / "shared.bin"),
        "shared.bin must have the SHA-256 of its manifest, [0-9a-f]{64}, but it has",
    ),
    "own flipped": (lambda f: flip(f / "rank-00000.bin"), "rank-00000.bin must have"),
    "missing": (
        lambda f: (f / "rank-00000.bin").unlink(),
        "rank-00000.bin must be there to be read",
    ),
    "manifest cut": (
        lambda f: (f / "manifest.json").write_bytes(
            (f / "manifest.json").read_bytes()[:-30]
        ),
        "manifest.json must be the manifest of a tf_basis distributed checkpoint",
    ),
    "manifest changed": (
        lambda f: (f / "manifest.json").write_text(
            (f / "manifest.json").read_text().replace('"step": 2', '"step": 3')
        ),
        "manifest.json must have the SHA-256 that it names: it says",
    ),
    "manifest of nothing": (
        lambda f: (f / "manifest.json").write_text('{"x": 1}'),
        "cannot be read as one .KeyError",
    ),
    "no text": (
        lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        "cannot be read as one .UnicodeDecodeError",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named_and_changes_nothing(model, saved, damage):
    folder, (first, _) = saved
    spoil, words = DAMAGES[damage]
    spoil(folder / "checkpoint-00000002")
    before = values(model)
    with pytest.raises(distributed.DamagedCheckpointError, match=words):
        RESTORE(folder, model)
    assert values(model) == before
    with pytest.warns(
        UserWarning, match="going on with .*checkpoint-00000001, because"
    ):
        assert RESTORE(folder, model, fallback=True).step == 1
    assert values(model) == first


FOREIGN = {
    "format": (lambda c: c.update(format=2), "must have format 1, received 2"),
    "kind": (lambda c: c.update(kind="other"), "received 'other'"),
    "flavor": (lambda c: c.update(flavor="keras9"), "the flavor .* received keras9"),
    "optimizer": (
        lambda c: c["optimizers"].__setitem__(0, "BasisSGD"),
        "the optimizers of this model, .'BasisAdam', 'OneBitAdam'., received .'BasisS",
    ),
    "shape": (
        lambda c: c["shared"]["tensors"][2].update(shape=[3, 4]),
        r"in place 2 of shared.bin '.*' float32 \(.*\), received '.*' float32 \(3, 4\)",
    ),
    "dtype": (
        lambda c: c["shared"]["tensors"][0].update(dtype="float16"),
        "in place 0 of shared.bin .* float32 .*, received .* float16",
    ),
    "name": (
        lambda c: c["ranks"][0]["tensors"][0].update(name="x"),
        "in place 0 of rank-00000.bin '.*worker_error' .* received 'x'",
    ),
    "fewer": (lambda c: c["shared"]["tensors"].pop(), "received nothing"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_the_checkpoint_of_something_else_is_refused(model, saved, what):
    folder, _ = saved
    change, words = FOREIGN[what]
    rewrite(folder / "checkpoint-00000002", change)
    before = values(model)
    with pytest.raises(ValueError, match=words) as error:
        RESTORE(folder, model, fallback=True)  # it is not damaged
    assert not isinstance(error.value, distributed.DamagedCheckpointError)
    assert values(model) == before


def test_a_table_of_another_hash_seed_is_refused(saved):
    other = new_model(seed=5)
    before = values(other)
    with pytest.raises(ValueError, match=r"tables of this model.*'seed': 5.*'seed': 0"):
        RESTORE(saved[0], other)
    assert values(other) == before


def test_what_has_no_manifest_counts_for_nothing(model, saved):
    folder, (first, _) = saved
    (folder / "checkpoint-00000002" / "manifest.json").unlink()
    (folder / "notes").mkdir()
    assert RESTORE(folder, model).step == 1
    assert values(model) == first
    SAVE(folder, model, 3, keep=2)
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["checkpoint-00000001", "checkpoint-00000003", "notes"]
    assert RESTORE(folder / "nothing", model) is None


def test_old_ones_go_when_the_new_one_is_complete(model, tmp_path):
    for step in range(5):
        SAVE(tmp_path, model, step, keep=2)
    assert snapshot.complete(tmp_path) == ["checkpoint-00000005", "checkpoint-00000004"]
    assert len(snapshot.folders(tmp_path)) == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"step": -1}, "step .* received -1"),
        ({"step": 1, "epoch": 0.5}, "epoch .* received 0.5"),
        ({"step": 1, "keep": 0}, "keep .* received 0"),
        ({"step": 1, "extra": {"x": object()}}, "extra must be a dict that is ready"),
    ],
)
def test_bad_arguments_write_nothing(model, tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        SAVE(tmp_path, model, **arguments)
    assert not list(tmp_path.iterdir())
    for directory in (None, 3, ""):  # on all ranks, where it is wrong on one
        told = "directory must be the path of a folder, received"
        with pytest.raises(ValueError, match=told):
            SAVE(directory, model, 1)
        with pytest.raises(ValueError, match=told):
            RESTORE(directory, model)


# ---- the callback ---------------------------------------------------------------


class Stop(keras.callbacks.Callback):
    """Ends the process, as far as training is concerned."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def small_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    return model


def batches(endless=False, known=True):
    x = np.random.default_rng(1).normal(size=(10, 2)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)
    if endless:
        return data.repeat()
    return data if known else data.filter(lambda *_: True)


CASES = {
    "epochs": ("epoch", {}, {}, 7, 5),
    "steps": (3, {}, {}, 8, 6),
    "steps, last of an epoch": (5, {}, {}, 6, 5),
    "unknown length": (3, {"known": False}, {}, 8, 6),
    "unknown length, last": (5, {"known": False}, {}, 6, 5),
    "endless": (3, {"endless": True}, {"steps_per_epoch": 4}, 7, 6),
}


@pytest.mark.parametrize(
    "case",
    ["steps", "unknown length, last"]
    + [
        pytest.param(case, marks=pytest.mark.long)
        for case in ("epochs", "steps, last of an epoch", "unknown length", "endless")
    ],
)
def test_fit_goes_on_where_it_was(tmp_path, case):
    every, kind, steps, stop, at = CASES[case]
    whole = small_model()
    fresh = distributed.CheckpointCallback(tmp_path / "whole", every)
    assert fresh.restore(whole) is None
    for part in fresh.parts(batches(**kind), epochs=3, **steps):
        whole.fit(**part, verbose=0, shuffle=False, callbacks=[fresh])
    model = small_model()
    first = distributed.CheckpointCallback(tmp_path / "parts", every)
    with pytest.raises(KeyboardInterrupt):
        for part in first.parts(batches(**kind), epochs=3, **steps):
            model.fit(**part, verbose=0, callbacks=[first, Stop(stop)])
    model = small_model()
    second = distributed.CheckpointCallback(tmp_path / "parts", every)
    assert second.restore(model).step == at
    if case == "steps":
        with pytest.raises(ValueError, match="goes on behind batch 1 of epoch 1"):
            model.fit(batches(), epochs=3, initial_epoch=1, callbacks=[second])
    for part in second.parts(batches(**kind), epochs=3, **steps):
        model.fit(**part, verbose=0, callbacks=[second])
    assert second.step == fresh.step == int(to_numpy(model.optimizer.iterations))
    assert values(model) == values(whole)
    names = [snapshot.complete(tmp_path / name)[0] for name in ("parts", "whole")]
    assert names[0] == names[1]  # as many as without the interruption


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"every": 0}, "every must be 'epoch' or an integer .* received 0"),
        ({"every": "step"}, "every .* received 'step'"),
        ({"keep": 0}, "keep .* received 0"),
        ({"timeout": -1}, "timeout .* received -1"),
        ({"directory": None}, "directory must be the path of a folder, received None"),
        ({"directory": ""}, "directory must be the path of a folder, received ''"),
    ],
)
def test_the_callback_refuses_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        distributed.CheckpointCallback(**{"directory": "folder", **arguments})


def test_a_folder_that_cannot_be_made_is_said_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("no folder")
    callback = distributed.CheckpointCallback(tmp_path / "file" / "checkpoints")
    with pytest.raises(OSError, match=r"^directory needs a folder .*/checkpoints'"):
        callback.on_train_begin()
    callback = distributed.CheckpointCallback(tmp_path / "new" / "checkpoints")
    callback.on_train_begin()
    assert not list((tmp_path / "new" / "checkpoints").iterdir())


def test_parts_must_be_of_a_dataset():
    callback = distributed.CheckpointCallback("folder")
    with pytest.raises(ValueError, match=r"data must be a tf.data.Dataset"):
        list(callback.parts(np.ones(3), epochs=1))
    with pytest.raises(ValueError, match=r"steps_per_epoch .* received 0"):
        list(callback.parts(batches(), epochs=1, steps_per_epoch=0))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="model must be a compiled model"):
        callback.restore(model)


def test_no_warning_without_a_reason(model, saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        RESTORE(saved[0], model)
