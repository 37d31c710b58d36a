"""Scores of a click model, and the table that compares optimizers over seeds."""

from __future__ import annotations

import sys

import numpy as np


def verbosity() -> str | int:
    """Keras's `verbose`: progress bars on a terminal, one line an epoch in a log."""
    return "auto" if sys.stdout.isatty() else 2


def auc(label: np.ndarray, score: np.ndarray) -> float:
    """Exact area under the ROC curve from ranks; equal scores count half."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    ones = int(label.sum())
    zeros = len(label) - ones
    if not ones or not zeros:
        raise ValueError("AUC needs both labels (rating below 4, and 4 or more)")
    return float((rank[label > 0].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def log_loss(label: np.ndarray, logit: np.ndarray) -> float:
    """Mean binary cross-entropy."""
    return float(np.mean(np.logaddexp(0.0, logit) - label * logit))


def summary(runs: list[dict]) -> dict:
    """Means over the seeds of one optimizer, with standard deviations.

    The time is the least of the runs: a busy machine only ever adds to it.
    """

    def of(key: str) -> np.ndarray:
        return np.array([run[key] for run in runs])

    def spread(values: np.ndarray) -> float:
        return float(values.std(ddof=1)) if len(values) > 1 else 0.0

    return {
        "optimizer": runs[0]["optimizer"],
        "learning_rate": runs[0]["learning_rate"],
        "auc": float(of("auc").mean()),
        "auc_spread": spread(of("auc")),
        "log_loss": float(of("log_loss").mean()),
        "log_loss_spread": spread(of("log_loss")),
        "state_bytes": int(of("state_bytes").max()),
        "ms_per_step": float(of("ms_per_step").min()),
    }


def print_table(lines: list[dict], seeds: int) -> None:
    """One line per optimizer; the first is what the others are compared with."""
    print(
        f"\n{'optimizer':<20}{'rate':>8}{'AUC':>18}{'log-loss':>18}"
        f"{'table state, bytes':>20}{'of Adam':>9}{'ms/step':>9}"
    )
    for s in lines:
        share = s["state_bytes"] / lines[0]["state_bytes"]
        print(
            f"{s['optimizer']:<20}{s['learning_rate']:>8g}"
            f"{s['auc']:>9.4f} ± {s['auc_spread']:.4f}"
            f"{s['log_loss']:>9.4f} ± {s['log_loss_spread']:.4f}"
            f"{s['state_bytes']:>20,}{share:>9.1%}{s['ms_per_step']:>9.2f}"
        )
    print(
        f"(mean ± standard deviation of {seeds} seeds; median time of a whole training "
        "step, in the quietest run)"
    )


def gains_of(ours: list[dict], theirs: list[dict]) -> list[float]:
    """AUC of each run minus that of the other optimizer from the same seed."""
    return [a["auc"] - b["auc"] for a, b in zip(ours, theirs, strict=True)]


def print_claim(gains: list[float], tolerance: float) -> bool:
    """Whether 100:1 loses no more than `tolerance` on average; says so."""
    mean = float(np.mean(gains))
    holds = mean >= -tolerance
    print(
        f"\nAUC of BasisAdam 100:1 minus Keras Adam: {mean:+.4f}, mean over "
        f"{len(gains)} seeds ({min(gains):+.4f} to {max(gains):+.4f}); at least "
        f"{-tolerance:g} is claimed: {'holds' if holds else 'DOES NOT HOLD'}"
    )
    return holds
