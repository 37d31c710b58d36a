"""Saving and restoring a training on several ranks, all of it or nothing."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis._version import __version__
from tf_basis.distributed import control, snapshot, watch
from tf_basis.distributed.rank_state import ModelState, build_together
from tf_basis.distributed.synchronize import synchronize
from tf_basis.distributed.world import World, unique_name

_COUNT = hyperparameters.integer("of at least 0", lambda v: v >= 0)
KEEP_RULE = hyperparameters.integer("of at least 1", lambda v: v >= 1)


class CheckpointInfo(NamedTuple):
    """Where a checkpoint stands.

    Attributes:
      path: its folder.
      step: what `save_checkpoint` was told: steps so far.
      epoch: the epoch to go on with, from 0.
      batch: how many batches of that epoch are done.
      ranks: how many ranks wrote it.
      extra: what else `save_checkpoint` was given.
    """

    path: str
    step: int
    epoch: int
    batch: int
    ranks: int
    extra: dict[str, Any]


def save_checkpoint(
    directory: str | Path,
    model: Any,
    step: int,
    *,
    epoch: int = 0,
    batch: int = 0,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> str:
    r"""Writes the state of a training: call it on all ranks, between two steps.

    Rank 0 writes what all ranks share: the variables of the model and of its optimizer
    and those inside it. Every rank writes what is its own: residuals, gradients being
    accumulated, and variables of the model that are not trained where they differ
    (means of `BatchNormalization`). When all have, rank 0 writes a manifest with the
    names, shapes, dtypes and SHA-256 of everything, and gives it its name in one
    moment: a process that is killed at any time leaves the checkpoint before it.

    Args:
      directory: where checkpoints are, each in a folder of its own; on a file system
        that all ranks share. One training at a time.
      model: a compiled model that has its variables.
      step: steps so far; comes back as `CheckpointInfo.step`.
      epoch: the epoch to go on with. Default 0.
      batch: how many batches of it are done. Default 0.
      extra: further values to keep, ready for JSON, equal on all ranks. Default: none.
      keep: how many checkpoints stay; older ones are removed when this one is
        complete. Default 3.
      process_set: that of the optimizer. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job; more than
        writing takes. Default 600; None: for ever.

    Returns:
      The folder of the checkpoint.

    Raises:
      ValueError: on every rank and before anything is written: an argument breaks its
        rule, or the ranks' arguments or variables differ.
      OSError: on every rank: some rank could not write. The folder has no manifest
        then and counts for nothing.

    Example:

    >>> import keras, tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(folder, model, step=50)
    ...     restore_checkpoint(folder, model).step
    50
    """
    world = World(process_set)
    name = unique_name("checkpoint")
    everyone = functools.partial(together, world, name)
    with watch.watched(world, name, timeout):
        build_together(model, everyone)
        synchronize(model.optimizer)
        (state,) = _own(everyone, lambda: ModelState(model, world))
        position = {"step": step, "epoch": epoch, "batch": batch}

        def prepare() -> tuple:
            hyperparameters.check("directory", directory, hyperparameters.folder)
            for argument, value in position.items():
                hyperparameters.check(argument, value, _COUNT)
            hyperparameters.check("keep", keep, KEEP_RULE)
            more = _plain(extra)
            return {**position, "keep": keep, "extra": more}, state.described()

        told = everyone(prepare)
        _check_alike(told)
        digests = everyone(state.digests)
        own = [
            index
            for place, index in enumerate(state.untrained)
            if len({each[place] for each in digests}) > 1
        ]
        where = Path(directory)
        begun = everyone(lambda: snapshot.begin(where) if world.rank == 0 else None)
        folder = where / begun[0]

        def write() -> list:
            path = folder / f"rank-{world.rank:05d}.bin"
            parts = [snapshot.write_part(path, state.local_tensors(own))]
            if world.rank == 0:
                path = folder / "shared.bin"
                parts.append(snapshot.write_part(path, state.shared_tensors()))
            return parts

        written = everyone(write)

        def finish() -> None:
            if world.rank > 0:
                return
            versions = {
                "tf_basis": __version__,
                "tensorflow": tf.__version__,
                "python": sys.version.split()[0],
            }
            content = {
                **position,
                "extra": told[0][0]["extra"],
                "world_size": world.size,
                "flavor": state.flavor,
                "versions": versions,
                "optimizers": state.optimizers,
                "tables": state.tables,
                "own": own,
                "shared": written[0][1],
                "ranks": [parts[0] for parts in written],
            }
            snapshot.finish(folder, content)
            snapshot.prune(where, keep, folder.name)

        everyone(finish)
    return str(folder)


def restore_checkpoint(
    directory: str | Path,
    model: Any,
    *,
    fallback: bool = False,
    process_set: Any = None,
    timeout: float | None = watch.DEFAULT_TIMEOUT,
) -> CheckpointInfo | None:
    r"""Gives all ranks the state of the newest checkpoint: call it on all ranks.

    Everything is checked on all ranks before anything changes. Folders without a
    manifest, which a save that was interrupted leaves, are passed over.

    On as many ranks as have written it training goes on to the same bits. On another
    number residuals are cut anew, so that what the exchange owes to the mean of the
    ranks stays what it was; rank 0 warns of it. See `docs/checkpoints.md`.

    Args:
      directory: see `save_checkpoint`.
      model: a compiled model with the variables of the one that was saved.
      fallback: whether to take the newest undamaged checkpoint, with a warning, where
        the newest one is damaged. Default False: that is an error.
      process_set: that of the optimizer. Default: all ranks.
      timeout: seconds until a rank that waits for others ends the job. Default 600;
        None: for ever.

    Returns:
      Where it stands; None, and nothing has changed, where there is none.

    Raises:
      DamagedCheckpointError: a ValueError, on every rank and before anything changes:
        a file is missing, cut short or changed, which is named with both values.
      ValueError: likewise: the checkpoint is of another flavour of Keras, of other
        variables, or of tables with another layout.
    """
    world = World(process_set)
    name = unique_name("checkpoint")
    everyone = functools.partial(together, world, name)
    with watch.watched(world, name, timeout):
        build_together(model, everyone)
        (state,) = _own(everyone, lambda: ModelState(model, world))

        def look() -> tuple:
            hyperparameters.check("directory", directory, hyperparameters.folder)
            hyperparameters.check("fallback", fallback, hyperparameters.flag)
            return {"fallback": fallback}, state.described()

        _check_alike(everyone(look))
        where = Path(directory)
        found = everyone(lambda: snapshot.complete(where) if world.rank == 0 else None)
        damaged: list[str] = []
        for candidate in found[0]:
            folder = where / candidate
            try:
                contents = everyone(functools.partial(state.verified, folder))
            except snapshot.DamagedCheckpointError as error:
                if not fallback:
                    raise
                damaged.append(str(error))
                continue
            break
        else:
            if damaged:
                raise snapshot.DamagedCheckpointError(
                    f"no checkpoint in {directory} is undamaged: {'; '.join(damaged)}"
                )
            return None
        content = contents[world.rank]
        if any(other != content for other in contents):
            raise ValueError(
                f"directory must be one that all ranks share: the manifests that they "
                f"read in {folder} differ"
            )
        everyone(lambda: state.restore(folder, content))
    if damaged and world.rank == 0:
        warnings.warn(
            f"tf_basis: going on with {folder}, because {'; '.join(damaged)}",
            stacklevel=2,
        )
    if content["world_size"] != world.size and world.rank == 0 and state.local:
        warnings.warn(
            f"tf_basis: {folder} was written by {content['world_size']} ranks: "
            f"residuals and accumulated gradients are cut anew for {world.size} "
            "ranks, their means over the ranks preserved",
            stacklevel=2,
        )
    keys = ("step", "epoch", "batch", "world_size", "extra")
    return CheckpointInfo(str(folder), *(content[key] for key in keys))


def together(world: World, name: str, action: Callable[[], Any]) -> list:
    """What `action` returns on every rank, in rank order; its error on all ranks.

    No rank waits for one that had to give up. `action` must exchange nothing.

    Raises:
      ValueError, OSError, or RuntimeError for all else: with what was said on the
        first rank that has an error.
    """
    value, mine, told = None, None, None
    try:
        value = action()
    except Exception as error:
        mine = error
        kind = next((k for k in _KINDS if isinstance(error, _KINDS[k])), None)
        told = (kind, str(error) if kind else f"{type(error).__name__}: {error}")
    everyone = world.objects((value, told), name)
    problems = [(rank, told) for rank, (_, told) in enumerate(everyone) if told]
    # A checkpoint of something else is no damaged one, even if another rank finds it.
    problems.sort(key=lambda entry: entry[1][0] == "DamagedCheckpointError")
    for rank, (kind, words) in problems:
        where = f"rank {rank}: " if world.size > 1 else ""
        raise _KINDS.get(kind, RuntimeError)(f"{where}{words}") from mine
    return [value for value, _ in everyone]


_KINDS = {
    "DamagedCheckpointError": snapshot.DamagedCheckpointError,  # a ValueError
    "ValueError": ValueError,
    "OSError": OSError,
}


def _own(everyone: Callable, make: Callable[[], Any]) -> list:
    """What cannot be sent: made on every rank, or on none."""
    made: list = []
    everyone(lambda: made.append(make()))
    return made


def _plain(extra: Any) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra must be a dict that is ready for JSON, received {extra!r} ({error})"
        ) from error


def _check_alike(told: list[tuple[dict, list[str]]]) -> None:
    """Arguments and variables of all ranks, against those of rank 0."""
    arguments, lines = told[0]
    for rank, (theirs, others) in enumerate(told):
        for argument, value in arguments.items():
            if theirs[argument] != value:
                raise ValueError(
                    f"{argument} must be equal on all ranks, received {value!r} on "
                    f"rank 0, {theirs[argument]!r} on rank {rank}"
                )
        found = control.first_difference([lines, others])
        if found is not None:
            place, (mine, other) = found
            raise ValueError(
                "all ranks must have the same variables in the same order, "
                f"received in place {place}: rank 0: {mine}; rank {rank}: {other}"
            )
