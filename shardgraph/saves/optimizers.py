"""The state of an optimizer in a checkpoint, for the parameters that this rank has, wherever they were before."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.saves.contents import names_by_number, names_of_groups, own_state
from shardgraph.saves.reading import Reader


def read_optimizer(reader: Reader, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, with a :class:`Shard` for each tensor that is one.

    Raises:
        DamagedError: files are not as they were written.
        CheckpointError: there is none, or it is of another optimizer; nothing has been changed.
    """
    index, folder = reader.index, str(reader.index.folder)
    entry = next((path[0] for path in index.paths.values() if path[0] in ("optimizer", "optim")), None)
    if entry is None:
        raise CheckpointError(f"{folder!r} has no state of an optimizer: load the model alone, without optimizer")
    if (kind := index.about.get("optimizer")) not in (None, kind_of(optimizer)):
        raise CheckpointError(
            f"{folder!r} has the state of {kind}, and the optimizer is {kind_of(optimizer)}: make one of the same "
            "class, or load without it. Nothing has been changed"
        )
    groups = names_of_groups(model, optimizer)
    own = own_state(optimizer)
    saved = _groups(reader, entry)
    _check_groups(folder, model, groups, saved)
    merged = [
        {**before, **theirs, "params": before["params"]}
        for before, theirs in zip(own["param_groups"], saved, strict=True)
    ]
    rest = {path[1]: reader.value(key) for key, path in index.paths.items() if path[0] == entry and len(path) == 2}
    return {
        **rest,
        "state": _states(reader, entry, model, optimizer, names_by_number(own, groups)),
        "param_groups": merged,
    }


def kind_of(optimizer: Any) -> str:
    """The class of an optimizer, or of that which others wrap."""
    inner = vars(optimizer).get("optim") or vars(optimizer).get("optimizer")
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" if inner is None else kind_of(inner)


def _groups(reader: Reader, entry: str) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, path in reader.index.paths.items():
        if path[:2] == (entry, "param_groups") and len(path) == 4:
            groups[path[2]][path[3]] = reader.plain(key)
    return [groups[number] for number in sorted(groups)]


def _check_groups(folder: str, model: nn.Module, groups: list[list[str]], saved: list[dict[str, Any]]) -> None:
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{folder!r} has the state of {len(saved)} parameter groups, and the optimizer has {len(groups)}: make it "
            "with the groups that it was saved with. Nothing has been changed"
        )
    here = {name for name, _ in model.named_parameters()}
    for number, (names, theirs) in enumerate(zip(groups, saved, strict=True)):
        if differing := {*names} ^ ({*theirs["params"]} & here):
            raise CheckpointError(
                f"group {number} of the optimizer has other parameters than in {folder!r}, such as "
                f"{min(differing)!r}: make it with the groups that it was saved with. Nothing has been changed"
            )


def _states(
    reader: Reader, entry: str, model: nn.Module, optimizer: Any, names: dict[int, str]
) -> dict[int, dict[str, Any]]:
    keys: dict[str, dict[str, str]] = defaultdict(dict)
    for key, path in reader.index.paths.items():
        if path[:2] == (entry, "state") and len(path) == 4:
            keys[path[2]][path[3]] = key
    parameters = dict(model.named_parameters())
    owners = None
    if hasattr(type(optimizer), "owners"):  # ShardedOptimizer: the state of each parameter is whole, on one rank
        owners = [owner for group in optimizer.owners for owner in group]
    return {
        number: {each: _state(reader, key, parameters[name], owners is not None) for each, key in keys[name].items()}
        for place, (number, name) in enumerate(names.items())
        if name in keys and (owners is None or owners[place] == optimizer.rank)
    }


def _state(reader: Reader, key: str, parameter: torch.Tensor, whole: bool) -> Any:
    """One value of the state of a parameter: as its shards are, if it has an element for each of its elements."""
    stored = reader.index.tensors.get(key)
    if stored is None or whole or not isinstance(parameter, DTensor) or stored.shape != parameter.shape:
        return reader.plain(key)
    return reader.shard(key, parameter) if stored.shape else reader.plain(key)
