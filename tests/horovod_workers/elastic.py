"""The trainings that an elastic one is compared with."""

from __future__ import annotations

import os

from elastic_training import batch, loss_of, model_of_seed

from horovod_workers.checkpoint import stepper


def plain(steps, seed):
    """The same steps on as many ranks as there are from the start."""
    os.environ["TF_BASIS_SEED"] = str(seed)
    model = model_of_seed()
    step = stepper(model)
    for number in range(steps):
        step(*batch(number))
    return loss_of(model)
