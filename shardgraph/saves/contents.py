"""What a checkpoint holds: tensors and other values of a model, its optimizer and other objects, by name.

Names are those that ``torch.distributed.checkpoint`` gives to ``{"model": ..., "optimizer": ...}`` of its
``get_state_dict``: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.module.checkpoint import describable
from shardgraph.module.local_state import tied
from shardgraph.module.parameters import is_each_ranks_own
from shardgraph.module.replaced import adopt, current
from shardgraph.module.sharded import ShardedModule
from shardgraph.torch_api import pytree

Path = tuple[Any, ...]
EXTRA, OBJECTS, RANDOM = "extra", "objects", "random"
OF_RANKS = (EXTRA, OBJECTS, RANDOM)
"""The entries that may differ between ranks: each rank's is kept then."""


@dataclass
class Contents:
    """Tensors and other values by key, and the path of each key in nested dictionaries and lists."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # of values: equal ones have equal digests on all ranks
    paths: dict[str, Path] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)  # names of this rank's parameters in the optimizer's groups

    def add(self, path: Path, value: Any) -> None:
        """Take in a value.

        Raises:
            CheckpointError: it could not be read again without running code of the file.
        """
        key = key_of(path)
        if key in self.paths:
            raise CheckpointError(f"two values of the checkpoint would both be called {key!r}: rename one of them")
        self.paths[key] = path
        if isinstance(value, torch.Tensor):
            self.tensors[key] = value.detach()
        else:
            self.values[key], self.digests[key] = packed(key, value), digest_of(value)


def key_of(path: Path) -> str:
    """The name of what is at a path."""
    return ".".join(map(str, path))


def contents_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Any], extra: Any
) -> Contents:
    """All that is saved. All ranks must call it: shards that are no boxes are all-gathered along an axis.

    Raises:
        CheckpointError: something cannot be saved; the message names it.
    """
    _check_replicated(model)
    made, ties = Contents(), tied(model.original if isinstance(model, ShardedModule) else model)
    state = describable(model.state_dict())
    for name, value in state.items():
        if ties.get(name) not in state:  # otherwise its values are those of another name, which the description says
            made.add(("model", name), value)
    if optimizer is not None:
        made.groups = names_of_groups(model, optimizer)
        _add_optimizer(made, optimizer)
    for name, value in objects.items():
        leaves = leaves_of(state := value.state_dict())
        if any(isinstance(leaf, DTensor) for leaf in leaves.values()):  # of shards, as averages of weights are
            for path, leaf in describable(leaves).items():
                made.add((OBJECTS, name, *path), leaf)
        else:
            made.add((OBJECTS, name), state)
    made.add((EXTRA,), extra)
    made.add((RANDOM,), random_state())
    return made


def _add_optimizer(made: Contents, optimizer: Any) -> None:
    state = own_state(optimizer)
    names = names_by_number(state, made.groups)
    for number, values in state["state"].items():
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        for key, value in (values | describable(tensors)).items():
            made.add(("optimizer", "state", names[number], key), value)
    for index, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            if key != "params":  # of all ranks together: see groups
                made.add(("optimizer", "param_groups", index, key), value)
    for key in state.keys() - {"state", "param_groups"}:
        made.add(("optimizer", key), state[key])


def own_state(optimizer: Any) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer, of what this rank has; ShardedOptimizer spreads it over ranks."""
    spread = hasattr(type(optimizer), "local_state_dict")
    state: dict[str, Any] = optimizer.local_state_dict() if spread else optimizer.state_dict()
    return state


def names_by_number(state: Mapping[str, Any], groups: list[list[str]]) -> dict[int, str]:
    """The names of the parameters that an optimizer's ``state_dict()`` has by numbers."""
    numbered = (group["params"] for group in state["param_groups"])
    return {
        number: name
        for numbers, names in zip(numbered, groups, strict=True)
        for number, name in zip(numbers, names, strict=True)
    }


def names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each of an optimizer's groups.

    Raises:
        CheckpointError: it has a parameter that is not of the model.
    """
    adopt(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(current(p)), "") for p in group["params"]] for group in optimizer.param_groups]
    for group, found in zip(optimizer.param_groups, groups, strict=True):
        if "" in found:
            shape = list(group["params"][found.index("")].shape)
            raise CheckpointError(
                f"the optimizer has a parameter of shape {shape} that is not of this model, so it has no name to be "
                "saved or loaded by: give the model whose parameters it trains"
            )
    return groups


def leaves_of(state: Any) -> dict[Path, Any]:
    """What is in nested dictionaries, by the path to it."""
    if not isinstance(state, Mapping):
        return {(): state}
    return {(key, *path): leaf for key, each in state.items() for path, leaf in leaves_of(each).items()}


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's generators that this rank draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def packed(key: str, value: Any) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        CheckpointError: it could only be read again by running code.
    """
    kinds = {type(leaf).__name__ for leaf in pytree.tree_leaves(value) if isinstance(leaf, DTensor)}
    buffer = io.BytesIO()
    try:
        if kinds:
            raise TypeError("it has a DTensor inside of other values")
        torch.save(value, buffer)
        unpacked(buffer.getvalue())
    except Exception as error:  # of any kind: whatever pickle meets
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{key!r} cannot be saved so that it is read again without running code of the file ({reason}): give "
            "numbers, texts, tensors, and lists and dictionaries of them"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """What :func:`packed` has packed."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def digest_of(value: Any) -> str:
    """A digest that is the same for equal values of any ranks."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(f"{len(value)} entries".encode())
        for key, each in value.items():
            _feed(digest, key)
            _feed(digest, each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        digest.update(f"{type(value).__name__} of {len(value)}".encode())
        for each in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            _feed(digest, each)
    else:
        digest.update(f"{type(value).__name__} {value!r}".encode())


def _check_replicated(model: nn.Module) -> None:
    """Refuse models of which ranks have other values where checkpoints have one."""
    if isinstance(model, ShardedModule) and model.replicas is not None:
        raise CheckpointError(
            "replicas of this plan train by themselves and differ, and a checkpoint has one model: save "
            "local_state_dict() of each rank with torch.save, and the optimizer's own state"
        )
    own = [name for name, parameter in model.named_parameters() if is_each_ranks_own(parameter)]
    if own and isinstance(model, ShardedModule) and model.plan.data_size > 1:
        raise CheckpointError(
            f"{own[0]!r} is ignored() by the plan, so that each rank has its own, and a checkpoint has one of each "
            "name: save local_state_dict() of each rank with torch.save"
        )
