"""A variable that says for which table layouts the optimizer's state is.

It is saved with the rest in every format, and compared when it is read: state of
another hash or seed has the same shapes and would go into wrong buckets.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tf_basis import layout_record

NAME = "table_layouts"
_VERSION = 1
_OPTIMIZERS = ("BasisAdam", "BasisSGD", "BasisAdagrad")
# What each number of a table is: a count, or the place of a word in a list. Words are
# added at the end: saved state depends on their places.
_WORDS: dict[str, tuple] = {
    "hashing": ("balanced", "murmur3", "double", "consistent"),
    "momentum": ("exclusive", "shared", "none"),
    "moment_dtype": ("float32", "bfloat16", "float16"),
    "energy_dtype": ("float32", "bfloat16", "log8"),
    "invariant_scalar": ("energy", "learned", None),
}
_FIELDS = (
    "rows",
    "dim",
    "buckets",
    "exclusive_rows",
    "owner_list",
    "hash_version",
    "hashing",
    "seed",
    "domains",
    "momentum",
    "moment_dtype",
    "energy_dtype",
    "invariant_scalar",
)


class FingerprintMixin:
    """Adds the variable when the optimizer is built, and compares it."""

    def _add_fingerprint(self) -> None:
        """Once, when the layouts are known."""
        errors = []

        def check(saved: Any) -> None:
            try:
                self._check_fingerprint(saved)
            except ValueError as error:
                errors.append(error)
                raise

        self._basis.fingerprint = self._add_checked(NAME, self._fingerprint(), check)
        if errors:  # of a checkpoint that waited: TensorFlow's lists catch ValueErrors
            raise errors[0]

    def _update_fingerprint(self) -> None:
        """After layouts have changed."""
        self._basis.fingerprint.assign(self._fingerprint())

    def _fingerprint(self) -> np.ndarray:
        """int64: this format's version, the optimizer, numbers for each table."""
        kinds = [c.__name__ for c in type(self).__mro__ if c.__name__ in _OPTIMIZERS]
        numbers = [_VERSION, _OPTIMIZERS.index(kinds[0])]
        for layout in self._basis.layouts.values():
            record = layout_record.record_of(layout)
            record["invariant_scalar"] = self._rule_of(layout).invariant_scalar
            numbers += _numbers(record)
        return np.array(numbers, np.int64)

    def _check_fingerprint(self, saved: Any) -> None:
        """Raises ValueError where saved state is of other layouts."""
        if not isinstance(saved, np.ndarray) and not hasattr(saved, "numpy"):
            return  # in a graph, where there is nothing to compare yet
        saved, own = np.asarray(saved).ravel(), self._fingerprint()
        if saved.shape == own.shape and not (saved != own).any():
            return
        refused = f"optimizer '{self.name}' cannot take this state: "
        if len(saved) < 2 or saved[0] != own[0]:
            raise ValueError(
                f"{refused}it must have the format version {own[0]}, received "
                f"{saved[0] if len(saved) else 'none'}"
            )
        if saved[1] != own[1] or len(saved) != len(own):
            here, there = (
                f"{_word(_OPTIMIZERS, v[1])} with {tables_in(v)} tables"
                for v in (own, saved)
            )
            raise ValueError(f"{refused}it is of a {there}, this is a {here}")
        words = []
        paths = [layout.path for layout in self._basis.layouts.values()]
        for i, path in enumerate(paths):
            at = slice(2 + i * len(_FIELDS), 2 + (i + 1) * len(_FIELDS))
            found = layout_record.differences(_words(own[at]), _words(saved[at]))
            if found:
                words.append(layout_record.in_words(path, found))
        if words:
            raise ValueError(
                f"{refused}it is of another table layout: {' and '.join(words)} (there "
                "is what was saved)"
            )


def tables_in(saved: np.ndarray) -> int:
    """Of how many tables such a variable is."""
    return (len(saved) - 2) // len(_FIELDS)


def kind_in(saved: np.ndarray) -> str:
    """Of an optimizer of which class such a variable is."""
    return _word(_OPTIMIZERS, int(saved[1]))


def _numbers(record: layout_record.Record) -> list[int]:
    owners = record["exclusive_rows"]
    listed = isinstance(owners, list)
    values = {
        **record,
        "exclusive_rows": len(owners) if listed else -1 if owners == "auto" else owners,
        "owner_list": _checksum(owners if listed else ()),
        "domains": _checksum(record["domains"]),
    }
    return [
        _WORDS[name].index(values[name]) if name in _WORDS else values[name]
        for name in _FIELDS
    ]


def _words(numbers: np.ndarray) -> layout_record.Record:
    """For messages: lists of rows are known by their checksum only."""
    record = {
        name: _word(_WORDS[name], value) if name in _WORDS else int(value)
        for name, value in zip(_FIELDS, numbers)
    }
    if record["exclusive_rows"] < 0:
        record["exclusive_rows"] = "auto"
    return record


def _word(words: tuple, place: int) -> Any:
    return words[place] if 0 <= place < len(words) else f"unknown ({place})"


def _checksum(rows: Any) -> int:
    return zlib.crc32(np.asarray(rows, "<i8").tobytes()) if len(rows) else 0
