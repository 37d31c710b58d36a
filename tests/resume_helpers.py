"""Training that is saved half-way in every format, and goes on in another process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from helpers import (
    active_flavor,
    batches_of,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
    run_python,
    state_digest,
)

import tf_basis
from tf_basis import optimizers

BATCH = 16
FORMATS = [
    "export",
    "keras",
    "weights",
    "checkpoint",
    "backup",
    "model_checkpoint",
    "weights_checkpoint",
]
if active_flavor() == "tf_keras":
    FORMATS.append("saved_model")
KINDS = ("adam", "sgd", "adagrad", "onebit")


def make_model(kind: str, half: int, run_eagerly: bool):
    """Half-way it is between two updates (sgd) or in the warm-up (onebit)."""
    assert half % 3
    classes = optimizers.for_flavor(active_flavor())
    optimizer = {
        "adam": lambda: make_optimizer(learning_rate=0.02, exclusive_rows=40),
        "sgd": lambda: classes.BasisSGD(0.05, 0.9, gradient_accumulation_steps=3),
        "adagrad": lambda: classes.BasisAdagrad(0.05, energy_dtype="log8"),
        "onebit": lambda: tf_basis.OneBitAdam(0.01, warmup_steps=half + half // 2),
    }[kind]()
    return make_click_model(optimizer, run_eagerly=run_eagerly)


def fit(model, first: int, last: int, per_epoch: int, callbacks=()):
    """Epochs of the same batches."""
    x, y = batches_of(0, 1, size=BATCH * per_epoch)[0]
    model.fit(
        x,
        y,
        batch_size=BATCH,
        initial_epoch=first,
        epochs=last,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


class InterruptionError(Exception):
    """What ends a run half-way."""


class _Interrupt(tf.keras.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise InterruptionError


class _Save(tf.keras.callbacks.Callback):
    """Saves in all formats that need no callback, after some epochs."""

    def __init__(self, folder: Path, epochs: int, formats: list) -> None:
        super().__init__()
        self.folder, self.epochs, self.formats = folder, epochs, formats

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self.epochs:
            for name in self.formats:
                self._save(name, str(self.folder / name))

    def _save(self, name: str, path: str) -> None:
        model = self.model
        if name == "export":
            tf_basis.export_saved_model(model, path)
        elif name == "keras":
            model.save(f"{path}.keras")
        elif name == "weights":
            model.save_weights(f"{path}.weights.h5")
        elif name == "checkpoint":
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        elif name == "saved_model":
            model.save(path, save_format="tf")


def weights_file(folder: Path) -> str:
    """Of ModelCheckpoint: tf_keras writes a checkpoint of its own there."""
    end = ".weights.h5" if active_flavor() == "keras3" else ""
    return str(folder / "weights_checkpoint_{epoch}") + end


def save_halves(folder, kind, formats, epochs, per_epoch, run_eagerly) -> str:
    """Saves half-way through a run; gives the digest of where the run ends."""
    folder, half = Path(folder) / kind, epochs * per_epoch
    folder.mkdir(parents=True)
    checkpoint = tf.keras.callbacks.ModelCheckpoint
    callbacks = [_Save(folder, epochs, formats)]
    if "model_checkpoint" in formats:
        path = str(folder / "model_checkpoint_{epoch}.keras")
        callbacks.append(checkpoint(path, save_freq=half))
    if "weights_checkpoint" in formats:
        path = weights_file(folder)
        callbacks.append(checkpoint(path, save_freq=half, save_weights_only=True))
    if "backup" in formats:
        model = make_model(kind, half, run_eagerly)
        backup = tf.keras.callbacks.BackupAndRestore(str(folder / "backup"))
        with contextlib.suppress(InterruptionError):
            fit(model, 0, 2 * epochs, per_epoch, [backup, _Interrupt(epochs)])
    model = make_model(kind, half, run_eagerly)
    fit(model, 0, 2 * epochs, per_epoch, callbacks)
    return digest(model)


def digest(model) -> str:
    return state_digest(optimizer_arrays(model.optimizer, model.weights))


def resume(folder, kind, name, epochs, per_epoch, run_eagerly) -> str:
    """Loads what was saved in one format, goes on; gives the digest of the end."""
    folder, callbacks = Path(folder) / kind, []
    model = make_model(kind, epochs * per_epoch, run_eagerly)
    path, first = str(folder / name), epochs
    if name == "export":
        tf_basis.restore_optimizer(model, path)
    elif name in ("keras", "model_checkpoint"):
        end = ".keras" if name == "keras" else f"_{epochs}.keras"
        model = tf.keras.models.load_model(path + end)
        model.run_eagerly = run_eagerly
    elif name in ("weights", "weights_checkpoint"):
        model.optimizer.build(model.trainable_variables)
        path = f"{path}.weights.h5"
        if name == "weights_checkpoint":
            path = weights_file(folder).format(epoch=epochs)
        model.load_weights(path)
    elif name == "checkpoint":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.read(path)
    elif name == "saved_model":
        # tf_keras makes a new optimizer, whatever it is; its state is in the files.
        model = tf.keras.models.load_model(path)
        model.run_eagerly = run_eagerly
        assert int(model.optimizer.iterations) == 0
        model.optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
        status = checkpoint.read(f"{path}/variables/variables")
        status.assert_existing_objects_matched()
    elif name == "backup":
        first = 0
        callbacks = [tf.keras.callbacks.BackupAndRestore(path)]
    start = np.array(tf.convert_to_tensor(model.optimizer.iterations))
    assert name == "backup" or start > 0
    fit(model, first, 2 * epochs, per_epoch, callbacks)
    return digest(model)


RESUME = """
import sys, resume_helpers
folder, epochs, per_epoch, eagerly, *pairs = sys.argv[1:]
for pair in pairs:
    kind, name = pair.split("/")
    found = resume_helpers.resume(
        folder, kind, name, int(epochs), int(per_epoch), eagerly == "True"
    )
    print("resumed", pair, found)
"""


def resume_elsewhere(folder, pairs, epochs, per_epoch, run_eagerly) -> dict:
    """The digests of `resume` in a new process: {"kind/format": digest}."""
    arguments = map(str, (folder, epochs, per_epoch, run_eagerly, *pairs))
    output = run_python(RESUME, *arguments).stdout
    sys.stdout.write(output)
    lines = [line.split() for line in output.splitlines()]
    return {line[1]: line[2] for line in lines if line[:1] == ["resumed"]}
