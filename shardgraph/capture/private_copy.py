"""A copy of a module's structure, to be changed and traced while other threads run the module itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardgraph.capture.subclasses import check_tensors
from shardgraph.torch_api import runs_its_own

_NONE: Mapping[int, torch.Tensor] = {}


def private_copy(model: nn.Module, stand_ins: Mapping[int, torch.Tensor] = _NONE) -> nn.Module:
    """``model`` as modules of its own: with the same names, classes, hooks and attributes, all free to be changed.

    Tensors are shared, so that it takes no memory, or replaced where ``stand_ins`` has another for their ``id``; tied
    ones stay tied. Attributes are deep copies, in which modules and tensors of the model are those of the copy. One
    that cannot be copied (a lock, a process group) is shared.
    """
    modules = list(model.modules())
    memo: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    memo |= {id(tensor): tensor for module in modules for tensor in _held(module) if id(tensor) not in memo}
    memo |= stand_ins
    memo[id(memo)] = []  # where deepcopy keeps what it has copied alive; see _deep_copy
    for module in modules:
        copied = {key: _deep_copy(value, memo) for key, value in vars(module).items() if key != "_compiled_call_impl"}
        memo[id(module)].__dict__.update(copied)  # without what replaces its call, as torch's own copies
    for module in modules:
        runs_its_own(memo[id(module)])
    return memo[id(model)]


def whole_copy(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model with attributes that a call has computed, which are constants in the copy.

    Raises:
        CaptureError: a parameter or buffer has operations of its own, and may not be copied as a tensor is.
    """
    check_tensors(model)
    held = [leaf for module in model.modules() for leaf in _held(module) if isinstance(leaf, torch.Tensor)]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in held if tensor.grad_fn is not None})


def _held(module: nn.Module) -> Iterator[Any]:
    """What attributes hold that has memory: tensors, and modules that are not registered."""
    for leaf in pytree.tree_leaves(list(vars(module).values())):
        if isinstance(leaf, (torch.Tensor, nn.Module)):
            yield leaf


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever its own copying raises, it works as it is
        for key in list(memo)[known:]:  # copies that are not complete
            del memo[key]
        return value
