"""Settings files: the optimizers they give."""

from __future__ import annotations

import builtins
import inspect
import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import make_optimizer, to_numpy

from tf_basis import config, distributed

KNOWN = """
optimizer:
  type: 1bit_adam
  lr: 6.0e-5
  betas: [0.9, 0.999]
  eps: 1.0e-6
compensation: {reset_interval: 2000, clip_value: 2.0}
quantization: {warmup_steps: 500, layerwise_bits: [1, 2, 1, 16]}
momentum_correction: {gamma: [0.9, 0.5, 0.1], boundaries: [0.1, 0.8]}
"""

ONE_BIT = {
    "learning_rate": 6e-5,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-6,
    "reset_interval": 2000,
    "clip_value": 2.0,
    "reset": "flush",
    "warmup_steps": 500,
    "total_steps": 20_000,
    "moments": "corrected",
    "gamma": [0.9, 0.5, 0.1],
    "boundaries": [0.1, 0.8],
    "sparse_values": "1bit",
    "policy": {
        "rules": [
            ["embedding", 1, 1],
            ["conv_kernel", 2, 1],
            ["dense_kernel", 1, 1],
            ["normalization", 16, 1],
        ],
        "min_elements": 1024,
    },
}


def config_of(optimizer) -> dict:
    """Its settings; learning rates as they were given."""
    found = json.loads(json.dumps(optimizer.get_config()))
    return {**found, "learning_rate": round(found["learning_rate"], 10)}


def inside(optimizer) -> dict:
    """Of the optimizer that was wrapped."""
    return optimizer.get_config()["optimizer"]["config"]


def test_the_known_form_gives_its_hyperparameters(flavor, tmp_path):
    path = tmp_path / "onebit.yaml"
    path.write_text(KNOWN)
    optimizer = config.load(path, total_steps=20_000, flavor=flavor)
    assert type(optimizer).__name__ == "DistributedOptimizer"
    dense = config_of(optimizer.dense_optimizer)
    assert {k: dense[k] for k in ONE_BIT} == ONE_BIT
    outer = inside(optimizer)
    assert outer["learning_rate"] == pytest.approx(6e-5, rel=1e-6)
    rest = ("beta_1", "beta_2", "epsilon", "compression_ratio")
    assert [outer[k] for k in rest] == [0.9, 0.999, 1e-6, 100.0]
    # Tables: rows in the bits of embeddings, and no residuals of their size.
    sent = optimizer.get_config()["compression"]
    assert sent["sparse_values"] == "1bit" and sent["policy"]["rules"] == [
        [".*", 32, 1]
    ]


def test_without_total_steps_the_warm_up_tells_and_a_warning_says_so():
    with pytest.warns(UserWarning, match=r"total_steps is not given.* 5000 steps"):
        optimizer = config.load(KNOWN)
    assert optimizer.dense_optimizer.total_steps == 5000
    frozen = KNOWN.split("momentum_correction")[0]
    assert config.load(frozen).dense_optimizer.moments == "frozen"


def test_every_form_of_a_source_is_the_same(tmp_path):
    data = {
        "optimizer": {"type": "1bit_adam", "learning_rate": 1e-3, "beta_1": 0.8},
        "distributed": {"timeout": None, "compression": "fp16"},
        "quantization": {"rules": [["tower", 2, 3]], "sparse_values": "float16"},
    }
    text = """
optimizer: {type: 1bit_adam, lr: 1e-3, beta_1: 0.8}
distributed: {timeout: null, compression: fp16}
compensation:
quantization:
  rules: [[tower, 2, 3]]
  sparse_values: float16
"""
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(data))
    sources = [data, text, json.dumps(data), path, str(path)]
    found = [config.load(s).get_config() for s in sources]
    assert all(f == found[0] for f in found)
    inner = config.load(text).dense_optimizer.get_config()
    assert inner["policy"]["rules"] == [["tower", 2, 3]] and inner["timeout"] is None
    assert found[0]["compression"]["policy"]["rules"] == [[".*", 16, 1]]


def test_yaml_needs_pyyaml_and_json_does_not(monkeypatch):
    original = builtins.__import__

    def without(name, *arguments, **more):
        if name == "yaml":
            raise ImportError(name)
        return original(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"PyYAML: pip install 'tf_basis\[config\]'"):
        config.load(KNOWN)
    assert config.load('{"optimizer": {"type": "adam", "lr": 0.25}}').beta_1 == 0.9


# Values unlike the defaults, by argument of BasisAdam.
OTHER = {
    "learning_rate": 0.5,
    "beta_1": 0.8,
    "beta_2": 0.95,
    "epsilon": 1e-5,
    "compression_ratio": 7.0,
    "num_buckets": 33,
    "state_budget": "1MB",
    "exclusive_rows": [3, 1],
    "row_frequencies": [1, 5, 3],
    "tables": "embed",
    "table_settings": {"user": {"exclusive_rows": 5, "scalar_range": [0.5, 2.0]}},
    "min_rows": 10,
    "momentum": "shared",
    "invariant_scalar": None,
    "scalar_decay": 0.5,
    "scalar_range": [0.5, 2.0],
    "scalar_rule": "log",
    "scalar_learning_rate": 0.01,
    "scalar_frequency_power": 0.5,
    "collision_reduce": "sum",
    "bias_correction": False,
    "hashing": "murmur3",
    "seed": 7,
    "moment_dtype": "bfloat16",
    "energy_dtype": "log8",
    "stale_decay": True,
    "weight_decay": 0.1,
    "row_clipnorm": 3.0,
    "dense_optimizer": {"type": "adam", "lr": 0.75, "eps": 1e-4},
    "clipnorm": 1.0,
    "clipvalue": 1.0,
    "global_clipnorm": 1.0,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
    "name": "mine",
}

IN_OPTIMIZER = "learning_rate beta_1 beta_2 epsilon weight_decay clipnorm clipvalue "

IN_OPTIMIZER += "global_clipnorm use_ema ema_momentum ema_overwrite_frequency name"


def test_every_argument_of_basis_adam_is_reached(flavor):
    cls = type(make_optimizer(flavor))
    known = set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}
    assert known == set(OTHER)
    for name, value in OTHER.items():
        settings = {"optimizer": {"type": "basis_adam"}}
        if name == "dense_optimizer":
            settings[name] = value
        else:
            place = "optimizer" if name in IN_OPTIMIZER.split() else "tables"
            settings.setdefault(place, {})[name] = value
        if name == "row_frequencies":
            settings["tables"]["exclusive_rows"] = 2
        if name == "ema_overwrite_frequency":
            settings["optimizer"]["use_ema"] = True
        wrapped = config.load(settings, flavor=flavor)
        if name == "dense_optimizer":
            inner = wrapped.dense_optimizer
            assert float(to_numpy(inner.learning_rate)) == 0.75
            assert inner.epsilon == 1e-4
            continue
        arguments = {**settings["optimizer"], **settings.get("tables", {})}
        arguments.pop("type")
        expected = make_optimizer(flavor, **arguments)
        assert inside(wrapped) == expected.get_config(), name


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"type": "basis_sgd", "momentum": 0.9, "nesterov": True}, "momentum_mode"),
        ({"type": "basis_adagrad", "initial_accumulator_value": 0.5}, "energy_dtype"),
    ],
)
def test_the_other_optimizers_and_one_bit_towers(flavor, settings, words):
    value = {"momentum_mode": "shared", "energy_dtype": "bfloat16"}[words]
    optimizer = config.load(
        {
            "optimizer": {"lr": 0.25, **settings},
            "tables": {words: value},
            "dense_optimizer": {"type": "1bit_adam", "lr": 0.5, "total_steps": 50},
            "momentum_correction": {"gamma": [0.5, 0.25], "boundaries": [0.3]},
        },
        flavor=flavor,
    )
    found, dense = inside(optimizer), optimizer.dense_optimizer
    assert {words: value, **settings}.items() - {("type", settings["type"])} <= (
        found.items()
    )
    assert type(optimizer)._inner_class.__name__.lower() == settings["type"].replace(
        "_", ""
    )
    assert float(to_numpy(dense.learning_rate)) == 0.5
    assert (dense.gamma, dense.boundaries) == ((0.5, 0.25), (0.3,))
    # γ of the first part up to 0.3 · 50 steps, of the second after.
    gammas = [float(dense._gamma(tf.constant(s, tf.int64))) for s in (1, 15, 16, 50)]
    assert gammas == [0.5, 0.5, 0.25, 0.25]


def test_gradients_in_one_bit_keep_those_of_embeddings_in_full():
    optimizer = config.load(
        {
            "optimizer": {"type": "adam", "betas": [0.5, 0.75], "lr": 1},
            "quantization": {"layerwise_bits": [16, 2, 1, 32], "warmup_steps": 0},
            "compensation": {"reset": "zero"},
        }
    )
    assert (optimizer.beta_1, optimizer.beta_2) == (0.5, 0.75)
    assert float(to_numpy(optimizer.learning_rate)) == 1
    sent = optimizer.get_config()["compression"]
    assert (sent["reset"], sent["sparse_values"]) == ("zero", "float16")
    assert sent["policy"]["rules"][0] == ["embedding", 16, 1]
    again = config.load(
        {"optimizer": {"type": "adam"}, "quantization": {"layerwise_bits": [1] * 4}}
    )
    sent = again.get_config()["compression"]
    assert sent["policy"]["rules"][:2] == [["embedding", 32, 1], ["conv_kernel", 1, 1]]
    plain = config.load({"optimizer": {"type": "adam"}})
    assert plain.get_config()["compression"]["policy"]["rules"] == [[".*", 32, 1]]


def test_other_mistakes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no settings file 'nowhere\.yaml'"):
        config.load("nowhere.yaml")
    with pytest.raises(ValueError, match="total_steps must be None without"):
        config.load({"optimizer": {"type": "adam"}}, total_steps=5)
    with pytest.raises(ValueError, match="total_steps must be None or an integer"):
        config.load(KNOWN, total_steps=0.5)
    path = tmp_path / "latin1.yaml"
    path.write_bytes("optimizer: {type: adam, name: é}".encode("latin1"))
    for source in (path, str(path)):
        with pytest.raises(ValueError, match=r"latin1\.yaml must be text in UTF-8"):
            config.load(source)


def test_options_of_the_exchange():
    settings = {
        "optimizer": {"type": "1bit_adam", "total_steps": 100},
        "compensation": {"adaptive_rate": {"floor": 0.25}},
        "quantization": {"adaptive_bits": True, "statistics": True},
        "communication": {"amplitude_interval": 10, "local_steps": 4},
    }
    dense = config.load(settings).dense_optimizer
    feedback = dense.compression.feedback
    assert feedback.adaptive_rate == (0.25, 0.9)
    assert feedback.adaptive_bits == distributed.AdaptiveBits()
    assert feedback.amplitude_interval == 10 and dense.local_steps == 4
    one = {"optimizer": {"type": "adam"}, "communication": {"delay": 1}}
    assert config.load(one)._distribution.compression.feedback.delay == 1


def test_a_model_trains_with_it():
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(50, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = config.load(KNOWN + "tables: {min_rows: 50}\n", total_steps=20_000)
    model.compile(optimizer, "mse", run_eagerly=True)  # no time for tracing
    x, y = np.arange(12).reshape(4, 3), np.ones((4, 1), np.float32)
    before = [w.copy() for w in model.get_weights()]
    model.fit(x, y, verbose=0)
    moved = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
    assert moved[0] and moved[1] and optimizer.state_bytes()
    assert int(to_numpy(optimizer.iterations)) == 1
    (kernel,) = [c for c in optimizer.dense_optimizer._exchange.channels if c.exchange]
    assert kernel.elements == 24 * 4 + 4 * 1 and kernel.exchange.clip_value == 2.0
