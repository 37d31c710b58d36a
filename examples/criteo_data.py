"""Files in the format of the Criteo click logs: read as a stream, or generated.

A line is a label (0 or 1), 13 integers and 26 categories (8 hexadecimal digits), apart
by tabs; integers and categories may be missing, which is an empty field. Files that end
in `.gz` are gzip. A stream holds some batches in memory, however long the files are.
"""

from __future__ import annotations

import glob
import gzip
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

NUMBERS, CATEGORIES = 13, 26
TEST_EVERY = 10  # every tenth batch is to test

Batch = tuple[dict[str, tf.Tensor], tf.Tensor]


def find(pattern: str) -> list[str]:
    """The files that a path or a pattern names, sorted.

    Raises:
      ValueError: there are none, or plain and gzip files are mixed.
    """
    paths = sorted(p for p in glob.glob(pattern) if pathlib.Path(p).is_file())
    if not paths:
        raise ValueError(f"data must name files that exist, received {pattern!r}")
    if len({p.endswith(".gz") for p in paths}) > 1:
        raise ValueError(f"data must be all gzip or all plain, received {paths}")
    return paths


def stream(
    paths: Sequence[str], rows: int, batch_size: int, test: bool = False
) -> tf.data.Dataset:
    """Batches of the part to train on, or to test: `(inputs, label)`.

    Inputs are `numbers` float32 [b, 13] and `rows` int64 [b, 26], rows in [0, `rows`).
    """
    kind = "GZIP" if paths[0].endswith(".gz") else ""
    lines = tf.data.TextLineDataset(list(paths), kind, buffer_size=1 << 20)
    batches = lines.batch(batch_size)
    if test:
        batches = batches.shard(TEST_EVERY, TEST_EVERY - 1)
    else:
        batches = batches.enumerate().filter(lambda i, _: (i + 1) % TEST_EVERY > 0)
        batches = batches.map(lambda _, batch: batch)
    return batches.map(
        lambda batch: parse(batch, rows), tf.data.AUTOTUNE, deterministic=True
    ).prefetch(4)


def parse(lines: tf.Tensor, rows: int) -> Batch:
    """A batch of lines, string [b].

    Numbers x become log(1 + x), missing and negative ones 0; categories, a missing one
    like any other, are hashed with the number of their column into one table.
    """
    columns = tf.io.decode_csv(
        lines,
        [0.0] * (1 + NUMBERS) + [""] * CATEGORIES,
        field_delim="\t",
        use_quote_delim=False,
    )
    label = columns[0][:, tf.newaxis]
    good = tf.reduce_all((label == 0.0) | (label == 1.0))
    with tf.control_dependencies(
        [tf.debugging.Assert(good, ["labels must be 0 or 1, received", label])]
    ):
        numbers = tf.stack(columns[1 : 1 + NUMBERS], axis=1)
    categories = tf.stack(
        [tf.strings.join([f"{i}=", c]) for i, c in enumerate(columns[1 + NUMBERS :])], 1
    )
    inputs = {
        "numbers": tf.math.log1p(tf.maximum(numbers, 0.0)),
        "rows": tf.strings.to_hash_bucket_fast(categories, rows),
    }
    return inputs, label


def generate(path: str, examples: int, seed: int = 0, part: int = 10_000) -> None:
    """Writes clicks of a random teacher: Zipf categories with effects, and numbers.

    A tenth of the integers and of the categories are missing; a quarter of the labels
    or so is 1.
    """
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(4, 50_000, CATEGORIES).astype(np.int64)
    effects = [rng.normal(scale=0.35, size=n) for n in sizes]
    slopes = rng.normal(scale=0.15, size=NUMBERS)
    names = rng.integers(1 << 32, size=CATEGORIES, dtype=np.uint64)
    write = gzip.open if str(path).endswith(".gz") else open
    with write(path, "wt", encoding="ascii") as file:
        for first in range(0, examples, part):
            count = min(part, examples - first)
            numbers = rng.geometric(0.05, (count, NUMBERS)) - 2  # some are -1
            logit = -1.5 + (np.log1p(np.maximum(numbers, 0)) - 2.5) @ slopes
            columns = [*np.char.mod("%d", numbers).T]
            for size, effect, name in zip(sizes, effects, names, strict=True):
                ids = (size * rng.random(count) ** 3).astype(np.int64)
                logit = logit + effect[ids]
                code = (ids.astype(np.uint64) * np.uint64(2654435761) + name) % (
                    1 << 32
                )
                columns.append(np.char.mod("%08x", code))
            fields = np.stack(columns, axis=1).astype(object)
            fields[rng.random(fields.shape) < 0.1] = ""
            label = rng.random(count) < 1 / (1 + np.exp(-logit))
            for click, line in zip(label, fields):
                file.write(f"{int(click)}\t{chr(9).join(line)}\n")
