"""Averages of metrics and warm-up of rates on two ranks; started by `callbacks`."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from callback_helpers import Spy, X, Y, fit, make_model
from helpers import to_numpy
from horovod_rank import check, error_of

from tf_basis import BasisAdam, distributed

keras = tf.keras


@check
def metrics_are_averaged():
    rank = hvd.rank()
    own = {"val_loss": 3.0} if rank == 0 else {"other": np.float32(0.5)}
    mine = {"loss": 0.1 + rank, "note": f"r{rank}", "f1": np.arange(2.0) * rank, **own}
    return {
        "plain": distributed.average_metrics(mine),
        "weighted": distributed.average_metrics(
            {"loss": 1.0 + rank}, weight=1 + 2 * rank
        ),
        "zero": distributed.average_metrics({"loss": [np.nan, 7.0][rank]}, weight=rank),
        "empty": distributed.average_metrics({}),
        "shapes": error_of(distributed.average_metrics, {"x": np.zeros(1 + rank)}),
        "weights": error_of(distributed.average_metrics, {"x": 1.0}, weight=-rank),
        "none": error_of(distributed.average_metrics, {"x": 1.0}, weight=0),
    }


@check
def logs_are_averaged_before_other_callbacks():
    model = make_model(keras.optimizers.SGD(0.1))
    own, seen = [], []
    history = model.fit(
        X[: 4 + 4 * hvd.rank()],
        Y[: 4 + 4 * hvd.rank()],
        validation_data=(X, Y) if hvd.rank() == 0 else None,
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[
            Spy(epoch_end=lambda _, logs: own.append(dict(logs))),
            distributed.MetricAverageCallback(),
            Spy(epoch_end=lambda _, logs: seen.append(dict(logs))),
        ],
    )
    return {"own": own, "seen": seen, "history": history.history}


def rates_of_fit(optimizer, look, *, warmup, **more):
    rates = []
    model = make_model(optimizer)
    fit(model, warmup, Spy(batch_begin=lambda *_: rates.append(look())), **more)
    return rates


def number(variable):
    return float(to_numpy(variable))


@check
def learning_rate_warms_up():
    adam = keras.optimizers.Adam(0.5)
    plain = rates_of_fit(
        adam,
        lambda: number(adam.learning_rate),
        warmup=distributed.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1),
        last=3,
    )
    both = BasisAdam(0.2, tables="embed", dense_optimizer=keras.optimizers.Adam(0.05))
    nested = rates_of_fit(
        both,
        lambda: (
            number(both.learning_rate),
            number(both.dense_optimizer.learning_rate),
        ),
        warmup=distributed.LearningRateWarmupCallback(0.2, 0.5, steps_per_epoch=4),
    )
    late = keras.optimizers.SGD(0.7)
    resumed = rates_of_fit(
        late,
        lambda: number(late.learning_rate),
        warmup=distributed.LearningRateWarmupCallback(0.1, warmup_epochs=2),
        first=1,
        last=3,
    )
    return {"plain": plain, "nested": nested, "resumed": resumed}


@check
def ranks_of_different_length_warm_up_alike():
    sgd = keras.optimizers.SGD(0.1)
    size = 4 + 4 * hvd.rank()
    rates, model = [], make_model(sgd)
    model.fit(
        X[:size],
        Y[:size],
        batch_size=2,
        verbose=0,
        callbacks=[
            distributed.LearningRateWarmupCallback(0.1, warmup_epochs=1),
            Spy(batch_begin=lambda *_: rates.append(number(sgd.learning_rate))),
        ],
    )
    return rates


@check
def warm_up_refuses_on_all_ranks():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    rate = schedule if hvd.rank() == 1 else 0.1
    warmup = distributed.LearningRateWarmupCallback

    def endless():
        while True:
            yield X[:4], Y[:4]

    def unknown():
        model = make_model(keras.optimizers.SGD(0.1))
        if hvd.rank() == 0:
            fit(model, warmup(0.1))
        signature = (tf.TensorSpec([4, 2], tf.int32), tf.TensorSpec([4, 1], tf.float32))
        data = tf.data.Dataset.from_generator(endless, output_signature=signature)
        model.fit(data.take(3), verbose=0, callbacks=[warmup(0.1)])

    return [
        error_of(fit, make_model(keras.optimizers.SGD(rate)), warmup(0.1)),
        error_of(fit, make_model(keras.optimizers.SGD(0.1)), warmup(0.1 + hvd.rank())),
        error_of(unknown),
    ]
