"""Settings files: what is refused, and how it is named."""

from __future__ import annotations

import pytest

from tf_basis import config


def ask(section, *settings, kind="1bit_adam"):
    """A setting of the known form and one that is wrong."""
    data = {"optimizer": {"type": kind}}
    if settings:
        data.setdefault(section, {}).update(dict([settings]))
    else:
        data[section] = 3
    return data


ERRORS = [
    (
        ask("compensation", "clip_valeu", 2.0),
        r"compensation\.clip_valeu is unknown: did you mean compensation\.clip_value\?",
    ),
    (
        ask("quantization", "clip_value", 2.0),
        r"quantization\.clip_value is unknown: did you mean compensation\.clip_value\?",
    ),
    (ask("compensaton"), r"compensaton is unknown: did you mean compensation\?"),
    (ask("clip_value"), r"clip_value is unknown: did you mean compensation\.clip"),
    (ask("compensation"), r"compensation must be .* mapping .* received 3"),
    (
        ask("compensation", "clip_value", "two"),
        r"compensation\.clip_value must be None or a number above 0, received 'two'",
    ),
    (ask("compensation", "clip_value", -1.0), r"compensation\.clip_value .* -1\.0"),
    (ask("compensation", "reset_interval", True), r"reset_interval .* received True"),
    (ask("quantization", "warmup_steps", 0), r"quantization\.warmup_steps .* 0$"),
    (ask("quantization", "layerwise_bits", [1, 2, 1]), r"layerwise_bits .* four"),
    (ask("quantization", "layerwise_bits", [1, 2, 3, 16]), r"layerwise_bits .* 3, "),
    (ask("quantization", "layerwise_bits", [2, 2, 1, 16]), r"of embeddings 1, 16"),
    (ask("quantization", "rules", [["dense", 5]]), r"quantization\.rules: bits .* 5"),
    (ask("quantization", "rules", ["dense"]), r"quantization\.rules .* \['dense'\]$"),
    (
        ask("quantization", "rules", [{"match": "dense", "bits": 1}]),
        r"quantization\.rules must be a list of rules, each \[match, bits\], .* gro",
    ),
    (ask("momentum_correction", "gamma", [0.9, 1.0]), r"correction\.gamma .*\[0, 1\)"),
    (ask("momentum_correction", "gamma", [0.9]), r"momentum_correction\.gamma must h"),
    (ask("momentum_correction", "boundaries", [0.8, 0.1]), r"\.boundaries .* above"),
    (
        ask("momentum_correction", "gamma", [0.9], kind="basis_adam"),
        r"momentum_correction must not be given for optimizer\.type 'basis_adam'",
    ),
    (ask("tables", "seed", 1, kind="adam"), r"tables must not be given .* no tables"),
    (ask("optimizer", "lr", "fast"), r"optimizer\.lr must be a number .* 'fast'"),
    (ask("optimizer", "betas", [0.9]), r"optimizer\.betas .* two numbers"),
    (ask("optimizer", "leraning_rate", 1), r"did you mean optimizer\.learning_rate\?"),
    (ask("optimizer", "betas", [0.9, 0.9], kind="basis_sgd"), r"optimizer\.betas is u"),
    (ask("optimizer", "type", "1bit_adm"), r"type .*\(nearest: '1bit_adam'\)"),
    ({}, r"optimizer\.type must be one of .* received None"),
    (
        {"optimizer": {"type": "adam", "lr": 1, "learning_rate": 2}},
        r"learning_rate and optimizer\.lr are one setting.* 2 and 1",
    ),
    (
        ask("tables", "table_settings", {"user": {"hashin": "murmur3"}}),
        r"tables\.table_settings\.user\.hashin is unknown: did you mean .*\.hashing\?",
    ),
    (
        ask("tables", "table_settings", {"user": {"seed": -1}}),
        r"tables\.table_settings\.user\.seed must be an integer in",
    ),
    (ask("distributed", "timeout", 0), r"distributed\.timeout must be None or .* 0$"),
    (ask("distributed", "compression", "onebit"), r"compression .* beside 1bit_adam"),
    (ask("distributed", "compression", "auto"), r"compression .* beside 1bit.* 'auto'"),
    (
        {
            **ask("compensation", "adaptive_rate", True, kind="basis_adam"),
            "dense_optimizer": {"type": "adam"},
        },
        r"compensation\.adaptive_rate must be None beside .* 'adam', .* received True",
    ),
    (
        {**ask("quantization", "block", 64, kind="adam"), "distributed": 1},
        r"distributed must be None or a mapping|distributed must be a mapping",
    ),
    (
        ask("quantization", "adaptive_bits", {"patiense": 3}),
        r"quantization\.adaptive_bits\.patiense is unknown: .*adaptive_bits\.patience",
    ),
    (
        ask("compensation", "adaptive_rate", {"floor": 2}),
        r"compensation\.adaptive_rate\.floor must be a number between 0 and 1",
    ),
    (ask("communication", "local_steps", 4, kind="adam"), r"local_steps is unknown"),
    (
        ask("communication", "local_steps_doubling", 5),
        r"communication\.local_steps_doubling must be None where .* received 5",
    ),
    (
        ask("communication", "staleness_decay", 0.5, kind="adam"),
        r"communication\.staleness_decay must be 1 where delay is 0, received 0\.5",
    ),
    (
        {
            **ask("optimizer", "lr", 1.0),
            "communication": {"local_steps": 4, "delay": 1},
        },
        r"communication\.delay must be 0 with local_steps=4, received 1",
    ),
    (
        {
            **ask("communication", "local_steps", 4),
            "momentum_correction": {"boundaries": [0.1, 0.8]},
        },
        r"momentum_correction must not .* communication\.local_steps .* and 4$",
    ),
    ([1, 2], r"source must be a path, text .* received list"),
    ("- 1\n- 2\n", r"settings must be a mapping .* received list"),
    ("optimizer: {type: adam, type: adam}", r"type must be given once"),
    ("optimizer: {type: adam", r"the text must be YAML or JSON"),
    ("optimizer: !!python/object:os.system {}", r"the text must be YAML or JSON"),
    ("optimizer: {1: adam}", r"names must be text, received 1"),
]


@pytest.mark.parametrize("source, words", ERRORS)
def test_what_is_wrong_is_named_before_anything_is_built(source, words, monkeypatch):
    def build(*_):
        raise AssertionError("something was built")

    monkeypatch.setattr(config.optimizers, "for_flavor", build)
    monkeypatch.setattr(config.distributed, "for_flavor", build)
    monkeypatch.setattr(config, "_keras", build)
    with pytest.raises(ValueError, match=words):
        config.load(source)
