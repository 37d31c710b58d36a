"""Trainings that save and go on, for `test_distributed_checkpoint.py`."""

from __future__ import annotations

import json
import pathlib
import warnings

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod_nursery import started
from horovod_pairs import digest, model_of
from horovod_rank import error_of

import tf_basis
from tf_basis import distributed
from tf_basis.distributed import callbacks, residuals
from tf_basis.distributed.broadcast import native

keras = tf.keras
TINY = distributed.Policy([("normalization", 16, 3)], min_elements=0)


def onebit(warmup_steps=3):
    return distributed.OneBitAdam(
        0.01, warmup_steps=warmup_steps, policy=TINY, block=64
    )


def compression():
    return distributed.OneBitCompression(TINY, block=64, clip_value=0.05)


def make(kind: str, **onebit_arguments):
    settings = {"compression_ratio": 10.0, "tables": "table"}
    if kind == "OneBitAdam":
        return onebit()
    if kind == "pair":
        inner = tf_basis.BasisAdam(
            0.01, dense_optimizer=onebit(**onebit_arguments), **settings
        )
        return distributed.DistributedOptimizer(inner)
    if kind == "accumulating":
        inner = tf_basis.BasisAdam(0.01, gradient_accumulation_steps=3, **settings)
        return distributed.DistributedOptimizer(inner, compression())
    inner = getattr(tf_basis, kind)(0.01, **settings)
    return distributed.DistributedOptimizer(inner, compression())


def batch(step: int):
    rng = np.random.default_rng([step, hvd.rank()])
    x = rng.integers(0, 40, (8 + 4 * hvd.rank(), 3)).astype(np.int32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    return tf.constant(x), tf.constant(y)


def stepper(model):
    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return step


def locals_of(model):
    return [s.variable.numpy() for s in residuals.local_state(model.optimizer)]


def summary(model):
    local = {id(s.variable) for s in residuals.local_state(model.optimizer)}
    everything = map(native, callbacks.optimizer_variables(model.optimizer))
    shared = [v for v in everything if id(v) not in local]
    return {
        "weights": digest(*[w.numpy() for w in model.weights]),
        "state": digest(*[v.numpy() for v in shared]),
        "local": digest(*locals_of(model)),
    }


def chain(directory, steps, every, kind="pair"):
    """Goes on where the last run was killed."""
    model = model_of(make(kind))
    info = distributed.restore_checkpoint(directory, model)
    begin = info.step if info else 0
    step = stepper(model)
    for number in range(begin, steps):
        step(*batch(number))
        if (number + 1) % every == 0:
            distributed.save_checkpoint(directory, model, number + 1, keep=2)
        if number == begin + every:  # there is something to go on with
            started()
    return {**summary(model), "begin": begin}


def file_of(directory, kind, how):
    """A file of this rank's own, in a format of Keras, TensorFlow or this package."""
    end = {"keras": ".keras", "weights": ".weights.h5"}.get(how, "")
    return f"{directory}/{kind}-{hvd.rank()}-{how}{end}"


def save_file(model, how, path):
    if how == "export":
        tf_basis.export_saved_model(model, path)
    elif how == "keras":
        model.save(path)
    elif how == "weights":
        model.save_weights(path)
    elif how == "checkpoint":
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    else:
        model.save(path, save_format="tf")


def load_file(kind, how, path):
    if how == "keras":
        return keras.models.load_model(path)
    if how == "saved_model":
        model, path = keras.models.load_model(path), f"{path}/variables/variables"
    else:
        model = model_of(make(kind))
    if how == "export":
        tf_basis.restore_optimizer(model, path)
        return model
    model.optimizer.build(model.trainable_variables)
    if how == "weights":
        model.load_weights(path)
    elif how == "checkpoint":
        both = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        both.read(path).assert_existing_objects_matched()
    else:
        state = tf.train.Checkpoint(optimizer=model.optimizer)
        state.read(path).assert_existing_objects_matched()
    return model


def straight(directory, kinds, save_at, steps, formats=()):
    """All steps in one process; saves in between."""
    results = {}
    for kind in kinds:
        model = model_of(make(kind))
        step = stepper(model)
        for number in range(steps):
            step(*batch(number))
            if number + 1 == save_at:
                distributed.save_checkpoint(f"{directory}/{kind}", model, save_at)
                for how in formats:
                    save_file(model, how, file_of(directory, kind, how))
                saved = summary(model)
        results[kind] = {**summary(model), "saved": saved}
    return results


def resumed_from_files(directory, kinds, save_at, steps, formats):
    """The same from the files of the ranks, in a process that has made none."""
    results = {}
    for kind in kinds:
        for how in formats:
            model = load_file(kind, how, file_of(directory, kind, how))
            restored = summary(model)
            step = stepper(model)
            for number in range(save_at, steps):
                step(*batch(number))
            results[f"{kind} {how}"] = {**summary(model), "saved": restored}
    return results


def resumed(directory, kinds, steps):
    """The steps behind the checkpoint, in a process that has made none."""
    results = {}
    for kind in kinds:
        if len(results) == 1:
            keras.layers.Dense(1)  # numbers in names must not count
        model = model_of(make(kind))
        info = distributed.restore_checkpoint(f"{directory}/{kind}", model)
        restored = summary(model)
        step = stepper(model)
        for number in range(info.step, steps):
            step(*batch(number))
        results[kind] = {**summary(model), "saved": restored}
    return results


def owed(directory, steps, restore):
    """What exchanges owe to the mean, by rank; saved here, or restored and cut."""
    model = model_of(make("pair"))
    if restore:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            info = distributed.restore_checkpoint(directory, model)
        said = [str(w.message) for w in caught if "tf_basis" in str(w.message)]
    else:
        step, said = stepper(model), []
        for number in range(steps):
            step(*batch(number))
        distributed.save_checkpoint(directory, model, steps, extra={"at": [1, 2]})
        info = None
    states = residuals.local_state(model.optimizer)
    return {
        "locals": [(s.kind, s.variable.numpy()) for s in states],
        "shared": summary(model)["state"],
        "info": info and info._asdict(),
        "said": said,
    }


def spoiled(directory):
    """Rank 1 finds its own file damaged: both get the error, nothing has changed."""
    model = model_of(make("pair"))
    distributed.save_checkpoint(directory, model, 1)
    model.weights[0].assign(model.weights[0] + 1.0)
    newest = distributed.save_checkpoint(directory, model, 2)
    if hvd.rank() == 0:
        path = f"{newest}/rank-00001.bin"
        with open(path, "r+b") as file:
            file.seek(5)
            byte = file.read(1)
            file.seek(5)
            file.write(bytes([byte[0] ^ 4]))
    model.weights[0].assign(model.weights[0] * 0.0)
    before = summary(model)
    error = error_of(distributed.restore_checkpoint, directory, model)
    same = summary(model) == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        info = distributed.restore_checkpoint(directory, model, fallback=True)
    unequal = error_of(distributed.save_checkpoint, directory, model, hvd.rank())
    blocked = directory
    if hvd.rank() == 1:  # a rank that cannot write
        blocked = "/proc/nowhere"
    refused = error_of(distributed.save_checkpoint, blocked, model, 3)
    return {
        "error": error,
        "same": same,
        "step": info.step,
        "said": [str(w.message) for w in caught],
        "unequal": unequal,
        "refused": refused,
        "left": sorted(p.name for p in pathlib.Path(directory).iterdir()),
    }


def untrained(directory):
    """Means that differ by rank, and what all have: on 2 ranks, and then on 3."""
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(distributed.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    mean, variance = layers[0].moving_mean, layers[0].moving_variance
    info = distributed.restore_checkpoint(directory, model)
    if info is None:
        mean.assign([hvd.rank(), 5.0])
        variance.assign([2.0, 3.0])
        model.layers[-1].bias.assign([hvd.rank() + 4.0])
        distributed.save_checkpoint(directory, model, 1)
        mean.assign([9.0, 9.0])
        distributed.restore_checkpoint(directory, model)
    with open(f"{directory}/checkpoint-00000001/manifest.json") as file:
        content = json.load(file)["content"]
    return {
        "mean": native(mean).numpy().tolist(),
        "bias": native(model.layers[-1].bias).numpy().tolist(),
        "own": [content["shared"]["tensors"][i]["name"] for i in content["own"]],
    }
