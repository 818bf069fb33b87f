"""The state of an optimizer of shards as that of whole parameters, in torch's format, and back again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.module import checkpoint
from shardgraph.module.replaced import adopt
from shardgraph.torch_api import pytree


def whole_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer of whole parameters, in CPU memory if ``keep``, else without values.

    All ranks must call it. Tensors are gathered one at a time, so that only ranks that keep them ever hold them all.
    """
    state = optimizer.state_dict()
    by_number = {
        number: pytree.tree_map(partial(_gathered, keep), state["state"][number]) for number in _numbers(state)
    }
    return {**state, "state": by_number if keep else {}}


def _gathered(keep: bool, value: Any) -> Any:
    return checkpoint.gathered(value, keep) if isinstance(value, torch.Tensor) else value


def _numbers(state: Mapping[str, Any]) -> list[int]:
    """The parameters that have a state, in an order that is the same on all ranks."""
    return sorted(state["state"])


def sharded_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`whole_state` returned, with this rank's shards, for ``optimizer.load_state_dict``.

    Raises:
        CheckpointError: the state is of other parameter groups.
    """
    sizes, theirs = (
        [len(group["params"]) for group in each] for each in (optimizer.param_groups, state["param_groups"])
    )
    if sizes != theirs:
        raise CheckpointError(
            f"the state is of parameter groups of {theirs} parameters, and this optimizer has groups of {sizes}: make "
            "it with the groups that the state was saved with"
        )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=True))
    by_number = {
        number: pytree.tree_map(partial(placed_like, of_number[number]), values)
        for number, values in state["state"].items()
    }
    return {**state, "state": by_number}


def described(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with tensors as ``torch.distributed.checkpoint`` can describe them.

    One in several blocks of a dimension is all-gathered along that axis, as of a model's state: all ranks must call it.
    """
    return {**state, "state": {number: checkpoint.describable(values) for number, values in state["state"].items()}}


def load_placed(
    is_ours: Callable[[Any], bool],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    load: Callable[[torch.optim.Optimizer, Any], None],
) -> None:
    """``load`` a state of whole tensors, or of shards as any plan has them, for the shards of parameters that are ours,
    also of an optimizer that was made of those that they have replaced.

    Each rank takes its part of whole tensors, without communication; shards of another plan are redistributed.

    Raises:
        CheckpointError: the state is of shards, and the parameters are not; nothing has been loaded.
    """
    adopt(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loaded = (value for values in state.get("state", {}).values() for value in pytree.tree_leaves(values))
    if any(isinstance(value, DTensor) for value in loaded) and not any(isinstance(p, DTensor) for p in parameters):
        raise CheckpointError(
            f"the state is that of shards, and this {type(optimizer).__name__} has whole parameters; nothing was "
            "loaded: get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, with "
            "StateDictOptions(full_state_dict=True), makes it whole, under the names of parameters"
        )
    load(optimizer, state)
    if isinstance(optimizer, torch.optim.LBFGS):  # whose state is of all parameters, and whole
        return
    for parameter, values in optimizer.state.items():
        if is_ours(parameter):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and not _is_placed_like(parameter, value):
                    values[name] = placed_like(parameter, value)


def _is_placed_like(parameter: Any, value: Any) -> bool:
    """Whether an optimizer may have this tensor beside the shards of ``parameter`` as it is."""
    if not value.dim() or value.shape != parameter.shape:
        return True
    return isinstance(value, DTensor) and (value.device_mesh, value.placements) == (
        parameter.device_mesh,
        parameter.placements,
    )


def placed_like(parameter: torch.Tensor, value: Any) -> Any:
    """A copy of ``value``: as the shards of ``parameter`` are, if it has an element for each of its elements."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(parameter, DTensor) and value.dim() and value.shape == parameter.shape:
        return checkpoint.sharded_like(value, parameter).clone()
    return value.clone()
