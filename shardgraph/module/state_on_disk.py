"""Optimizer state in memory-mapped files, for any optimizer of torch that updates parameters of such a plan.

Optimizers make their state themselves, at their first step, and have no option for where. But each keeps that of a
parameter in a dictionary of its own, ``optimizer.state[parameter]``: one that puts what it is given into a file, as
soon as it is given, has them keep it there, without a moment at which all of it is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph import torch_api
from shardgraph.module.mapped_files import mapped_files
from shardgraph.runtime.host import is_in_file
from shardgraph.torch_api import as_placed, local_tensor

_folders: Any = WeakIdKeyDictionary()  # by parameter whose optimizer state is in files, their folder
_followed: Any = WeakIdKeyDictionary()  # optimizers that hand out and take in plain dictionaries of state


def keep_state_on_disk(parameters: Iterable[torch.Tensor], folder: str) -> None:
    """Have every optimizer keep the state of these parameters in files in ``folder``, from its next step on."""
    _hook_all_optimizers()
    for parameter in parameters:
        _folders[parameter] = folder


def keep_state_as_of(parameter: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Have the state of what is updated in the place of ``parameter`` be in files if that of ``parameter`` is."""
    if parameter in _folders:
        _folders[stand_in] = _folders[parameter]


@cache
def _hook_all_optimizers() -> None:
    torch_api.before_every_step(_before_step)
    torch_api.after_every_step(_after_step)


class _StateInFiles(dict[str, Any]):
    """The state of a parameter. Its tensors, but for counters, are in files.

    Raises:
        OffloadError: the folder has no room left; the optimizer's step ends there.
    """

    folder: str

    def __init__(self, folder: str, state: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder = folder
        for key, value in state.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, self._in_file(value) if isinstance(value, torch.Tensor) else value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _StateInFiles, (self.folder, dict(self))

    def _in_file(self, value: torch.Tensor) -> torch.Tensor:
        local = local_tensor(value)
        if local.numel() < 2 or local.device.type != "cpu" or is_in_file(local):
            return value
        own = mapped_files(self.folder, {"": local}, "tensors of the optimizer's state")[""].copy_(local)
        return as_placed(own, value) if isinstance(value, DTensor) else own


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give the parameters that are to be updated states in files; what there is of them is moved."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or (folder := _folders.get(parameter)) is None:
                continue
            state = optimizer.state[parameter]
            if not isinstance(state, _StateInFiles):
                optimizer.state[parameter] = _StateInFiles(folder, state)
            if optimizer not in _followed:
                _followed[optimizer] = True
                optimizer.register_state_dict_post_hook(_plain)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Take back what was not used: an optimizer around another one, which has a step too, keeps no state itself."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(state := optimizer.state.get(parameter), _StateInFiles) and not state:
                del optimizer.state[parameter]


def _plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State as checkpoints have it: in dictionaries of no type of ours."""
    state = {key: dict(of) if isinstance(of, _StateInFiles) else of for key, of in state_dict["state"].items()}
    return {**state_dict, "state": state}
