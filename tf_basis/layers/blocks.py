"""Initial values of large tables, made block by block.

Keras's random initializers need three times the memory of what they return. Here a
table takes its own size and that of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Elements of a block; tables with no more are what the initializer makes of them.
BLOCK = 1 << 20

# Whose values do not depend on the number of rows.
_OF_ELEMENTS = (
    "Zeros",
    "Ones",
    "Constant",
    "RandomUniform",
    "RandomNormal",
    "TruncatedNormal",
)


def by_blocks(initializer: Any, keras: Any) -> Callable:
    """`initializer`, or one that calls it for blocks of rows of large tables.

    The first block has the initializer's own values; others have those of one like it
    with another seed. Initializers that are not Keras's, or for which the number of
    rows matters, are called once for the whole.

    Args:
      initializer: of `keras.initializers`.
      keras: the module of the flavour.

    Returns:
      A callable of shape and dtype.
    """
    known = [getattr(keras.initializers, name) for name in _OF_ELEMENTS]
    kind, config = type(initializer), {}
    if hasattr(initializer, "get_config"):
        config = initializer.get_config()
    wide = kind is keras.initializers.VarianceScaling and config["mode"] == "fan_out"
    if not (wide or kind in known):
        return initializer

    def initialize(shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        rows, dim = map(int, shape)
        count = max(1, BLOCK // dim)
        if rows <= count or not tf.executing_eagerly():
            return initializer(shape, dtype=dtype, **kwargs)
        starts = range(0, rows, count)
        table = tf.raw_ops.Empty(shape=[rows, dim], dtype=tf.as_dtype(dtype))
        for first, block in zip(starts, _like(initializer, config)):
            places = tf.range(first, min(first + count, rows))
            values = block((len(places), dim), dtype=dtype, **kwargs)
            # Not a variable's assignment, which would leave it to copy when it is read.
            table = tf.raw_ops.InplaceUpdate(x=table, i=places, v=values)
        return table

    return initialize


def _like(initializer: Any, config: dict[str, Any]) -> Iterator[Any]:
    """The initializer, then others like it."""
    yield initializer
    seed, number = config.get("seed"), 0
    while True:
        number += 1
        if isinstance(seed, int):
            config = {**config, "seed": (seed + 0x9E3779B1 * number) % (1 << 31)}
        # Without a seed each has one of its own; a generator of seeds goes on.
        again = seed is not None and not isinstance(seed, int)
        yield initializer if again else type(initializer).from_config(config)
