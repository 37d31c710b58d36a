"""Options of the 1-bit exchange in `fit`, saved and resumed."""

from __future__ import annotations

import tempfile

import horovod.tensorflow as hvd
import numpy as np
from horovod_pairs import digest, keras, raw
from horovod_rank import check, error_of

import tf_basis
from tf_basis import distributed
from tf_basis.distributed import restore_checkpoint, save_checkpoint
from tf_basis.distributed.world import World

SIZE = 2


def make_model(optimizer):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(30, 4, name="items")(inputs))
    hidden = keras.layers.Dense(16, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse")
    return model


def all_options(**more):
    dense = distributed.OneBitAdam(
        0.01, warmup_steps=3, policy=[("kernel", 1)], block=8, **more
    )
    optimizer = tf_basis.BasisAdam(0.02, tables="items", dense_optimizer=dense)
    return make_model(distributed.DistributedOptimizer(optimizer))


X = np.arange(80, dtype=np.int32).reshape(40, 2) % 30
Y = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]


def fit(model, batches: slice, *callbacks):
    mine = slice(hvd.rank(), None, SIZE)
    x, y = X[mine][batches], Y[mine][batches]
    return model.fit(
        x, y, batch_size=2, verbose=0, shuffle=False, callbacks=list(callbacks)
    )


@check
def saved_and_resumed():
    """9 steps = 5 + 4 to the bit, all ranks' memory in the checkpoint."""
    results = {}
    cases = {
        "amplitudes": {"amplitude_interval": 4, "adaptive_rate": True},
        "bits": {"adaptive_bits": {"patience": 2}, "amplitude_interval": 3},
        "delay": {"delay": 1, "statistics": True},
        "local": {"local_steps": 2},
    }
    for name, settings in cases.items():
        whole = all_options(**settings)
        fit(whole, slice(0, 18))
        first = all_options(**settings)
        fit(first, slice(0, 10))
        root = tempfile.mkdtemp() if hvd.rank() == 0 else None
        root = World().objects(root, f"root_{name}")[0]
        # A wrong value in the second model must be overwritten.
        save_checkpoint(root, first, step=5)
        second = all_options(**settings)
        fit(second, slice(10, 12))
        restore_checkpoint(root, second)
        fit(second, slice(10, 18))
        results[name] = {
            "whole": digest(*map(raw, whole.trainable_variables)),
            "resumed": digest(*map(raw, second.trainable_variables)),
            "half": digest(*map(raw, first.trainable_variables)),
        }
    return results


@check
def callbacks_in_fit():
    statistics = distributed.QuantizationStatistics(every=2)
    drift = distributed.ReplicaDriftCheck(every=2)
    together = distributed.SynchronizeCallback()
    model = all_options(local_steps=4, statistics=True)
    history = fit(model, slice(0, 18), statistics, drift, together)
    return {
        "keys": sorted(k for k in history.history if k.startswith("quantization")),
        "records": [r["batch"] for r in statistics.history],
        "last": statistics.history[-1]["groups"],
        "checks": drift.checks,
        "digest": digest(*map(raw, model.trainable_variables)),
        "without": error_of(
            fit, all_options(), slice(0, 4), distributed.QuantizationStatistics()
        ),
    }
