"""What a settings file may hold: sections, names and rules, by optimizer type."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from tf_basis import hyperparameters
from tf_basis.adapters import arguments
from tf_basis.distributed import (
    auto,
    compression,
    metadata,
    onebit_local,
    onebit_rule,
    policy,
    watch,
)
from tf_basis.distributed.metadata import AdaptiveBits, AdaptiveRate
from tf_basis.hyperparameters import RULES, Rule, check
from tf_basis.optimizers import selection
from tf_basis.optimizers.adagrad import BasisAdagradMixin
from tf_basis.optimizers.adam import BasisAdamMixin
from tf_basis.optimizers.sgd import BasisSGDMixin

Settings = dict[str, Any]

# Type -> the class that has the tables; None: Keras's Adam, which has none.
TYPES: dict[str, type | None] = {
    "1bit_adam": BasisAdamMixin,
    "basis_adam": BasisAdamMixin,
    "basis_sgd": BasisSGDMixin,
    "basis_adagrad": BasisAdagradMixin,
    "adam": None,
}
DENSE_TYPES = ("1bit_adam", "adam")
LAYERS = ("embedding", "conv_kernel", "dense_kernel", "normalization")
ROWS = {1: "1bit", 16: "float16", 32: "float32"}
# Names of the well-known form, and the arguments that they are.
ALIASES = {"lr": "learning_rate", "eps": "epsilon"}

_BETA = RULES["beta_1"]
_DISTRIBUTED = {
    "compression": Rule(
        f"None or one of {', '.join(map(repr, auto.NAMES))}",
        lambda v: v is None or v in auto.NAMES,
    ),
    "average_aggregated_gradients": hyperparameters.flag,
    "timeout": watch.TIMEOUT_RULE,
}
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
_ADAM = ("weight_decay", *_CLIPPING)
_COUNT = hyperparameters.integer("of at least 1", lambda v: v >= 1, optional=True)
_KERAS = {
    "name": Rule("a name", lambda v: isinstance(v, str) and bool(v)),
    "use_ema": hyperparameters.flag,
    "ema_momentum": hyperparameters.real("in [0, 1]", lambda v: 0 <= v <= 1),
    "ema_overwrite_frequency": _COUNT,
}
_RATE = {
    "learning_rate": hyperparameters.real("of at least 0", lambda v: v >= 0),
    "epsilon": RULES["epsilon"],
}
_BETAS = {
    "betas": Rule(
        "a list of two numbers in [0, 1)",
        lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and all(map(_ok, v)),
    ),
    "beta_1": _BETA,
    "beta_2": _BETA,
}
_TABLES = Rule(
    "None, a regular expression on the variable path or a list of paths",
    lambda v: (
        v is None
        or hyperparameters.is_pattern(v)
        or (isinstance(v, list) and all(isinstance(p, str) for p in v))
    ),
)
_BITS = Rule(
    "a list of four numbers of bits (embedding, convolution, dense, normalisation), "
    f"each one of {', '.join(map(str, policy.BITS))}; of embeddings 1, 16 or 32",
    lambda v: (
        isinstance(v, (list, tuple))
        and len(v) == len(LAYERS)
        and all(b in policy.BITS and not isinstance(b, (bool, float)) for b in v)
        and v[0] in ROWS
    ),
)
_RULE_LIST = Rule(
    "a list of rules, each [match, bits], [match, bits, interval] or [match, bits, "
    "interval, group]",
    lambda v: (
        isinstance(v, (list, tuple)) and all(isinstance(r, (list, tuple)) for r in v)
    ),
)
_ADAPTIVE = Rule(
    "True, False or a mapping from names to settings",
    lambda v: v is None or isinstance(v, (bool, Mapping)),
)
_ADAPTS = {"adaptive_rate": AdaptiveRate, "adaptive_bits": AdaptiveBits}
_MAPPING = Rule(
    "a mapping from names to settings", lambda v: v is None or isinstance(v, Mapping)
)


def _ok(value: Any) -> bool:
    return _BETA.accepts(value)


def check_sections(data: Any) -> dict[str, Settings]:
    """The settings by section, each checked; long names for short ones.

    Raises:
      ValueError: something is unknown, missing or breaks its rule; the message has its
        path, such as `compensation.clip_value`.
    """
    if not isinstance(data, Mapping):
        raise ValueError(
            "settings must be a mapping from sections to settings, received "
            f"{type(data).__name__}"
        )
    everything = _all_sections()
    _check_names("", data, everything, everything)
    data = {k: v for k, v in data.items() if v is not None}  # `section:` and no more
    for section, settings in data.items():
        check(section, settings, _MAPPING)
    kind = _type_of("optimizer", data.get("optimizer", {}), tuple(TYPES))
    dense = data.get("dense_optimizer")
    dense_kind = None
    if dense is not None:
        dense_kind = _type_of("dense_optimizer", dense, DENSE_TYPES)
    sections = sections_of(kind, dense_kind)
    checked = {}
    for section, settings in data.items():
        if section not in sections:
            raise ValueError(
                f"{section} must not be given for optimizer.type {kind!r}"
                f"{_reason(section)}, received {dict(settings)!r}"
            )
        _check_names(section, settings, sections[section], sections)
        for name, value in settings.items():
            check(f"{section}.{name}", value, sections[section][name])
            if name in _ADAPTS and isinstance(value, Mapping):
                path, cls = f"{section}.{name}", _ADAPTS[name]
                _check_names(path, value, cls._fields, {})
                metadata.checked(path, dict(value), cls)
        checked[section] = _long_names(section, settings)
    if "momentum_correction" in checked:
        checked["momentum_correction"] = schedule = {
            "gamma": (0.9, 0.5, 0.1),
            "boundaries": (0.1, 0.8),
            **checked["momentum_correction"],
        }
        try:
            onebit_rule.check_schedule(**schedule)
        except ValueError as error:
            raise ValueError(f"momentum_correction.{error}") from None
    rate = checked.get("compensation", {}).get("adaptive_rate")
    if dense_kind == "adam" and rate not in (None, False):
        raise ValueError(
            "compensation.adaptive_rate must be None beside a dense_optimizer of type "
            f"'adam', which has a rate of its own, received {rate!r}"
        )
    if "communication" in checked:
        _check_communication(checked)
    for pattern, own in (checked.get("tables", {}).get("table_settings") or {}).items():
        path = f"tables.table_settings.{pattern}"
        check(path, own, _MAPPING)
        allowed = _table_rules(TYPES[kind])
        allowed = {k: r for k, r in allowed.items() if k in selection.SETTINGS}
        _check_names(path, own or {}, allowed, {})
        for name, value in (own or {}).items():
            check(f"{path}.{name}", value, allowed[name])
    return checked


def _check_communication(checked: Mapping[str, Settings]) -> None:
    """Raises ValueError where its settings do not go together."""
    settings = {
        "delay": 0,
        "staleness_decay": 1.0,
        "local_steps": 1,
        "local_steps_doubling": None,
        **checked["communication"],
    }
    steps, delay = settings["local_steps"], settings["delay"]
    if steps > 1 and "momentum_correction" in checked:
        raise ValueError(
            "momentum_correction must not be given where communication.local_steps is "
            f"above 1, received {checked['momentum_correction']!r} and {steps}"
        )
    try:
        compression.check_staleness(delay, settings["staleness_decay"])
        onebit_local.check_local_steps(
            steps, settings["local_steps_doubling"], "frozen", delay
        )
    except ValueError as error:
        raise ValueError(f"communication.{error}") from None


def sections_of(kind: str, dense_kind: str | None) -> dict[str, dict[str, Rule]]:
    """Sections, names and rules for these types of optimizers."""
    cls, one_bit = TYPES[kind], "1bit_adam" in (kind, dense_kind)
    own = {**_RATE, **_KERAS, **{n: RULES[n] for n in _ADAM}}
    if cls is not None:
        own["gradient_accumulation_steps"] = arguments.RULES[
            "gradient_accumulation_steps"
        ]
    if kind == "basis_sgd":
        del own["epsilon"]
        own |= {"momentum": cls._rules["momentum"], "nesterov": RULES["nesterov"]}
    elif kind == "basis_adagrad":
        own["initial_accumulator_value"] = RULES["initial_accumulator_value"]
    else:
        own |= _BETAS
    if kind == "adam":
        own["amsgrad"] = hyperparameters.flag
    if kind == "1bit_adam":
        # `compensation.clip_value` clips what is quantised.
        own = {k: r for k, r in own.items() if k not in _CLIPPING}
        own["total_steps"] = onebit_rule.RULES["total_steps"]
    sections = {"optimizer": own, "distributed": _DISTRIBUTED}
    if cls is not None:
        sections["tables"] = _table_rules(cls)
    if cls is not None and kind != "1bit_adam":
        dense = {**_RATE, **_BETAS, "weight_decay": RULES["weight_decay"]}
        if dense_kind == "1bit_adam":
            dense["total_steps"] = onebit_rule.RULES["total_steps"]
        else:
            dense["amsgrad"] = hyperparameters.flag
        sections["dense_optimizer"] = dense
    feedback = compression.RULES
    sections["compensation"] = {
        name: feedback[name] for name in ("reset_interval", "clip_value", "reset")
    }
    sections["compensation"]["adaptive_rate"] = _ADAPTIVE
    names = ("amplitude_interval", "delay", "staleness_decay")
    sections["communication"] = {name: feedback[name] for name in names}
    sections["quantization"] = {
        "warmup_steps": (onebit_rule.RULES if one_bit else feedback)["warmup_steps"],
        "layerwise_bits": _BITS,
        "rules": _RULE_LIST,
        "min_elements": policy.RULES["min_elements"],
        "block": feedback["block"],
        "sparse_values": feedback["sparse_values"],
        "statistics": feedback["statistics"],
        "adaptive_bits": _ADAPTIVE,
    }
    if one_bit:
        for name in ("local_steps", "local_steps_doubling"):
            sections["communication"][name] = onebit_rule.RULES[name]
        sections["momentum_correction"] = {
            name: onebit_rule.RULES[name] for name in ("gamma", "boundaries")
        }
    for section in ("optimizer", "dense_optimizer"):
        if section in sections:
            rules = sections[section]
            short = {s: rules[long] for s, long in ALIASES.items() if long in rules}
            sections[section] = {"type": _ANY, **rules, **short}
    return sections


_ANY = Rule("anything", lambda v: True)


def _table_rules(cls: type) -> dict[str, Rule]:
    """Every argument of the class that is about tables."""
    known = inspect.signature(cls.__init__).parameters
    rules = {**RULES, **cls._rules}
    elsewhere = {*_RATE, *_BETAS, *_KERAS, *_ADAM, "nesterov"}
    elsewhere |= {"initial_accumulator_value"}
    if "momentum_mode" in known:
        elsewhere.add("momentum")
    own = {n: rules[n] for n in known if n in rules and n not in elsewhere}
    return {**own, "tables": _TABLES, "table_settings": _MAPPING}


def _all_sections() -> dict[str, dict[str, Rule]]:
    """Every section, with what it may hold for some type."""
    every: dict[str, dict[str, Rule]] = {}
    for kind, cls in TYPES.items():
        for section, rules in sections_of(kind, "1bit_adam" if cls else None).items():
            every[section] = {**every.get(section, {}), **rules}
    return every


def _type_of(section: str, settings: Mapping, types: tuple[str, ...]) -> str:
    value = settings.get("type")
    if value in types and isinstance(value, str):
        return value
    near = difflib.get_close_matches(str(value), types, 1, 0.0)
    hint = f" (nearest: {near[0]!r})" if isinstance(value, str) and near else ""
    raise ValueError(
        f"{section}.type must be one of {', '.join(map(repr, types))}, received "
        f"{value!r}{hint}"
    )


def _check_names(
    section: str, given: Iterable[Any], known: Iterable[str], sections: Mapping
) -> None:
    known = list(known)
    for name in given:
        if name in known:
            continue
        path = f"{section}.{name}" if section else str(name)
        here = f"in {section}" if section else "as sections"
        raise ValueError(
            f"{path} is unknown: did you mean "
            f"{_nearest(section, str(name), known, sections)}? "
            f"Known {here}: {', '.join(known)}"
        )


def _nearest(section: str, name: str, known: list[str], sections: Mapping) -> str:
    for other, names in sections.items():
        if other != section and name in names:
            return f"{other}.{name}"  # right name, wrong place
    # `cutoff=0`: the nearest, however far.
    best = difflib.get_close_matches(name.lower(), known, 1, 0.0)[0]
    return f"{section}.{best}" if section else best


def _long_names(section: str, settings: Mapping) -> Settings:
    checked: Settings = {}
    came_as: dict[str, str] = {}
    for name, value in settings.items():
        both = name == "betas"
        names = ("beta_1", "beta_2") if both else (ALIASES.get(name, name),)
        for long, each in zip(names, value if both else (value,)):
            if long in checked:
                raise ValueError(
                    f"{section}.{name} and {section}.{came_as[long]} are one setting: "
                    f"give one of them, received {value!r} and {checked[long]!r}"
                )
            if long == "learning_rate":
                each = float(each)  # `lr: 1`; Keras takes no integer
            checked[long], came_as[long] = each, name
    return checked


def _reason(section: str) -> str:
    if section == "momentum_correction":
        return " without an optimizer of type '1bit_adam', whose it is"
    if section == "dense_optimizer":
        return ", which has its own"
    return ", which compresses no tables"
