"""Ends a job in which a rank waits for others that do not come.

Horovod warns of such ranks, but not under Gloo: there a collective that one rank has
not joined waits for ever. Here each rank counts the exchanges it has begun and ended
in variables; a thread looks at them, tells the launcher's key-value store how far this
rank has come, and where an exchange lasts too long asks it who is behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.distributed.world import World

DEFAULT_TIMEOUT = 600.0
TIMEOUT_RULE = hyperparameters.real(
    "above 0, in seconds", lambda v: v > 0, optional=True
)
EXIT_CODE = 74  # what `sysexits.h` calls EX_IOERR


class Watch:
    """Watches the exchanges of one object.

    Args:
      world: the ranks.
      name: what the exchanges are called in the message.
      timeout: seconds that an exchange may last; None: for ever.
    """

    def __init__(self, world: World, name: str, timeout: float | None) -> None:
        self.name, self.timeout = name, timeout
        self.world = world
        self._active = timeout is not None and world.size > 1
        if not self._active:
            return
        with tf.init_scope():
            # begun, ended; rank-local, not state: saved nowhere
            self._progress = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self),), daemon=True, name=f"watch {name}"
        )
        thread.start()

    @functools.cached_property
    def clock(self) -> Clock:
        """Of the exchange in which this object's ranks meet in every step."""
        return Clock()

    def begin(self, after: Sequence[tf.Tensor] = ()) -> list:
        """What must be done before an exchange, but after what may raise an error."""
        if not self._active:
            return []
        with tf.control_dependencies(after):
            return [self._progress.assign_add([1, 0])]

    def end(self, results: Any) -> list:
        """To be called with what the exchange results in; what must come after.

        What may raise an error that a program goes on after comes after, too: an
        exchange that has begun and does not end ends the job.
        """
        if not self._active:
            return []
        done = tf.nest.flatten(results, expand_composites=True)
        with tf.control_dependencies([r for r in done if r is not None]):
            return [self._progress.assign_add([0, 1])]

    def give_up(self) -> None:
        """To be called when an exchange has failed: nobody waits any more."""
        if self._active:
            self._progress.assign([self.progress()[0]] * 2)

    def progress(self) -> tuple[int, int]:
        """How many exchanges this rank has begun, and ended."""
        begun, ended = self._progress.numpy()
        return int(begun), int(ended)


class Clock:
    """How long this rank has waited for others, in a variable: it works inside graphs.

    Synchronous steps last equally long on all ranks. What tells them apart is how long
    each waits where they first meet: between two meetings a rank has been busy for the
    time between their ends, less what it waited in the second.
    """

    def __init__(self) -> None:
        # Seconds waited so far, when the last meeting ended. Rank-local, not state:
        # saved nowhere.
        with tf.init_scope(), tf.device("CPU:0"):
            self._times = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False)

    def met(self, came: tf.Tensor, left: tf.Tensor) -> list:
        """To be called with both times of a meeting; what must come after."""
        waited, _ = tf.unstack(self._times.read_value())
        return [self._times.assign(tf.stack([waited + left - came, left]))]

    def read(self) -> tuple[float, float]:
        """Seconds waited so far, and when the last meeting ended (0: none yet)."""
        waited, left = self._times.numpy()
        return float(waited), float(left)


@contextlib.contextmanager
def watched(world: World, name: str, timeout: float | None) -> Iterator[None]:
    """Around exchanges that run now, not in a graph: all ranks get through in time."""
    watch = Watch(world, name, timeout)
    watch.begin()
    try:
        yield
    finally:  # an error on all ranks is no waiting
        watch.end([])


def _watch(reference: weakref.ref) -> None:
    seen, since, told = (0, 0), time.monotonic(), None
    store = _Store()
    while True:
        watch = reference()
        if watch is None:
            return
        now = watch.progress()
        if now != seen:
            seen, since = now, time.monotonic()
        if told != now[0]:
            store.put(watch.name, watch.world.rank, now[0])
            told = now[0]
        waited = time.monotonic() - since
        if now[0] > now[1] and waited > watch.timeout:
            _end(watch, now[0], waited, store)
        pause = min(5.0, watch.timeout / 4)
        del watch
        time.sleep(pause)


def _end(watch: Watch, begun: int, waited: float, store: _Store) -> None:
    ranks = range(watch.world.size)
    reached = {r: store.get(watch.name, r) for r in ranks}
    missing = [r for r in ranks if reached[r] is not None and reached[r] < begun]
    unknown = [r for r in ranks if reached[r] is None]
    who = f"missing: ranks {missing}" if missing else "no rank is known to be missing"
    if unknown:
        who += f"; nothing is known of ranks {unknown}"
    sys.stderr.write(
        f"tf_basis: rank {watch.world.rank} has waited {waited:.0f} s in exchange "
        f"{begun} of {watch.name} for other ranks; {who}. Every rank must take the "
        f"same steps. The job ends here (timeout={watch.timeout:g}).\n"
    )
    sys.stderr.flush()
    os._exit(EXIT_CODE)  # the main thread waits inside Horovod: nothing can raise there


class _Store:
    """The key-value store of Horovod's launcher, where there is one."""

    def __init__(self) -> None:
        self._address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        self._port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")

    def put(self, name: str, rank: int, value: int) -> None:
        self._call("put_data_into_kvstore", name, str(rank), value)

    def get(self, name: str, rank: int) -> int | None:
        return self._call("read_data_from_kvstore", name, str(rank))

    def _call(self, function: str, *arguments: Any) -> Any:
        if not self._address:
            return None
        from horovod.runner.http import http_client

        try:
            return getattr(http_client, function)(self._address, self._port, *arguments)
        except (OSError, RuntimeError):
            return None
