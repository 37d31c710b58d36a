"""EmbeddingCollection: against numpy, gradients, settings, saving."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import tensorflow as tf
from helpers import make_optimizer, to_numpy

import tf_basis
from tf_basis import layers
from tf_basis.layers import FeatureConfig, TableConfig, collection, config

ROWS, DIM = 50, 3


def pooled(table, examples, weights, combiner):
    """The definition, in float64."""
    out = np.zeros((len(examples), table.shape[1]))
    for i, (ids, w) in enumerate(zip(examples, weights)):
        w = np.asarray(w, np.float64)
        total = w @ table[ids].astype(np.float64) if len(ids) else np.zeros(DIM)
        scale = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt(np.square(w).sum())}
        out[i] = total / scale[combiner] if scale[combiner] else 0.0
    return out


def random_examples(rng, n=17):
    """Empty rows and repeated ids; weights of which some are zero."""
    lengths = rng.integers(0, 6, n)
    lengths[[0, 5]] = 0
    examples = [rng.integers(0, 8, k) for k in lengths]
    weights = [rng.choice([0.0, 0.5, 2.0, 3.0], k).astype(np.float32) for k in lengths]
    weights[3] = np.zeros_like(weights[3])
    return examples, weights


def forms(examples, values, dtype, padding):
    """The same as a ragged, a sparse and a padded tensor with its mask."""
    lengths = [len(e) for e in examples]
    flat = np.concatenate([np.asarray(v, dtype) for v in values])
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant(flat), lengths)
    width = max(lengths) + 1
    padded = np.full((len(examples), width), padding, dtype)
    mask = np.zeros(padded.shape, bool)
    for i, v in enumerate(values):
        padded[i, : len(v)], mask[i, : len(v)] = v, True
    sparse = tf.SparseTensor(np.argwhere(mask), flat, padded.shape)
    return {"ragged": ragged, "sparse": sparse, "padded": (padded, mask)}


def collect(flavor, *features, **arguments):
    return layers.for_flavor(flavor).EmbeddingCollection(features, **arguments)


@pytest.mark.parametrize("combiner", config.COMBINERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("form", ["ragged", "sparse", "padded"])
def test_pooling_equals_numpy(flavor, combiner, weighted, form, rng):
    table = TableConfig("t", ROWS, DIM, combiner=combiner)
    layer = collect(flavor, FeatureConfig("f", table, (None, None)))
    for trial in range(3):
        examples, weights = random_examples(rng)
        ids = forms(examples, examples, np.int64, -1)[form]
        given = forms(examples, weights, np.float32, np.nan)[form]
        arguments = {}
        if form == "padded":
            (ids, mask), given = ids, given[0]
            arguments["mask"] = {"f": mask}
        if weighted:
            arguments["weights"] = {"f": given}
        else:
            weights = [np.ones(len(e)) for e in examples]
        call = tf.function(layer) if trial == 2 else layer
        out = call({"f": ids}, **arguments)["f"]
        wanted = pooled(to_numpy(layer.table("t")), examples, weights, combiner)
        np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_fixed_numbers_of_ids(flavor, rng):
    """One id each, k ids combined, k ids apart; two features share a table."""
    table, other = TableConfig("t", ROWS, DIM), TableConfig("u", 9, 2, combiner="sqrtn")
    layer = collect(
        flavor,
        FeatureConfig("one", table),
        FeatureConfig("apart", table, (None, 4), (None, 4, DIM)),
        FeatureConfig("four", other, (None, 4)),
    )
    ids = {
        "one": rng.integers(0, ROWS, 6),
        "apart": rng.integers(0, ROWS, (6, 4)),
        "four": rng.integers(0, 9, (6, 4)),
    }
    out = layer(ids)
    t, u = to_numpy(layer.table("t")), to_numpy(layer.table("u"))
    np.testing.assert_array_equal(out["one"], t[ids["one"]])
    np.testing.assert_array_equal(out["apart"], t[ids["apart"]])
    np.testing.assert_allclose(out["four"], u[ids["four"]].sum(1) / 2, rtol=1e-5)
    assert len(layer.trainable_weights) == 2
    joined = collect(
        flavor,
        FeatureConfig("b", table),
        FeatureConfig("a", other, (None, 4)),
        concatenate=True,
    )
    out = joined({"a": ids["four"], "b": ids["one"]})
    assert out.shape == (6, DIM + 2)
    t = to_numpy(joined.table("t"))
    np.testing.assert_array_equal(out[:, :DIM], t[ids["one"]])


def test_one_sparse_gradient_for_each_table(flavor):
    """Masked places are not in it."""
    table = TableConfig("t", ROWS, DIM, combiner="sum")
    layer = collect(
        flavor, FeatureConfig("a", table), FeatureConfig("b", table, (None, 2))
    )
    ids = {"a": np.array([3, 4]), "b": np.array([[3, 9], [0, 0]])}
    mask = {"b": np.array([[True, True], [False, False]])}
    with tf.GradientTape() as tape:
        out = layer(ids, mask=mask)
        loss = tf.reduce_sum(out["a"]) + 10.0 * tf.reduce_sum(out["b"])
    (gradient,) = tape.gradient(loss, layer.trainable_weights)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(gradient.indices.numpy().tolist()) == [3, 3, 4, 9]
    dense = tf.convert_to_tensor(gradient).numpy()[:, 0]
    np.testing.assert_array_equal(dense[[0, 3, 4, 9]], [0.0, 11.0, 1.0, 10.0])


def test_masked_places_apart_are_zeros_and_not_looked_up(flavor):
    """Padding may be outside of the table."""
    table = TableConfig("t", ROWS, DIM)
    layer = collect(
        flavor,
        FeatureConfig("one", table),
        FeatureConfig("many", table, (None, 2), (None, 2, DIM)),
    )
    ids = {"one": np.array([-1, 7]), "many": np.array([[3, -1], [-1, 9]])}
    mask = {name: value >= 0 for name, value in ids.items()}
    with tf.GradientTape() as tape:
        out = tf.function(layer)(ids, mask=mask)
        loss = tf.reduce_sum(out["one"]) + tf.reduce_sum(out["many"])
    (gradient,) = tape.gradient(loss, layer.trainable_weights)
    assert sorted(gradient.indices.numpy().tolist()) == [3, 7, 9]
    np.testing.assert_array_equal(gradient.values, np.ones((3, DIM)))
    padded = np.vstack([to_numpy(layer.table("t")), np.zeros(DIM)])
    for name, value in out.items():
        np.testing.assert_array_equal(value, padded[ids[name]])


# ---- what the optimizer reads -------------------------------------------------------


_ITEM = TableConfig(
    "item", 300, 4, moment_dtype="bfloat16", scalar_range=(0.5, 2.0), scalar_decay=0.9
)


def settings_layer(flavor):
    return collect(
        flavor,
        FeatureConfig(
            "user", TableConfig("user", 400, 4, num_buckets=20, exclusive_rows=5)
        ),
        FeatureConfig("item", _ITEM),
        FeatureConfig("small", TableConfig("small", 30, 4)),
    )


def test_the_optimizer_reads_the_settings(flavor):
    layer = settings_layer(flavor)
    layer.build(None)
    optimizer = make_optimizer(flavor, compression_ratio=10.0, min_rows=10_000)
    optimizer.build(layer.trainable_weights)
    state = {
        name: optimizer.table_state(layer.table(name)) for name in ("user", "item")
    }
    assert state["user"]["second_moment"].shape == (20, 4)
    assert state["item"]["second_moment"].shape == (30, 4)
    of_item = optimizer._basis.layouts[optimizer._var_key(layer.table("item"))]
    assert dict(of_item.scalar) == {"scalar_decay": 0.9, "scalar_range": (0.5, 2.0)}
    assert TableConfig("t", 9, 1, invariant_scalar="none").settings() == {
        "invariant_scalar": None
    }
    with pytest.raises(ValueError, match="compressed table"):
        optimizer.table_state(layer.table("small"))
    assert optimizer.table_settings == {}
    assert optimizer.resize(layer.table("user"), factor=2) == 35  # 5 + 2 · 15


def test_patterns_of_the_optimizer_come_first(flavor):
    layer = settings_layer(flavor)
    layer.build(None)
    optimizer = make_optimizer(flavor, table_settings={"user": {"num_buckets": 44}})
    optimizer.build(layer.trainable_weights)
    state = optimizer.table_state(layer.table("user"))
    assert state["second_moment"].shape == (44, 4)


def test_plan_reads_the_settings(flavor):
    layer = settings_layer(flavor)
    layer.build(None)
    found = tf_basis.plan(layer, min_rows=200)
    assert {t.path.split("/")[-2]: t.buckets for t in found.tables} == {
        "item": 3,
        "user": 20,
    }


def test_a_saved_model_keeps_layer_and_settings(tmp_path):
    keras, rng = tf.keras, np.random.default_rng(0)
    flavor = tf_basis.adapters.flavor.active()
    inputs = {
        "user": keras.Input((), dtype="int32", name="user"),
        "item": keras.Input((), dtype="int32", name="item"),
        "small": keras.Input((3,), dtype="int32", name="small"),
    }
    tables = settings_layer(flavor).features
    small = FeatureConfig("small", tables[2].table, (None, 3))
    layer = collect(flavor, *tables[:2], small, concatenate=True, name="tables")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(make_optimizer(learning_rate=0.05), "mse")
    x = {
        "user": rng.integers(0, 400, 64),
        "item": rng.integers(0, 300, 64),
        "small": rng.integers(0, 30, (64, 3)),
    }
    y = (x["user"] % 2)[:, None].astype(np.float32)
    losses = model.fit(x, y, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    path = str(tmp_path / "model.keras")
    model.save(path)
    again = keras.models.load_model(path)
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), again.predict(x, verbose=0)
    )
    user = again.get_layer("tables").table("user")
    assert again.optimizer.table_state(user)["second_moment"].shape == (20, 4)
    for each in (model, again):
        each.fit(x, y, shuffle=False, verbose=0)
    assert again.get_layer("tables").get_config() == layer.get_config()
    for a, b in zip(model.weights, again.weights):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


def test_mixed_precision_keeps_the_gradient_sparse(flavor):
    layer = collect(
        flavor, FeatureConfig("f", TableConfig("t", 9, 2)), dtype="mixed_bfloat16"
    )
    with tf.GradientTape() as tape:
        out = layer({"f": np.array([1, 2])})["f"]
        loss = tf.reduce_sum(tf.cast(out, tf.float32))
    assert out.dtype == tf.bfloat16
    (gradient,) = tape.gradient(loss, layer.trainable_weights)
    assert isinstance(gradient, tf.IndexedSlices) and gradient.dtype == tf.float32


def test_files_of_a_model_in_which_the_first_table_grew(tmp_path):
    """The optimizer made anew has the tables in the model's order."""
    keras, flavor = tf.keras, tf_basis.adapters.flavor.active()

    def build(rows):
        first = TableConfig("first", rows, 4, num_buckets=3)
        second = TableConfig("second", 20, 4, num_buckets=5)
        inputs = {n: keras.Input((), dtype="int64", name=n) for n in "ab"}
        features = [FeatureConfig("a", first), FeatureConfig("b", second)]
        layer = collect(flavor, *features, concatenate=True, name="tables")
        return keras.Model(inputs, keras.layers.Dense(1, name="d")(layer(inputs)))

    model = build(10)
    model.compile(make_optimizer(learning_rate=0.01), "mse")
    x, y = {n: tf.constant([1, 2]) for n in "ab"}, tf.constant([[0.0], [1.0]])
    model.fit(x, y, verbose=0)
    model.get_layer("tables").grow("first", 30, model.optimizer)
    tf_basis.retrace(model)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    tf_basis.export_saved_model(model, tmp_path / "export")
    loaded, restored = keras.models.load_model(tmp_path / "model.keras"), build(30)
    restored.compile(type(model.optimizer).from_config(model.optimizer.get_config()))
    tf_basis.restore_optimizer(restored, tmp_path / "export")
    restored.compile(restored.optimizer, "mse")
    for each in (model, loaded, restored):
        each.fit(x, y, verbose=0)
    for each in (loaded, restored):
        for a, b in zip(model.weights, each.weights):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.parametrize("module", [config, collection])
def test_docstrings(module):
    names = {n: getattr(layers, n) for n in layers.__all__} | {"tf": tf}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and result.failed == 0
