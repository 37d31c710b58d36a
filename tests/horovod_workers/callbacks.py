"""Broadcasts on two ranks: what a training starts with."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from callback_helpers import (
    FLAVOR,
    Spy,
    X,
    Y,
    arrays,
    basis_adam,
    fit,
    make_model,
    train_apart,
)
from helpers import state_digest, to_numpy, variables_of
from horovod_rank import check, error_of

import horovod_workers.callbacks_logs  # noqa: F401  its checks run in this launch too
from tf_basis import BasisAdam, distributed
from tf_basis.distributed import broadcast

keras = tf.keras


def state_at_start(model, root, **more):
    """What a rank has before `fit` and before its first step."""
    seen = []
    before = arrays(model)
    callbacks = [
        distributed.BroadcastCallback(root),
        Spy(
            batch_begin=lambda batch, _: (
                seen.append(state_digest(arrays(model))) if batch == 0 else None
            )
        ),
    ]
    fit(model, *callbacks, **more)
    return {"before": state_digest(before), "started": seen, "variables": len(before)}


@check
def basis_adam_starts_alike():
    return state_at_start(train_apart(make_model(basis_adam())), 0)


@check
def root_rank_one():
    return state_at_start(train_apart(make_model(basis_adam())), 1)


@check
def unbuilt_optimizer_starts_alike():
    return state_at_start(make_model(keras.optimizers.Adam(0.1 + hvd.rank())), 0)


@check
def every_fit_broadcasts_once():
    model = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    first = state_at_start(model, 0, first=3, last=5)
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    return [first, state_at_start(model, 0, first=5, last=6)]


@check
def loss_scale_optimizer_starts_alike():
    if FLAVOR == "keras3":
        cls = keras.optimizers.LossScaleOptimizer
        optimizer = cls(
            keras.optimizers.Adam(0.1), initial_scale=2.0 ** (hvd.rank() + 3)
        )
    else:
        cls = keras.mixed_precision.LossScaleOptimizer
        scale = 2.0 ** (hvd.rank() + 3)
        optimizer = cls(keras.optimizers.Adam(0.1), initial_scale=scale)
    model = train_apart(make_model(optimizer))
    scales = []

    def scale(*_):
        own = getattr(optimizer, "dynamic_scale", None)
        scales.append(float(to_numpy(optimizer.loss_scale if own is None else own)))

    scale()
    started = state_at_start(model, 0)
    fit(model, distributed.BroadcastCallback(), Spy(batch_begin=scale))
    return {**started, "scales": scales[:2]}


@check
def multi_optimizer_starts_alike():
    if FLAVOR == "tf_keras":
        return None
    from keras.src.optimizers.multi_optimizer import MultiOptimizer, OptimizerMap

    table = BasisAdam(0.1, tables="embed", compression_ratio=4)
    routes = OptimizerMap(default_optimizer=keras.optimizers.Adam(0.1))
    routes["embed"] = table
    model = train_apart(make_model(MultiOptimizer(routes)))
    return state_at_start(model, 0)


class Local(keras.optimizers.SGD):
    """Has state that belongs to one rank."""

    def build(self, variables):
        done = getattr(self, "_local", None) is not None
        super().build(variables)
        if not done:
            if FLAVOR == "keras3":
                self._local = self.add_variable((3,), name="local")
            else:
                self._local = tf.Variable(tf.zeros(3), name="local", trainable=False)
                self._variables.append(self._local)
            self._local.assign(np.full(3, 10.0 + hvd.rank(), np.float32))

    @property
    def residual_variables(self):
        return [broadcast.native(self._local)]


@check
def residuals_stay():
    optimizer = BasisAdam(0.1, tables="embed", dense_optimizer=Local(0.1))
    model = make_model(optimizer)
    seen = {}

    def look(batch, _):
        if batch == 0:
            seen["local"] = to_numpy(optimizer.dense_optimizer._local)
            seen["weights"] = state_digest({"w": to_numpy(model.weights[1])})

    fit(model, distributed.BroadcastCallback(), Spy(batch_begin=look))
    return seen


@check
def distributed_optimizer_keeps_its_residuals():
    inner = BasisAdam(0.1, tables="embed")
    compression = distributed.OneBitCompression(
        distributed.Policy(min_elements=0), block=8
    )
    optimizer = distributed.DistributedOptimizer(inner, compression)
    model = make_model(optimizer)
    own = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)
    for epochs in (1, 2):
        model.fit(
            X[own],
            Y[own],
            batch_size=2,
            epochs=epochs,
            initial_epoch=epochs - 1,
            verbose=0,
            callbacks=[distributed.BroadcastCallback()],
        )
    local = {id(v) for v in optimizer.residual_variables}
    everything = [
        broadcast.native(v) for v in [*model.weights, *variables_of(optimizer)]
    ]
    return {
        "residuals": [v.numpy() for v in optimizer.residual_variables],
        "shared": [v.numpy() for v in everything if id(v) not in local][:5],
    }


class Late(keras.Model):
    """Has no weights before it sees data (on tf_keras)."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(tf.cast(x, tf.float32) / 30)


@check
def late_model_is_alike_after_its_first_batch():
    keras.utils.set_random_seed(hvd.rank())
    model = Late()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    seen = []
    fit(
        model,
        distributed.BroadcastCallback(),
        Spy(batch_end=lambda *_: seen.append(state_digest(arrays(model)))),
    )
    return seen[0]


def many_variables(rank):
    rng = np.random.default_rng(rank)
    whole = rng.integers(0, 100, 7)
    bits = rng.integers(0, 2**32, 3, dtype=np.uint32)
    variables = [
        tf.Variable(whole % 2 == 0),
        tf.Variable(bits),
        tf.Variable(whole.astype(np.int64) - (1 << 40)),
        tf.Variable(whole.astype(np.int8)),
        tf.Variable(tf.cast(rng.normal(size=(3, 5)), tf.bfloat16)),
        tf.Variable(rng.normal(size=(2, 2, 2)).astype(np.float16)),
        tf.Variable(rng.normal(size=(40, 3)).astype(np.float32)),
        tf.Variable(rng.normal() * np.float64(np.pi)),
        tf.Variable(np.zeros((0, 4), np.float32)),
        tf.Variable((rng.normal(size=2) + 1j * rng.normal(size=2)).astype("complex64")),
        tf.Variable(np.float32([np.nan, -0.0, np.inf][rank]), name="special"),
    ]
    return variables, [v.numpy() for v in variables]


@check
def every_dtype_arrives_to_the_bit():
    results = {}
    limit = broadcast.CHUNK_BYTES
    for chunk in (limit, 17):
        broadcast.CHUNK_BYTES = chunk
        variables, _ = many_variables(hvd.rank())
        distributed.broadcast_variables([*variables, variables[0]], root_rank=1)
        results[chunk] = [v.numpy().tobytes() for v in variables]
    broadcast.CHUNK_BYTES = limit
    _, theirs = many_variables(1)
    return {"got": results, "wanted": [v.tobytes() for v in theirs]}


@check
def differing_variables_are_refused():
    rank = hvd.rank()
    kept = tf.Variable([1.0 + rank])
    shape = [kept, tf.Variable(np.zeros((2, 3 + rank)), name="wide")]
    dtype = [kept, tf.Variable(np.zeros(2, [np.int32, np.int64][rank]), name="typed")]
    number = [kept] * 2 + [tf.Variable(0.0, name="more")] * rank
    named = [kept, tf.Variable(0.0, name=["one", "other"][rank])]
    errors = [
        error_of(distributed.broadcast_variables, variables)
        for variables in (shape, dtype, number, named)
    ]
    errors.append(error_of(distributed.broadcast_variables, [kept], root_rank=2))
    errors.append(error_of(distributed.broadcast_variables, [kept], root_rank=rank))
    text = tf.Variable(["a"], name="text")
    errors.append(error_of(distributed.broadcast_variables, [kept, text]))
    models = error_of(
        fit,
        make_model(keras.optimizers.SGD(0.1), width=4 + rank),
        distributed.BroadcastCallback(),
    )
    numbered = [kept, tf.Variable(0.0, name=f"dense_{rank}/kernel")]
    return {
        "errors": errors,
        "model": models,
        "before": float(kept[0]),
        "numbered": error_of(distributed.broadcast_variables, numbered),
        "after": float(kept[0]),
    }


@check
def process_set_of_one():
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    mine = sets[hvd.rank()]
    variable = tf.Variable([float(hvd.rank())])
    distributed.broadcast_variables([variable], process_set=mine)
    means = distributed.average_metrics({"x": hvd.rank()}, process_set=mine)
    other = error_of(
        distributed.broadcast_variables, [variable], process_set=sets[1 - hvd.rank()]
    )
    return {"value": float(variable[0]), "mean": means["x"], "other": other}
