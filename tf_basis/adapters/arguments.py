"""Arguments that an optimizer base takes, checked alike on each Keras flavour."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from tf_basis import hyperparameters

RULES = {
    "gradient_accumulation_steps": hyperparameters.integer(
        "of at least 2", lambda v: v >= 2, optional=True
    ),
    "loss_scale_factor": hyperparameters.real(
        "above 0", lambda v: v > 0, optional=True
    ),
}
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


def check(
    optimizer: Any,
    flavor: str,
    received: Mapping[str, Any],
    known: Collection[str],
    advice: Mapping[str, str],
) -> None:
    """Refuses arguments that this flavour of Keras does not have.

    Args:
      optimizer: what the arguments are for.
      flavor: the name of the flavour, for messages.
      received: the arguments of the optimizer base, by name.
      known: the names it takes.
      advice: what to do instead, for unknown names that users are likely to try.

    Raises:
      TypeError: a name is unknown; the message names it.
      ValueError: a value breaks its rule, or two clipping arguments are given.
    """
    for name, value in received.items():
        if name not in known:
            kind = type(optimizer)
            own = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
            hint = advice.get(name, f"it takes {', '.join(sorted(own | {*known}))}")
            raise TypeError(
                f"{name} must not be given: {kind.__name__} on {flavor} does not have "
                f"it ({hint}), received {name}={value!r}"
            )
        if name in RULES and not RULES[name].accepts(value):
            raise ValueError(f"{name} must be {RULES[name].words}, received {value!r}")
    clipping = {k: received[k] for k in _CLIPPING if received.get(k) is not None}
    if len(clipping) > 1:
        raise ValueError(
            f"only one of {', '.join(_CLIPPING)} may be given, received {clipping}"
        )


def check_inner(optimizer: Any, dense_optimizer: Any) -> None:
    """Refuses a `dense_optimizer` that would leave ranks or scales apart.

    Raises:
      ValueError: it has a loss scale, which nobody applied; or it averages its
        variables over the ranks, while nobody does so with the others.
    """
    factor = getattr(dense_optimizer, "loss_scale_factor", None)
    wraps = type(dense_optimizer).__name__.startswith("LossScaleOptimizer")
    if factor is not None or wraps:
        raise ValueError(
            "dense_optimizer must not scale losses, since it sees the gradients only: "
            "scale the loss of the whole optimizer, received "
            f"{type(dense_optimizer).__name__} with loss_scale_factor={factor!r}"
        )
    if getattr(optimizer, "distributes", False):
        return
    alone = getattr(dense_optimizer, "distributes", False)
    if getattr(dense_optimizer, "exchanges_for_itself", False):
        alone = dense_optimizer.ranks > 1
    if alone:
        raise ValueError(
            "dense_optimizer must not be the only one that is distributed, or tables "
            "would drift apart: wrap the whole optimizer in "
            "tf_basis.distributed.DistributedOptimizer, received "
            f"{type(dense_optimizer).__name__}"
        )
