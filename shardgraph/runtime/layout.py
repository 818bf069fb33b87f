"""The modules that hold a model's parameters and buffers, looked up once instead of in every call."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn

_children, _own_parameters = attrgetter("_modules"), attrgetter("_parameters")
_values = methodcaller("values")
_mode, _trained = attrgetter("training"), attrgetter("requires_grad")


class Layout:
    """The modules and parameters of a model, and the place of each parameter.

    A call begins with :meth:`refresh`, which compares modules and parameters with those recorded, by identity, and
    looks them up again if one was added, removed or replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look_up()

    def _look_up(self) -> None:
        self._modules = list(self._model.modules())
        self._parameters = list(self._model.parameters())
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._objects = self._present()

    def _present(self) -> list[Any]:
        """Every current submodule and parameter of every module."""
        children = map(_values, map(_children, self._modules))
        parameters = map(_values, map(_own_parameters, self._modules))
        return list(chain(chain.from_iterable(children), chain.from_iterable(parameters)))

    def refresh(self) -> None:
        """Look up modules and parameters again if any has changed."""
        now = self._present()
        # The recorded objects are kept alive, so no other object can have one of their ids.
        if len(now) != len(self._objects) or list(map(id, now)) != list(map(id, self._objects)):
            self._look_up()

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
