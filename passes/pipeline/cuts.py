"""Where a captured model may be cut into stages: before the first operation of a module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    first: dict[str, fx.Node] = {}
    for path, node in _beginnings(gm):
        first.setdefault(path, node)
    start = first.get("")
    outermost: dict[fx.Node, str] = {}
    for path, node in first.items():
        if node not in outermost or len(path) < len(outermost[node]):
            outermost[node] = path
    return [CutPoint(path, node) for node, path in outermost.items() if node is not start and path]


def _beginnings(gm: fx.GraphModule) -> Iterable[tuple[str, fx.Node]]:
    """The modules around each forward operation, in order, without operations that every stage computes itself."""
    inside, anywhere = forward_nodes(gm), computed_anywhere(gm)
    for node in gm.graph.nodes:
        if node in inside and node not in anywhere and node.op == "call_function":
            yield "", node
            for path, _ in MODULES.get(node, {}).values():
                yield path, node


def beginnings_of(gm: fx.GraphModule, names: Sequence[str]) -> list[fx.Node]:
    """The first operations of the stages that begin with the modules ``names``.

    Raises:
        PlanError: forward computes nothing in such a module, or the modules do not run in this order.
    """
    known: dict[str, fx.Node] = {}
    for path, node in _beginnings(gm):
        known.setdefault(path, node)
    found = []
    for name in names:
        if name not in known:
            raise PlanError(
                f"a stage is to begin with the module {name!r}, in which nothing is computed"
                f"{nearest(name, known) or ''}; {_possible(gm)}"
            )
        found.append(known[name])
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for earlier, later, name in zip([known.get(""), *found], found, names, strict=False):
        if earlier is None or order[later] <= order[earlier]:
            raise PlanError(
                f"the stage that begins with the module {name!r} would be empty or before the one that precedes it: "
                f"name modules in the order in which forward runs them; {_possible(gm)}"
            )
    return found


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
    said = [((pattern, each), each.index) for pattern, each in annotations if isinstance(each, stage)]
    begins: dict[int, str] = {}
    latest, latest_said = 0, None
    for path in dict.fromkeys(path for path, _ in _beginnings(gm)) if said else ():
        for each, number in said:
            if not matches(each[0], path):
                continue
            if number < latest and latest_said is not None:
                raise PlanError(
                    f"{written(each)} and {written(latest_said)} contradict each other: {path!r} runs after what is in "
                    f"stage {latest}, and stages follow each other"
                )
            if number > latest:
                latest, latest_said = number, each
                begins[number] = path
    if missing := [number for number in range(1, latest) if number not in begins]:
        raise PlanError(
            f"stages up to {latest} are annotated and none is stage({missing[0]}): every stage from 1 needs a module"
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
    starts = [sum(balance[:i]) for i in range(1, len(balance))]
    return tuple(layers[at] for at in starts)


def stack_of_layers(gm: fx.GraphModule) -> list[str]:
    """The layer names of the longest numbered stack that forward runs, in forward order."""
    stacks: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for path, _ in _beginnings(gm)):
        parent, _, number = path.rpartition(".")
        if number.isdigit():
            stacks.setdefault(parent, []).append(path)
    return max(stacks.values(), key=len, default=[])
