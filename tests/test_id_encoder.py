"""IdEncoder: against a Counter; files; tables that grow with a vocabulary; errors."""

from __future__ import annotations

import doctest
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    active_flavor,
    assert_same_bits,
    keras_of,
    make_optimizer,
    optimizer_arrays,
    state_of,
    to_numpy,
)

import tf_basis
from tf_basis import layers
from tf_basis.layers import (
    EmbeddingCollection,
    FeatureConfig,
    IdEncoder,
    TableConfig,
    growing,
    id_encoder,
)

MASK = {"string": "", "int64": 0}


def make(flavor, **arguments):
    return layers.for_flavor(flavor).IdEncoder(**arguments)


def random_rows(rng, kind: str, n=60, first=1):
    """Lists of skewed ids, of which the first and some more are empty."""
    ids = (first + 50 * rng.random(400) ** 3).astype(int)
    ids = [f"ü{i}".encode() if kind == "string" else i for i in ids.tolist()]
    cuts = [0, *np.sort(rng.integers(0, len(ids), n))]
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]


def forms_of(rows, kind: str) -> dict:
    """The same ids as each kind of input."""
    flat = np.array(
        [i for row in rows for i in row], object if kind == "string" else int
    )
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant(flat), [len(r) for r in rows])
    sparse = ragged.to_sparse()
    dataset = tf.data.Dataset.from_tensor_slices(ragged)
    return {
        "flat": flat,
        "ragged": ragged,
        "sparse": sparse,
        "padded": ragged.to_tensor(MASK[kind]).numpy(),
        "lists": [list(r) for r in rows],
        "dataset": dataset,  # of one row each, dense
        "batches": dataset.ragged_batch(7),
        "scalars": tf.data.Dataset.from_tensor_slices(flat),
    }


class Reference:
    """The definition of `adapt`, with a Counter."""

    def __init__(self, first, hashed, min_count=1, max_size=10**9):
        self.first, self.min_count, self.max_size = first, min_count, max_size
        self.ids, self.hashed, self.by_row = [], hashed, Counter()

    def adapt(self, rows):
        counts = Counter(i for row in rows for i in row)
        new = [i for i, n in counts.items() if n >= self.min_count]
        new = sorted(set(new) - set(self.ids), key=lambda i: (-counts[i], i))
        self.ids += new[: max(self.max_size - len(self.ids), 0)]
        for an_id, n in counts.items():
            self.by_row[self.row(an_id)] += n

    def row(self, an_id):
        known = an_id in self.ids
        return self.first + self.ids.index(an_id) if known else self.hashed(an_id)


@pytest.mark.parametrize("kind", ["string", "int64"])
def test_adapt_equals_a_counter(flavor, kind, rng):
    """In each form, twice, with ids left out for being rare or too many."""
    hashing = keras_of(flavor).layers.Hashing(3)
    first, second = random_rows(rng, kind), random_rows(rng, kind, first=30)
    limits = {"min_count": 6, "max_size": 26}
    wanted = Reference(4, lambda i: 1 + int(hashing(tf.constant([i]))[0]), **limits)
    wanted.adapt(first)
    size = len(wanted.ids)
    wanted.adapt(second)
    assert 0 < size < len(wanted.ids) == 26
    frequencies = np.zeros(30, int)
    frequencies[list(wanted.by_row)] = list(wanted.by_row.values())
    rows = [[wanted.row(i) for i in row] for row in second]
    forms = [forms_of(first, kind), forms_of(second, kind)]
    for form in forms[0] if kind == "string" else ("flat", "sparse", "batches"):
        encoder = make(
            flavor, id_dtype=kind, num_oov=3, mask_token=MASK[kind], **limits
        )
        encoder.adapt(forms[0][form])
        assert encoder.num_rows == 4 + size and encoder.exclusive_rows(2) == 6
        assert np.all(np.diff(encoder.row_frequencies()[4:]) <= 0)
        early = encoder.vocabulary()
        encoder.adapt(forms[1][form])
        assert encoder.vocabulary().tolist() == wanted.ids
        assert encoder.vocabulary()[:size].tolist() == early.tolist()
        np.testing.assert_array_equal(encoder.row_frequencies(), frequencies)
        if form in ("flat", "ragged", "sparse", "padded"):
            out = encoder(forms[1][form])
            flat = getattr(out, "flat_values", getattr(out, "values", out))
            assert flat.dtype == tf.int64
            if form == "padded":
                flat = tf.boolean_mask(flat, flat > 0)
            assert flat.numpy().tolist() == [r for row in rows for r in row]
        if form == "ragged":
            assert out.to_list() == rows
    as_map = forms[1]["batches"].map(encoder)
    assert [r for batch in as_map for r in batch.to_list()] == rows
    assert encoder(tf.constant(wanted.ids[7])).numpy() == 11  # a scalar


@pytest.mark.parametrize("kind", ["string", "int64"])
def test_rows_without_a_vocabulary(flavor, kind, rng):
    """As Keras hashes; adapt counts rows."""
    rows = random_rows(rng, kind)
    forms = forms_of(rows, kind)
    encoder = make(flavor, id_dtype=kind, hash_rows=9, mask_token=MASK[kind])
    assert encoder.num_rows == 10 and not encoder.row_frequencies().any()
    hashed = 1 + keras_of(flavor).layers.Hashing(9)(forms["ragged"])
    assert encoder(forms["ragged"]).to_list() == hashed.to_list()
    padded = hashed.to_tensor(0).numpy()
    np.testing.assert_array_equal(tf.function(encoder)(forms["padded"]), padded)
    counts = np.bincount(hashed.flat_values, minlength=10)
    for times in (1, 2):
        encoder.adapt(forms["batches"] if times == 1 else forms["padded"])
        np.testing.assert_array_equal(encoder.row_frequencies(), times * counts)
    single = make(flavor, id_dtype=kind, hash_rows=1)
    assert not single(forms["flat"]).numpy().any()


# ---- files ---------------------------------------------------------------------------


def make_model(seed=0):
    """Strings and ragged integers, encoded and embedded; the encoders know nothing."""
    keras = tf.keras
    words = keras.Input((), dtype="string", name="word")
    numbers = keras.Input((None,), dtype="int64", name="number", ragged=True)
    rows = {
        "word": IdEncoder(num_oov=2, name="words")(words),
        "number": IdEncoder("int64", min_count=2, name="numbers")(numbers),
    }
    embed = EmbeddingCollection(
        [
            FeatureConfig("word", TableConfig("w", 60, 4, num_buckets=12)),
            FeatureConfig("number", TableConfig("n", 60, 4), (None, None)),
        ],
        concatenate=True,
        name="embed",
    )
    outputs = keras.layers.Dense(1, name="top")(embed(rows))
    model = keras.Model({"word": words, "number": numbers}, outputs)
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile(make_optimizer(learning_rate=0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def inputs_of(rng, n=32):
    """Words and numbers, and what both together decide."""
    words = rng.integers(0, 40, n)
    numbers = tf.RaggedTensor.from_row_lengths(
        tf.constant(rng.integers(0, 30, 3 * n)), rng.permutation([2, 4] * (n // 2))
    )
    y = (words % 2)[:, None].astype(np.float32)
    return {"word": tf.constant([f"w{i}" for i in words]), "number": numbers}, y


def encoders_of(model):
    return [model.get_layer(name) for name in ("words", "numbers")]


def adapted_model():
    model, (x, _) = make_model(), inputs_of(np.random.default_rng(1))
    for encoder, name in zip(encoders_of(model), ("word", "number")):
        encoder.adapt(x[name])
    return model


def dense(x):
    return {"word": x["word"], "number": x["number"].to_tensor()[:, :2]}


def save_and_load(model, how: str, path):
    keras = tf.keras
    if how == "checkpoint":
        other = make_model(seed=5)
        tf.train.Checkpoint(model=model).write(str(path / "ckpt"))
        tf.train.Checkpoint(model=other).read(str(path / "ckpt")).assert_consumed()
        return other
    if how == "weights":
        other = make_model(seed=5)
        model.save_weights(str(path / "m.weights.h5"))
        other.load_weights(str(path / "m.weights.h5"))
        return other
    model.save(str(path / "m.keras"))
    return keras.models.load_model(str(path / "m.keras"))


@pytest.mark.parametrize("how", ["keras", "weights", "checkpoint"])
def test_files_keep_rows_and_counts(how, tmp_path, rng):
    model, (x, _) = adapted_model(), inputs_of(rng)
    again = save_and_load(model, how, tmp_path)
    np.testing.assert_array_equal(again(x), model(x))
    for encoder, other in zip(encoders_of(model), encoders_of(again)):
        assert_alike(encoder, other, x["word" if encoder.name == "words" else "number"])


def assert_alike(encoder, other, data):
    """As they are, and adapted further."""
    for _ in range(2):
        np.testing.assert_array_equal(encoder.vocabulary(), other.vocabulary())
        counts = other.row_frequencies()
        np.testing.assert_array_equal(encoder.row_frequencies(), counts)
        encoder.adapt(data)
        other.adapt(data)


@pytest.mark.skipif(active_flavor() == "keras3", reason="formats of tf_keras")
def test_files_of_tf_keras(tmp_path):
    """Of the older ones, h5 has no place for a vocabulary: that is an error later."""
    keras = tf.keras
    encoder, word = IdEncoder(name="words"), keras.Input((), dtype="string")
    encoder.adapt(["a", "b", "b"])
    model = keras.Model(word, encoder(word))
    model.save(str(tmp_path / "m"), save_format="tf")
    model.save(str(tmp_path / "m.h5"))
    again = keras.models.load_model(str(tmp_path / "m"))
    assert_alike(encoder, again.get_layer("words"), ["c", "a"])
    assert again(tf.constant(["c", "b", "d"])).numpy().tolist() == [3, 1, 0]
    again = keras.models.load_model(str(tmp_path / "m.h5"))
    with pytest.raises(ValueError, match="s' has no vocabulary: call its adapt first"):
        again(tf.constant(["a"]))


def test_an_export_serves_with_stock_ops(tmp_path, rng):
    model, (x, _) = adapted_model(), inputs_of(rng)
    specs = {
        "word": tf.TensorSpec([None], tf.string, "word"),
        "number": tf.TensorSpec([None, 2], tf.int64, "number"),
    }
    tf_basis.export_saved_model(model, str(tmp_path / "m"), inputs=specs)
    served = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    wanted = np.asarray(model(dense(x)))
    (found,) = served(**dense(x)).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    graph = served.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    assert not [n.op for n in nodes if "Basis" in n.op or n.op == "PyFunc"]


# ---- vocabularies and tables that grow -----------------------------------------------


def test_a_table_grows_with_its_vocabulary(tmp_path, rng):
    """In the middle of a training: old rows to the bit, and training goes on."""
    keras = tf.keras
    vocabulary = [f"w{i}" for i in range(40)]
    encoder = IdEncoder(name="words")
    encoder.adapt(vocabulary[:30] + vocabulary[:12])
    assert encoder.num_rows == 31
    table = TableConfig(
        "w",
        encoder.num_rows,
        4,
        num_buckets=9,
        exclusive_rows=3,
        row_frequencies=encoder.row_frequencies(),
    )
    embed = EmbeddingCollection(
        [FeatureConfig("word", table), FeatureConfig("other", TableConfig("o", 5, 2))],
        concatenate=True,
        name="embed",
    )
    word = keras.Input((), dtype="string", name="word")
    other = keras.Input((), dtype="int64", name="other")
    outputs = embed({"word": encoder(word), "other": other})
    model = keras.Model({"word": word, "other": other}, keras.layers.Dense(1)(outputs))
    model.compile(make_optimizer(learning_rate=0.05), "mse")

    def fit(which, some, n=96, seed=0, model=model):
        rng = np.random.default_rng(seed)
        i = rng.integers(0, some, n)
        x = {
            "word": tf.constant([vocabulary[j] for j in i]),
            "other": tf.constant(i % 5),
        }
        y = np.sin(i)[:, None].astype(np.float32)
        call = which.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=5)
        return call.history["loss"], x

    _, x = fit(model, 30)
    old = embed.table("w")
    before = state_of(model.optimizer, old)
    buckets = model.optimizer.buckets(old)
    predicted = model.predict(x, verbose=0)
    order = [v.shape for v in model.trainable_variables]
    function = tf.function(lambda rows: embed({"word": rows, "other": rows * 0}))
    function(tf.constant([7]))

    encoder.adapt(vocabulary)
    assert encoder.num_rows == 41
    with pytest.raises(Exception, match=r"must be in \[0, 31\)"):
        embed({"word": encoder(vocabulary), "other": np.zeros(40, int)})
    embed.grow("w", encoder.num_rows, model.optimizer)
    tf_basis.retrace(model)

    new = embed.table("w")
    after = state_of(model.optimizer, new)
    assert after["theta"].shape == (41, 4) and after["row_energy"].shape == (41,)
    assert_same_bits({k: after[k][: len(v)] for k, v in before.items()}, before)
    np.testing.assert_array_equal(model.optimizer.buckets(new)[:31], buckets)
    assert after["theta"][31:].std(axis=1).all() and not after["row_energy"][31:].any()
    assert [tuple(v.shape) for v in model.trainable_variables] == [
        (41, 4) if tuple(s) == (31, 4) else tuple(s) for s in order
    ]
    assert getattr(new, "path", new.name) == getattr(old, "path", old.name)
    np.testing.assert_array_equal(model.predict(x, verbose=0), predicted)
    with pytest.raises(Exception, match=r"\[0, 0\)"):
        function(tf.constant([7]))  # as it was traced

    path = str(tmp_path / "model.keras")
    model.save(path)
    again = keras.models.load_model(path)
    losses, _ = fit(model, 40, seed=1)
    assert losses[-1] < 0.8 * losses[0]
    assert (to_numpy(new)[31:] != after["theta"][31:]).any(axis=1).sum() > 5
    fit(again, 40, seed=1)
    assert_same_bits(
        optimizer_arrays(again.optimizer, again.weights),
        optimizer_arrays(model.optimizer, model.weights),
    )
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    written = checkpoint.write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(
        written
    ).assert_existing_objects_matched()


def test_a_table_grows_alone(flavor):
    """Before it is built, and without an optimizer; the config knows."""
    table = TableConfig("t", 5, 2, initializer="ones")
    features = [FeatureConfig("a", table), FeatureConfig("b", table, (None, 3))]
    made = layers.for_flavor(flavor).EmbeddingCollection
    layer = made(features)
    layer.grow("t", 6)
    layer.build(None)
    layer.grow("t", 8)
    assert to_numpy(layer.table("t")).tolist() == [[1, 1]] * 8
    assert [f.table.vocabulary_size for f in layer.features] == [8, 8]
    again = made.from_config(layer.get_config())
    assert [f.table.vocabulary_size for f in again.features] == [8, 8]
    assert len(layer.trainable_weights) == 1
    assert layer({"a": np.array([7]), "b": np.array([[5, 6, 7]])})["b"].shape == (1, 2)


# ---- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"id_dtype": "float32"}, "id_dtype must be one of 'string', 'int64', rec"),
        ({"min_count": 0}, "min_count must be an integer of at least 1, received 0"),
        ({"max_size": 0}, "max_size must be None or .* at least 1, received 0"),
        ({"num_oov": -1}, "num_oov must be an integer of at least 0, received -1"),
        ({"hash_rows": 0}, "hash_rows must be None or .* at least 1, received 0"),
        ({"hash_rows": 9, "min_count": 2}, "min_count must be 1 with hash_rows.* 2"),
        ({"mask_token": 0}, "mask_token must be None or a string .*received 0"),
        ({"id_dtype": "int64", "mask_token": ""}, "mask_token .* 64 bits .*''"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        IdEncoder(**arguments)


def endless():
    return tf.data.Dataset.from_tensors(["a"]).repeat()


@pytest.mark.parametrize(
    "arguments, data, words",
    [
        ({}, [], "dataset of 'e' must hold ids, received none"),
        ({"mask_token": "a"}, ["a"], "dataset of 'e' must hold ids, received none"),
        ({}, [1.0, np.nan], "'e' must be strings with .*'string', received float32"),
        ({}, ["a", np.nan], "'e' must be all strings or all integers, received"),
        ({}, [[1], [2, 3]], "must be strings .*received int32"),
        ({"id_dtype": "int64"}, ["a"], "must be integers.*'int64', received string"),
        ({"id_dtype": "int64"}, [1.5], "must be integers.*, received float32"),
        ({"id_dtype": "int64"}, [True], "must be integers.*, received bool"),
        ({"id_dtype": "int64"}, np.uint64([1]), "not uint64, .*received uint64"),
        ({"min_count": 3}, ["a", "a", "b"], "min_count must be reached .*3 .* 2 times"),
        ({}, endless(), "dataset of 'e' must end, received an infinite"),
        ({}, tf.data.Dataset.from_tensors((["a"], 1)), "must give one tensor of ids"),
    ],
)
def test_bad_data(arguments, data, words):
    encoder = IdEncoder(name="e", **arguments)
    with pytest.raises(ValueError, match=words):
        encoder.adapt(data)
    assert encoder.num_rows == 1 + len(encoder.get_config()["mask_token"] or "")
    assert not encoder.row_frequencies().any()


def test_one_id_without_rows_for_others(flavor):
    encoder = make(flavor, num_oov=0)
    encoder.adapt(["a", "b", "a"])
    assert int(encoder(tf.constant("b"))) == 1
    rows = tf.data.Dataset.from_tensor_slices(["a", "b"]).map(encoder)
    assert [int(row) for row in rows] == [0, 1]


def test_bad_calls(flavor):
    encoder = make(flavor, name="e", num_oov=0)
    with pytest.raises(ValueError, match="'e' has no vocabulary: call its adapt"):
        encoder(tf.constant(["a"]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"e\W* has no vocabulary"):
        tf.function(encoder.call)(tf.constant(["a"]))
    encoder.adapt(["a", "b"])
    for call in (encoder.call, tf.function(encoder.call)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"e\W* must be in its .*\n?.*zebra"
        ):
            call(tf.constant(["a", "zebra"]))
        with pytest.raises(ValueError, match=r"ids of 'e' must be strings .* int32"):
            call(tf.constant([3]))
    keras = keras_of(flavor)
    with pytest.raises(ValueError, match=r"ids of 'e' must be strings .* float32"):
        encoder(keras.Input((2,)))
    with pytest.raises(ValueError, match=r"k must be an integer in \[0, 2\].* 3"):
        encoder.exclusive_rows(3)
    with pytest.raises(RuntimeError, match="adapt of 'e' must be called eagerly"):
        tf.function(lambda: encoder.adapt(["c"]))()
    store = {"ids": np.arange(2), "counts": np.ones(2, int)}
    with pytest.raises(ValueError, match="vocabulary of 'e' must be stored by an enc"):
        encoder.load_own_variables(store)
    store = {"bytes": np.zeros(2, np.uint8), "lengths": np.array([3]), "counts": [1]}
    with pytest.raises(ValueError, match="must be stored with 3 bytes, received 2"):
        encoder.load_own_variables(store)
    assert encoder.vocabulary().tolist() == [b"a", b"b"]


def test_bad_growth():
    layer = EmbeddingCollection([FeatureConfig("f", TableConfig("t", 5, 2))])
    layer.build(None)
    keras = tf.keras
    for arguments, words in [
        (("u", 9), "table must be one of 't', received 'u'"),
        (("t", 4), "vocabulary_size must be .* at least 5, the rows of 't', rec.* 4"),
        (("t", 9, keras.optimizers.SGD()), "optimizer must be one of tf_basis"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer.grow(*arguments)
    optimizer = make_optimizer()
    optimizer.build([tf.Variable(tf.zeros([3, 2]))])
    with pytest.raises(ValueError, match="old_variable must be a variable that"):
        layer.grow("t", 9, optimizer)
    assert tuple(layer.table("t").shape) == (5, 2)
    assert layer({"f": np.array([4])})["f"].shape == (1, 2)


@pytest.mark.parametrize("module", [id_encoder, growing])
def test_docstrings(module):
    names = {n: getattr(layers, n) for n in layers.__all__} | {"tf": tf}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and result.failed == 0
