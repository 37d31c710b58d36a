"""Quantisation with error feedback and the two-stage exchange, in float64.

Only scales and the threshold are rounded to float32, as messages hold them.
"""

from __future__ import annotations

import numpy as np


def blocks_of(elements: int, block: int) -> list[slice]:
    return [slice(i, min(i + block, elements)) for i in range(0, elements, block)]


def quantize_block(u: np.ndarray, bits: int) -> tuple[np.ndarray, list, np.ndarray]:
    """What a block stands for, its scales and the code of each element."""
    size = np.abs(u)
    mean = _float32(size.mean())
    positive = (u >= 0).astype(int)
    if bits == 1:
        return np.where(positive, mean, -mean), [mean], positive
    large = size >= mean
    low = _float32(size[~large].mean()) if (~large).any() else 0.0
    high = _float32(size[large].mean()) if large.any() else 0.0
    scale = np.where(large, high, low)
    return np.where(positive, scale, -scale), [low, high], positive + 2 * large


def _float32(x: float) -> float:
    return float(np.float32(x))


def quantize(u: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, bytes]:
    """What u is quantised to, and the message that says so."""
    u = np.asarray(u, np.float64)
    quantized, message = np.zeros_like(u), b""
    for part in blocks_of(len(u), block):
        quantized[part], scales, codes = quantize_block(u[part], bits)
        number = sum(int(code) << (bits * i) for i, code in enumerate(codes))
        message += np.array(scales, "<f4").tobytes()
        message += number.to_bytes((len(codes) * bits + 7) // 8, "little")
    return quantized, message


class Exchange:
    """All ranks of the two-stage exchange."""

    def __init__(self, elements: int, workers: int, bits: int, block: int) -> None:
        self.elements, self.bits, self.block = elements, bits, block
        self.worker_errors = np.zeros((workers, elements))
        self.server_error = np.zeros(elements)  # of all owners, in element order
        blocks = len(blocks_of(elements, block))
        per_rank = -(-blocks // workers) * block
        self.owned = [
            slice(min(j * per_rank, elements), min((j + 1) * per_rank, elements))
            for j in range(workers)
        ]

    def average(self, gradients: np.ndarray) -> np.ndarray:
        """What every rank receives; the errors move on."""
        compensated = np.asarray(gradients, np.float64) + self.worker_errors
        sent = np.array([quantize(u, self.bits, self.block)[0] for u in compensated])
        self.worker_errors = compensated - sent
        mean = sent.mean(axis=0) + self.server_error
        result = np.zeros(self.elements)
        for part in self.owned:
            result[part], _ = quantize(mean[part], self.bits, self.block)
        self.server_error = mean - result
        return result
