"""`GrowBuckets`: the same `fit` goes on with more buckets and all of its state."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    batches_of,
    make_click_model,
    make_optimizer,
    optimizer_arrays,
    run_python,
    to_numpy,
)

import tf_basis

(X, Y) = batches_of(0, 1, size=96)[0]


def make_model(**more):
    settings = {k: more.pop(k) for k in ("run_eagerly", "jit_compile") if k in more}
    arguments = {"learning_rate": 0.02, "exclusive_rows": 20, **more}
    return make_click_model(make_optimizer(**arguments), **settings)


def fit(model, first: int, last: int, *callbacks):
    return model.fit(
        X,
        Y,
        batch_size=32,
        initial_epoch=first,
        epochs=last,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def table_of(model):
    (table,) = [v for v in model.trainable_variables if v.shape[0] == 12_000]
    return table


def buckets_of(model) -> int:
    return len(model.optimizer.table_state(table_of(model))["bucket_steps"])


def arrays_of(model) -> dict:
    return optimizer_arrays(model.optimizer, model.weights)


@pytest.mark.parametrize(
    "mode", ["graph", "eager", pytest.param("xla", marks=pytest.mark.long)]
)
def test_one_fit_gives_the_bits_of_fits_with_resize_between(backend, mode):
    if mode == "xla" and backend == "op":
        pytest.skip("XLA always takes the twin")
    settings = {"eager": {"run_eagerly": True}, "xla": {"jit_compile": True}}
    one, other = (make_model(**settings.get(mode, {})) for _ in range(2))
    grow = tf_basis.GrowBuckets({1: 2, 3: 1.5})
    history = fit(one, 0, 5, grow)
    fit(other, 0, 1)
    other.optimizer.resize(table_of(other), factor=2)
    tf_basis.retrace(other)
    fit(other, 1, 3)
    other.optimizer.resize(table_of(other), factor=1.5)
    tf_basis.retrace(other)
    fit(other, 3, 5)
    assert_same_bits(arrays_of(one), arrays_of(other))
    path = grow.changes[0][1]
    assert grow.changes == [(1, path, 120, 220), (3, path, 220, 320)]
    assert buckets_of(one) == 320
    assert int(to_numpy(one.optimizer.iterations)) == 15
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert history.epoch == list(range(5))


def test_every_step_after_the_change_reaches_the_new_state(backend):
    """No step is lost: each of the 15 steps counts in some bucket of every row."""
    model = make_model(num_buckets=21)
    fit(model, 0, 5, tf_basis.GrowBuckets({1: 2, 2: 2, 4: 2}))
    state = model.optimizer.table_state(table_of(model))
    assert len(state["bucket_steps"]) == 28
    assert set(state["bucket_steps"][20:]) == {15}


def test_steps_callables_and_patterns():
    schedules = [{4: 3}, lambda step: 3 if step == 4 else None, {4: {"embed": 3}}]
    results = []
    for schedule in schedules:
        model = make_model(tables="embed")
        grow = tf_basis.GrowBuckets(schedule, every="step")
        fit(model, 0, 3, grow)
        assert [c[0] for c in grow.changes] == [4, 4]
        assert {c[3] - 20 for c in grow.changes} == {3 * 1, 3 * 100}
        results.append(arrays_of(model))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_counts_for_some_tables():
    model = make_model(tables="embed")
    grow = tf_basis.GrowBuckets({1: {"^embedding_?[0-9]*/": 90}}, unit="num_buckets")
    with pytest.raises(ValueError, match="must name compressed tables") as error:
        fit(make_model(), 0, 2, tf_basis.GrowBuckets({1: {"nothing": 2}}))
    assert "nothing" in str(error.value)
    fit(model, 0, 3, grow)
    layouts = model.optimizer._basis.layouts.values()
    assert {x.mapping.num_buckets for x in layouts} == {90}
    fit(model, 0, 3, grow)  # counts may come again
    assert {x.mapping.num_buckets for x in layouts} == {90}


def test_resumed_steps_repeat_nothing():
    model = make_model()
    grow = tf_basis.GrowBuckets({2: 2}, every="step")
    fit(model, 0, 1, grow)
    fit(model, 0, 2, grow)
    assert len(grow.changes) == 1 and buckets_of(model) == 220


def test_before_the_first_step(capsys):
    """The optimizer is built by then, or is built for it."""
    model = make_model()
    fit(model, 0, 1, tf_basis.GrowBuckets({0: 2}, verbose=1))
    assert buckets_of(model) == 220
    assert "epoch 0: " in capsys.readouterr().out


@pytest.mark.skipif(active_flavor() != "keras3", reason="wrappers of Keras 3")
@pytest.mark.parametrize("wrapper", ["LossScaleOptimizer", "MultiOptimizer"])
def test_inside_wrappers(wrapper):
    optimizers = tf.keras.optimizers
    inner = make_optimizer(learning_rate=0.02, exclusive_rows=20)
    if wrapper == "LossScaleOptimizer":
        outer = optimizers.LossScaleOptimizer(inner)
    else:
        mapping = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*embeddings": inner})
        outer = optimizers.MultiOptimizer(mapping)
    model = make_click_model(outer)
    fit(model, 0, 3, tf_basis.GrowBuckets({1: 2}))
    state = inner.table_state(table_of(model))
    assert len(state["bucket_steps"]) == 220
    assert state["bucket_steps"][20:].max() > 3


@pytest.mark.skipif(active_flavor() != "tf_keras", reason="tf_keras has this switch")
def test_steps_that_the_optimizer_compiles_itself():
    """tf_keras may keep a compiled step of its own; it must see the new state."""
    results = []
    for compiled in (True, False):
        model = make_model()
        model.optimizer.jit_compile = compiled
        fit(model, 0, 4, tf_basis.GrowBuckets({1: 2}))
        assert buckets_of(model) == 220
        results.append(model.optimizer.table_state(table_of(model)))
    for name, value in results[0].items():
        np.testing.assert_allclose(value, results[1][name], 1e-3, 1e-9)


MIRRORED_SOURCE = """
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)

import tf_basis
from test_grow_callback import fit, make_model, table_of

results = []
for strategy in (tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), None):
    scope = (strategy or tf.distribute.get_strategy()).scope()
    with scope:
        model = make_model()
    fit(model, 0, 4, tf_basis.GrowBuckets({1: 2, 2: 1.5}))
    results.append(model.optimizer.table_state(table_of(model)))
    if strategy is None:
        continue
    for slots in model.optimizer._basis.slots.values():
        for slot in slots.values():
            first, second = [part.numpy() for part in slot.values]
            assert first.tobytes() == second.tobytes()
assert len(results[0]["bucket_steps"]) == 320
for name, value in results[0].items():
    np.testing.assert_allclose(value, results[1][name], 1e-4, 1e-9)
print("same")
"""


@pytest.mark.long
def test_mirrored_replicas_grow_alike():
    """Two logical CPUs, so a process of its own."""
    assert run_python(MIRRORED_SOURCE).stdout.split()[-1] == "same"


def test_errors():
    for arguments, words in [
        (({1: 0},), "schedule must be a number above 0 in its values: factors"),
        (({-1: 2},), "schedule must be an integer of at least 0 in its keys"),
        (({1: 2.5}, "num_buckets"), "schedule must be an integer of at least 1"),
        (([2, 3],), "schedule must be a dict or a callable"),
        (({1: {"(": 2}},), r"schedule must be .* regular expressions .* '\('"),
        (({1: {3: 2}},), "schedule must be .* regular expressions .* received 3"),
        (({1: 2}, "times"), "unit must be one of 'factor', 'num_buckets'"),
        (({1: 2}, "factor", "batch"), "every must be one of 'epoch', 'step'"),
    ]:
        with pytest.raises(ValueError, match=words):
            tf_basis.GrowBuckets(*arguments)
    model = make_click_model("sgd")
    with pytest.raises(ValueError, match="optimizer of tf_basis"):
        fit(model, 0, 1, tf_basis.GrowBuckets({1: 2}))
