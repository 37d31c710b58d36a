"""The steps of OneBitAdam after its warm-up: the C++ op, or its pure-TF twin."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.ops import dispatch, quantize_ops


class Target(NamedTuple):
    """A variable: its elements of the flat buffer begin at `start`."""

    variable: tf.Variable
    start: int
    decays: bool


class Scales(NamedTuple):
    """Scalars of a step, float32; `epsilon` is a number."""

    first: tf.Tensor
    root: tf.Tensor
    decay: tf.Tensor
    epsilon: float


def step_frozen(
    first: tf.Variable,
    second: tf.Variable,
    message: tf.Tensor,
    targets: Sequence[Target],
    scales: Scales,
    *,
    bits: int,
    block: int,
) -> None:
    """m ← what the message stands for; then `move`s the variables by `change`.

    Args:
      first: m, float32 [n].
      second: v, float32 [n], only read.
      message: uint8, see `tf_basis.distributed.quantize`.
      targets: in the order of their elements; gaps between them are allowed.
      scales: of `change`, and the decay.
      bits: of the message.
      block: of the message.
    """
    library = _library(first, targets)
    if library is not None:
        library.tf_basis_step_frozen(
            first.handle,
            second.handle,
            message,
            *_move_inputs(targets, scales),
            **_move_attributes(targets, scales),
            bits=bits,
            block=block,
        )
        return
    mean = quantize_ops.dequantize(message, first.shape[0], bits, block)
    mean = first.assign(mean, read_value=True)
    move(targets, change(mean, second, scales), scales.decay)


def step_local(
    first: tf.Variable,
    second: tf.Variable,
    drift: tf.Variable,
    values: Sequence[tf.Tensor],
    targets: Sequence[Target],
    scales: Scales,
    *,
    beta: float,
    block: int,
) -> None:
    """m ← β·m + (1 − β)·g, drift ← drift + m·scale; then `move`s the variables.

    Args:
      first: m, float32 [n].
      second: v, float32 [n], only read.
      drift: float32 [n].
      values: g in pieces.
      targets: see `step_frozen`.
      scales: of `change`, and the decay.
      beta: β.
      block: elements that one thread works on at a time.
    """
    library = _library(first, targets)
    if library is not None:
        library.tf_basis_step_local(
            first.handle,
            second.handle,
            drift.handle,
            values,
            *_move_inputs(targets, scales),
            **_move_attributes(targets, scales),
            keep=beta,
            take=1 - beta,
            block=block,
        )
        return
    mean = beta * first - (beta - 1) * quantize_ops.joined(values)
    mean = first.assign(mean, read_value=True)
    drift.assign_add(mean * scales.first)
    move(targets, change(mean, second, scales), scales.decay)


def _move_inputs(targets: Sequence[Target], scales: Scales) -> tuple:
    """What both ops are given of how the variables move: tensors."""
    handles = [t.variable.handle for t in targets]
    return scales.first, scales.root, scales.decay, handles


def _move_attributes(targets: Sequence[Target], scales: Scales) -> dict[str, Any]:
    """And attributes."""
    return {
        "starts": [t.start for t in targets],
        "decayed": [t.decays for t in targets],
        "epsilon": scales.epsilon,
    }


def _library(first: tf.Variable, targets: Sequence[Target]) -> ModuleType | None:
    """The op library, where all variables are such that it can change them."""
    library = dispatch.library_for_variable(first)
    for target in targets:
        if target.variable.dtype != tf.float32:
            library = None
        library = library and dispatch.library_for_variable(target.variable)
    return library


def change(first: tf.Tensor, second: tf.Tensor, scales: Scales) -> tf.Tensor:
    """m·scale / (√v·scale + ε), 0 where v is 0.

    Without a gradient in the warm-up there is no variance: what is quantised, divided
    by ε alone, would be a step of thousands.
    """
    moved = first * scales.first / (tf.sqrt(second) * scales.root + scales.epsilon)
    return tf.where(second > 0, moved, 0.0)


def move(targets: Sequence[Target], delta: tf.Tensor, decay: tf.Tensor) -> None:
    """θ ← θ − decay·θ where it decays, then θ ← θ − delta, for all variables."""
    for variable, start, decays in targets:
        if decays:
            variable.assign_sub(variable * tf.cast(decay, variable.dtype))
        size = variable.shape.num_elements()
        part = tf.reshape(tf.slice(delta, [start], [size]), variable.shape)
        variable.assign_sub(tf.cast(part, variable.dtype))
