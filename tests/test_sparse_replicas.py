"""MirroredStrategy on two logical CPUs: replicas agree, and equal one replica."""

from __future__ import annotations

import contextlib
import json
import warnings

import numpy as np
import pytest
from helpers import (
    BACKENDS,
    FLAVORS,
    batches_of,
    keras_of,
    make_click_model,
    make_optimizer,
    run_python,
    to_numpy,
    variables_of,
)

# Options of BasisAdam, whether the loss is scaled, and whether SGD does the dense part.
CASES = {
    "default": ({"exclusive_rows": 50}, False, False),
    "clipping": ({"global_clipnorm": 0.05, "weight_decay": 0.1}, False, True),
    "accumulation": ({"gradient_accumulation_steps": 2, "clipnorm": 0.02}, True, True),
    "averages": ({"use_ema": True, "ema_overwrite_frequency": 3}, True, True),
}


def components(variable) -> list[np.ndarray]:
    """The copies of a variable on all devices."""
    if hasattr(variable, "path"):  # keras.Variable
        variable = variable.value
    parts = getattr(variable, "values", None)
    return [np.array(p.numpy()) for p in parts or [variable]]


def fit(flavor, strategy, options, scaled, sgd):
    keras = keras_of(flavor)
    with strategy.scope() if strategy else contextlib.nullcontext():
        if sgd:
            inner = keras.optimizers.SGD(0.1, momentum=0.9)
            options = {**options, "dense_optimizer": inner}
        optimizer = make_optimizer(learning_rate=0.02, **options)
        if scaled:
            wrap = keras.mixed_precision.LossScaleOptimizer
            optimizer = wrap(optimizer, initial_scale=2.0**10)
        model = make_click_model(optimizer)
    x, y = batches_of(0, 1, size=160)[0]
    model.fit(x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)
    return model


def print_comparison(flavor: str, mode: str) -> None:
    """In a new process with two devices: by case how far apart everything is."""
    import tensorflow as tf

    from tf_basis.ops import loader

    warnings.simplefilter("ignore")
    cpus = [tf.config.LogicalDeviceConfiguration()] * 2
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, cpus)
    # One for all cases: TensorFlow numbers the collectives of each from 1 again.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    report = {}
    with loader.use(mode):
        for name, case in CASES.items():
            single, mirrored = fit(flavor, None, *case), fit(flavor, strategy, *case)
            distances, copies, same = [], 0, True
            theirs = [*mirrored.weights, *variables_of(mirrored.optimizer)]
            ours = [*single.weights, *variables_of(single.optimizer)]
            for one, many in zip(ours, theirs, strict=True):
                first, *others = components(many)
                copies = max(copies, 1 + len(others))
                same &= all(o.tobytes() == first.tobytes() for o in others)
                one = to_numpy(one)
                assert one.shape == first.shape
                distances += [np.max(np.abs(one - first.astype(one.dtype)), initial=0)]
            report[name] = [float(max(distances)), copies, bool(same)]
    print(json.dumps(report))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=name, marks=[pytest.mark.long] * (name == "twin"))
        for name, mode in BACKENDS.items()
    ],
)
@pytest.mark.parametrize("flavor", FLAVORS)
def test_replicas_agree_and_equal_one_replica(flavor, mode):
    source = (
        f"import test_sparse_replicas as t; t.print_comparison({flavor!r}, {mode!r})"
    )
    legacy = "1" if flavor == "tf_keras" else "0"
    output = run_python(source, TF_USE_LEGACY_KERAS=legacy).stdout
    report = json.loads(output.strip().splitlines()[-1])
    assert list(report) == list(CASES)
    for name, (distance, copies, same) in report.items():
        assert copies == 2, name
        assert same, f"{name}: the replicas drifted apart"
        assert distance < 2e-5, f"{name}: {distance} from one replica"
