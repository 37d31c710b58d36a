"""What `onebit_convergence.py` runs on every rank: one training after the other."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import link
import numpy as np

ADAM = "Adam, float32"
FROZEN = "OneBitAdam"
CORRECTED = "OneBitAdam, corrected"
FEEDBACK = "1-bit gradients, Adam"
LITERAL = "OneBitAdam, literal policy"

TUNING_SHARE = 0.85  # of the training part; the rest of it judges the rates
TUNING_SEED = 100  # none of those that are compared


def make_optimizer(
    name: str, rate: float, settings: dict[str, Any], total_steps: int
) -> Any:
    """The towers' optimizer; the table has BasisAdam in all of them."""
    import tensorflow as tf

    import tf_basis
    from tf_basis import distributed

    table = {"tables": "table/embeddings", "compression_ratio": 100}
    if name in (ADAM, FEEDBACK):
        basis = tf_basis.BasisAdam(
            settings["table_rate"],
            dense_optimizer=tf.keras.optimizers.Adam(rate, epsilon=1e-8),
            **table,
        )
        if name == ADAM:
            return distributed.DistributedOptimizer(basis)
        compression = distributed.OneBitCompression(warmup_steps=total_steps // 10)
        return distributed.DistributedOptimizer(basis, compression)
    policy = [distributed.NORMALIZATION_EVERY_10] if name == LITERAL else None
    one_bit = distributed.OneBitAdam(
        rate,
        total_steps=total_steps,
        moments="corrected" if name == CORRECTED else "frozen",
        policy=policy,
    )
    basis = tf_basis.BasisAdam(settings["table_rate"], dense_optimizer=one_bit, **table)
    return distributed.DistributedOptimizer(basis)


def train(
    name: str,
    rate: float,
    seed: int,
    clicks: Any,
    settings: dict[str, Any],
    hvd: Any,
    make: Callable[..., Any] = make_optimizer,
    sizes: Sequence[int] | None = None,
) -> dict[str, Any]:
    """One run; AUC on the test part on rank 0. `make` has `make_optimizer`'s form.

    `sizes`: examples of each rank in a step, by default as many on each.
    """
    import tensorflow as tf
    from comparison import auc, log_loss
    from dlrm_model import make_model, scores

    from tf_basis import distributed

    ranks, rank = hvd.size(), hvd.rank()
    ends = np.cumsum([0, *(sizes or [settings["batch"]] * ranks)])
    steps_per_epoch = clicks.n_train // int(ends[-1])
    total_steps = steps_per_epoch * settings["epochs"]
    model = make_model(
        clicks,
        seed,
        dim=settings["dim"],
        bottom=settings["bottom"],
        top=settings["top"],
    )
    optimizer = make(name, rate, settings, total_steps)
    optimizer.build(model.trainable_variables)
    if sizes:
        optimizer.step_weight.assign(sizes[rank])
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def step(inputs, label):
        with tf.GradientTape() as tape:
            value = loss(label, model(inputs, training=True))
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables))
        return value

    rng = np.random.default_rng(seed)  # the same order on all ranks
    begun = time.perf_counter()
    for _ in range(settings["epochs"]):
        order = rng.permutation(clicks.n_train)
        for number in range(steps_per_epoch):
            first, end = number * ends[-1] + ends[rank : rank + 2]
            chosen = order[first:end]
            inputs = {k: tf.constant(v) for k, v in clicks.inputs(chosen).items()}
            step(inputs, tf.constant(clicks.label[chosen, np.newaxis]))
    distributed.synchronize(optimizer)
    seconds = time.perf_counter() - begun
    everyone = hvd.allgather_object(
        sum(float(np.abs(np.asarray(v)).sum(dtype=np.float64)) for v in variables)
    )
    if len(set(everyone)) > 1:
        raise RuntimeError(f"{name}: ranks have drifted apart: {everyone}")
    run = {"optimizer": name, "rate": rate, "seed": seed, "steps": total_steps}
    if rank == 0:
        run["quantization"] = optimizer.quantization_statistics
        test = slice(clicks.n_train, len(clicks.label))
        logit = scores(model, clicks, test)
        run["auc"] = auc(clicks.label[test], logit)
        run["log_loss"] = log_loss(clicks.label[test], logit)
        run["ms_per_step"] = 1e3 * seconds / max(total_steps, 1)
    tf.keras.backend.clear_session()
    return run


def load(settings: dict[str, Any]) -> Any:
    """Clicks from ratings, or synthetic ones."""
    import dlrm_data
    import movielens_data

    if settings["data"] is None:
        # Small tables: what is compared is how the towers learn.
        return dlrm_data.synthetic(
            settings["examples"],
            test_share=0.3,
            sizes=[n // 10 + 2 for n in dlrm_data.SYNTHETIC_SIZES],
        )
    return dlrm_data.from_movielens(movielens_data.load(settings["data"]))


def tune(clicks: Any, settings: dict[str, Any], hvd: Any) -> dict[str, float]:
    """The best candidate of each optimizer on the last part of the training part."""
    end = clicks.n_train
    inner = dataclasses.replace(
        clicks,
        dense=clicks.dense[:end],
        rows=clicks.rows[:end],
        weights=clicks.weights[:end],
        label=clicks.label[:end],
        n_train=int(end * TUNING_SHARE),
    )
    rates = {}
    for name in settings["optimizers"]:
        found = {
            rate: train(name, rate, TUNING_SEED, inner, settings, hvd).get("auc")
            for rate in settings["candidates"]
        }
        # Rank 0 alone has scores.
        found = hvd.broadcast_object(found)
        rates[name] = max(found, key=found.get)
        if hvd.rank() == 0:
            print(f"validation AUC of {name}: {found}; takes {rates[name]}", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-settings", required=True)
    settings, hvd = link.start(parser.parse_args().rank_settings)
    clicks = load(settings)
    rates, runs = settings["rates"], []
    if settings["candidates"]:
        rates = tune(clicks, settings, hvd)
    for seed in range(settings["seeds"]):
        for name in settings["optimizers"]:
            runs.append(train(name, rates[name], seed, clicks, settings, hvd))
    if hvd.rank() == 0:
        found = {"rates": rates, "runs": runs, "table_rows": clicks.n_rows}
        link.report(settings, found)


if __name__ == "__main__":
    main()
