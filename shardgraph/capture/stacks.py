"""Stacks of layers in a model, and the model with fewer of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardgraph.capture.private_copy import private_copy

LEAST = 4
"""Layers that must be left out of a stack for a trace of fewer to be worth its comparisons."""


class UnequalLayersError(Exception):
    """The layers of a stack do not all do the same; the model is traced whole."""


@dataclass(frozen=True)
class Stack:
    """``path`` is a container of ``layers`` numbered modules.

    The ``head`` first layers are followed by units of ``period`` layers that are all alike. ``repeats`` of these units
    are left out of the model with few layers, which keeps two of them and what comes after.
    """

    path: str
    layers: int
    head: int = 0
    period: int = 1
    repeats: int = 0

    @property
    def prefix(self) -> str:
        """What names of its layers start with."""
        return f"{self.path}." if self.path else ""

    @property
    def units(self) -> int:
        """Units of layers after the head."""
        return (self.layers - self.head) // self.period

    def up_to(self, units: int) -> int:
        """Layers of a model with the head and so many units."""
        return self.head + units * self.period

    def unit_of(self, layer: int) -> int:
        """The unit of a layer of the model with few: 0 or 1, or -1 and 2 for layers before and after these."""
        return max(-1, min((layer - self.head) // self.period, 2))

    def unit(self, number: int) -> list[str]:
        """The names of the layers of a unit."""
        return [f"{self.prefix}{layer}" for layer in range(self.up_to(number), self.up_to(number + 1))]

    @property
    def few(self) -> int:
        """Layers of the model with few."""
        return self.layers - self.omitted

    @property
    def omitted(self) -> int:
        """Layers of the model that the one with few does not have."""
        return self.repeats * self.period

    def stands_for(self, number: int) -> range:
        """The layers of the model that layer ``number`` of few is traced for; it is the first of them."""
        if number < self.head:
            return range(number, number + 1)
        if number < self.head + self.period:
            return range(number, number + self.omitted + 1, self.period)
        return range(number + self.omitted, number + self.omitted + 1)


def stacks_of(model: nn.Module) -> list[Stack]:
    """The containers with enough numbered modules for some to be left out, but for those inside others."""
    found: list[Stack] = []
    for path, module in model.named_modules():
        names = list(module._modules)
        inside = any(path.startswith(stack.prefix) for stack in found)
        numbered = len(names) >= LEAST + 4 and names == [str(number) for number in range(len(names))]
        if numbered and not inside and len(set(map(id, module._modules.values()))) == len(names):
            found.append(Stack(path, len(names)))
    return found


def with_few_layers(model: nn.Module, stacks: Sequence[Stack], counted: bool = False) -> nn.Module:
    """A copy of the model with the same tensors and ``few`` layers in each of the stacks; with ``counted`` its
    configuration has their numbers."""
    copied = private_copy(model)
    for stack in stacks:
        if counted:
            count_layers(copied, stack, stack.few)
        layers = copied.get_submodule(stack.path)._modules
        kept = [layers[str(stack.stands_for(number)[0])] for number in range(stack.few)]
        layers.clear()
        layers.update({str(number): layer for number, layer in enumerate(kept)})
    return copied


def count_layers(copied: nn.Module, stack: Stack, layers: int) -> None:
    """Have the module that holds a stack, and its configuration, count so many layers, as in ``num_hidden_layers``."""
    owner = copied.get_submodule(stack.path.rpartition(".")[0])
    for holder in (owner, *vars(owner).values()):
        for name, value in getattr(holder, "__dict__", {}).items():
            other = any(half in name and half not in stack.path for half in ("encoder", "decoder"))
            if type(value) is int and value == stack.layers and _COUNT.search(name) and not other:
                vars(holder)[name] = layers


_COUNT = re.compile(r"^(n|num)_(\w+_)?layers?$|^(en|de)coder_layers$|^depth$|^n_blocks$")


def layer_of(path: str, stacks: Sequence[Stack]) -> tuple[int, int, str] | None:
    """The stack's position, the layer's number and the name in the layer of something in a model, if it is in one."""
    for position, stack in enumerate(stacks):
        if path.startswith(stack.prefix):
            number, _, rest = path.removeprefix(stack.prefix).partition(".")
            if number.isdecimal():
                return position, int(number), rest
    return None


def numbered_modules(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[tuple[int, int, nn.Module]]:
    """Every layer of the stacks, with the stack's position and its number."""
    for position, stack in enumerate(stacks):
        for name, layer in model.get_submodule(stack.path)._modules.items():
            if layer is not None:
                yield position, int(name), layer
