"""A graph cut at the model's modules: runs of operations that a person would have written as one function.

A unit is a module whose operations become one function: a layer of a stack of them, else a child of the model (or of
what holds a stack). What is not in a module, or in a small one, stays in the function of the whole model.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import FORWARD_MODULES, MADE_BY, MODULES, ROLE, SHARD_OF

_SMALL = 8
"""Operations of a module that are not worth a function of their own."""

ROOT = ""
"""The unit of the whole model."""


@dataclass(frozen=True)
class Segment:
    """Operations of one unit that follow on each other. ``again`` counts earlier ones of the same unit."""

    unit: str
    kind: str
    nodes: tuple[fx.Node, ...]
    again: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What a segment of backward has in common with that of forward."""
        return self.unit, self.again

    @property
    def stack(self) -> str:
        """The name of the stack that it is a layer of, ``""`` for none."""
        path, _, number = self.unit.rpartition(".")
        return (path or "layers") if number.isdecimal() and not self.again else ""

    @property
    def number(self) -> int:
        """Its place in the stack."""
        return int(self.unit.rpartition(".")[2])


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """The paths and classes of the modules that an operation, or the one that it differentiates, is in."""
    recorded = MODULES.get(node) or FORWARD_MODULES.get(node) or {}
    return [(path, getattr(kind, "__name__", str(kind)).rpartition(".")[2]) for path, kind in recorded.values()]


class Units:
    """The units of a model, as those graphs show that have its forward operations."""

    def __init__(self, graphs: Iterable[fx.GraphModule]) -> None:
        self._kinds: dict[str, str] = {}
        self._small: set[str] = set()
        counts: Counter[str] = Counter()
        for gm in graphs:
            for node in gm.graph.nodes:
                self._kinds |= dict(modules_of(node))
        self._stacks = self._find_stacks()
        self._holders = {path[:i] for path in self._stacks for i in _ends(path)} | self._stacks
        for gm in graphs:
            for segment in self.segments(gm, backward=False):
                counts[segment.unit] = max(counts[segment.unit], len(segment.nodes))
        self._small = {unit for unit, count in counts.items() if count <= _SMALL and not self._is_layer(unit)}

    def _find_stacks(self) -> set[str]:
        """The paths of modules with numbered children of which two or more are of one class."""
        children: dict[str, list[str]] = {}
        for path, kind in self._kinds.items():
            parent, _, name = path.rpartition(".")
            if name.isdecimal():
                children.setdefault(parent, []).append(kind)
        found = {path for path, kinds in children.items() if len(kinds) > len(set(kinds))}
        return {path for path in found if not any(_inside(path, other) for other in found)}

    def _is_layer(self, unit: str) -> bool:
        parent, _, name = unit.rpartition(".")
        return name.isdecimal() and parent in self._stacks

    def of(self, node: fx.Node) -> str | None:
        """The unit of an operation; None if it is of no module, and so of a pass or of autograd."""
        modules = modules_of(node.args[0] if node.target is operator.getitem else node)
        for path, _ in modules:
            if path and path not in self._holders:
                return path
        return ROOT if modules else None

    def segments(self, gm: fx.GraphModule, backward: bool) -> list[Segment]:
        """The operations of a graph, in their order."""
        nodes = _with_parts(node for node in gm.graph.nodes if node.op == "call_function")
        units = self._absorbed(_filled(nodes, [self.of(node) for node in nodes]), nodes, backward)
        units = [ROOT if unit in self._small else unit for unit in units]
        segments: list[Segment] = []
        seen: Counter[str] = Counter()
        start = 0
        for i in range(1, len(nodes) + 1):
            if i == len(nodes) or units[i] != units[start]:
                unit = units[start]
                kind = self._kinds.get(unit, unit)
                segments.append(Segment(unit, kind, tuple(nodes[start:i]), seen[unit]))
                seen[unit] += 1
                start = i
        return segments

    def _absorbed(self, units: list[str], nodes: list[fx.Node], backward: bool) -> list[str]:
        """What the model does after each layer of a stack, such as adding the residual, counts to the layer."""
        order = range(len(units))[:: -1 if backward else 1]
        runs = _runs([units[i] for i in order])
        between: dict[str, set[tuple[str, ...]]] = {}
        for (unit, _, _), (root, start, stop), (after, _, _) in zip(runs, runs[1:], runs[2:], strict=False):
            stack = unit.rpartition(".")[0]
            in_stack = self._is_layer(unit) and self._is_layer(after) and after.rpartition(".")[0] == stack != ""
            if root == ROOT and in_stack:
                between.setdefault(stack, set()).add(tuple(str(nodes[order[i]].target) for i in range(start, stop)))
        made = list(units)
        for (unit, _, _), (root, start, stop) in pairwise(runs):
            pattern = between.get(unit.rpartition(".")[0], set())
            if root != ROOT or not self._is_layer(unit) or len(pattern) != 1:
                continue
            (targets,) = pattern
            here = tuple(str(nodes[order[i]].target) for i in range(start, stop))
            if here[: len(targets)] == targets:
                for i in range(start, start + len(targets)):
                    made[order[i]] = unit
        return made


def _with_parts(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The operations in order, what is taken out of several results right behind the operation."""
    order: list[fx.Node] = []
    for node in nodes:
        if node.target is not operator.getitem:
            order.append(node)
            order += [user for user in node.users if user.target is operator.getitem]
        elif node.args[0].op != "call_function":
            order.append(node)
    return order


def _runs(units: Sequence[str]) -> list[tuple[str, int, int]]:
    runs, start = [], 0
    for i in range(1, len(units) + 1):
        if i == len(units) or units[i] != units[start]:
            runs.append((units[start], start, i))
            start = i
    return runs


def _filled(nodes: list[fx.Node], units: list[str | None]) -> list[str]:
    """The units with those of passes: what only prepares a parameter, or brings back what was kept for backward, counts
    to what follows, all else to what was."""
    prepares: set[fx.Node] = set()
    for node, unit in zip(nodes, units, strict=True):
        if (
            unit is None
            and MADE_BY.get(node) is not None
            and all(
                each in prepares or (each.op == "placeholder" and (node.target is ir.TO_DEVICE or _is_state(each)))
                for each in node.all_input_nodes
                if node.target is not ir.WAIT_COPY or each is node.args[0]
            )
        ):
            prepares.add(node)
    made: list[str | None] = list(units)
    following: str | None = None
    for i in reversed(range(len(nodes))):
        if made[i] is None and nodes[i] in prepares:
            made[i] = following
        elif units[i] is not None:
            following = units[i]
    before = ROOT
    for i, unit in enumerate(made):
        if unit is None:
            made[i] = before
        else:
            before = unit
    return [unit or ROOT for unit in made]


def _is_state(placeholder: fx.Node) -> bool:
    role = ROLE.get(placeholder)
    return isinstance(role, (ir.Parameter, ir.Buffer, ir.Gathered)) or placeholder in SHARD_OF


def _inside(path: str, other: str) -> bool:
    return path != other and (path.startswith(f"{other}.") or not other)


def _ends(path: str) -> list[int]:
    """Where the paths of the modules that a module is in end."""
    return [match.start() for match in re.finditer(r"\.", path)]
