"""The layout of one compressed table: how many buckets, and which state they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tf_basis.hashing import row_mapping
from tf_basis.ops.hash_ops import RowMapping


@dataclass(frozen=True)
class TableLayout:
    """Sizes and formats of the state of one table.

    Attributes:
      path: the path of the table's variable, for messages.
      dim: columns of the table.
      mapping: which bucket a row uses.
      momentum: `"exclusive"`, `"shared"` or `"none"`.
      led: whether owners are found during training (`exclusive_rows="auto"`).
      moment_dtype: of both moments: `"float32"`, `"bfloat16"` or `"float16"`.
      energy_dtype: of row energies: `"float32"`, `"bfloat16"` or `"log8"`.
      scalar: pairs of name and value: what the table sets of its scalars itself.
    """

    path: str
    dim: int
    mapping: RowMapping
    momentum: str
    led: bool = False
    moment_dtype: str = "float32"
    energy_dtype: str = "float32"
    scalar: tuple[tuple[str, Any], ...] = ()

    @property
    def first_moment_rows(self) -> int:
        """Buckets below this have a first moment; the others need none."""
        if self.momentum == "shared" or (self.led and self.momentum == "exclusive"):
            return self.mapping.num_buckets
        return self.mapping.owners if self.momentum == "exclusive" else 0


def bucket_count(
    n_rows: int,
    compression_ratio: float,
    exclusive_rows: int = 0,
    num_buckets: int | None = None,
) -> int:
    """B of a table: `num_buckets`, else max(K + 1, ceil(N / ratio)); at most N."""
    if num_buckets is None:
        num_buckets = max(exclusive_rows + 1, math.ceil(n_rows / compression_ratio))
    return min(num_buckets, n_rows)


def table_layout(
    path: str,
    shape: tuple[int, ...],
    *,
    compression_ratio: float,
    num_buckets: int | None,
    exclusive_rows: Any,
    hashing: str,
    seed: int,
    momentum: str,
    moment_dtype: str = "float32",
    energy_dtype: str = "float32",
    scalar: Mapping[str, Any] | None = None,
) -> TableLayout:
    """The layout of the variable at `path`.

    Raises:
      ValueError: the variable is no table, or the exclusive rows fill all buckets
        or are no rows of it.
    """
    if len(shape) != 2 or None in shape:
        raise ValueError(
            f"tables must select variables of rank 2 with a known shape, but "
            f"'{path}' has the shape {tuple(shape)}"
        )
    n_rows, dim = map(int, shape)
    if n_rows < 1 or dim < 1:
        raise ValueError(
            f"tables must select variables that are not empty, but '{path}' has "
            f"the shape {tuple(shape)}"
        )
    led = exclusive_rows == "auto"
    if led:
        exclusive_rows = 0
    is_count = isinstance(exclusive_rows, int)
    count = exclusive_rows if is_count else len(exclusive_rows)
    buckets = bucket_count(n_rows, compression_ratio, count, num_buckets)
    mapping = row_mapping(n_rows, buckets, exclusive_rows, hashing, seed)
    led &= buckets < n_rows  # else every row owns its bucket anyway
    if led and (hashing == "double" or momentum == "shared"):
        raise ValueError(
            "exclusive_rows='auto' needs one bucket a row that is its owner's alone: "
            "hashing must not be 'double' and momentum not 'shared', received "
            f"hashing={hashing!r}, momentum={momentum!r} for '{path}'"
        )
    return TableLayout(
        path,
        dim,
        mapping,
        momentum,
        led,
        moment_dtype,
        energy_dtype,
        tuple(sorted((scalar or {}).items())),
    )
