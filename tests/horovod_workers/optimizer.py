"""Checks of the distributed optimizer, the tape and OneBitAdam on this flavour."""

import json
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import load_golden
from horovod_pairs import (
    KERAS3,
    applier,
    data,
    digest,
    fit,
    gradients,
    keras,
    model_of,
    new,
    pair,
    raw,
)
from horovod_rank import check, error_of

import horovod_workers.optimizer_trouble  # noqa: F401  its checks run in this launch too
import tf_basis
from tf_basis import distributed


@check
def basis_with_onebit_adam():
    return pair()


@check
def literal_policy():
    return pair(policy=[distributed.NORMALIZATION_EVERY_10])


@check
def automatic_warmup():
    inner = distributed.OneBitAdam(0.001, beta_2=0.9, warmup_steps="auto")
    optimizer = tf_basis.BasisAdam(0.01, dense_optimizer=inner)
    optimizer = distributed.DistributedOptimizer(optimizer)
    result = fit(optimizer)
    return {**result, "frozen_at": int(optimizer.dense_optimizer.frozen_at)}


@check
def basis_alone_in_one_bit():
    compression = distributed.OneBitCompression(
        block=64, reset_interval=7, sparse_values="float16"
    )
    optimizer = tf_basis.BasisAdam(0.01, compression_ratio=10.0)
    return fit(distributed.DistributedOptimizer(optimizer, compression))


@check
def golden_onebit_adam():
    errors = {}
    for case in load_golden("onebit_adam"):
        if case["workers"] != hvd.size():
            continue
        variable = new(case["theta0"], "theta")
        optimizer = distributed.OneBitAdam(
            case["learning_rate"],
            case["beta_1"],
            case["beta_2"],
            case["epsilon"],
            warmup_steps=case["warmup_steps"],
            total_steps=case["total_steps"],
            moments=case["moments"],
            policy=[(".*", 1)],
            block=case["block"],
        )
        optimizer.build([variable])
        apply = applier(optimizer, [variable])
        first, second = optimizer._exchange.moments[0]
        worst = 0.0
        for step in case["steps"]:
            apply(tf.constant(step["gradients"][hvd.rank()], tf.float32))
            for got, name in [
                (raw(variable), "theta"),
                (first, "first_moment"),
                (second, "second_moment"),
            ]:
                worst = max(worst, np.abs(got.numpy() - step[name]).max())
        errors[case["moments"]] = float(worst)
    return errors


@check
def equals_one_process():
    """float32 over the ranks against the mean gradient applied at once."""
    worst = {}
    table_shape = tf.constant([12, 4], tf.int64)
    for name, make in {
        "adam": lambda: keras.optimizers.Adam(0.01),
        "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
        "decayed": lambda: keras.optimizers.Adam(0.01, weight_decay=0.1),
        "basis": lambda: tf_basis.BasisAdam(0.01, min_rows=10, compression_ratio=2.0),
    }.items():
        shapes = [(12, 4), (8, 8)]
        names = ["table/embeddings", "tower/kernel"]
        sets = [
            [new(np.ones(s), n.replace("/", "_")) for s, n in zip(shapes, names)]
            for _ in range(2)
        ]
        if name == "basis":
            sets = [[new(np.ones(s), n) for s, n in zip(shapes, "ab")] for _ in sets]
        alone, together = make(), distributed.DistributedOptimizer(make())
        for optimizer, variables in zip([alone, together], sets):
            optimizer.build(variables)
        apply_alone, apply_together = map(applier, [alone, together], sets)
        for step in range(6):
            everyone = []
            for rank in range(hvd.size()):
                rng = np.random.default_rng([9, rank, step])
                ids = rng.integers(0, 12, 5 + rank)
                everyone.append((ids, rng.normal(size=(len(ids), 4))))
            ids, values = everyone[hvd.rank()]
            mine = tf.IndexedSlices(
                tf.constant(values, tf.float32), tf.constant(ids), table_shape
            )
            apply_together(mine, tf.constant(gradients(hvd.rank(), step, (8, 8))))
            total = np.zeros((12, 4))
            for ids, values in everyone:
                np.add.at(total, ids, values)
            touched = np.unique(np.concatenate([i for i, _ in everyone]))
            mean = tf.IndexedSlices(
                tf.constant(total[touched] / hvd.size(), tf.float32),
                tf.constant(touched),
                table_shape,
            )
            dense = np.mean(
                [gradients(r, step, (8, 8)) for r in range(hvd.size())], axis=0
            )
            apply_alone(mean, tf.constant(dense))
        worst[name] = max(
            float(np.abs(raw(a).numpy() - raw(b).numpy()).max()) for a, b in zip(*sets)
        )
    return worst


@check
def accumulation_communicates_once_per_update():
    """k batches of gradients, one exchange; the mean, or the sum."""
    results = {}
    for average in (True, False):
        variable = new(np.zeros(4), "a_bias")
        optimizer = distributed.DistributedOptimizer(
            tf_basis.BasisSGD(1.0, gradient_accumulation_steps=3),
            average_aggregated_gradients=average,
        )
        optimizer.build([variable])
        apply = applier(optimizer, [variable])
        for step in range(6):
            apply(tf.fill([4], float(step + hvd.rank())))
        exchanges = optimizer._distribution.reducer._steps.numpy()[0]
        results["mean" if average else "sum"] = raw(variable).numpy().tolist()
        results["exchanges"] = int(exchanges)
    return results


@check
def weights_of_ranks():
    variable = new(np.zeros(4), "a_bias")
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    apply = applier(optimizer, [variable])
    optimizer.step_weight.assign(float(1 + hvd.rank()))
    apply(tf.fill([4], float(10 * hvd.rank())))
    weighted = raw(variable).numpy().tolist()
    optimizer.step_weight.assign(1.0 if hvd.rank() == 0 else 0.0)
    apply(tf.fill([4], 2.0 if hvd.rank() == 0 else 1e30))
    alone = raw(variable).numpy().tolist()
    optimizer.step_weight.assign(0.0)
    apply(tf.fill([4], 1.0))
    return {
        "weighted": weighted,
        "alone": alone,
        "nobody": raw(variable).numpy().tolist() == alone,
        "skipped": int(optimizer.skipped_steps),
    }


@check
def intervals():
    """A variable with interval 3 steps with the mean of three gradients."""
    slow, fast = new(np.zeros(4), "slow_gamma"), new(np.zeros(4), "fast_bias")
    optimizer = distributed.DistributedOptimizer(
        keras.optimizers.SGD(1.0), distributed.OneBitCompression([("slow", 32, 3)])
    )
    optimizer.build([slow, fast])
    apply = applier(optimizer, [slow, fast])
    path = []
    for step in range(6):
        g = tf.fill([4], float(step + hvd.rank()))
        apply(g, g)
        path.append([float(raw(slow).numpy()[0]), float(raw(fast).numpy()[0])])
    return path


@check
def uneven_batches():
    """Every example weighs the same, whatever the sizes and numbers of batches."""
    examples = [14, 9, 5, 8][hvd.rank()]
    x, y = data(hvd.rank(), examples)
    everyone = [data(r, n) for r, n in enumerate([14, 9, 5, 8][: hvd.size()])]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    # A small rate: each step of 0.05 makes differences in rounding ten times larger.
    together = model_of(distributed.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    even = distributed.even_batches(dataset)
    together.fit(even, epochs=1, verbose=0)
    alone = model_of(keras.optimizers.SGD(0.01))
    for start in range(0, max(len(x) for x, _ in everyone), 4):
        xs = np.concatenate([x[start : start + 4] for x, _ in everyone])
        ys = np.concatenate([y[start : start + 4] for _, y in everyone])
        alone.train_on_batch(xs, ys)
    return {
        "difference": max(
            float(np.abs(a.numpy() - b.numpy()).max())
            for a, b in zip(together.weights, alone.weights)
        ),
        "weights": digest(*[w.numpy() for w in together.weights]),
        "steps": int(together.optimizer.iterations.numpy()),
    }


@check
def tape():
    table, kernel = (
        tf.Variable(np.ones((9, 3), "f")),
        tf.Variable(np.ones((64, 64), "f")),
    )
    compression = distributed.OneBitCompression(block=64)

    @tf.function
    def step(ids, x, weight):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.gather(table, ids)) + tf.reduce_sum(kernel * x)
        wrapped = distributed.DistributedGradientTape(tape, compression)
        return *wrapped.gradient(y, [table, kernel], weight=weight), wrapped.finite

    x = gradients(hvd.rank(), 0, (64, 64))
    slices, dense, finite = step(tf.constant([1, 1, 2 + hvd.rank()]), x, 1.0)
    bad = np.full((64, 64), np.inf if hvd.rank() == 1 else 1.0, np.float32)
    _, zeros, went = step(tf.constant([1, 1, 2 + hvd.rank()]), bad, 1.0)
    return {
        "rows": tf.convert_to_tensor(slices).numpy()[:, 0].tolist(),
        "dense": digest(dense.numpy()),
        "finite": [bool(finite), bool(went)],
        "zeros": bool(np.all(zeros.numpy() == 0)),
        "interval": error_of(
            distributed.DistributedGradientTape(
                tf.GradientTape(), distributed.OneBitCompression([(".*", 1, 2)])
            )._reducer,
            [kernel],
        ),
    }


@check
def horovods_own_optimizer():
    """Horovod's tf_keras DistributedOptimizer with our compression."""
    if KERAS3:
        return None
    import horovod.tensorflow.keras as hvd_keras

    variable = tf.Variable(np.zeros((32, 32), np.float32))
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        compression=distributed.OneBitCompression(block=64, reset_interval=4),
    )

    @tf.function
    def descend(slope):
        # Horovod reduces where the gradient is computed.
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * slope)
        optimizer.minimize(loss, [variable], tape=tape)

    true = np.zeros((32, 32))
    for step in range(4):
        descend(tf.constant(gradients(hvd.rank(), step, (32, 32))))
        true -= np.mean(
            [gradients(r, step, (32, 32)) for r in range(hvd.size())], axis=0
        )
    # The fourth exchange flushes.
    return {
        "difference": float(np.abs(variable.numpy() - true).max()),
        "weights": digest(variable.numpy()),
    }


@check
def saving():
    """A saved model brings the wrapping back, its state and its residuals."""
    compression = distributed.OneBitCompression(
        [("norm", 16, 2)], block=64, clip_value=3.0, sparse_values="float16"
    )
    inner = tf_basis.BasisAdam(
        0.01,
        compression_ratio=10.0,
        dense_optimizer=distributed.OneBitAdam(0.01, warmup_steps=3),
    )
    model = model_of(distributed.DistributedOptimizer(inner, compression, timeout=77))
    x, y = data(hvd.rank(), 64)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"model{hvd.rank()}.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    old, new_ = model.optimizer, loaded.optimizer
    same = [
        np.array_equal(raw(a), raw(b)) for a, b in zip(old.variables, new_.variables)
    ]
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    plain = keras.optimizers.get(
        json.loads(json.dumps(keras.optimizers.serialize(old)))
    )
    return {
        "class": type(new_).__name__,
        "is_basis": isinstance(new_, tf_basis.BasisAdam),
        "inner": type(new_.dense_optimizer).__name__,
        "config": old.get_config() == new_.get_config() == plain.get_config(),
        "same": all(same) and len(same) == len(old.variables),
        "goes_on": digest(*[w.numpy() for w in model.weights])
        == digest(*[w.numpy() for w in loaded.weights]),
    }
