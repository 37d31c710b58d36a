"""What EmbeddingCollection and its configs refuse, and in which words."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_basis import layers
from tf_basis.layers import FeatureConfig, TableConfig

ROWS, DIM = 50, 3
TABLE = TableConfig("t", ROWS, DIM)
RAGGED = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
OTHER = tf.ragged.constant([[1.0, 2.0], [3.0]])


def collect(flavor, *features, **arguments):
    return layers.for_flavor(flavor).EmbeddingCollection(features, **arguments)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (({"f": [[-1, 0]]},), "run", r"feature \W*f\W*: ids must be in \[0, 50\)"),
        (({"f": [[0, 50]]},), "run", r"feature \W*f\W*: ids must be in \[0, 50\)"),
        (({"f": [[0.5, 1.0]]},), "call", "feature 'f': ids must be integers.* float"),
        (({"f": [1, 2]},), "call", r"feature 'f': ids must have the shape \(None, No"),
        (({"g": [[1]]},), "call", r"inputs .* unknown \['g'\], missing \['f'\]"),
        (({"f": [[1]]}, {"g": [[1.0]]}), "call", r"weights must .* unknown \['g'\]"),
        (([[1]],), "call", "inputs must be a dict with the features"),
        (({"f": [[1, 2]]}, {"f": [[1.0, np.nan]]}), "run", r"f\W*: weights .* finite"),
        (({"f": [[1, 2]]}, {"f": [[1.0]]}), "call", r"f': weights .* the shape \(1, 2"),
        (({"f": RAGGED}, {"f": OTHER}), "run", r"f\W*: weights must be where its"),
        (({"f": RAGGED}, {"f": [[1.0, 2.0]]}), "call", "weights must be ragged"),
        (({"f": RAGGED}, None, {"f": [[True]]}), "call", "must be dense with a mask"),
        (({"f": [[1]]}, None, {"f": [[1]]}), "call", "'f': mask must be boolean"),
    ],
)
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_bad_inputs_name_the_feature(flavor, arguments, error, words, function):
    layer = collect(flavor, FeatureConfig("f", TABLE, (None, None)))
    layer.build(None)
    kind = tf.errors.InvalidArgumentError if error == "run" else ValueError
    values = [
        {k: v if tf.is_tensor(v) else np.array(v) for k, v in a.items()}
        if isinstance(a, dict)
        else a
        for a in arguments
    ]
    call = tf.function(layer.call) if function else layer.call
    with pytest.raises(kind, match=words):
        call(*values)


def test_bad_shapes_name_the_feature(flavor):
    """Known when it is traced, or when it runs."""
    pair = [FeatureConfig("a", TABLE), FeatureConfig("b", TABLE, (None, 3))]
    layer = collect(flavor, *pair, concatenate=True)
    ids = {"a": tf.constant([1, 2]), "b": tf.ones([2, 3], tf.int32)}
    assert layer(ids).shape == (2, 2 * DIM)
    words = r"feature \W*b\W*: ids must have the shape \(None, 3\), received"
    with pytest.raises(ValueError, match=words):
        layer.call({**ids, "b": tf.ones([2, 2], tf.int32)})
    for spec, wrong in (([None, None], [2, 2]), (None, [2, 3, 1])):
        call = tf.function(lambda b: layer.call({**ids, "b": b})).get_concrete_function(
            tf.TensorSpec(spec, tf.int32)
        )
        call(ids["b"])
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            call(tf.ones(wrong, tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many examples each"):
        layer.call({**ids, "a": tf.constant([1])})
    outside = tf.SparseTensor([[7, 0]], [1], [2, 3])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"b\W*: .* of examples in"
    ):
        layer.call({**ids, "b": outside})
    with pytest.raises(ValueError, match="b': ids must be integers, received None"):
        layer.call({**ids, "b": None})
    with pytest.raises(ValueError, match="b': weights must be numbers"):
        layer.call(ids, weights={"b": tf.fill([2, 3], "x")})
    with pytest.raises(ValueError, match="must be FeatureConfigs, received 'a'"):
        collect(flavor, "a")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: TableConfig("a/b", 1, 1), "name must be a name without '/'"),
        (lambda: TableConfig("t", 0, 1), "vocabulary_size must be .* received 0"),
        (lambda: TableConfig("t", 1, 1.5), "embedding_dim must be .* received 1.5"),
        (lambda: TableConfig("t", 1, 1, combiner="max"), "combiner .* 'max'"),
        (lambda: TableConfig("t", 9, 1, num_buckets=0), "num_buckets .* received 0"),
        (
            lambda: TableConfig("t", 9, 1, row_frequencies=[1, 2]),
            "row_frequencies must have one number for each of the 9 rows .* 2",
        ),
        (lambda: FeatureConfig("f", "t"), "feature 'f': table must be a TableConfig"),
        (lambda: FeatureConfig("f", TABLE, ()), "feature 'f': input_shape must be"),
        (
            lambda: FeatureConfig("f", TABLE, (None, 2), (None, 7)),
            r"feature 'f': output_shape must be one of \[\(None, 3\)",
        ),
        (lambda: layers.EmbeddingCollection([]), "features must be FeatureConfigs"),
        (
            lambda: layers.EmbeddingCollection(
                [FeatureConfig("a", TABLE), FeatureConfig("b", TableConfig("t", 2, 3))]
            ),
            "tables of one name must be alike",
        ),
        (
            lambda: layers.EmbeddingCollection(
                [FeatureConfig("a", TABLE, (None, 2), (None, 2, DIM))], concatenate=True
            ),
            "concatenate must be False where",
        ),
    ],
)
def test_bad_configs(make, words):
    with pytest.raises(ValueError, match=words):
        make()
