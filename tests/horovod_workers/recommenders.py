"""A model of TensorFlow Recommenders on ranks that see different data."""

import horovod.tensorflow as hvd
import numpy as np
import tfrs_models
from helpers import is_compressed
from horovod_pairs import digest, shared_state
from horovod_rank import check

import tf_basis
from tf_basis import distributed


@check
def ranking_and_retrieval():
    model, data = tfrs_models.Both(), tfrs_models.ratings(hvd.rank(), 1000).batch(100)
    basis = tf_basis.BasisAdam(0.02, min_rows=50, compression_ratio=10.0)
    model.compile(distributed.DistributedOptimizer(basis))
    history = model.fit(
        data, epochs=8, callbacks=[distributed.BroadcastCallback()], verbose=0
    )
    return {
        "data": digest(*[np.array(d["user"]) for d in data]),
        "weights": digest(*[w.numpy() for w in model.trainable_variables]),
        "state": digest(*shared_state(model.optimizer)),
        "compressed": sum(
            is_compressed(model.optimizer, v) for v in model.trainable_variables
        ),
        "losses": history.history["loss"],
    }
