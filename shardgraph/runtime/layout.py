"""The modules that hold a model's parameters and buffers, looked up once instead of in every call."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import ShardGraphError
from shardgraph.torch_api import storage_address

_children, _own_parameters, _own_buffers = map(attrgetter, ("_modules", "_parameters", "_buffers"))
_values = methodcaller("values")
_mode, _trained = attrgetter("training"), attrgetter("requires_grad")


class Layout:
    """The modules, parameters and buffers of a model, and the place of each.

    A call begins with :meth:`refresh`, which compares all of them with those recorded, by identity, and looks them up
    again if one was added, removed or replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sharded: dict[str, Hashable] | None = None
        self.look_up()

    def look_up(self) -> None:
        """Look up modules, parameters and buffers again.

        Raises:
            ShardGraphError: a parameter is not as :meth:`settle` recorded it.
        """
        if self._sharded is not None:
            _check_same(self._sharded, dict(self._model.named_parameters()))
        self._modules = list(self._model.modules())
        self._parameters = list(self._model.parameters())
        self._places: dict[str, tuple[nn.Module, str]] = {}
        # Plain tensor attributes are like buffers; those that are set later are looked up when they are compiled for.
        attributes = ((module, vars(module)) for module in self._modules)
        self._attributes = [(m, k) for m, own in attributes for k, v in own.items() if isinstance(v, torch.Tensor)]
        # A module has the same dictionaries for as long as it lives.
        own = (_children, _own_parameters, _own_buffers)
        self._holders = [holder(module) for module in self._modules for holder in own]
        self._objects = self._present()
        self._note_storages()
        self.buffers = tuple(_kind(each) for each in self._objects if not isinstance(each, (nn.Module, nn.Parameter)))

    def settle(self) -> None:
        """Record the parameters as those that programs are compiled for."""
        self._sharded = None
        self.look_up()
        self._sharded = {name: _kind(parameter) for name, parameter in self._model.named_parameters()}

    def _note_storages(self) -> None:
        """Record the storages of DTensors: what assignment to ``.data`` replaces, and their shards do not have."""
        self._distributed = [parameter for parameter in self._parameters if isinstance(parameter, DTensor)]
        self._storages = [parameter.untyped_storage() for parameter in self._distributed]  # kept alive, as objects are
        self._addresses = list(map(storage_address, self._distributed))

    def _present(self) -> list[Any]:
        """Every current submodule, parameter and buffer of every module, and every plain tensor attribute."""
        attributes = (vars(module).get(key) for module, key in self._attributes)
        return list(chain(chain.from_iterable(map(_values, self._holders)), attributes))

    def refresh(self) -> None:
        """Look up modules, parameters and buffers again if any has changed.

        Raises:
            ShardGraphError: a parameter is not as :meth:`settle` recorded it.
        """
        addresses = list(map(storage_address, self._distributed))
        if addresses != self._addresses:
            changed = next(p for p, a, b in zip(self._distributed, addresses, self._addresses, strict=True) if a != b)
            name = next(name for name, parameter in self._model.named_parameters() if parameter is changed)
            raise ShardGraphError(
                f"the data of the parameter {name!r} was replaced after shardgraph.compile (parameter.data = ..., or "
                "model.to(...)), which does not change its shard: write values in place, as parameter.copy_(...) under "
                "torch.no_grad() does, or compile the model again"
            )
        now = self._present()
        # The recorded objects are kept alive, so no other object can have one of their ids.
        if len(now) != len(self._objects) or not all(map(is_, now, self._objects)):
            self.look_up()

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode, in the order of ``modules()``."""
        return tuple(map(_mode, self._modules))

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each parameter requires a gradient, in the order of ``parameters()``."""
        return tuple(map(_trained, self._parameters))

    def parameter(self, fqn: str) -> nn.Parameter:
        """The parameter of this name."""
        module, key = self._place(fqn)
        return module._parameters[key]  # type: ignore[return-value]  # a program's names exist

    def buffer(self, fqn: str) -> torch.Tensor:
        """The buffer or plain tensor attribute named ``fqn``."""
        tensor: torch.Tensor = getattr(*self._place(fqn))
        return tensor

    def _place(self, fqn: str) -> tuple[nn.Module, str]:
        """The module that has a parameter or buffer, and its key there."""
        if fqn not in self._places:
            path, _, key = fqn.rpartition(".")
            self._places[fqn] = self._model.get_submodule(path), key
        return self._places[fqn]


def _kind(tensor: Any) -> Hashable:
    """What a program assumes of a tensor; None for an absent one."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return tuple(tensor.shape), tensor.dtype, tensor.placements if isinstance(tensor, DTensor) else None


def _check_same(sharded: dict[str, Hashable], parameters: dict[str, nn.Parameter]) -> None:
    """Raise ShardGraphError if a parameter was added, or replaced by one of another kind."""
    for name, parameter in parameters.items():
        if name not in sharded:
            change = "added to the model"
        elif _kind(parameter) != sharded[name]:
            change = f"replaced by one of shape {list(parameter.shape)} and {parameter.dtype} that is not its shard"
        else:
            continue
        raise ShardGraphError(
            f"the parameter {name!r} was {change} after shardgraph.compile: change the model before, or compile it "
            "again; to change values alone, write them in place (parameter.copy_(...) under torch.no_grad())"
        )
