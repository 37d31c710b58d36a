"""Checksums of arrays: those of files that were written before."""

from __future__ import annotations

import doctest
import hashlib

import numpy as np
import pytest
import tensorflow as tf

from tf_basis import checksums

ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "scalar": np.float64(-0.0),
    "bfloat16": tf.constant([1.5, -2.0], tf.bfloat16).numpy(),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float16),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_bytes_in_c_order_are_hashed(case):
    array = ARRAYS[case]
    plain = np.asarray(array).tobytes()
    assert checksums.of_array(array) == hashlib.sha256(plain).hexdigest()
    told = checksums.of_array(array, "ö")
    assert told == hashlib.sha256(b"\xc3\xb6" + plain).hexdigest()


def test_json_is_hashed_in_its_shortest_form():
    text = '{"a":[1,null],"b":"\\u00e4"}'
    found = checksums.of_json({"b": "ä", "a": (1, None)})
    assert found == hashlib.sha256(text.encode()).hexdigest()


def test_docstrings():
    names = {"of_array": checksums.of_array, "np": np}
    result = doctest.testmod(checksums, extraglobs=names)
    assert result.attempted and result.failed == 0
