"""A model of what an exchange of gradients costs: latency, bytes, arithmetic.

A MODEL, not a measurement: `break_even.py` fits its costs here and compares. For every
collective a fixed time, for every message on the way of a rank a latency α, for every
byte that a link carries β, for every element what a rank computes:

    seconds = collectives·fixed + messages·α + bytes·β + elements·cost

float32 is charged no arithmetic. The model knows no congestion, no stragglers, no
overlap with the computation, and no cost of Horovod's negotiation that grows with the
ranks.
"""

from __future__ import annotations

from typing import NamedTuple

WAYS = ("float32", "float16", "1 bit")
BLOCK = 2048
# Bytes of an element; of 1 bit with one float32 scale per block.
BYTES = {"float32": 4.0, "float16": 2.0, "1 bit": 1 / 8 + 4 / BLOCK}


class Costs(NamedTuple):
    """What a rank and its network cost.

    Attributes:
      fixed: seconds of a collective of next to nothing.
      alpha: seconds of a message between machines.
      host: seconds of a byte that a rank sends, however fast its link.
      inner: seconds of a byte between ranks of one machine.
      float16: seconds of an element for casting and adding float16.
      one_bit: seconds of an element for quantising, averaging and restoring.
    """

    fixed: float
    alpha: float
    host: float
    inner: float
    float16: float
    one_bit: float

    def of_element(self, way: str) -> float:
        """Seconds of arithmetic."""
        costs = {"float32": 0.0, "float16": self.float16, "1 bit": self.one_bit}
        return costs[way]


class Load(NamedTuple):
    """What an exchange puts on the network, seen from one rank.

    Attributes:
      collectives: how many.
      messages: one after the other.
      bytes: that the link of a machine carries one way.
      inner_messages: within a machine, one after the other.
      inner_bytes: that a rank sends within its machine.
    """

    collectives: float
    messages: float
    bytes: float
    inner_messages: float = 0.0
    inner_bytes: float = 0.0


def flat(way: str, elements: float, ranks: int, per_machine: int = 1) -> Load:
    """All ranks in one exchange, `per_machine` of them behind one link.

    float32 and float16 in a ring allreduce: 2·(W − 1) messages of 1/W of the buffer;
    the ring, laid along the machines, enters and leaves each once. 1 bit in an
    alltoall, in which each rank sends 1/W to every other, and a ring allgather: the
    link of a machine carries what its G ranks send to the W − G elsewhere, and the
    ring once.
    """
    buffer, w, g = BYTES[way] * elements, ranks, per_machine
    if w == g:  # one machine
        return Load(1 if way != "1 bit" else 2, 0, 0, 2 * (w - 1), _ring(buffer, w))
    if way != "1 bit":
        return Load(1, 2 * (w - 1), _ring(buffer, w))
    scattered = g * (w - g) / w * buffer
    return Load(2, 2 * (w - 1), scattered + (w - 1) / w * buffer)


def two_level(way: str, elements: float, machines: int, per_machine: int) -> Load:
    """Reduced within machines in float32, exchanged between them, spread within.

    Each of the G ranks of a machine owns 1/G of the elements, has their sum in the
    machine (ring reduce-scatter), exchanges it with the owners elsewhere in `way`, and
    the machine gathers what results (ring allgather, in bits where there are bits).
    Arithmetic is charged in full, as if a rank quantised more than its share. Not what
    this package does, whose exchange is flat.
    """
    m, g = machines, per_machine
    share = (g - 1) / g if g > 1 else 0.0
    within = share * (BYTES["float32"] + BYTES[way]) * elements
    if m == 1:
        return Load(2, 0, 0, 2 * (g - 1), within)
    # The G shards travel side by side on one link: together the whole buffer.
    between = flat(way, elements, m)
    return Load(
        between.collectives + (2 if g > 1 else 0),
        between.messages,
        between.bytes,
        2 * (g - 1),
        within,
    )


def _ring(buffer: float, ranks: int) -> float:
    """Bytes that each rank of a ring allreduce sends."""
    return 2 * (ranks - 1) / ranks * buffer


def seconds(way: str, elements: float, load: Load, beta: float, costs: Costs) -> float:
    """The time of an exchange.

    Args:
      way: one of `WAYS`.
      elements: of the buffer.
      load: what it puts on the network.
      beta: seconds of a byte on a link between machines; it is never below
        `costs.host`.
      costs: of the ranks.
    """
    return (
        load.collectives * costs.fixed
        + load.messages * costs.alpha
        + load.bytes * max(beta, costs.host)
        + load.inner_bytes * costs.inner
        + elements * costs.of_element(way)
    )


def beta_of(gigabits: float) -> float:
    """Seconds of a byte on a link of so many Gbit/s."""
    return 8e-9 / gigabits


def break_even(
    elements: float, one_bit: Load, other: Load, against: str, costs: Costs
) -> float:
    """Below how many Gbit/s 1 bit is faster than `against`.

    Infinite where it is at any speed the ranks can send at, 0 where it never is.
    """
    saved = other.bytes - one_bit.bytes
    if saved <= 0:
        return 0.0
    # But for what the links between machines carry.
    free = costs._replace(host=0.0)
    dearer = seconds("1 bit", elements, one_bit, 0.0, free)
    dearer -= seconds(against, elements, other, 0.0, free)
    if dearer <= saved * costs.host:
        return float("inf")
    return 8e-9 * saved / dearer
