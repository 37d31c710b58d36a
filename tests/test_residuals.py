"""Residuals cut for another number of ranks: numbers alone, and one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import to_numpy

from tf_basis import distributed
from tf_basis.distributed import residuals
from tf_basis.distributed.exchange import OneBitExchange, owned_elements
from tf_basis.distributed.world import World, alone

keras = tf.keras
ELEMENTS, BLOCK = 100, 8  # 13 blocks, the last one short


def states():
    exchange = OneBitExchange(ELEMENTS, BLOCK, clip_value=1.0)
    table = tf.Variable(tf.zeros([0, 3]), shape=[None, 3])
    ids = tf.Variable(tf.zeros([0], tf.int64), shape=[None])
    Local = residuals.Local
    return [
        Local(exchange.server_error, "server", exchange),
        Local(exchange.worker_error, "worker", exchange),
        Local(tf.Variable(tf.zeros([2, 3])), "mean"),
        Local(exchange.clipped, "count"),
        Local(ids, "rows"),
        Local(table, "row_values"),
        Local(tf.Variable([0.0]), "own"),
    ]


def of_rank(rng, rank: int, ranks: int):
    owned = owned_elements(ELEMENTS, BLOCK, ranks)[rank] if ranks > 1 else 0
    return [
        rng.normal(size=owned).astype(np.float32),
        rng.normal(size=ELEMENTS).astype(np.float32),
        rng.normal(size=(2, 3)).astype(np.float32),
        np.array([rank + 1], np.int64),
        rng.integers(0, 9, rank),
        rng.normal(size=(rank, 3)).astype(np.float32),
        np.array([rank], np.float32),
    ]


def owed(values) -> list:
    """What results of exchanges still owe to the mean over the ranks, by kind."""
    server, worker, mean, count, ids, rows, _ = zip(*values)
    table = np.zeros((9, 3))
    for i, r in zip(ids, rows):
        np.add.at(table, i, r.astype(np.float64) / len(values))
    joined = np.concatenate(server).astype(np.float64)
    debt = np.mean(worker, axis=0, dtype=np.float64) + (joined if joined.size else 0)
    return [debt, np.mean(mean, axis=0, dtype=np.float64), np.sum(count), table]


@pytest.mark.parametrize(
    "old, new", list(itertools.product([1, 2, 3, 7, 20], repeat=2))
)
def test_what_is_owed_stays(rng, old, new):
    before = [of_rank(rng, r, old) for r in range(old)]
    columns = list(zip(*before))
    after = [
        residuals.recut(states(), columns.__getitem__, old, new, r) for r in range(new)
    ]
    for was, now in zip(owed(before), owed(after)):
        np.testing.assert_allclose(now, was, atol=1e-6)
    for rank, values in enumerate(after):
        shapes = [s.shape(new, rank) for s in states()]
        assert all(s.is_compatible_with(v.shape) for s, v in zip(shapes, values))
        assert [v.dtype for v in values] == [v.dtype for v in before[0]]
        assert values[-1] == [rank if rank < old else 0]


def test_what_is_lost_counts_as_nothing(rng):
    before = [of_rank(rng, r, 3) for r in range(3)]
    columns = [[a, None, c] for a, _, c in zip(*before)]
    after = [residuals.recut(states(), columns.__getitem__, 3, 2, r) for r in range(2)]
    gone = [np.zeros_like(v) for v in before[1]]
    gone[4], gone[5] = gone[4][:0], gone[5][:0]
    for was, now in zip(owed([before[0], gone, before[2]]), owed(after)):
        np.testing.assert_allclose(now, was, atol=1e-6)
    assert after[1][-1] == [0]  # that of rank 1 is lost: rank 0's


# ---- elastic, in one process ------------------------------------------------------


def small_model(optimizer="sgd"):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def onebit():
    policy = distributed.Policy(min_elements=0)
    return distributed.OneBitAdam(0.1, warmup_steps=1, policy=policy, block=8)


def numbers_of(model) -> list[np.ndarray]:
    """Its worker error and weights."""
    local = residuals.local_state(model.optimizer)
    errors = [s.variable.numpy() for s in local if s.kind == "worker"]
    return [*errors, *(to_numpy(w) for w in model.weights)]


def test_a_state_goes_back_to_its_last_commit():
    model = small_model(onebit())
    state = distributed.ElasticState(model, epoch=0, batch=0, note="a")
    x, y = np.ones((8, 2), np.float32), np.ones((8, 4), np.float32)
    calls = []

    @distributed.elastic_run
    def train(state, epochs):
        calls.append(epochs)
        callback = distributed.ElasticCallback(state, every=1)
        for epoch in range(state.epoch, epochs):
            model.fit(
                x,
                y,
                batch_size=4,
                initial_epoch=epoch,
                epochs=epoch + 1,
                verbose=0,
                callbacks=[callback],
            )
        return state.epoch, state.batch

    assert train(state, 2) == (2, 0) and calls == [2]
    before = numbers_of(model)
    assert np.any(before[0])
    state.note = "b"
    model.fit(x, y, verbose=0)
    assert not np.array_equal(numbers_of(model)[0], before[0])
    # What Horovod does after a failure.
    state.restore()
    state.reset()
    assert train(state, 2) == (2, 0)
    for was, now in zip(before, numbers_of(model)):
        np.testing.assert_array_equal(now, was)
    assert (state.note, state.epoch, state.batch) == ("a", 2, 0)


def test_errors_of_others_are_not_taken_for_failed_exchanges():
    state = distributed.ElasticState(small_model())

    @distributed.elastic_run
    def fails(state):
        raise tf.errors.UnknownError(None, None, "the disk is full")

    with pytest.raises(tf.errors.UnknownError, match="the disk is full"):
        fails(state)


def test_bad_states_are_refused():
    with pytest.raises(ValueError, match="model must be a compiled model"):
        distributed.ElasticState(keras.Sequential([keras.layers.Dense(1)]))
    part = distributed.OneBitAdam(process_set="some ranks")
    with pytest.raises(ValueError, match=r"process_set must be None .* 'some ranks'"):
        distributed.ElasticState(small_model(part))
    with pytest.raises(ValueError, match=r"every must be .* received 0"):
        distributed.ElasticCallback(distributed.ElasticState(small_model()), every=0)
    with pytest.raises(ValueError, match="state must be an ElasticState, received 3"):
        distributed.ElasticCallback(3)


def test_a_world_can_be_made_alone():
    with alone():
        world = World()
    assert (world.size, world.rank) == (1, 0)
    world.follow()
    assert world.size == World().size
