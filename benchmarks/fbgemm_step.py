"""A worker of step_time.py: FBGEMM's row-wise Adagrad on the CPU.

It runs in an environment of its own, with numpy, torch and fbgemm_gpu: PyTorch and
TensorFlow do not belong in one process.  FBGEMM's step is its backward pass: it sums
the gradients of a row and updates the row and its accumulator at once.  The forward
passes that it needs are made before, outside of the timing.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import fbgemm_gpu
import numpy as np
import torch
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from measure import Contender

LEARNING_RATE, EPSILON = 1e-3, 1e-8


@dataclass
class Backward(Contender):
    """Times backward passes, each on the output of a forward pass made before.

    All forward passes of a turn come first. A forward pass right before would leave
    the rows in the caches, which no other contender finds there.
    """

    outputs: deque = field(default_factory=deque)

    def measure(self, round_number: int, calls: int, most_seconds: float) -> None:
        first = self._calls
        self.outputs = deque(self.call(first + i) for i in range(calls + 1))
        super().measure(round_number, calls, most_seconds)
        self.outputs.clear()

    def run(self) -> float:
        output, gradient = self.outputs.popleft()
        start = time.perf_counter()
        output.backward(gradient)
        seconds = time.perf_counter() - start
        self._calls += 1
        return seconds


def make_table(rows: int, dim: int) -> SplitTableBatchedEmbeddingBagsCodegen:
    """One table on the host, every element 0.1."""
    # Ids in bags of one: no other sums, and faster by half than PoolingMode.NONE.
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPSILON,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    table.init_embedding_weights_uniform(0.1, 0.1)
    return table


def check_step(table, ids: torch.Tensor, offsets: torch.Tensor, gradient) -> None:
    """Takes the first step, and compares it with row-wise Adagrad in float64."""
    table(ids, offsets).backward(gradient)
    rows, positions = np.unique(ids.numpy(), return_inverse=True)
    g = np.zeros((len(rows), gradient.shape[1]))
    np.add.at(g, positions, gradient.double().numpy())
    root = np.sqrt(np.mean(g**2, axis=1, keepdims=True))
    expected = 0.1 - LEARNING_RATE * g / (root + EPSILON)
    found = table.split_embedding_weights()[0][rows].double().numpy()
    if not np.allclose(found, expected, rtol=0, atol=1e-6):
        raise SystemExit("FBGEMM's first step is not that of row-wise Adagrad")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=Path, help="ids and gradients, as .npz")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = {"torch": torch.__version__, "fbgemm_gpu": fbgemm_gpu.__version__}
    if arguments.batches is None:  # asked only whether it could
        workers.serve({}, about)
        return
    with np.load(arguments.batches) as file:
        indices = [torch.from_numpy(x) for x in file["indices"]]
        gradients = [torch.from_numpy(x) for x in file["gradients"]]
    offsets = torch.arange(len(indices[0]) + 1)
    table = make_table(arguments.rows, gradients[0].shape[1])
    check_step(table, indices[0], offsets, gradients[0])

    def forward(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        output = table(indices[i % len(indices)], offsets)
        return output, gradients[i % len(gradients)]

    states = [x for states in table.split_optimizer_states() for x in states]
    about["state_bytes"] = sum(x.numel() * x.element_size() for x in states)
    workers.serve({arguments.name: Backward(arguments.name, forward)}, about)


if __name__ == "__main__":
    main()
