"""The data of a plan's picture: the modules, with the parameters that a rank holds and the bytes that it sends."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from textwrap import wrap

from shardgraph.capture.stacks import Stack
from shardgraph.ir import collectives, group_of
from shardgraph.mesh import Mesh
from shardgraph.passes.analysis.local import shard_shape
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.analysis.rows import node_wire_bytes, operation_of
from shardgraph.passes.program import Program
from shardgraph.sizes import format_bytes

_COLOURS = ("#8ecae6", "#ffd166", "#a8d5a2", "#f4a6b8", "#cdb4f0", "#f7b37e")
_OTHER = "#d0d0d0"  # all placements beyond the colours that are easily told apart
_WIDTH = 110  # characters of a line above the picture


class UnknownTrafficError(Exception):
    """What more layers send does not follow from what a few of them send: draw the whole model."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter by its name within its module; ``local`` is the shape of rank 0's shard, the largest one."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placement: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return math.prod(self.local) * self.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return math.prod(self.shape) * self.itemsize

    @property
    def shapes(self) -> str:
        """Global and local shape, as ``"(8, 4) -> (2, 4)"``; one shape if the rank holds the whole parameter."""
        whole, local = (f"({', '.join(map(str, shape))})" for shape in (self.shape, self.local))
        return whole if self.shape == self.local else f"{whole} -> {local}"


@dataclass
class Traffic:
    """A step's collectives of one kind for a module's parameters and buffers, and the bytes that a rank sends."""

    direction: str
    operation: str
    axis: str
    count: int = 0
    nbytes: int = 0

    def repeat(self, captured: int, layers: int) -> None:
        """Count for ``layers`` layers what was counted for the ``captured`` ones, or between each two of them."""
        for few, many in ((captured, layers), (captured - 1, layers - 1)):
            if self.count % few == 0:
                self.nbytes = self.nbytes * many // few
                self.count = self.count * many // few
                return
        raise UnknownTrafficError(f"{self.calls} of {captured} layers say nothing about {layers}")

    @property
    def calls(self) -> str:
        """``"forward: 2 x all_gather over dp"``."""
        operation = self.operation.removesuffix("_into_tensor").removesuffix("_tensor")
        return f"{self.direction}: {self.count} x {operation} over {self.axis}"


@dataclass(eq=False)
class Site:
    """A producer and consumer of values in a module, see :mod:`shardgraph.pictures.flow`.

    Its ``kind`` is ``"module"``, a whole module with parameters and no submodules; ``"parameter"``, the use of one
    parameter of any other module; ``"borrowed"``, the use of a parameter of another module, such as a tied one;
    ``"join"``, operations without parameters on values of several sites; ``"inputs"`` or ``"outputs"`` of the model.
    ``text`` is the parameter's name (``"borrowed"``: fully qualified) or the operations; empty for a whole module.
    """

    module: Module
    kind: str
    text: str

    @property
    def use(self) -> str:
        """How a borrowed parameter comes to be used here: it is a submodule's, or tied."""
        inside = self.text.startswith(f"{self.module.path}." if self.module.path else "")
        return "of a submodule" if inside else "tied"


@dataclass(eq=False)
class Module:
    """A module with its own parameters, their traffic, and its submodules."""

    path: str
    own: list[HeldParameter] = field(default_factory=list)
    traffic: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    children: dict[str, Module] = field(default_factory=dict)

    def find(self, path: str) -> Module:
        """The module of that name below this one, created if it does not exist."""
        module = self
        for name in path.split(".") if path else ():
            below = f"{module.path}.{name}" if module.path else name
            module = module.children.setdefault(name, Module(below))
        return module

    def walk(self) -> Iterator[Module]:
        """This module and all below it."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def parameters(self) -> Iterator[HeldParameter]:
        """The parameters of this module and of all below it."""
        return (parameter for module in self.walk() for parameter in module.own)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters on one rank."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def likeness(self) -> tuple[object, ...]:
        """Equal for modules that are drawn as one."""
        inside = tuple((name, child.likeness()) for name, child in self.children.items())
        return (*self.own, *self.traffic.values(), *((site.kind, site.text) for site in self.sites), inside)

    def groups(self) -> Iterator[list[Module]]:
        """The children; consecutive equal ones whose names are numbers are one group."""

        def key(item: tuple[str, Module]) -> object:
            name, child = item
            return child.likeness() if name.isdigit() else name

        return ([child for _, child in group] for _, group in groupby(self.children.items(), key))

    def shown(self) -> Iterator[list[Module]]:
        """The groups that are drawn inside; a list that contains only equal layers is replaced by its layers."""
        for group in self.groups():
            inside = list(group[0].groups())
            bare = not (group[0].own or group[0].traffic or group[0].sites)
            yield inside[0] if bare and len(group) == len(inside) == 1 < len(inside[0]) else group


@dataclass(frozen=True)
class Tree:
    """The modules of a program on a mesh; ``plan`` is the name of its plan.

    ``stages``: how a pipeline divides them, each module on the ranks of one stage; empty without one. ``division``: how
    a step is divided into calls, if it is known. ``sent_in``: the step, or the call of a step, that sends what is told.
    """

    plan: str
    mesh: Mesh
    root: Module
    stages: str = ""
    division: str = ""
    sent_in: str = "step"

    @property
    def title(self) -> str:
        return f"Plan {self.plan} on " + (" x ".join(f"{axis}={size}" for axis, size in self.mesh) or "one process")

    @property
    def on(self) -> str:
        """Where the bytes of modules are counted."""
        return "over stages" if self.stages else "per rank"

    @property
    def summary(self) -> list[str]:
        """Lines about the whole: the bytes held and sent, how a step is divided, and where stages begin."""
        sent: Counter[str] = Counter()
        for traffic in (each for module in self.root.walk() for each in module.traffic.values()):
            sent[traffic.axis] += traffic.nbytes
        whole = sum(parameter.whole_bytes for parameter in self.root.parameters())
        on = "over one rank of each stage" if self.stages else "per rank"
        held = f"{format_bytes(self.root.nbytes)} {on}, {format_bytes(whole)} in all"
        ways = ", ".join(f"{format_bytes(nbytes)} over {axis}" for axis, nbytes in sent.items()) or "nothing"
        within = " within stages" if self.stages else ""
        line = f"Parameters: {held}. Sent per rank and {self.sent_in}{within}: {ways}"
        more = (wrap(text, _WIDTH, break_long_words=False) for text in (self.division, self.stages))
        return [line, *chain.from_iterable(more)]

    @property
    def colours(self) -> dict[str, str]:
        """A colour for every placement that occurs, in order of first use."""
        placements = dict.fromkeys(parameter.placement for parameter in self.root.parameters())
        return dict(zip(placements, chain(_COLOURS, repeat(_OTHER)), strict=False))

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The colour of every placement, and a line about the parameters that have it."""
        lines = []
        for placement, colour in self.colours.items():
            placed = [parameter for parameter in self.root.parameters() if parameter.placement == placement]
            held = format_bytes(sum(parameter.nbytes for parameter in placed))
            lines.append((colour, f"{placement}: {len(placed)} parameters, {held} {self.on}"))
        return lines

    def lengthen(self, stack: Stack, captured: int) -> None:
        """Repeat the middle one of the ``captured`` equal layers of a stack, so that it has all its layers.

        Layers without parameters are not drawn, and layers that share parameters are drawn once.

        Raises:
            UnknownTrafficError: the stack itself has collectives, and not one for each layer or between each two, or
                its first layers are unlike the others.
        """
        drawn, few = self.root.find(stack.path), stack.up_to(captured)
        present, middle = list(drawn.children.values()), stack.up_to(captured // 2)
        if drawn.traffic and stack.head:
            raise UnknownTrafficError(f"{stack.path} has collectives of its own, and layers of two kinds")
        if len(present) == few:
            more = [copy.deepcopy(present[middle]) for _ in range(stack.layers - few)]
            repeated = (*present[:middle], *more, *present[middle:])
            drawn.children = {str(i): layer for i, layer in enumerate(repeated)}
            for traffic in drawn.traffic.values():
                traffic.repeat(few, stack.layers)
            for i, layer in enumerate(repeated):
                before = layer.path
                for module in layer.walk():
                    module.path = f"{stack.path}.{i}{module.path.removeprefix(before)}"


def build_tree(program: Program) -> Tree:
    """The modules of ``program`` that have parameters or collectives.

    A collective counts for the module of its parameter or buffer if it has one, otherwise for the module of its node.
    """
    mesh, root = program.plan.mesh, Module("")
    for fqn, shape in program.shapes.items():
        path, _, name = fqn.rpartition(".")
        local, entry = shard_shape(program.context, fqn, 0), program.parameters[fqn]
        placed = zip(entry.placements, mesh, strict=True)
        placement = ", ".join(f"{placement} over {axis}" for placement, (axis, _) in placed) or "whole"
        placement += ", on the host" if entry.offload else ""
        itemsize = program.context.stored[fqn].itemsize
        root.find(path).own.append(HeldParameter(name, tuple(shape), local, placement, itemsize))
    for direction, gm in (("forward", program.forward), ("backward", program.backward)):
        for node in collectives(gm) if gm is not None else ():
            key = (direction, operation_of(node), group_of(node))
            traffic = root.find(module_of(node)).traffic.setdefault(key, Traffic(*key))
            traffic.count += 1
            traffic.nbytes += node_wire_bytes(node, mesh)
    return Tree(program.plan.name, program.plan.whole_mesh, root)


def describe(alike: list[Module], on: str) -> tuple[str, str]:
    """The name of modules that are drawn as one, and the bytes that are held of them, counted :attr:`~Tree.on`."""
    module, held = alike[0], f"{format_bytes(alike[0].nbytes)} {on}"
    if len(alike) == 1:
        return module.path.rpartition(".")[2] or "model", held if module.nbytes else ""
    first, last = (".".join(end.path.split(".")[-2:]) for end in (module, alike[-1]))
    return f"{first} to {last}", f"{len(alike)} equal layers, each {held}"
