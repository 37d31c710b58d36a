"""Proofs that nothing of a table's size is made: conversions, graphs, memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import tensorflow as tf

_refusing = False


def _refuse(value, dtype=None, name=None, as_ref=False):
    if _refusing:
        raise AssertionError("IndexedSlices were made dense")
    return NotImplemented  # which leaves it to TensorFlow


# TensorFlow has no way to take this back, so it stays and does nothing.
tf.register_tensor_conversion_function(tf.IndexedSlices, _refuse, priority=0)


@contextlib.contextmanager
def nothing_made_dense():
    """Inside, whoever turns IndexedSlices into a tensor gets an AssertionError."""
    global _refusing
    _refusing = True
    try:
        yield
    finally:
        _refusing = False


_HOLDS_VARIABLES = {"ReadVariableOp", "VarHandleOp", "Placeholder"}


def nodes_of(function) -> list:
    """Every op of a concrete function and of the functions that it calls."""
    definition = function.graph.as_graph_def(add_shapes=True)
    inner = (node for f in definition.library.function for node in f.node_def)
    return [*definition.node, *inner]


def ops_of_size(function, n_rows: int) -> set[str]:
    """Types of the ops that make a tensor with `n_rows` rows; to read a variable
    makes none."""
    found = set()
    for node in nodes_of(function):
        shapes = node.attr["_output_shapes"].list.shape
        large = any(s.dim and s.dim[0].size == n_rows for s in shapes)
        if large and node.op not in _HOLDS_VARIABLES:
            found.add(node.op)
    return found


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def peak_memory(function) -> int:
    """The most bytes by which a call makes this process grow."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is used now
    before = _memory("VmRSS")
    function()
    return _memory("VmHWM") - before


def dense_of(indices, values, shape) -> np.ndarray:
    """The gradient with duplicates summed, in float64."""
    dense = np.zeros(shape)
    np.add.at(dense, np.asarray(indices), np.asarray(values, np.float64))
    return dense
