"""Distributed optimizers from settings files."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf_basis import distributed, hyperparameters, optimizers
from tf_basis.adapters import flavor as flavors
from tf_basis.adapters import keras_modules
from tf_basis.config_schema import LAYERS, ROWS, Settings, check_sections
from tf_basis.distributed import onebit_rule
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.policy import Policy

_CLASSES = {
    "1bit_adam": "BasisAdam",
    "basis_adam": "BasisAdam",
    "basis_sgd": "BasisSGD",
    "basis_adagrad": "BasisAdagrad",
}


def load(
    source: Any,
    *,
    total_steps: int | None = None,
    process_set: Any = None,
    flavor: str | None = None,
) -> Any:
    r"""The distributed optimizer that a settings file describes.

    Everything is checked before anything is built. A file in the well-known form::

        optimizer:
          type: 1bit_adam
          lr: 6.0e-5
          betas: [0.9, 0.999]
          eps: 1.0e-6
        compensation: {reset_interval: 2000, clip_value: 2.0}
        quantization: {warmup_steps: 500, layerwise_bits: [1, 2, 1, 16]}
        momentum_correction: {gamma: [0.9, 0.5, 0.1], boundaries: [0.1, 0.8]}

    Types: `1bit_adam` (`BasisAdam` for the tables, `OneBitAdam` for the rest),
    `basis_adam`, `basis_sgd`, `basis_adagrad` and `adam` (Keras's). Further sections:
    `tables`, whose names are the arguments of the class; `dense_optimizer`, of type
    `1bit_adam` or `adam`; `distributed`. All names: `docs/configuration.md`.

    Args:
      source: a path; or text, in YAML or JSON; or a mapping. YAML needs PyYAML (the
        extra `tf_basis[config]`), JSON and mappings do not.
      total_steps: steps of the whole training, what `boundaries` are shares of; in
        place of `total_steps` of the file. Where `momentum_correction` is given and
        neither is, it is taken to be warmup_steps / the first boundary, and a warning
        says so. Default None.
      process_set: a Horovod process set with this rank. Default: all ranks.
      flavor: `"keras3"` or `"tf_keras"`. Default: what `tf.keras` is.

    Returns:
      What `tf_basis.distributed.DistributedOptimizer` returns. On one process that was
      not launched it needs no Horovod.

    Raises:
      ValueError: a section or name is unknown, or a value breaks its rule; the message
        has its path, such as `compensation.clip_valeu`, and the nearest valid one.
      FileNotFoundError: there is no file of this name.
      ImportError: the settings are YAML and PyYAML is not installed.

    Example:

    >>> optimizer = load({"optimizer": {"type": "1bit_adam", "lr": 1e-3}})
    >>> optimizer.dense_optimizer.moments
    'frozen'
    """
    hyperparameters.check("total_steps", total_steps, onebit_rule.RULES["total_steps"])
    sections = check_sections(source if isinstance(source, Mapping) else _read(source))
    name = flavor or flavors.active()
    outer = dict(sections["optimizer"])
    kind = outer.pop("type")
    tables = sections.get("tables", {})
    settings = _exchange(sections)
    inner = sections.get("dense_optimizer")
    if kind == "1bit_adam":
        shared = ("learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay")
        inner = {"type": kind, "total_steps": outer.pop("total_steps", None)}
        inner |= {k: outer[k] for k in shared if k in outer}
    one_bit = inner is not None and inner["type"] == "1bit_adam"
    if total_steps is not None and not one_bit:
        raise ValueError(
            "total_steps must be None without an optimizer of type '1bit_adam', "
            f"received {total_steps!r}"
        )
    wrapping = dict(sections.get("distributed", {}))
    chosen = wrapping.pop("compression", None)
    if one_bit:
        compression = _of_tables(chosen, settings)
    else:
        compression = _of_gradients(chosen, sections, settings)
    # From here on objects are made.
    if inner is not None:
        correction = sections.get("momentum_correction")
        outer["dense_optimizer"] = (
            _one_bit_adam(
                inner, settings, correction, total_steps, wrapping, process_set, name
            )
            if one_bit
            else _keras(name).Adam(**{k: v for k, v in inner.items() if k != "type"})
        )
    if kind == "adam":
        optimizer = _keras(name).Adam(**outer)
    else:
        cls = getattr(optimizers.for_flavor(name), _CLASSES[kind])
        optimizer = cls(**outer, **tables)
    return distributed.DistributedOptimizer(
        optimizer, compression, process_set=process_set, **wrapping
    )


def _exchange(sections: Mapping[str, Settings]) -> Settings:
    """Arguments of a `OneBitCompression` but for the policy, and the policy's rules."""
    settings = dict(sections.get("compensation", {}))
    settings |= sections.get("quantization", {})
    settings |= sections.get("communication", {})
    bits = settings.pop("layerwise_bits", None)
    rules = list(settings.pop("rules", ()))
    if bits is not None:
        rules += zip(LAYERS, bits)
        settings.setdefault("sparse_values", ROWS[bits[0]])
    least = {k: settings.pop(k) for k in ("min_elements",) if k in settings}
    try:
        settings["policy"] = Policy(rules, **least)
    except ValueError as error:
        raise ValueError(f"quantization.rules: {error}") from None
    return settings


def _one_bit_adam(
    inner: Settings,
    settings: Settings,
    correction: Settings | None,
    total_steps: int | None,
    wrapping: Settings,
    process_set: Any,
    name: str,
) -> Any:
    arguments = {k: v for k, v in inner.items() if k != "type"} | settings
    if total_steps is not None:
        arguments["total_steps"] = total_steps
    if correction is not None:
        arguments |= {"moments": "corrected", **correction}
        if arguments.get("total_steps") is None:
            arguments["total_steps"] = _assumed_steps(arguments)
    if "timeout" in wrapping:
        arguments["timeout"] = wrapping["timeout"]
    cls = distributed.for_flavor(name).OneBitAdam
    return cls(process_set=process_set, **arguments)


def _assumed_steps(arguments: Settings) -> int:
    warmup = arguments.get("warmup_steps")
    warmup = warmup if isinstance(warmup, int) else 500
    first = (arguments["boundaries"] or [1.0])[0]
    steps = math.ceil(warmup / first)
    warnings.warn(
        f"total_steps is not given: boundaries are taken as shares of {steps} steps, "
        f"as if the warm-up of {warmup} steps ended at the first of them ({first:g}). "
        "Give load(..., total_steps=) or optimizer.total_steps",
        stacklevel=4,
    )
    return steps


def _of_tables(chosen: str | None, settings: Settings) -> Any:
    """Of what `OneBitAdam` leaves: tables, whose rows travel and have no residuals."""
    if chosen in ("onebit", "auto"):
        raise ValueError(
            "distributed.compression must be None, 'none' or 'fp16' beside 1bit_adam: "
            "it is for dense gradients of tables, and residuals of 1 bit would be as "
            f"large as the tables, received {chosen!r}"
        )
    return OneBitCompression(
        [(".*", 16 if chosen == "fp16" else 32)],
        sparse_values=settings.get("sparse_values", "float32"),
    )


def _of_gradients(
    chosen: str | None,
    sections: Mapping[str, Settings],
    settings: Settings,
) -> Any:
    names = ("compensation", "quantization", "communication")
    given = [s for s in names if s in sections]
    if given and chosen not in (None, "onebit"):
        raise ValueError(
            f"distributed.compression must be None or 'onebit' where {given[0]} is "
            f"given, received {chosen!r}"
        )
    if not given:
        return chosen
    # Dense gradients of embeddings in full: residuals would be as large as the tables.
    policy = settings.pop("policy")
    rules = [
        r._replace(bits=32) if r.match == "embedding" and r.bits < 16 else r
        for r in policy.rules
    ]
    return OneBitCompression(Policy(rules, policy.min_elements), **settings)


def _keras(name: str) -> Any:
    return keras_modules.keras_of(name).optimizers


# ---- reading -------------------------------------------------------------------------


def _read(source: Any) -> Any:
    """What a file or a text holds."""
    if isinstance(source, os.PathLike):
        return _parse(_text_of(source), str(source))
    if not isinstance(source, str):
        raise ValueError(
            "source must be a path, text in YAML or JSON, or a mapping, received "
            f"{type(source).__name__}"
        )
    if os.path.isfile(source):
        return _parse(_text_of(source), source)
    text = "\n" in source or re.search(r":\s|^\s*\{", source + "\n")
    if not text:
        raise FileNotFoundError(f"no settings file {source!r}")
    return _parse(source, "the text")


def _text_of(path: str | os.PathLike) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}") from None


def _parse(text: str, where: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=_distinct)
        except json.JSONDecodeError as error:
            if where.endswith(".json"):
                raise ValueError(f"{where} must be JSON: {error}") from None
            # YAML, then: `{lr: 1}`
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"{where} must be read as YAML, which needs PyYAML: pip install "
            "'tf_basis[config]' (or give JSON or a mapping)"
        ) from None
    try:
        return yaml.load(text, _yaml_loader(yaml))
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be YAML or JSON: {error}") from None


def _yaml_loader(yaml: Any) -> type:
    """Safe, with YAML 1.2's numbers (`1e-3`), and no name twice."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            self.flatten_mapping(node)
            return _distinct(
                (self.construct_object(key, True), self.construct_object(value, True))
                for key, value in node.value
            )

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.construct_mapping)
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )
    return Loader


def _distinct(pairs: Any) -> dict:
    """A dict; two values for one name are an error."""
    result: dict = {}
    for name, value in pairs:
        if not isinstance(name, str):
            raise ValueError(f"names must be text, received {name!r}: {value!r}")
        if name in result:
            raise ValueError(
                f"{name} must be given once, received {result[name]!r} and {value!r}"
            )
        result[name] = value
    return result


__all__ = ["load"]
