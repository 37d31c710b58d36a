"""Models that change from Keras's Adam to BasisAdam and back."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    batches_of,
    keras_of,
    make_click_model,
    make_optimizer,
    make_slices,
    make_variable,
    optimizer_arrays,
    to_numpy,
    variables_of,
)
from migration_helpers import DIM, N_ROWS, trained_adam


def fit(model, first: int, last: int) -> float:
    for x, y in batches_of(first, last):
        loss = model.train_on_batch(x, y)
    return float(np.ravel(loss)[0])


@pytest.mark.parametrize("source", ["model", "keras file", "checkpoint"])
def test_a_model_changes_its_optimizer(backend, source, tmp_path):
    model = make_click_model(tf.keras.optimizers.Adam(0.02))
    fit(model, 0, 4)
    if source == "keras file":
        model.save(str(tmp_path / "model.keras"))
        model = tf.keras.models.load_model(str(tmp_path / "model.keras"))
    elif source == "checkpoint":
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = saved.write(str(tmp_path / "ckpt"))
        model = make_click_model(tf.keras.optimizers.Adam(0.02))
        model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path)
    optimizer = make_optimizer(learning_rate=0.02, exclusive_rows=30)
    optimizer.load_adam(model.optimizer, model.trainable_variables)
    assert int(to_numpy(optimizer.iterations)) == 4
    model.compile(optimizer, "binary_crossentropy", jit_compile=False)
    assert np.isfinite(fit(model, 4, 8))
    adam = model.optimizer.to_adam()
    assert int(to_numpy(adam.iterations)) == 8
    model.compile(adam, "binary_crossentropy", jit_compile=False)
    assert fit(model, 8, 12) < 1.0
    path = str(tmp_path / "again.keras")
    model.save(path)
    restored = tf.keras.models.load_model(path)
    assert_same_bits(
        optimizer_arrays(model.optimizer), optimizer_arrays(restored.optimizer)
    )


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_dense_optimizer_and_wrappers(flavor, kind):
    keras = keras_of(flavor)
    adam, table, bias = trained_adam(flavor, kind=kind)
    inner = keras.optimizers.AdamW(0.5, weight_decay=0.25)
    optimizer = make_optimizer(
        flavor,
        learning_rate=0.01,
        tables=[table],
        num_buckets=12,
        dense_optimizer=inner,
    )
    optimizer.load_adam(adam, [table, bias])
    wanted = [to_numpy(v) for v in variables_of(adam) if v.shape == (3,)]
    found = [to_numpy(v) for v in variables_of(inner) if v.shape == (3,)]
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(left, right)
    assert int(to_numpy(inner.iterations)) == 20
    back = optimizer.to_adam()
    found = [to_numpy(v) for v in variables_of(back) if v.shape == (3,)]
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(left, right)


def test_accumulated_batches_are_converted(flavor):
    """Keras 3 counts batches and tf_keras updates; both stand for 20 updates."""
    adam, table, bias = trained_adam(flavor)
    optimizer = make_optimizer(
        flavor,
        learning_rate=0.01,
        tables=[table],
        num_buckets=12,
        gradient_accumulation_steps=3,
    )
    optimizer.load_adam(adam, [table, bias])
    assert int(tf.convert_to_tensor(optimizer.iterations)) == 20
    back = optimizer.to_adam()
    assert int(tf.convert_to_tensor(back.iterations)) == 20
    slices = make_slices([3], np.ones((1, DIM)), (N_ROWS, DIM))
    optimizer.apply_gradients([(slices, table), (tf.ones(3), bias)])
    with pytest.raises(ValueError, match="accumulated 1 of 3 gradients"):
        optimizer.to_adam()


@pytest.mark.skipif(active_flavor() != "keras3", reason="one process is enough")
def test_large_tables_pass_in_chunks(monkeypatch):
    """The same with chunks of 16 rows as with one."""
    from tf_basis import moments

    arrays = []
    for size in (1 << 22, 128):
        monkeypatch.setattr(moments, "_CHUNK_NUMBERS", size)
        adam, table, bias = trained_adam("keras3")
        kind = {"hashing": "double", "num_buckets": 24, "momentum": "shared"}
        optimizer = make_optimizer("keras3", learning_rate=0.01, tables=[table], **kind)
        optimizer.load_adam(adam, [table, bias])
        back = optimizer.to_adam()
        optimizer.resize(table, num_buckets=31)
        arrays.append({**optimizer_arrays(optimizer, variables_of(back))})
    assert arrays[0].keys() == arrays[1].keys()
    for key, value in arrays[0].items():
        np.testing.assert_allclose(value, arrays[1][key], 1e-6, 1e-12)


def test_errors(flavor):
    optimizers = keras_of(flavor).optimizers
    adam, table, bias = trained_adam(flavor, 1)

    def load(source, variables=(table, bias), **arguments):
        optimizer = make_optimizer(flavor, tables="table", num_buckets=9, **arguments)
        optimizer.load_adam(source, list(variables))

    unbuilt = optimizers.Adam(0.1)
    strict, sgd = optimizers.Adam(0.1, amsgrad=True), optimizers.SGD(0.1)
    averaging = optimizers.Adam(0.1, use_ema=True)
    for each in (strict, sgd, averaging):
        each.build([table, bias])
    stranger = make_variable(np.zeros(2), flavor, "stranger")
    for call, words in [
        (lambda: load(unbuilt), "adam must be built"),
        (lambda: load(strict), "adam must be an Adam or AdamW .* without amsgrad"),
        (lambda: load(sgd), "adam must be an Adam or AdamW"),
        (lambda: load(averaging), "adam must have use_ema=False"),
        (lambda: load(adam, [table, bias, stranger]), "without state for 'stranger'"),
        (
            lambda: load(adam, dense_optimizer=optimizers.SGD(0.1)),
            "dense_optimizer must be an Adam",
        ),
        (lambda: make_optimizer(flavor).to_adam(), "no state yet"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    if flavor == "tf_keras":
        with pytest.raises(ValueError, match="variables must be given"):
            make_optimizer(flavor).load_adam(adam)
    else:
        optimizer = make_optimizer(flavor, tables="table", num_buckets=9)
        optimizer.load_adam(adam)
        assert len(optimizer.table_state("table")["bucket_steps"]) == 9
