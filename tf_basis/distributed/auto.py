"""`compression="auto"`: what gradients travel as, decided by measuring the link."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis.distributed import compression as settings
from tf_basis.distributed import control, watch
from tf_basis.distributed.channel import Channel, name_of
from tf_basis.distributed.compression import OneBitCompression
from tf_basis.distributed.exchange import new_variable
from tf_basis.distributed.metadata import AdaptiveRate
from tf_basis.distributed.policy import kind_of
from tf_basis.distributed.reducer import Spec
from tf_basis.distributed.world import World

AUTO = "auto"
CANDIDATES = settings.NAMES
NAMES = (*CANDIDATES, AUTO)
# By what the exchange must be faster: one bit costs accuracy, float16 range.
ONE_BIT_GAIN, FLOAT16_GAIN = 1.5, 1.1
ROUNDS = 3
# A longer buffer is measured in part: the time of such a one is that of its bytes.
MOST_ELEMENTS = 2**24
# Seconds of one round of all candidates beyond which one round must do.
LONG = 5.0

_log = logging.getLogger("tf_basis")


class Choice(NamedTuple):
    """What `"auto"` has decided; equal on all ranks.

    Attributes:
      compression: `"none"`, `"fp16"` or `"onebit"`.
      seconds: of an exchange of all dense gradients, by candidate: the median over
        rounds on the slowest rank. Empty where there is nothing to exchange.
    """

    compression: str
    seconds: dict[str, float]


def named(compression: Any) -> Any:
    """The settings that `compression=` means; `"auto"` stays until `settle`.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(compression, str) and compression == AUTO:
        return AUTO
    try:
        return settings.named(compression)
    except ValueError as error:
        text = str(error).replace(str(settings.NAMES), str(NAMES))
        raise ValueError(text) from None


def adaptive_rate(compression: Any) -> AdaptiveRate | None:
    """That of the settings; `"auto"` has none."""
    if isinstance(compression, str):
        return None
    return compression.feedback.adaptive_rate


def choose(seconds: Mapping[str, float]) -> str:
    """One bit or float16 where clearly faster than what is more exact.

    Args:
      seconds: of each of `CANDIDATES`.

    Example:

    >>> choose({"none": 0.6, "fp16": 0.4, "onebit": 0.3})
    'fp16'
    """
    exact = min(seconds["none"], seconds["fp16"])
    if seconds["onebit"] * ONE_BIT_GAIN < exact:
        return "onebit"
    return "fp16" if seconds["fp16"] * FLOAT16_GAIN < seconds["none"] else "none"


@tf.autograph.experimental.do_not_convert  # it measures, whatever is being traced
def settle(
    compression: Any,
    specs: Sequence[Spec],
    world: World,
    name: str,
    timeout: float | None,
) -> tuple[OneBitCompression, Choice | None]:
    """The settings to build with: as they are, or, of `"auto"`, as measured now.

    Every candidate exchanges buffers of the sizes that its policy gives the variables,
    a few times, the ranks together. The ranks then gather their times, so that all
    decide alike. Embeddings are left out: their gradients travel as rows.

    Args:
      compression: what `named` returned.
      specs: the variables, as a `GradientReducer` takes them.
      world: the ranks. On one nothing is measured, and it is `"none"`.
      name: names the collectives.
      timeout: seconds until a waiting rank ends the job; None: for ever.

    Raises:
      ValueError: on every rank, where variables differ.
    """
    if not isinstance(compression, str):
        return compression, None
    if world.size == 1 or not any(_dense(s) for s in specs):
        return settings.named("none"), Choice("none", {})
    with watch.watched(world, f"{name}_choice", timeout):
        entries = [f"{s.path} {s.shape} {s.dtype}, compression 'auto'" for s in specs]
        control.agree(world, f"{name}_choice", entries)
        # Outside graphs: optimizers are built while a step is traced.
        with tf.init_scope():
            seconds = _measured(specs, world, f"{name}_choice")
    chosen = Choice(choose(seconds), seconds)
    if world.rank == 0:
        told = ", ".join(f"{c} {1e3 * s:.2f} ms" for c, s in seconds.items())
        _log.info("%s: compression='auto' is %r (%s)", name, chosen.compression, told)
    return settings.named(chosen.compression), chosen


def _measured(specs: Sequence[Spec], world: World, name: str) -> dict[str, float]:
    exchanges = [
        exchange_of(settings.named(c), specs, world, f"{name}_{c}") for c in CANDIDATES
    ]
    for run, _ in exchanges:
        run()  # traces
    first = _together(world, name, [timed(run, world) for run, _ in exchanges])
    rounds = [first]
    if sum(first) < LONG:  # known to all ranks alike
        for _ in range(ROUNDS - 1):
            mine = [timed(run, world) for run, _ in exchanges]
            rounds.append(_together(world, name, mine))
    return {
        candidate: statistics.median(times) * scale
        for candidate, times, (_, scale) in zip(CANDIDATES, zip(*rounds), exchanges)
    }


def _together(world: World, name: str, seconds: list[float]) -> list[float]:
    """The times of a round on the rank where each took longest."""
    mine = tf.constant([seconds], tf.float64)
    everyone = world.gather(mine, f"{name}_times").numpy()
    return everyone.max(axis=0).tolist()


def timed(run: Callable[[], Any], world: World) -> float:
    """Seconds of one exchange that all ranks begin together."""
    world.total(tf.zeros([1]), "together")
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def exchange_of(
    compression: OneBitCompression, specs: Sequence[Spec], world: World, name: str
) -> tuple[Callable[[], Any], float]:
    """Exchanges dense gradients of the variables, or a part; and how small a part.

    Returns:
      A function that does it once, and by what to multiply its time.
    """
    members: dict[Any, list[tuple[int, ...]]] = {}
    for spec in specs:
        if _dense(spec):
            way = compression.policy.way(spec.path, spec.shape)
            members.setdefault(way, []).append(spec.shape)
    total = sum(math.prod(s) for shapes in members.values() for s in shapes)
    scale = max(1.0, total / MOST_ELEMENTS)
    channels, pieces = [], []
    for way, shapes in sorted(members.items()):
        if scale > 1:
            shapes = [(int(sum(map(math.prod, shapes)) / scale),)]
        label = name_of(name, way)
        channels.append(
            Channel(
                range(len(shapes)),
                shapes,
                way,
                compression.feedback,
                world,
                label,
                new_variable,
            )
        )
        pieces.append([tf.random.stateless_normal(s, [0, 0]) for s in shapes])

    @tf.function(autograph=False)
    def run(step, pieces):
        before: list[tf.Tensor] = []
        for channel, gradients in zip(channels, pieces):
            with tf.control_dependencies(before):
                mean = channel.mean(channel.pieces(gradients), step)
            before = [mean[:1]]
        return before

    step = tf.zeros([], tf.int64)
    return lambda: [r.numpy() for r in run(step, pieces)], scale


def _dense(spec: Spec) -> bool:
    """Whether its gradient travels in the flat buffers."""
    return not spec.leave and kind_of(spec.path, spec.shape) != "embedding"
