"""What `onebit_ablation.py` runs on every rank."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import link
from allreduce_ranks import Timed, tower_step
from onebit_convergence_ranks import load, train

ADAM, ONE_BIT = "Adam, float32", "OneBitAdam"
DELAYED = "Adam, float32, delay=1"
AUTO = 'Adam, compression="auto"'
UNEVEN = "batches 2 to 1"  # as BalancedBatch makes them for ranks of unequal speed
# What is added to OneBitAdam; `steps` stands for the steps of the whole training.
OPTIONS: dict[str, dict[str, Any]] = {
    ONE_BIT: {},
    UNEVEN: {},
    "amplitude_interval=10": {"amplitude_interval": 10},
    "block=256": {"block": 256},
    "block=256, amplitude_interval=10": {"block": 256, "amplitude_interval": 10},
    "statistics": {"statistics": True},
    "adaptive_rate": {"adaptive_rate": True},
    "adaptive_bits": {"adaptive_bits": True},
    "2 bits": {"policy": [("dense_kernel", 2)]},
    "delay=1": {"delay": 1},
    "delay=1, staleness_decay=0.5": {"delay": 1, "staleness_decay": 0.5},
    "local_steps=4": {"local_steps": 4},
    "local_steps=16, doubling": {"local_steps": 16, "local_steps_doubling": "steps/10"},
}
NAMES = (ADAM, DELAYED, AUTO, *OPTIONS)
ADAMS = (ADAM, DELAYED, AUTO)


def one_bit_adam(name: str, rate: float, steps: int, **more: Any) -> Any:
    """OneBitAdam with an option."""
    from tf_basis import distributed

    settings = {**OPTIONS[name], **more}
    if settings.get("local_steps_doubling"):
        settings["local_steps_doubling"] = max(1, steps // 10)
    return distributed.OneBitAdam(rate, **settings)


def wrapped(name: str, optimizer: Any) -> Any:
    """The optimizer, stepping with the gradients of all ranks."""
    from tf_basis import distributed

    compression = "auto" if name == AUTO else None
    if name == DELAYED:
        compression = distributed.OneBitCompression([(".*", 32)], delay=1)
    return distributed.DistributedOptimizer(optimizer, compression)


def make_optimizer(
    name: str, rate: float, settings: dict[str, Any], total_steps: int
) -> Any:
    """As in `onebit_convergence.py`: the table has BasisAdam, the towers vary."""
    import tensorflow as tf

    import tf_basis

    if name in ADAMS:
        dense = tf.keras.optimizers.Adam(rate, epsilon=1e-8)
    else:
        dense = one_bit_adam(name, rate, total_steps, total_steps=total_steps)
    basis = tf_basis.BasisAdam(
        settings["table_rate"],
        tables="table/embeddings",
        compression_ratio=100,
        dense_optimizer=dense,
    )
    return wrapped(name, basis)


def sizes_of(name: str, batch: int, ranks: int) -> list[int] | None:
    """Examples of each rank in a step; None: `batch` on each."""
    if name != UNEVEN:
        return None
    others = batch * ranks // (ranks + 1)
    return [batch * ranks - others * (ranks - 1), *[others] * (ranks - 1)]


def quality(settings: dict[str, Any], hvd: Any) -> dict[str, Any]:
    """AUC of each option and seed."""
    clicks = load(settings)
    rate = settings["rate"]
    runs = []
    for seed in range(settings["seeds"]):
        for name in settings["options"]:
            sizes = sizes_of(name, settings["batch"], hvd.size())
            runs.append(
                train(name, rate, seed, clicks, settings, hvd, make_optimizer, sizes)
            )
    return {"runs": runs, "table_rows": clicks.n_rows}


def cost(settings: dict[str, Any], hvd: Any) -> dict[str, Any]:
    """Seconds and bytes of training steps of a large tower, for each option."""
    import keras
    import tensorflow as tf

    found = {}
    for name in settings["options"]:

        def make(name: str = name) -> Any:
            # A rate that changes nothing: a warm-up of one step is no basis.
            if name in ADAMS:
                return wrapped(name, keras.optimizers.Adam(1e-12))
            return one_bit_adam(name, 1e-12, 10, warmup_steps=1)

        sizes = sizes_of(name, settings["batch"], hvd.size())
        batch = sizes[hvd.rank()] if sizes else settings["batch"]
        call = tower_step(settings["widths"], batch, make, hvd)
        if sizes:
            call.optimizer.step_weight.assign(batch)
        timed = Timed(name, call)
        # Past what begins alike: the warm-up, a doubling interval.
        for _ in range(settings["before"]):
            call()
        for _ in range(settings["rounds"]):
            timed.measure(settings["calls"], hvd, tf)
        everyone = hvd.allgather_object(timed.seconds)
        found[name] = {"seconds": everyone, "bytes": timed.bytes}
        found[name]["scales"] = scale_bytes(call.optimizer)
        tf.keras.backend.clear_session()
    return found


def scale_bytes(optimizer: Any) -> list[float]:
    """Bytes of scales as this rank sent them, and before they were deflated."""
    from tf_basis.distributed.residuals import exchangers

    sent = plain = 0.0
    for _, part in exchangers(optimizer):
        for channel in part.channels:
            if channel.exchange is not None:
                for amplitudes in channel.exchange.amplitudes.values():
                    sent += float(amplitudes.traffic[0])
                    plain += float(amplitudes.traffic[1])
    return [sent, plain]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-settings", required=True)
    settings, hvd = link.start(parser.parse_args().rank_settings)
    found = (quality if settings["task"] == "quality" else cost)(settings, hvd)
    if hvd.rank() == 0:
        link.report(settings, found)


if __name__ == "__main__":
    main()
