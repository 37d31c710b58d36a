"""What every argument may be: one rule a name, checked in one place.

``check("beta_1", 1.0)`` raises an error that names the argument, the rule and
the value received.  Optimizers call `check_all` before they touch any state.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

MAX_SEED = 2**32 - 1


class Rule(NamedTuple):
    """Words for the error, and the test itself."""

    words: str
    accepts: Callable[[Any], bool]


def _is_real(value: Any) -> bool:
    return (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def real(words: str, accepts: Callable[[float], bool], optional: bool = False) -> Rule:
    """A finite number, or None where `optional`."""
    prefix = "None or a number" if optional else "a number"
    return Rule(
        f"{prefix} {words}",
        lambda v: (optional and v is None) or (_is_real(v) and accepts(v)),
    )


def integer(words: str, accepts: Callable[[int], bool], optional: bool = False) -> Rule:
    """An integer, or None where `optional`."""
    prefix = "None or an integer" if optional else "an integer"
    return Rule(
        f"{prefix} {words}",
        lambda v: (optional and v is None) or (_is_integer(v) and accepts(v)),
    )


def choice(*names: str | None) -> Rule:
    """One of a few names."""
    return Rule(
        f"one of {', '.join(map(repr, names))}",
        # 1.0, an array or a tensor may equal a name, too.
        lambda v: (
            isinstance(v, (str, numbers.Integral, type(None)))
            and not isinstance(v, bool)
            and v in names
        ),
    )


# Where there must be a number of buckets; as an optimizer's argument it is optional.
count = integer("of at least 1", lambda v: v >= 1)

flag = Rule("True or False", lambda v: isinstance(v, bool))

folder = Rule(
    "the path of a folder",
    lambda v: isinstance(v, (str, os.PathLike)) and bool(str(v)),
)
optional_folder = Rule(
    f"None or {folder.words}", lambda v: v is None or folder.accepts(v)
)


def _is_frequencies(value: Any) -> bool:
    if value is None:
        return True
    array = np.asarray(value)
    return (
        array.ndim == 1
        and array.size > 0
        and np.issubdtype(array.dtype, np.number)
        and bool(np.all(np.isfinite(array)) and np.all(array >= 0))
    )


def is_pattern(value: Any) -> bool:
    """Whether it is a regular expression."""
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(map(_is_real, value))
        and 0 < value[0] <= value[1]
    )


def _is_row_selection(value: Any) -> bool:
    if _is_integer(value):
        return value >= 0
    if getattr(value, "ndim", 1) != 1:
        return False
    rows = list(value)
    return all(_is_integer(r) and r >= 0 for r in rows) and len(set(rows)) == len(rows)


_BYTES = {"": 1, "b": 1}
for _i, _prefix in enumerate("kmgt", 1):
    _BYTES |= {f"{_prefix}b": 1000**_i, f"{_prefix}ib": 1024**_i}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def _bytes_of(value: Any) -> int | None:
    if _is_integer(value):
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _BYTES:
        return None
    return int(Fraction(match[1]) * _BYTES[match[2].lower()])


size = Rule(
    "a number of bytes above 0: an integer, or text such as '256MB' or '1.5GiB' "
    "(units B, KB, MB, GB, TB, or KiB, MiB, GiB, TiB of powers of 1024)",
    lambda v: (_bytes_of(v) or 0) > 0,
)


def parse_bytes(name: str, value: int | str) -> int:
    """A number of bytes, also given as text: "256MB" is 256,000,000, "1KiB" 1,024.

    Raises:
      ValueError: the argument called `name` is no such number.
    """
    check(name, value, size)
    return _bytes_of(value)


RULES: dict[str, Rule] = {
    "state_budget": Rule(
        f"None or {size.words}", lambda v: v is None or size.accepts(v)
    ),
    "beta_1": real("in [0, 1)", lambda v: 0 <= v < 1),
    "beta_2": real("in [0, 1)", lambda v: 0 <= v < 1),
    "epsilon": real("above 0", lambda v: v > 0),
    "compression_ratio": real("of at least 1", lambda v: v >= 1),
    "row_frequencies": Rule(
        "None or one number of at least 0 for each row", _is_frequencies
    ),
    "scalar_frequency_power": real("of at least 0", lambda v: v >= 0),
    "moment_dtype": choice("float32", "bfloat16", "float16"),
    "energy_dtype": choice("float32", "bfloat16", "log8"),
    "stale_decay": flag,
    "nesterov": flag,
    "initial_accumulator_value": real("of at least 0", lambda v: v >= 0),
    "n_rows": count,
    "num_buckets": integer("of at least 1", lambda v: v >= 1, optional=True),
    "exclusive_rows": Rule(
        "an integer of at least 0, a list of different rows or 'auto'",
        lambda v: v == "auto" if isinstance(v, str) else _is_row_selection(v),
    ),
    "min_rows": integer("of at least 1", lambda v: v >= 1),
    "momentum": choice("exclusive", "shared", "none"),
    "invariant_scalar": choice("energy", "learned", None),
    "scalar_decay": real("in [0, 1)", lambda v: 0 <= v < 1),
    "scalar_range": Rule("a pair (low, high) with 0 < low <= high", _is_range),
    "scalar_rule": choice("gradient", "sign", "log"),
    "scalar_learning_rate": real("of at least 0", lambda v: v >= 0),
    "collision_reduce": choice("mean", "sum", "sequential"),
    "bias_correction": flag,
    "hashing": choice("balanced", "murmur3", "double", "consistent"),
    "seed": integer("in [0, 2**32)", lambda v: 0 <= v <= MAX_SEED),
    "weight_decay": real("of at least 0", lambda v: v >= 0, optional=True),
    "row_clipnorm": real("above 0", lambda v: v > 0, optional=True),
    "clipnorm": real("above 0", lambda v: v > 0, optional=True),
    "clipvalue": real("above 0", lambda v: v > 0, optional=True),
    "global_clipnorm": real("above 0", lambda v: v > 0, optional=True),
}


def check(name: str, value: Any, rule: Rule | None = None) -> None:
    """Raises ValueError where `value` breaks the rule of argument `name`."""
    rule = rule or RULES[name]
    try:
        accepted = rule.accepts(value)
    # An unhashable or array value in a comparison, an integer beyond all floats.
    except (TypeError, ValueError, OverflowError):
        accepted = False
    if not accepted:
        raise ValueError(f"{name} must be {rule.words}, received {value!r}")


def check_all(
    arguments: dict[str, Any], own_rules: dict[str, Rule] | None = None
) -> None:
    """Checks every argument that has a rule; `own_rules` come first."""
    rules = {**RULES, **(own_rules or {})}
    for name, value in arguments.items():
        if name in rules:
            check(name, value, rules[name])


def checked_when_made(check_made: Callable[[Any], None]) -> Callable[[type], type]:
    """Makes a NamedTuple call `check_made(it)` before anyone is given it."""

    def decorate(cls: type) -> type:
        make = cls.__new__

        @functools.wraps(make)
        def new(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            check_made(made)
            return made

        cls.__new__ = staticmethod(new)  # a NamedTuple's body cannot define it
        return cls

    return decorate


def checked_learning_rate(value: Any) -> Any:
    """A number as a float; a schedule or callable as it is.

    Raises:
      ValueError: a number that is below 0 or not finite.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return value
    if not 0 <= value < math.inf:
        raise ValueError(
            "learning_rate must be a finite number of at least 0, a schedule or "
            f"a callable, received {value!r}"
        )
    return float(value)
