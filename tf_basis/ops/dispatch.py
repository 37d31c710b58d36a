"""Chooses between the C++ op and its pure-TF twin, each time a step is traced."""

from __future__ import annotations

from types import ModuleType

import tensorflow as tf

# The only private TensorFlow call of the package: there is no public way to ask
# whether the function that is being traced will be compiled by XLA.
from tensorflow.python.ops import control_flow_util

from tf_basis.ops import loader


def in_xla() -> bool:
    """Whether what is traced now will be compiled by XLA, which has no custom ops."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def library_for_tensors() -> ModuleType | None:
    """The op library for an op that reads and writes no variable."""
    return None if in_xla() else loader.compiled()


def library_for_variable(variable: tf.Variable) -> ModuleType | None:
    """The op library for an op that updates `variable`: on the CPU only."""
    on_cpu = not variable.device or "device:CPU" in variable.device
    return loader.compiled() if on_cpu and not in_xla() else None
