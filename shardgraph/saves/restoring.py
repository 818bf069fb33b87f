"""What is read for a model, its optimizer and other objects, and takes its place once all of it is known good."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.module import checkpoint
from shardgraph.module.sharded import ShardedModule
from shardgraph.saves.assignment import of_rank
from shardgraph.saves.contents import EXTRA, OBJECTS, RANDOM, key_of, leaves_of
from shardgraph.saves.manifest import StoredTensor
from shardgraph.saves.optimizers import read_optimizer
from shardgraph.saves.reading import Reader
from shardgraph.saves.shards import Shard, all_placed


class Restored:
    """What one checkpoint has for this rank, read and verified; nothing has been changed until :meth:`apply`.

    Raises:
        DamagedError: files are not as they were written.
        CheckpointError: it is of another model or optimizer, or lacks something.
    """

    def __init__(
        self,
        reader: Reader,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        objects: Mapping[str, Any],
        rank: int,
        ranks: int,
    ) -> None:
        self._index, self._reader, self._rank, self._ranks = reader.index, reader, rank, ranks
        self._model, self._optimizer, self._objects = model, optimizer, objects
        self._weights = self._read_model()
        self._optimizer_state = {} if optimizer is None else read_optimizer(self._reader, model, optimizer)
        self._states = {name: self._read_object(name, each) for name, each in objects.items()}
        self.extras = self._of_all_ranks((EXTRA,))
        self._random = self._of_all_ranks((RANDOM,))

    def apply(self) -> None:
        """Put everything in its place. All ranks must call it."""
        model = self._model
        if checkpoint.loads_its_own_way(model.original if isinstance(model, ShardedModule) else model):
            model.load_state_dict(all_placed(self._weights))
        else:
            own = checkpoint.tensors_of(model)
            for name, value in self._weights.items():
                if isinstance(value, Shard):
                    checkpoint.copy_into(own[name], value.placed())
        if self._optimizer is not None:
            self._optimizer.load_state_dict(all_placed(self._optimizer_state))
        for name, state in self._states.items():
            self._objects[name].load_state_dict(all_placed(state))
        self._set_random()

    def _read_model(self) -> dict[str, Any]:
        entry = ("model",) if any(path[0] == "model" for path in self._index.paths.values()) else ()
        keys = {
            key_of(path[len(entry) :]): key for key, path in self._index.paths.items() if path[: len(entry)] == entry
        }
        stored = {name: self._index.tensors[key] for name, key in keys.items() if key in self._index.tensors}
        own = checkpoint.tensors_of(self._model)
        self._check(own, stored)
        read: dict[str, Any] = {}
        seen = set()
        for name, tensor in own.items():
            if name in stored and not tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                read[name] = self._reader.shard(keys[name], tensor)
        extra_state = {name: key for name, key in keys.items() if key in self._index.values and entry}
        return read | {name: self._reader.value(key) for name, key in extra_state.items()}

    def _check(self, own: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
        """Raise CheckpointError if the tensors are not those of the model; warn if they will be rounded."""
        folder = str(self._index.folder)
        keys, misshapen = checkpoint.compared(own, stored)
        if any(keys) or misshapen:
            whose = f", a {self._index.about['model']}" if "model" in self._index.about else ""
            raise CheckpointError(
                f"{checkpoint.differences(own, stored)}\n{folder!r} was not loaded, and nothing has been changed: load "
                f"it into the model that it was saved from{whose}"
            )
        checkpoint.check_dtypes(own, stored)
        for name, each in stored.items():
            if name in own and each.dtype != own[name].dtype:
                warnings.warn(
                    f"{name!r} in {folder!r} is {each.dtype} and is rounded to {own[name].dtype}, that of the model",
                    stacklevel=8,
                )
                return

    def _read_object(self, name: str, target: Any) -> Any:
        inside = {path[2:]: key for key, path in self._index.paths.items() if path[:2] == (OBJECTS, name) and path[2:]}
        if any(key in self._index.tensors for key in inside.values()):
            return self._read_nested(inside, leaves_of(target.state_dict()))
        states = self._of_all_ranks((OBJECTS, name))
        if not states:
            known = sorted({path[1] for path in self._index.paths.values() if path[0] == OBJECTS and path[1:]})
            raise CheckpointError(
                f"{str(self._index.folder)!r} has no object called {name!r}; it has {known or 'none'}"
            )
        if (state := own_of(states, self._rank, self._ranks)) is None:
            raise CheckpointError(
                f"each of {len(states)} ranks has saved another state of {name!r} in {str(self._index.folder)!r}, and "
                f"{self._ranks} ranks load: load on as many, or leave it out of objects="
            )
        return state[0]

    def _read_nested(self, keys: Mapping[tuple[Any, ...], str], template: Mapping[tuple[Any, ...], Any]) -> Any:
        """Nested dictionaries of shards, as those of a ``template`` by the path to them, and of other values."""
        state: dict[Any, Any] = {}
        for path, key in keys.items():
            inner = state
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            target = template.get(path)
            if isinstance(target, DTensor) and key in self._index.tensors:
                inner[path[-1]] = self._reader.shard(key, target)
            else:
                inner[path[-1]] = self._reader.plain(key)
        return state

    def _of_all_ranks(self, path: tuple[str, ...]) -> list[Any]:
        """One value, that of all ranks; or each rank's; or none."""
        if (key := key_of(path)) in self._index.values:
            return [self._reader.value(key)]
        keys = [of_rank(key, rank) for rank in range(self._index.about.get("ranks", 0))]
        return [self._reader.value(each) for each in keys if each in self._index.values]

    def _set_random(self) -> None:
        if (state := own_of(self._random, self._rank, self._ranks)) is not None:
            torch.set_rng_state(state[0]["cpu"])
            if "cuda" in state[0] and torch.cuda.is_available():
                torch.cuda.set_rng_state(state[0]["cuda"])
        elif self._random:
            warnings.warn(
                f"each of {len(self._random)} ranks has saved another state of its random numbers, and {self._ranks} "
                "ranks load: they go on with their own",
                stacklevel=6,
            )


def own_of(values: list[Any], rank: int, ranks: int) -> list[Any] | None:
    """This rank's of the values that all ranks have, or each of them; None if there is none, or as many other ranks."""
    if len(values) == 1:
        return values
    return [values[rank]] if values and len(values) == ranks else None
