"""IdEncoder: vocabularies and counts against plain Python, and what it refuses."""

from __future__ import annotations

import doctest
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers import keras_of

from tf_basis import layers
from tf_basis.layers import IdEncoder, growing, id_encoder

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


@pytest.mark.parametrize("module", [id_encoder, growing])
def test_docstrings(module):
    names = {n: getattr(layers, n) for n in layers.__all__} | {"tf": tf}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and result.failed == 0
