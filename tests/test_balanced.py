"""BalancedBatch: two ranks of which one is half as fast, and one process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from horovod_helpers import launch_fixture

from tf_basis import distributed
from tf_basis.distributed.balanced_plan import Plan, apportion

checks = launch_fixture("balanced", ranks=2, timeout=300)
N, STEPS, EVERY = 48, 26, 4

# ---- two ranks ------------------------------------------------------------------


def test_sizes_follow_the_speed_and_their_sum_stays(checks):
    fast, slow = checks["sizes_follow_the_speed"]
    assert fast["before"] == slow["before"] == [24, 24]
    assert fast["history"] == slow["history"] and len(fast["history"]) >= 2
    assert fast["sizes"] == slow["sizes"] == fast["history"][-1]["sizes"]
    assert 28 <= fast["sizes"][0] <= 35  # ideal 32
    # At least 80 % of 1 + 1/2, the throughput of ranks that do not wait.
    seconds = max(fast["sizes"][0], 2 * slow["sizes"][1])
    assert 6 * seconds <= 5 * N
    sizes = [[len(x) for x in rank["seen"][-STEPS:]] for rank in (fast, slow)]
    assert fast["iterations"] == slow["iterations"] == STEPS
    held = [[24, 24]] * STEPS
    for record in fast["history"]:
        held[record["step"] :] = [record["sizes"]] * (STEPS - record["step"])
    assert [list(pair) for pair in zip(*sizes)] == held
    assert {sum(pair) for pair in held} == {N} and held[0] != held[-1]


def test_every_example_counts_alike_while_sizes_change(checks):
    """As one process that has all examples of each step in one batch."""
    ranks = checks["sizes_follow_the_speed"]
    kernel, bias = ranks[0]["first"].astype(np.float64)[:, 0], 0.0
    for step in range(-STEPS, 0):
        x = np.concatenate([rank["seen"][step] for rank in ranks]).astype(np.float64)
        slope = 2 * (1 + x[:, 2]) * (x @ kernel + bias - x[:, 0] + x[:, 1]) / N
        kernel, bias = kernel - 0.05 * slope @ x, bias - 0.05 * slope.sum()
    for rank in ranks:
        np.testing.assert_allclose(rank["weights"][0][:, 0], kernel, atol=2e-6)
        np.testing.assert_allclose(rank["weights"][1], [bias], atol=2e-6)


def test_one_bit_scales_weigh_by_examples(checks):
    for found in checks["one_bit_scales_weigh_by_examples"]:
        for bits, moved in found.items():
            # 12 examples of 1 and 4 of 5; the mean of ranks that count alike is 3.
            np.testing.assert_allclose(moved, 2.0, rtol=1e-5, err_msg=f"{bits} bits")


def test_a_loop_of_its_own_assigns_weights(checks):
    for found, size in zip(checks["a_loop_of_its_own_assigns_weights"], (12, 4)):
        assert found["lengths"] == [size, size]
        np.testing.assert_allclose(found["kernel"], -2 * 2.0, rtol=1e-6)


def test_mistakes_end_on_all_ranks(checks):
    for errors in checks["mistakes_end_on_all_ranks"]:
        assert "has given [-1, -1] on the ranks" in errors["ignored"]
        assert "has given [-1, -1] on the ranks" in errors["other"]
        assert "all ranks must have the same arguments" in errors["unequal"]
        assert "global_batch_size': 17" in errors["unequal"]
        assert "optimizer must be a DistributedOptimizer" in errors["plain"]
        assert "2 ranks, received 9 with minimum=5" in errors["small"]


# ---- one process ----------------------------------------------------------------


@pytest.mark.parametrize(
    "total, shares, bounds, expected",
    [
        (100, [1, 1, 1], {}, [34, 33, 33]),
        (100, [1 / 3, 2 / 3], {}, [33, 67]),
        (10, [0.5, 0.5, 1e-12], {}, [5, 4, 1]),
        (100, [1, 1e-9, 1], {"minimum": 10, "maximum": 60}, [45, 10, 45]),
        (100, [9, 1, 1], {"maximum": 40}, [40, 30, 30]),
        (6, [5, 1, 1], {"minimum": 2, "maximum": 2}, [2, 2, 2]),
        (1, [3], {}, [1]),
    ],
)
def test_apportion(total, shares, bounds, expected):
    assert apportion(total, shares, **bounds) == expected


def test_apportion_keeps_sum_bounds_and_order(rng):
    for _ in range(200):
        ranks = int(rng.integers(1, 9))
        shares = rng.lognormal(sigma=2, size=ranks).tolist()
        least = int(rng.integers(1, 9))
        most = least + int(rng.integers(0, 60))
        total = int(rng.integers(least * ranks, most * ranks + 1))
        sizes = apportion(total, shares, least, most)
        assert sum(sizes) == total and least <= min(sizes) <= max(sizes) <= most
        ordered = [size for _, size in sorted(zip(shares, sizes))]
        assert ordered == sorted(ordered)


def test_what_pipelines_have_begun_stays_and_they_wait_for_an_agreement():
    plan, given = Plan([3, 5]), []
    iterator, sizes = plan.take(0, 7, rank=0)
    assert sizes == [3, 3]
    with plan.held() as begun:
        late = threading.Thread(target=lambda: given.append(plan.take(iterator, 9, 0)))
        late.start()
        late.join(0.05)
        assert begun == 2 and late.is_alive() and given == []
        plan.change(3, [4, 4])  # another rank has begun three
    late.join(5)
    assert given == [(iterator, [3, 4])]
    assert plan.take(0, 9, rank=1) == (iterator + 1, [4, 4])
    with pytest.raises(RuntimeError, match="a newer one has been begun"):
        plan.take(iterator, 9, 0)


def test_one_process_has_all_examples_in_any_structure():
    keras = tf.keras
    x = {"a": np.arange(7, dtype=np.int32), "b": np.ones((7, 2), np.float32)}
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(7.0), np.full(7, 2)))
    balance = distributed.BalancedBatch(5, every=1)
    batches = balance.batches(data.repeat())
    assert batches.element_spec[0]["b"].shape.as_list() == [None, 2]
    found = [f for f in batches.take(3)]
    assert [f[0]["a"].numpy().tolist() for f in found][1] == [5, 6, 0, 1, 2]
    assert found[2][2].numpy().tolist() == [2.0] * 5
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = data.map(lambda x, y, w: (x["b"], y)).repeat()
    model.fit(balance.batches(data), steps_per_epoch=3, verbose=0, callbacks=[balance])
    assert balance.sizes == [5] and balance.history == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"global_batch_size": 0}, "global_batch_size .* at least 1, received 0"),
        ({"every": 1.5}, "every must be an integer .* received 1.5"),
        ({"smoothing": 1.0}, r"smoothing must be a number in \[0, 1\), received 1.0"),
        ({"minimum": 0}, "minimum .* received 0"),
        ({"maximum": False}, "maximum .* received False"),
        ({"maximum": 7}, "maximum times the 1 ranks, received 8 with .* maximum=7"),
        ({"minimum": 9}, "received 8 with minimum=9"),
        ({"timeout": -1}, "timeout .* received -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        distributed.BalancedBatch(**{"global_batch_size": 8, **arguments})


@pytest.mark.parametrize(
    "dataset, words",
    [
        ([1], r"a tf.data.Dataset, received \[1\]"),
        (lambda d: d, "must have no end.* received one of 5 examples"),
        (
            lambda d: d.filter(lambda x, y: x > 0),
            "received one of an unknown number of examples",
        ),
        (lambda d: d.map(lambda x, y: x).repeat(), r"examples \(x, y\) or .* received"),
        (lambda d: d.map(lambda x, y: (x, y, [x])).repeat(), "one number as sample_"),
        (
            lambda d: d.map(lambda x, y: (tf.sparse.eye(2), y)).repeat(),
            "dense tensors of known rank, received",
        ),
    ],
)
def test_bad_datasets_are_refused(dataset, words):
    if callable(dataset):
        dataset = dataset(tf.data.Dataset.from_tensor_slices((range(5), range(5))))
    with pytest.raises(ValueError, match=words):
        distributed.BalancedBatch(4).batches(dataset)
    with pytest.raises(ValueError, match="weights must be True or False, received 0"):
        distributed.BalancedBatch(4).batches(dataset, weights=0)
