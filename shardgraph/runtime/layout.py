"""The modules that hold a model's parameters and buffers, looked up once instead of in every call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.capture.numbers import as_tensor
from shardgraph.errors import ShardGraphError
from shardgraph.ir import JointGraph
from shardgraph.runtime.host import is_on_host
from shardgraph.torch_api import local_tensor, storage_address

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
        self.strange: list[str] = []  # parameters that were added or replaced since they were recorded
        self._set: set[str] = set()  # attributes that programs set, and of all buffers and attributes those they read
        self._read: set[str] = set()
        self._counted: set[str] = set()  # numbers that programs count, which are inputs as buffers are
        self.look_up()

    def look_up(self) -> None:
        """Look up modules, parameters and buffers again, and what is not as :meth:`settle` recorded it.

        Raises:
            ShardGraphError: a parameter was replaced by a DTensor that is placed otherwise.
        """
        if self._sharded is not None:
            self.strange = _strange(self._sharded, dict(self._model.named_parameters()))
        self._modules = list(self._model.modules())
        self._parameters = list(self._model.parameters())
        self.names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        # Plain tensor attributes are like buffers; those that are set later are looked up when they are compiled for.
        self._attributes = [
            (module, key)
            for path, module in self._model.named_modules()
            for key, value in vars(module).items()
            if self._is_input(f"{path}.{key}".lstrip("."), value)
        ]
        # A module has the same dictionaries for as long as it lives.
        own = (_children, _own_parameters, _own_buffers)
        self._holders = [holder(module) for module in self._modules for holder in own]
        self.on_host = any(is_on_host(local_tensor(parameter)) for parameter in self._parameters)
        self._objects = self._present()
        self._note_storages()
        self.buffers = self._kinds()

    def _is_input(self, fqn: str, value: Any) -> bool:
        """Whether programs may take an attribute as an input: a tensor that is not only set, or what they do take."""
        return fqn in self._read or (isinstance(value, torch.Tensor) and fqn not in self._set)

    def settle(self) -> None:
        """Record the parameters as those that programs are compiled for."""
        self._sharded = None
        self.strange = []
        self.look_up()
        self._sharded = {name: _kind(parameter) for name, parameter in self._model.named_parameters()}

    @property
    def settled(self) -> bool:
        """Whether parameters are those that programs are compiled for."""
        return self._sharded is not None

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
            ShardGraphError: the values of a parameter are in other memory than its shard, or it was replaced by a
                DTensor that is placed otherwise.
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

    def note(self, joint: JointGraph) -> None:
        """Record the attributes that a new program sets. Those that no program reads are no part of its key."""
        self._set |= {each.fqn for each in joint.results}
        self._counted |= {each.fqn for each in joint.results if each.number}
        self._read |= joint.buffers
        if self._set:
            self.look_up()

    def follow(self) -> None:
        """Record the buffers and plain tensor attributes that a call has set."""
        self._objects = self._present()
        self.buffers = self._kinds()

    def _kinds(self) -> tuple[Hashable, ...]:
        return tuple(_kind(each) for each in self._objects if not isinstance(each, (nn.Module, nn.Parameter)))

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode, in the order of ``modules()``."""
        return tuple(map(_mode, self._modules))

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each parameter requires a gradient, in the order of ``parameters()``."""
        return tuple(map(_trained, self._parameters))

    @contextmanager
    def training(self, trained: Iterable[bool]) -> Iterator[None]:
        """Inside, these parameters require a gradient too, in the order of ``parameters()``."""
        frozen = [each for each, wanted in zip(self._parameters, trained, strict=True) if wanted > each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_()
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of ``parameters()``."""
        return self._parameters

    def parameter(self, fqn: str) -> nn.Parameter:
        """The parameter of this name."""
        module, key = self._place(fqn)
        return module._parameters[key]  # type: ignore[return-value]  # a program's names exist

    def buffer(self, fqn: str) -> torch.Tensor:
        """The buffer or plain tensor attribute named ``fqn``; a number as a tensor."""
        value: Any = getattr(*self._place(fqn))
        return as_tensor(value, torch.float64) if fqn in self._counted else value

    def replace(self, fqn: str, value: torch.Tensor) -> None:
        """Set the buffer named ``fqn`` to another tensor."""
        setattr(*self._place(fqn), value)

    def _place(self, fqn: str) -> tuple[nn.Module, str]:
        """The module that has a parameter or buffer, and its key there."""
        if fqn not in self._places:
            path, _, key = fqn.rpartition(".")
            self._places[fqn] = self._model.get_submodule(path), key
        return self._places[fqn]


def _kind(tensor: Any) -> Hashable:
    """What a program assumes of a tensor; the type of anything else."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), tensor.dtype, tensor.placements
    return (
        tuple(tensor.shape),
        tensor.dtype,
        tensor.stride(),
        tensor.requires_grad and not isinstance(tensor, nn.Parameter),
    )


def _strange(sharded: dict[str, Hashable], parameters: dict[str, nn.Parameter]) -> list[str]:
    """The parameters that were added, or replaced by whole ones.

    Raises:
        ShardGraphError: one was replaced by a DTensor of another kind.
    """
    strange = [name for name, parameter in parameters.items() if _kind(parameter) != sharded.get(name)]
    for name in strange:
        parameter = parameters[name]
        if isinstance(parameter, DTensor):
            raise ShardGraphError(
                f"the parameter {name!r} was replaced after shardgraph.compile by a DTensor of shape "
                f"{list(parameter.shape)} and {parameter.dtype}, placed {parameter.placements}, that is not its shard: "
                "assign a whole parameter, which is sharded at the next call, or compile the model again"
            )
    return strange
