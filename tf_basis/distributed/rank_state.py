"""The state of a model and its optimizer: shared by the ranks, or of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import checksums, layout_record
from tf_basis.distributed import residuals, snapshot
from tf_basis.distributed.broadcast import name_of, native
from tf_basis.distributed.callbacks import build, is_built, optimizer_variables
from tf_basis.distributed.world import World

Named = tuple[str, Callable[[], np.ndarray]]


def checked_optimizer(model: Any) -> Any:
    """The optimizer of a compiled model that has its variables.

    Raises:
      ValueError: it is no such model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not hasattr(model, "make_train_function"):
        raise ValueError(
            f"model must be a compiled model of either Keras, received {model!r}"
        )
    if not is_built(model):
        raise ValueError(
            f"model must have its variables: call it on a batch, or build it, "
            f"before, received the model '{model.name}' without"
        )
    return optimizer


def build_together(model: Any, everyone: Callable[[Callable], list]) -> None:
    """Makes the optimizer's variables, on all ranks or on none.

    Args:
      model: a compiled model.
      everyone: runs a function on all ranks; see `checkpoint.together`.
    """

    def look() -> bool:
        optimizer = checked_optimizer(model)
        return bool(getattr(optimizer, "built", False))

    built = everyone(look)
    if any(built) and not all(built):
        raise ValueError(
            "optimizer must be built on all ranks or on none: whether it is, by rank: "
            f"{built}"
        )
    build(model.optimizer, model)


class ModelState:
    """The variables of a model and its optimizer, told apart and named.

    Args:
      model: a compiled model; it and its optimizer are built.
      world: the ranks; None: whatever the optimizer's are.

    Attributes:
      shared: (name, variable) of what rank 0 has for all.
      untrained: which of these are the model's and not trained: ranks may differ.
      local: what is of one rank; see `residuals`.

    Raises:
      ValueError: the optimizer exchanges within another set of ranks.
    """

    def __init__(self, model: Any, world: World | None = None) -> None:
        optimizer = model.optimizer
        self.world = world
        for _, part in residuals.exchangers(optimizer):
            other = part.world
            if world is not None and (other.size, other.rank) != (
                world.size,
                world.rank,
            ):
                raise ValueError(
                    "process_set must be that of the optimizer, which has "
                    f"{other.size} ranks, received one of {world.size}"
                )
        self.local = residuals.local_state(optimizer)
        self.local_names = [_last_part(local.variable) for local in self.local]
        untrained = {id(native(v)) for v in model.non_trainable_variables}
        known = {id(local.variable) for local in self.local}
        self.shared: list[tuple[str, tf.Variable]] = []
        self.untrained: list[int] = []
        named = [(name_of(v), v) for v in model.variables]
        named += [(_last_part(v), v) for v in optimizer_variables(optimizer)]
        for name, variable in named:
            plain = native(variable)
            if id(plain) in known:
                continue
            known.add(id(plain))
            if plain.dtype.as_numpy_dtype is object:
                raise ValueError(
                    "variables must hold numbers, received "
                    f"'{name}' of {plain.dtype.name}"
                )
            if id(plain) in untrained:
                self.untrained.append(len(self.shared))
            self.shared.append((name, plain))
        modules = [cls.__module__.split(".")[0] for cls in type(model).__mro__]
        self.flavor = "tf_keras" if "tf_keras" in modules else "keras3"
        self.optimizers = [
            getattr(type(each), "_inner_class", type(each)).__name__
            for each in residuals.nested_optimizers(optimizer)
        ]
        self.tables = list(_tables(optimizer))

    def described(self) -> list[str]:
        """A line for each variable, equal on all ranks of a training."""
        lines = [f"{name} {v.dtype.name} {v.shape}" for name, v in self.shared]
        for name, local in zip(self.local_names, self.local):
            shape = "" if local.kind == "server" else local.variable.shape
            lines.append(f"{name} {local.variable.dtype.name} {shape}")
        return lines + self.tables

    def digests(self) -> list[str]:
        """Of the values of `untrained`."""
        return [checksums.of_array(self.shared[i][1].numpy()) for i in self.untrained]

    # ---- as tensors of a file ----------------------------------------------------

    def shared_tensors(self) -> Iterator[Named]:
        """What rank 0 writes."""
        for name, variable in self.shared:
            yield name, variable.numpy

    def local_tensors(self, own: list[int]) -> Iterator[Named]:
        """What every rank writes: its own, and the shared ones that differ, `own`."""
        for name, local in zip(self.local_names, self.local):
            yield name, local.variable.numpy
        for index in own:
            name, variable = self.shared[index]
            yield name, variable.numpy

    def verified(self, folder: Path) -> dict[str, Any]:
        """The content of a manifest, all that it says having been checked.

        Raises:
          DamagedCheckpointError: a file is not what was written.
          ValueError: it is the checkpoint of something else.
        """
        content = snapshot.read_manifest(folder)
        path = folder / snapshot.MANIFEST
        for what in ("flavor", "optimizers", "tables"):
            mine, theirs = getattr(self, what), content[what]
            if mine != theirs:
                raise ValueError(
                    f"{path} must have the {what} of this model, {mine}, received "
                    f"{theirs}"
                )
        expected = [(n, v.dtype.name, v.shape) for n, v in self.shared]
        _check_tensors(path, content["shared"], expected)
        size = content["world_size"]
        for rank, part in enumerate(content["ranks"]):
            mine = [
                (name, local.variable.dtype.name, local.shape(size, rank))
                for name, local in zip(self.local_names, self.local)
            ]
            mine += [expected[index] for index in content["own"]]
            _check_tensors(path, part, mine)
        snapshot.verify_part(folder, content["shared"])
        for rank, part in enumerate(content["ranks"]):
            if size != self.world.size or rank == self.world.rank:
                snapshot.verify_part(folder, part)
        return content

    def restore(self, folder: Path, content: dict[str, Any]) -> None:
        """Takes the values of a checkpoint that was `verified`."""
        with snapshot.PartReader(folder, content["shared"]) as reader:
            for number, (_, variable) in enumerate(self.shared):
                variable.assign(reader.read(number))
        size, rank = content["world_size"], self.world.rank
        parts = content["ranks"]
        if size == self.world.size:
            with snapshot.PartReader(folder, parts[rank]) as reader:
                for number, local in enumerate(self.local):
                    local.variable.assign(reader.read(number))
        else:

            def values_of(number: int) -> list[np.ndarray]:
                values = []
                for part in parts:
                    with snapshot.PartReader(folder, part) as reader:
                        values.append(reader.read(number))
                return values

            self.assign_local(values_of, size)
        if rank < size:
            with snapshot.PartReader(folder, parts[rank]) as reader:
                for number, index in enumerate(content["own"]):
                    value = reader.read(len(self.local) + number)
                    self.shared[index][1].assign(value)

    def assign_local(
        self, values_of: Callable[[int], residuals.Values], old_ranks: int
    ) -> None:
        """Cuts what `old_ranks` ranks had for the ranks that there are now."""
        values = residuals.recut(
            self.local, values_of, old_ranks, self.world.size, self.world.rank
        )
        for local, value in zip(self.local, values):
            local.variable.assign(value)


def _last_part(variable: Any) -> str:
    # What comes before it depends on where an optimizer was built: alone or in a step.
    return name_of(variable).rsplit("/", 1)[-1]


def _check_tensors(path: Path, part: dict[str, Any], expected: list[tuple]) -> None:
    found = [(t["name"], t["dtype"], tuple(t["shape"])) for t in part["tensors"]]
    for place in range(max(len(found), len(expected))):
        mine = expected[place] if place < len(expected) else None
        theirs = found[place] if place < len(found) else None
        same = mine is not None and theirs is not None and mine[:2] == theirs[:2]
        if same and tf.TensorShape(mine[2]).is_compatible_with(theirs[2]):
            continue
        text = [
            "nothing" if each is None else f"'{each[0]}' {each[1]} {each[2]}"
            for each in (mine, theirs)
        ]
        raise ValueError(
            f"{path} must have the variables of this model, in place {place} of "
            f"{part['file']} {text[0]}, received {text[1]}"
        )


def _tables(optimizer: Any) -> Iterator[str]:
    """What decides the meaning of the state of tables, beside its shapes."""
    for each in residuals.nested_optimizers(optimizer):
        layouts = getattr(getattr(each, "_basis", None), "layouts", {})
        for number, layout in enumerate(layouts.values()):
            fields = layout_record.record_of(layout)
            fields.pop("path")  # numbers of layers are in it
            yield f"table {number}: {fields}"
