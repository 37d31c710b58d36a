"""Statistics of gradients, drift of replicas and overflow of residuals on two ranks."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import to_numpy
from horovod_rank import check, error_of

import tf_basis
from tf_basis import BasisAdam, distributed

keras = tf.keras
X = np.arange(24, dtype=np.int32).reshape(12, 2) % 30
Y = np.linspace(-1, 1, 12, dtype=np.float32)[:, None]


def make_model(optimizer=None, seed=3):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((2,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(30, 4)(inputs))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(16)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    if optimizer is None:
        policy = [("dense_kernel", 1)]
        dense = distributed.OneBitAdam(0.01, warmup_steps=1, policy=policy)
        optimizer = BasisAdam(0.02, tables="embed", dense_optimizer=dense)
        optimizer = distributed.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def fit(model, *callbacks, scale=1.0):
    """Three steps; every rank has data of its own."""
    mine = slice(hvd.rank(), None, 2)
    return model.fit(
        X[mine],
        scale * Y[mine],
        batch_size=2,
        verbose=0,
        shuffle=False,
        callbacks=list(callbacks),
    )


@check
def statistics_are_of_this_rank():
    model = make_model()
    x, y = X[hvd.rank() :: 2][:2], Y[hvd.rank() :: 2][:2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = [
        tf.convert_to_tensor(g).numpy().astype(np.float64)
        for g in tape.gradient(loss, model.trainable_weights)
    ]
    model = make_model()  # the averages of batch normalisation as before
    mine = distributed.GradientStatistics(1)
    second = distributed.GradientStatistics(1, ranks=[1])
    fit(model, mine, second)
    first = mine.history[0]["variables"]
    return {
        "expected": [[g.mean(), g.std(), g.min(), g.max()] for g in gradients],
        "found": [list(s.values())[:4] for s in first.values()],
        "steps": [record["step"] for record in mine.history],
        "second": len(second.history),
    }


class Change(keras.callbacks.Callback):
    """Moves a variable of rank 1 by one bit after the last batch."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and hvd.rank() == 1:
            variable = self.choose(self.model)
            value = to_numpy(variable)
            value.flat[-1] = np.nextafter(value.flat[-1], np.inf, dtype=value.dtype)
            variable.assign(value)


def rate_of(model):
    return getattr(model.optimizer, "_learning_rate", None)


@check
def one_bit_on_one_rank_ends_the_training_on_all():
    errors = {}
    for name, choose, options in [
        ("kernel", lambda m: m.trainable_weights[3], {}),
        ("rate", rate_of, {}),
        ("rate_compared", rate_of, {"optimizer": True}),
    ]:
        model, check = make_model(), distributed.ReplicaDriftCheck(1, **options)
        errors[name] = error_of(fit, model, Change(choose), check)
        errors[f"{name}_checks"] = check.checks
        errors[f"{name}_residuals"] = [
            to_numpy(v) for v in model.optimizer.residual_variables
        ]
        errors[f"{name}_path"] = distributed.broadcast.name_of(choose(model))
    return errors


@check
def what_differs_is_found_at_the_first_look():
    averages = distributed.ReplicaDriftCheck(1, non_trainable=True)
    starts = distributed.ReplicaDriftCheck(2)
    return {
        "averages": error_of(fit, make_model(), averages),
        "starts": error_of(fit, make_model(seed=hvd.rank()), starts),
    }


@check
def overflow_warns_the_rank_that_has_it():
    sent = distributed.OneBitCompression([("dense_kernel", 1)], clip_value=100.0)
    sgd = distributed.DistributedOptimizer(keras.optimizers.SGD(0.0), sent)
    model, own = make_model(sgd), distributed.ResidualOverflowCheck(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # Of rank 1 alone the gradients are large.
        fit(model, own, scale=1e4 if hvd.rank() else 1.0)
    messages = [str(w.message) for w in seen if "clip_value" in str(w.message)]
    return {"messages": messages, "clipped": list(own.clipped.values())}


def scalars_in(folder):
    """What TensorBoard finds there: tags with their steps and values."""
    return {
        (value.tag, event.step): float(tf.make_ndarray(value.tensor))
        for file in sorted(Path(folder).rglob("*tfevents*"))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }


@check
def quantization_is_recorded():
    sent = distributed.OneBitCompression([("dense_kernel", 1)], statistics=True)
    sgd = distributed.DistributedOptimizer(keras.optimizers.SGD(0.1), sent)
    with tempfile.TemporaryDirectory() as folder:
        record = distributed.QuantizationStatistics(2, log_dir=folder)
        logs = fit(make_model(sgd), record).history
        scalars = scalars_in(folder)
    plain = distributed.DistributedOptimizer(keras.optimizers.SGD(0.1))
    return {
        "history": record.history,
        "logs": {k: v for k, v in logs.items() if k.startswith("quantization/")},
        "scalars": scalars,
        "plain": error_of(
            fit, make_model(plain), distributed.QuantizationStatistics(1)
        ),
    }


@check
def shadow_rows_have_the_gradients_of_all_ranks():
    owners = BasisAdam(0.02, tables="embed", num_buckets=30)
    model = make_model(distributed.DistributedOptimizer(owners))
    watch = tf_basis.CollisionReport(shadow_rows=12)
    fit(model, distributed.BroadcastCallback(), watch)
    return watch.last.tables[0]["shadows"]
