"""Checks of the harness itself: what ranks return, and how one fails."""

import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod_rank import check, error_of


@check
def sum_of_ranks():
    mine = np.full(3, hvd.rank() + 1, np.float32)
    total = hvd.allreduce(tf.constant(mine), op=hvd.Sum)
    return {"rank": hvd.rank(), "size": hvd.size(), "total": total.numpy()}


@check
def one_rank_fails():
    if hvd.rank() == 1:
        raise RuntimeError("only here")
    return "fine"


@check
def error_text():
    def refuse():
        raise ValueError(f"rank {hvd.rank()}")

    return error_of(refuse)


@check
def flavor():
    return {
        "module": tf.keras.layers.Layer.__module__.split(".")[0],
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "cycle": os.environ["HOROVOD_CYCLE_TIME"],
    }
