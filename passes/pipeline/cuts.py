"""Where a captured model may be cut into stages: before the first operation of a module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from shardgraph.errors import PlanError, nearest
from shardgraph.ir.attributes import MODULES
from shardgraph.passes.partition.split import forward_nodes
from shardgraph.passes.pipeline.assign import computed_anywhere
from shardgraph.plans.annotations.kinds import stage
from shardgraph.plans.annotations.match import Annotated, matches, written


@dataclass(frozen=True)
class CutPoint:
    """A point where a stage may begin: before ``node``, the first operation of the module ``name``."""

    name: str
    node: fx.Node


def cut_points(gm: fx.GraphModule) -> list[CutPoint]:
    """All cut points in forward order; of modules that begin at the same operation the outermost gives the name.

    The first operation of forward is not a cut point: the stage before it would be empty.
    """
    first = _first_operations(gm)
    outermost: dict[fx.Node, str] = {}
    for path, node in first.items():
        if node not in outermost or len(path) < len(outermost[node]):
            outermost[node] = path
    return [CutPoint(path, node) for node, path in outermost.items() if node is not first.get("") and path]


def _first_operations(gm: fx.GraphModule) -> dict[str, fx.Node]:
    """The first forward operation of each module, in order, apart from those that every stage computes itself."""
    inside, anywhere = forward_nodes(gm), computed_anywhere(gm)
    first: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in inside and node not in anywhere and node.op == "call_function":
            for path in ("", *(path for path, _ in MODULES.get(node, {}).values())):
                first.setdefault(path, node)
    return first


def beginnings_of(gm: fx.GraphModule, names: Sequence[str]) -> list[fx.Node]:
    """The first operations of the stages that begin with the modules ``names``.

    Raises:
        PlanError: forward computes nothing in such a module, or the modules do not run in this order.
    """
    first = _first_operations(gm)
    for name in names:
        if name not in first:
            raise PlanError(
                f"a stage is to begin with the module {name!r}, in which nothing is computed"
                f"{nearest(name, first) or ''}; {_possible(gm)}"
            )
    begins = [first[name] for name in names]
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for earlier, later, name in zip([first.get(""), *begins], begins, names, strict=False):
        if earlier is None or order[later] <= order[earlier]:
            raise PlanError(
                f"the stage that begins with the module {name!r} would be empty or before the one that precedes it: "
                f"name modules in the order in which forward runs them; {_possible(gm)}"
            )
    return begins


def _possible(gm: fx.GraphModule) -> str:
    names = [point.name for point in cut_points(gm)]
    shown = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"this model can be cut before {shown}" if names else "this model cannot be cut at all"


def annotated_stages(gm: fx.GraphModule, annotations: Sequence[Annotated]) -> tuple[str, ...]:
    """The modules at which stages begin according to ``stage(i)`` annotations; empty if there are none.

    A stage begins with the first module in forward order that is annotated with it.

    Raises:
        PlanError: a stage number is missing, or an earlier stage follows a later one.
    """
    stages = [(pattern, each) for pattern, each in annotations if isinstance(each, stage)]
    begins: dict[int, str] = {}
    latest: tuple[str, stage] | None = None  # the annotation of the last stage so far
    for path in _first_operations(gm) if stages else ():
        for each in stages:
            number, last = each[1].index, 0 if latest is None else latest[1].index
            if not matches(each[0], path):
                continue
            if latest is not None and number < last:
                raise PlanError(
                    f"{written(each)} and {written(latest)} contradict each other: {path!r} runs after what is in "
                    f"stage {last}, and stages follow each other"
                )
            if number > last:
                latest, begins[number] = each, path
    if missing := [number for number in range(1, max(begins, default=0)) if number not in begins]:
        raise PlanError(
            f"stages up to {max(begins)} are annotated and none is stage({missing[0]}): every stage from 1 needs a "
            "module"
        )
    return tuple(begins[number] for number in sorted(begins))


def balanced(gm: fx.GraphModule, balance: Sequence[int]) -> tuple[str, ...]:
    """The modules at which stages begin if stage ``i`` has ``balance[i]`` layers of the model's longest stack.

    Operations before the first layer are in the first stage, those after the last layer in the last.

    Raises:
        PlanError: the model has no stack of layers, a stage has none, or the numbers do not add up to the layers.
    """
    layers = stack_of_layers(gm)
    if sum(balance) != len(layers) or any(count < 1 for count in balance):
        raise PlanError(
            f"balance {list(balance)} gives {sum(balance)} layers to {len(balance)} stages, and the model has "
            f"{len(layers)} ({', '.join(map(repr, layers[:3]))}{', ...' if len(layers) > 3 else ''}): give each stage "
            "one or more, so that they add up"
        )
    return tuple(layers[start] for start in itertools.accumulate(balance[:-1]))


def stack_of_layers(gm: fx.GraphModule) -> list[str]:
    """The layer names of the longest numbered stack that forward runs, in forward order."""
    stacks: dict[str, list[str]] = {}
    for path in _first_operations(gm):
        parent, _, number = path.rpartition(".")
        if number.isdigit():
            stacks.setdefault(parent, []).append(path)
    return max(stacks.values(), key=len, default=[])
