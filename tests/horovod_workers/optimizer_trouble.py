"""Ranks that differ, and steps that all must skip; started by `optimizer`."""

import os
import tempfile
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod_pairs import KERAS3, applier, digest, gradients, keras, new, raw
from horovod_rank import check, error_of

from tf_basis import distributed


@check
def different_kinds_of_gradients():
    first, second = new(np.zeros((4, 4)), "a_kernel"), new(np.zeros(4), "b_bias")
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([first, second])

    @tf.function
    def apply(g):
        other = None if hvd.rank() == 1 else tf.ones([4])
        optimizer.apply_gradients([(g, first), (other, second)])

    message = error_of(apply, tf.ones([4, 4]))
    return {"error": message, "unchanged": bool(np.all(raw(first).numpy() == 0))}


@check
def different_variables():
    shape = (4, 4 + hvd.rank())
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(1.0))
    return error_of(optimizer.build, [new(np.zeros(shape), "a_kernel")])


@check
def different_policies():
    bits = 1 + hvd.rank() % 2
    optimizer = distributed.DistributedOptimizer(
        keras.optimizers.SGD(1.0), distributed.OneBitCompression([(".*", bits)])
    )
    return error_of(optimizer.build, [new(np.zeros((4, 4)), "a_kernel")])


@check
def not_finite_on_one_rank():
    out = {}
    for name in ("wrapped", "onebit_adam"):
        variable = new(np.ones((64, 64)), "a_kernel")
        if name == "wrapped":
            optimizer = distributed.DistributedOptimizer(
                keras.optimizers.Adam(0.1, weight_decay=0.1), "onebit"
            )
        else:
            optimizer = distributed.OneBitAdam(0.1, warmup_steps=1, weight_decay=0.1)
        optimizer.build([variable])
        apply = applier(optimizer, [variable])
        for step in range(3):
            apply(tf.constant(gradients(hvd.rank(), step, (64, 64))))
        before = [raw(variable).numpy()]
        before += [raw(v).numpy() for v in optimizer.variables if "kernel" in v.name]
        before += [v.numpy() for v in optimizer.residual_variables]
        bad = np.ones((64, 64), np.float32)
        bad[3, 3] = np.nan if hvd.rank() == 1 else 1
        apply(tf.constant(bad))
        after = [raw(variable).numpy()]
        after += [raw(v).numpy() for v in optimizer.variables if "kernel" in v.name]
        after += [v.numpy() for v in optimizer.residual_variables]
        apply(tf.constant(gradients(hvd.rank(), 4, (64, 64))))
        out[name] = {
            "kept": all(map(np.array_equal, before, after)),
            "skipped": int(optimizer.skipped_steps),
            "iterations": int(optimizer.iterations.numpy()),
            "weights": digest(raw(variable).numpy()),
            "moved": not np.array_equal(raw(variable).numpy(), before[0]),
        }
    return out


@check
def loss_scaling():
    """All ranks leave out a step that overflows on one."""
    inner = distributed.DistributedOptimizer(keras.optimizers.SGD(1.0))
    if KERAS3:
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    else:
        scaled = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)
    variable = new(np.zeros(4), "a_bias")
    scaled.build([variable])

    @tf.function
    def apply(g):
        if not KERAS3:
            (g,) = scaled.get_unscaled_gradients([g])
        scaled.apply_gradients([(g, variable)])

    apply(tf.fill([4], 4.0 * (1 + hvd.rank())))
    once = raw(variable).numpy().tolist()
    apply(tf.fill([4], float("inf") if hvd.rank() == 1 else 4.0))
    scale = scaled.dynamic_scale if KERAS3 else scaled.loss_scale
    return {
        "once": once,
        "kept": raw(variable).numpy().tolist() == once,
        "scale": float(tf.convert_to_tensor(raw(scale))),
    }


@check
def a_caught_error_ends_no_job():
    """A step that raises on all ranks leaves nothing that waits."""
    first, second = (new(np.ones((40, 40), "f"), n) for n in ("a_kernel", "b_kernel"))
    optimizer = distributed.OneBitAdam(0.1, warmup_steps=1, timeout=2.0)
    optimizer.build([first, second])
    apply = applier(optimizer, [first, second])
    g = tf.ones((40, 40))
    apply(g, g)
    one = applier(optimizer, [first])
    error = error_of(one if hvd.rank() == 1 else apply, *[g, g][: 2 - hvd.rank()])
    time.sleep(4)
    apply(g, g)
    return {"error": error, "steps": int(optimizer.iterations.numpy())}


@check
def no_folder_on_one_rank():
    """Saving and restoring end on all ranks with what was wrong on one."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    folder = 3 if hvd.rank() == 1 else "never-made"
    place = "/proc/nowhere" if hvd.rank() == 1 else tempfile.mkdtemp()
    callback = distributed.CheckpointCallback(place, timeout=20)
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    weights = model.get_weights()
    fit = error_of(model.fit, x, y, verbose=0, callbacks=[callback])
    return {
        "fit": fit,
        "kept": all(map(np.array_equal, weights, model.get_weights())),
        "save": error_of(distributed.save_checkpoint, folder, model, 1, timeout=20),
        "restore": error_of(distributed.restore_checkpoint, folder, model, timeout=20),
        "written": os.path.exists("never-made"),
    }
