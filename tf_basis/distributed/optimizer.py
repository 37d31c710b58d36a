"""Any Keras optimizer, stepping with the gradients of all ranks."""

from __future__ import annotations

import functools
from typing import Any

from tf_basis import hyperparameters
from tf_basis.adapters import flavor, keras_modules
from tf_basis.distributed import auto, watch
from tf_basis.distributed.optimizer_step import (
    DistributedStepMixin,
    Distribution,
    exchanging,
)

_RULES = {
    "timeout": watch.TIMEOUT_RULE,
    "average_aggregated_gradients": hyperparameters.flag,
}


class DistributedMixin(DistributedStepMixin):
    """What `DistributedOptimizer` adds to the class of the optimizer it is given."""

    # ---- config ------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """The inner optimizer and the arguments of the wrapping."""
        adapter = flavor.load_adapter(self._flavor)
        inner = self._inner_class.from_config(super().get_config())
        return {
            "optimizer": adapter.serialize(inner),
            "name": self.name,
            **self._distribution.arguments(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects=None) -> Any:
        """The reverse of `get_config`."""
        config = dict(config)
        config.pop("name", None)
        adapter = flavor.load_adapter(cls._flavor)
        inner = adapter.deserialize(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return DistributedOptimizer(inner, **config)

    @classmethod
    def _of(cls, config: dict[str, Any], settings: Distribution) -> Any:
        """From the config of the inner optimizer."""
        # Not at import: it makes an optimizer, and with it TensorFlow's devices.
        adapter = flavor.load_collective(cls._flavor)
        getattr(adapter, "agree_in_loss_scaling", lambda: None)()
        optimizer = super().from_config(config)
        optimizer._distribution = settings
        return optimizer


def DistributedOptimizer(  # noqa: N802  a class to its users, as in Horovod
    optimizer: Any,
    compression: Any = None,
    *,
    average_aggregated_gradients: bool = True,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> Any:
    r"""Makes an optimizer step with the mean of the gradients of all ranks.

    Works on Keras 3 and tf_keras, with `fit` and with loops of your own. On every rank,
    once per update, after gradient accumulation and before clipping:

    1. a gather of a few numbers: is every gradient finite, what does each rank weigh;
    2. dense gradients in flat buffers, by the bits of their policy;
    3. IndexedSlices as rows: duplicates summed, gathered, summed again.

    The same bytes come out on every rank, so that ranks that start alike stay alike to
    the last bit. Where a gradient is not finite on some rank, all ranks skip the step
    and count it in `skipped_steps`. Give the ranks equal weights at the start with
    `BroadcastCallback`.

    Args:
      optimizer: an optimizer of Keras 3 or tf_keras. A `dense_optimizer` that exchanges
        for itself (`OneBitAdam`) keeps its variables to itself.
      compression: None or `"none"` (default): float32; `"fp16"`; `"onebit"`; a
        `OneBitCompression` with settings of your own; or `"auto"`: what of the first
        three is faster here by a margin, measured when it is built, the same on all
        ranks. See `compression_choice`; the config has what was decided.
      average_aggregated_gradients: whether an update uses the mean (default) or the sum
        of the gradients of its `gradient_accumulation_steps`.
      process_set: a Horovod process set with this rank. Default: all ranks. It is not
        part of the config.
      timeout: seconds that an exchange may wait for other ranks before the job is ended
        with a message that names them. Default 600; None: for ever.

    Returns:
      An optimizer of a class derived from that of `optimizer`, with its arguments, and
      the properties `step_weight`, `skipped_steps`, `compression_choice` and
      `residual_variables`.
      `optimizer`, and a `dense_optimizer` of it, are left as they are: it has copies.
      Saved models load it wherever
      `tf_basis.distributed` is imported.

    Raises:
      ValueError: an argument breaks its rule; when it is built, on every rank: the
        ranks' variables, shapes or policies differ.
      RuntimeError: Horovod has not been initialised in a launched process.

    Example:

    >>> import keras
    >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3), "onebit")
    >>> isinstance(optimizer, keras.optimizers.Adam)
    True

    Reference: Sergeev and Del Balso 2018, "Horovod".
    """
    name = keras_modules.flavor_of(optimizer)
    for argument, value in [
        ("timeout", timeout),
        ("average_aggregated_gradients", average_aggregated_gradients),
    ]:
        hyperparameters.check(argument, value, _RULES[argument])
    settings = Distribution(
        auto.named(compression), average_aggregated_gradients, process_set, timeout
    )
    if isinstance(optimizer, DistributedMixin):
        raise ValueError(
            "optimizer must not be distributed already, received "
            f"{type(optimizer).__name__}({type(optimizer)._inner_class.__name__})"
        )
    if getattr(optimizer, "exchanges_for_itself", False):
        optimizer.join(process_set)
        return optimizer
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise ValueError(
            "optimizer must be the innermost one: wrap what "
            f"{type(optimizer).__name__} contains instead, as in "
            "LossScaleOptimizer(DistributedOptimizer(Adam(...)))"
        )
    inner = getattr(optimizer, "dense_optimizer", None)
    if isinstance(inner, DistributedMixin):
        raise ValueError(
            "dense_optimizer must not be distributed: wrap the whole optimizer, "
            f"received {type(inner).__name__}({type(inner)._inner_class.__name__})"
        )
    rate = auto.adaptive_rate(settings.compression)
    if inner is not None and rate is not None:
        raise ValueError(
            "adaptive_rate must be None where a dense_optimizer has a rate of its own: "
            f"give it to OneBitAdam inside, received {rate}"
        )
    adapter = flavor.load_collective(name)
    cls = _define(type(optimizer), name)
    config = optimizer.get_config()
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate) and not hasattr(rate, "get_config"):
        config["learning_rate"] = rate  # a function: no config can hold it
    wrapped = cls._of(config, settings)
    _copy_exclusions(optimizer, wrapped)
    if inner is not None:
        _copy_exclusions(inner, wrapped.dense_optimizer)
    if exchanging(optimizer) is not None:
        exchanging(optimizer).check_process_set(process_set)
        wrapped.dense_optimizer.join(process_set)
    if adapter.built(optimizer):
        adapter.copy_state(optimizer, wrapped)
    return wrapped


def _copy_exclusions(source: Any, target: Any) -> None:
    """What `exclude_from_weight_decay` was told, which no config holds."""
    for name, value in vars(source).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(target, name, value)


@functools.cache
def _define(inner_class: type, flavor_name: str) -> type:
    """The class of optimizers of `inner_class` that are distributed."""
    adapter = flavor.load_collective(flavor_name).CollectiveAdapter

    bases = (DistributedMixin, adapter, inner_class)
    members = {
        "__doc__": DistributedOptimizer.__doc__,
        "__module__": __name__,
        "_flavor": flavor_name,
        "_inner_class": inner_class,
    }
    cls = type("DistributedOptimizer", bases, members)
    return flavor.load_adapter(flavor_name).register(cls)


# So that saved optimizers are known before the first is made.
_define(flavor.load_adapter(flavor.active()).Optimizer, flavor.active())
