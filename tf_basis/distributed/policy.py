"""Which variables travel in how many bits, and how often."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tf_basis import hyperparameters

KINDS = ("embedding", "dense_kernel", "conv_kernel", "bias", "normalization", "other")
BITS = (1, 2, 16, 32)
_NORMALIZATION = ("gamma", "beta", "scale", "moving_mean", "moving_variance")
_CONVOLUTION = ("depthwise_kernel", "pointwise_kernel")

RULES = {
    "bits": hyperparameters.choice(*BITS),
    "interval": hyperparameters.integer("of at least 1", lambda v: v >= 1),
    "group": hyperparameters.Rule(
        "letters, digits and _, or empty",
        lambda v: isinstance(v, str) and re.fullmatch(r"\w*", v) is not None,
    ),
    "min_elements": hyperparameters.integer("of at least 0", lambda v: v >= 0),
    "rules": hyperparameters.Rule(
        "a list of (match, bits), (match, bits, interval) or (match, bits, interval, "
        "group)",
        lambda v: not isinstance(v, (str, bytes, dict)) and iter(v) is not None,
    ),
    "match": hyperparameters.Rule(
        f"one of the kinds {KINDS} or a regular expression for the path of a variable",
        lambda v: isinstance(v, str) and bool(v),
    ),
}


def _check_rule(rule: Rule) -> None:
    hyperparameters.check_all(rule._asdict(), RULES)
    try:
        re.compile(rule.match)
    except re.error as error:
        raise ValueError(
            f"match must be {RULES['match'].words}, received {rule.match!r} ({error})"
        ) from None


@hyperparameters.checked_when_made(_check_rule)
class Rule(NamedTuple):
    """Variables of a kind, or whose path a pattern is found in, and how they travel.

    Args:
      match: one of `KINDS`, or a regular expression searched in the variable's path.
      bits: 1 or 2 with error feedback, 16 (float16) or 32 per element.
      interval: the variable takes no step k − 1 times, then one step with the mean of
        the k gradients. Default 1.
      group: variables of one group, bits and interval share a buffer, statistics and
        what adapts to these. Default "".

    Raises:
      ValueError: an argument breaks its rule.
    """

    match: str
    bits: int
    interval: int = 1
    group: str = ""


class Way(NamedTuple):
    """How a variable travels."""

    bits: int
    interval: int
    group: str = ""


# Dense gradients of embeddings (IndexedSlices never come here) in full precision.
DEFAULT_RULES = (
    Rule("embedding", 32),
    Rule("dense_kernel", 1),
    Rule("conv_kernel", 2),
    Rule("bias", 16),
    Rule("normalization", 16),
    Rule("other", 16),
)
NORMALIZATION_EVERY_10 = Rule("normalization", 16, interval=10)
"""Normalisation in 16 bits, at every tenth step: a rule for a `Policy`."""


class Policy:
    """Chooses bits and interval for each variable; the first rule that fits counts.

    By default kernels of dense layers travel in 1 bit, of convolutions in 2, biases,
    normalisation and everything under `min_elements` in 16, at every step. Gradients
    that are IndexedSlices travel as rows, whatever the policy says.

    Args:
      rules: rules that come before the default ones: `Rule`s or (match, bits) or
        (match, bits, interval) or (match, bits, interval, group).
      min_elements: variables with fewer elements travel in 16 bits where only a default
        rule fits them. Default 1024.

    Raises:
      ValueError: an argument breaks its rule.

    Example:

    >>> policy = Policy([("normalization", 16, 10), ("tower_1/", 2)])
    >>> policy.way("tower_1/dense/kernel", (512, 256))
    Way(bits=2, interval=1, group='')
    >>> policy.way("tower_2/dense/kernel", (512, 256))
    Way(bits=1, interval=1, group='')
    """

    def __init__(
        self, rules: Iterable[Rule | Sequence[Any]] = (), min_elements: int = 1024
    ) -> None:
        hyperparameters.check("rules", rules, RULES["rules"])
        hyperparameters.check("min_elements", min_elements, RULES["min_elements"])
        self.rules = tuple(_rule(r) for r in rules)
        self.min_elements = min_elements

    @classmethod
    def of(cls, value: Any) -> Policy:
        """A policy as it is, or one of the rules or the config given; None: default."""
        if isinstance(value, Policy):
            return value
        if isinstance(value, dict) and set(value) <= {"rules", "min_elements"}:
            return cls(**value)
        if value is None or isinstance(value, (list, tuple)):
            return cls(value or ())
        raise ValueError(
            "policy must be None, a Policy, or a list of rules for one, received "
            f"{value!r}"
        )

    def way(self, path: str, shape: Sequence[int]) -> Way:
        """How the variable with this path and shape travels."""
        kind, elements = kind_of(path, shape), 1
        for n in shape:
            elements *= n
        for rule in self.rules:
            if _fits(rule, path, kind):
                return Way(rule.bits, rule.interval, rule.group)
        bits = next(r.bits for r in DEFAULT_RULES if r.match == kind)
        return Way(16 if elements < self.min_elements and bits < 16 else bits, 1)

    def get_config(self) -> dict[str, Any]:
        """The arguments, ready for JSON."""
        return {
            "rules": [list(r if r.group else r[:3]) for r in self.rules],
            "min_elements": self.min_elements,
        }


def kind_of(path: str, shape: Sequence[int]) -> str:
    """The kind of a variable, one of `KINDS`, from its path and shape.

    Keras names what it makes: `embeddings`, `kernel`, `bias`, `gamma`. A kernel is one
    of a convolution where it has four axes or more, or three and a path with `conv`.
    """
    parts = path.lower().split("/")
    last = re.sub(r"(_\d+)?(:\d+)?$", "", parts[-1])
    if last in ("embeddings", "embedding"):
        return "embedding"
    if last in _NORMALIZATION:
        return "normalization"
    if "bias" in last:
        return "bias"
    if last in _CONVOLUTION or (last.endswith("kernel") and len(shape) >= 4):
        return "conv_kernel"
    if len(shape) == 3 and last.endswith("kernel") and "conv" in path.lower():
        return "conv_kernel"
    return "dense_kernel" if len(shape) >= 2 else "other"


def _fits(rule: Rule, path: str, kind: str) -> bool:
    if rule.match in KINDS:
        return rule.match == kind
    return re.search(rule.match, path) is not None


def _rule(value: Any) -> Rule:
    try:
        if isinstance(value, str):
            raise TypeError("no sequence of a match and bits")
        return Rule(*value)
    except TypeError:
        raise ValueError(
            f"rules must be {RULES['rules'].words}, received {value!r}"
        ) from None
