"""Checks of the exchange itself, whatever the Keras flavour and number of ranks."""

import hashlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from helpers import load_golden
from horovod_rank import check, error_of

from tf_basis.distributed import OneBitCompression, OneBitExchange, rows
from tf_basis.distributed.world import World
from tf_basis.ops import loader


def digest(*arrays) -> str:
    joined = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    return hashlib.sha256(joined).hexdigest()


def gradients(rank: int, step: int, elements: int) -> np.ndarray:
    rng = np.random.default_rng([rank, step])
    return rng.normal(scale=1 + rank, size=elements).astype(np.float32)


def run_golden(ops: str) -> list:
    largest = []
    with loader.use(ops):
        for case in load_golden("onebit_allreduce"):
            if case["workers"] != hvd.size():
                continue
            exchange = OneBitExchange(case["elements"], case["block"])
            average = tf.function(exchange.average)
            for step in case["steps"]:
                mine = np.array(step["gradients"][hvd.rank()], np.float32)
                result = average(tf.constant(mine)).numpy()
                owned = [
                    len(g)
                    for g in np.split(
                        np.arange(case["elements"]),
                        np.arange(1, hvd.size())
                        * case["blocks_per_rank"]
                        * case["block"],
                    )
                ]
                start = sum(owned[: hvd.rank()])
                server = step["server_error"][start : start + owned[hvd.rank()]]
                largest.append(
                    [
                        np.abs(result - step["average"]).max(),
                        np.abs(
                            exchange.worker_error.numpy()
                            - step["worker_error"][hvd.rank()]
                        ).max(),
                        np.abs(exchange.server_error.numpy() - server).max(initial=0),
                    ]
                )
    return largest


@check
def golden_op():
    return run_golden("require")


@check
def golden_twin():
    return run_golden("off")


def conserve(bits: int, steps: int, elements: int = 300) -> dict:
    """Sum of averages against the sum of true means, and the bytes of each step."""
    exchange = OneBitExchange(elements, 64, bits=bits)
    average = tf.function(exchange.average)
    got, true = np.zeros(elements), np.zeros(elements)
    bytes_of_steps = hashlib.sha256()
    for step in range(steps):
        result = average(gradients(hvd.rank(), step, elements)).numpy()
        bytes_of_steps.update(result.tobytes())
        got += result
        true += np.mean(
            [gradients(r, step, elements) for r in range(hvd.size())], axis=0
        )
    worker = hvd.allgather(exchange.worker_error[np.newaxis]).numpy().astype(float)
    server = hvd.allgather(tf.convert_to_tensor(exchange.server_error)).numpy()
    return {
        "digest": bytes_of_steps.hexdigest(),
        "difference": np.abs(true - got - worker.mean(axis=0) - server).max(),
        "residual": np.abs(worker).max(),
        "lag": np.abs(true - got).max(),
    }


@check
def conserves_one_bit():
    return conserve(1, 1000)


@check
def conserves_two_bits():
    return conserve(2, 100)


@check
def flush():
    """After a flush nothing is owed; before it the sum lags."""
    exchange = OneBitExchange(100, 16)
    average, flushed = tf.function(exchange.average), tf.function(exchange.flush)
    true, got = np.zeros(100), np.zeros(100)
    for step in range(5):
        mine = tf.constant(gradients(hvd.rank(), step, 100))
        got += (flushed if step == 4 else average)(mine).numpy()
        true += np.mean([gradients(r, step, 100) for r in range(hvd.size())], axis=0)
    return {
        "lag": np.abs(true - got).max(),
        "residual": max(np.abs(v.numpy()).max(initial=0) for v in exchange.residuals),
        "digest": digest(got),
    }


@check
def not_finite_on_one_rank():
    exchange = OneBitExchange(40, 8)
    average = tf.function(exchange.average)
    average(gradients(hvd.rank(), 0, 40))
    before = [v.numpy() for v in exchange.residuals]
    mine = gradients(hvd.rank(), 1, 40)
    if hvd.rank() == 1:
        mine[7] = np.inf
    result = average(mine).numpy()
    after = [v.numpy() for v in exchange.residuals]
    return {
        "all_nan": bool(np.isnan(result).all()),
        "kept": all(map(np.array_equal, before, after)),
        "next": digest(average(gradients(hvd.rank(), 2, 40)).numpy()),
    }


@check
def zero_blocks_stay_zero():
    exchange = OneBitExchange(64, 16)
    mine = gradients(hvd.rank(), 0, 64)
    mine[16:32] = 0
    result = exchange.average(mine).numpy()
    return np.array_equal(result[16:32], np.zeros(16)) and np.all(result[:16] != 0)


@check
def clipped():
    exchange = OneBitExchange(16, 16, clip_value=1.0)
    mine = np.full(16, 0.5, np.float32)
    mine[: 1 + hvd.rank()] = 9.0
    exchange.average(mine)
    return {
        "count": int(exchange.clipped[0]),
        "residual": exchange.worker_error.numpy().tolist(),
    }


@check
def eager_equals_traced():
    results = []
    for wrap in (lambda f: f, tf.function):
        exchange = OneBitExchange(100, 16)
        average = wrap(exchange.average)
        for step in range(3):
            last = average(tf.constant(gradients(hvd.rank(), step, 100)))
        results.append(digest(last.numpy(), exchange.worker_error.numpy()))
    return results


@check
def rows_of_several_tables():
    """Sums over the ranks, duplicates and empty batches included."""
    rng = np.random.default_rng(hvd.rank())
    everyone = []
    for rank in range(hvd.size()):
        own = np.random.default_rng(rank)
        everyone.append(batch(own, rank))
    mine = batch(rng, hvd.rank())
    slices = [rows.summed(tf.IndexedSlices(v, i)) for i, v in mine]
    counts = World().gather(
        tf.constant([[s.indices.shape[0] for s in slices]], tf.int64), "counts"
    )
    worst = {}
    for form in rows.VALUES:
        reduce = tf.function(
            lambda slices, counts, form=form: rows.mean(
                slices, counts, World(), "test", form
            )
        )
        means = reduce(slices, counts)
        worst[form] = 0.0
        for table, mean in enumerate(means):
            dense = np.zeros([9, mean.values.shape[1]])
            np.add.at(dense, mean.indices.numpy(), mean.values.numpy())
            want = np.zeros_like(dense)
            for batches in everyone:
                ids, values = batches[table]
                np.add.at(want, ids, values)
            want /= hvd.size()
            error = np.abs(dense - want).max() / np.abs(want).max()
            worst[form] = max(worst[form], float(error))
            assert np.all(np.diff(mean.indices.numpy()) > 0)
    return {"worst": worst, "digest": digest(*[m.values.numpy() for m in means])}


def batch(rng, rank: int) -> list:
    out = []
    for table, width in enumerate((3, 5, 3)):
        n = 0 if (table, rank) == (1, 0) else 6 + rank
        out.append(
            (
                rng.integers(0, 9, n),
                rng.normal(size=(n, width)).astype(np.float32),
            )
        )
    return out


@check
def horovods_own_tape():
    weights = tf.Variable(np.ones((64, 32), np.float32))
    bias = tf.Variable(np.ones(40, np.float32))
    compression = OneBitCompression(block=64, warmup_steps=1)

    def step(x, scale):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(weights * x) + scale * tf.reduce_sum(bias)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(y, [weights, bias])

    traced = tf.function(step)
    rng = np.random.default_rng(hvd.rank())
    true, got = np.zeros((64, 32)), np.zeros((64, 32))
    digests = []
    for number in range(6):
        x = rng.normal(size=(64, 32)).astype(np.float32)
        true += hvd.allreduce(x, op=hvd.Average, name=f"true{number}").numpy()
        # Another type of `scale` traces again; residuals go on all the same.
        scale = tf.constant(1.0) if number < 3 else 2.0 + number
        first, second = traced(x, scale)
        got += first.numpy()
        digests.append(digest(first.numpy(), second.numpy()))
    worker, server = compression.residuals[:2]
    owed = hvd.allreduce(worker, op=hvd.Average, name="owed").numpy()
    owed += hvd.allgather(tf.convert_to_tensor(server), name="server").numpy()
    return {
        "difference": np.abs(true - got - owed.reshape(64, 32)).max(),
        "lag": np.abs(true - got).max(),
        "digests": digests,
        "channels": len(compression._channels),
    }


@check
def horovods_tape_with_the_bare_class():
    weights = tf.Variable(np.ones(64, np.float32))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(weights * x)
        tape = hvd.DistributedGradientTape(
            tape, compression=OneBitCompression, op=hvd.Sum
        )
        return tape.gradient(y, [weights])[0]

    return step(tf.fill([64], float(hvd.rank() + 1))).numpy().tolist()


@check
def a_subset_of_the_ranks():
    if hvd.size() < 3:
        return None
    half = hvd.add_process_set([0, 2])
    if not half.included():
        return error_of(OneBitExchange, 20, 8, process_set=half)
    exchange = OneBitExchange(20, 8, process_set=half)
    result = exchange.average(np.full(20, float(hvd.rank() + 1), np.float32))
    return result.numpy().tolist()
