"""Extracts the joint graph of each stage, with the values that it receives from and sends to its neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardgraph.errors import PlanError
from shardgraph.ir import (
    Buffer,
    Forwarded,
    Gradient,
    IntermediateBase,
    Mutation,
    Output,
    Parameter,
    Returned,
    Role,
    Tangent,
    UnboundGraph,
    add_output,
    outputs,
    placeholders,
)
from shardgraph.ir.attributes import ROLE, VALUE, Change, carried, new_placeholder, write
from shardgraph.passes.base import Context, Graphs
from shardgraph.passes.pipeline.assign import Assignment, assign_stages
from shardgraph.passes.pipeline.batch_norm import batch_norms
from shardgraph.passes.pipeline.cuts import beginnings_of

aten = torch.ops.aten
Results = list[tuple[Role | None, Any]]


@dataclass(frozen=True)
class DivideIntoStages:
    """Takes the joint graph of a microbatch; returns one joint graph per pipeline stage, with the values exchanged with
    its neighbours. The stages after the first begin with the modules ``begin``.

    Must not change: what is computed.

    Raises:
        PlanError: a module is unknown or out of order, or one stage writes a buffer that another reads.
    """

    begin: tuple[str, ...]

    name: ClassVar[str] = "divide-into-stages"
    requires: ClassVar[frozenset[str]] = frozenset({"recomputed"})
    provides: ClassVar[frozenset[str]] = frozenset({"divided-into-stages"})
    excludes: ClassVar[frozenset[str]] = frozenset({"divided-into-stages", "sharded-parameters", "split"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        gm = graphs.pop("joint")
        stages = stage_graphs(gm, assign_stages(gm, beginnings_of(gm, self.begin)))
        _check_buffers(stages)
        for number, stage in enumerate(stages):
            graphs[f"stage{number}/joint"] = stage
            context.batch_norms[number] = tuple(batch_norms(stage))


def _check_buffers(stages: list[fx.GraphModule]) -> None:
    """Raise PlanError if a stage reads a buffer that another stage writes."""
    read: dict[str, set[int]] = {}
    for number, gm in enumerate(stages):
        for role in placeholders(gm):
            if isinstance(role, Buffer):
                read.setdefault(role.fqn, set()).add(number)
    for number, gm in enumerate(stages):
        written = [role.of.fqn for role, _ in outputs(gm) if isinstance(role, Mutation) and isinstance(role.of, Buffer)]
        for fqn in written:
            if others := read.get(fqn, set()) - {number}:
                raise PlanError(
                    f"the buffer {fqn!r} is written in stage {number} and read in stage {min(others)}, whose ranks "
                    "would not see what is written: let stages begin so that both are in one"
                )


def stage_graphs(gm: fx.GraphModule, assignment: Assignment) -> list[fx.GraphModule]:
    """The joint graph of each stage, from the joint graph of the whole model.

    A stage takes parameters, buffers and inputs as the whole graph does, ``Forwarded`` values from the previous stage
    and ``Returned`` ones from the next stage, and sends values of the same roles to its neighbours; values for stages
    further away are passed on. The last stage returns the outputs and takes the tangents; a buffer is written by the
    stage that computes it. A parameter that several stages use is taken by each, and each returns its own partial
    gradient.
    """
    parts = _parts(gm, assignment)
    return [_graph(gm, assignment, parts, number) for number in range(assignment.count)]


def crossings(gm: fx.GraphModule, assignment: Assignment) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """For each stage the values that it receives from the previous stage, and from the next one."""
    return [(list(part.received), list(part.tangents)) for part in _parts(gm, assignment)]


def _parts(gm: fx.GraphModule, assignment: Assignment) -> list[_Part]:
    parts = [_Part(number) for number in range(assignment.count)]
    for number, results in enumerate(_results(gm, assignment)):
        parts[number].results = results
    _Crossings(gm, assignment, parts).find()
    return parts


class _Part:
    """What one stage receives from its neighbours, and its own ``results``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.results: Results = []
        self.received: dict[fx.Node, None] = {}  # forward values, from the previous stage
        self.tangents: dict[fx.Node, None] = {}  # backward values, from the next stage


def _results(gm: fx.GraphModule, assignment: Assignment) -> list[Results]:
    """The results of the whole graph by stage; gradient sums over several stages are split into partials."""
    found: list[Results] = [[] for _ in range(assignment.count)]
    for role, value in outputs(gm):
        if isinstance(role, (Output, IntermediateBase)) or not isinstance(value, fx.Node):
            if not (isinstance(role, Gradient) and value is None):
                found[-1].append((role, value))
        elif isinstance(role, Gradient) and isinstance(role.of, Parameter):
            for number, total in _gradient_parts(gm, assignment, value).items():
                found[number].append((role, total))
        else:
            found[assignment.home.get(value, 0)].append((role, value))
    return found


def _gradient_parts(gm: fx.GraphModule, assignment: Assignment, gradient: fx.Node) -> dict[int, fx.Node]:
    """By stage the sum of the terms of ``gradient`` that it computes."""
    terms: dict[int, list[fx.Node]] = {}
    for term in _terms(gradient, assignment):
        terms.setdefault(assignment.home.get(term, 0), []).append(term)
    return {number: _sum(gm, assignment, number, several) for number, several in terms.items()}


def _terms(node: fx.Node, assignment: Assignment) -> list[fx.Node]:
    operands = [value for value in node.args if isinstance(value, fx.Node)]
    adds = node.target is aten.add.Tensor and len(operands) == 2 and len(node.users) == 1 and not node.kwargs
    if not adds or any(operand.meta["val"].shape != node.meta["val"].shape for operand in operands):
        return [node]
    found = [term for operand in operands for term in _terms(operand, assignment)]
    apart = {assignment.home.get(term) for term in found} != {assignment.home.get(node)}
    return found if apart else [node]


def _sum(gm: fx.GraphModule, assignment: Assignment, number: int, terms: list[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        with gm.graph.inserting_before(gm.graph.output_node()):
            added = gm.graph.call_function(aten.add.Tensor, (total, term))
        write(added, carried(Change.MERGED, total, term) | {VALUE: term.meta["val"]})
        assignment.home[added] = number
        total = added
    return total


class _Crossings:
    """Finds the values that cross stage boundaries, from what each stage uses."""

    def __init__(self, gm: fx.GraphModule, assignment: Assignment, parts: list[_Part]) -> None:
        self.gm, self.assignment, self.parts = gm, assignment, parts
        self.anywhere, self.home = assignment.anywhere, assignment.home

    def find(self) -> None:
        used_at: dict[fx.Node, set[int]] = {}
        for node, stages in self._uses():
            used_at.setdefault(node, set()).update(stages)
        for node in self.gm.graph.nodes:
            if node in self.anywhere or node not in used_at:
                continue
            for number in range(self.home[node] + 1, max(used_at[node]) + 1):
                self.parts[number].received[node] = None
            for number in range(min(used_at[node]), self.home[node]):
                self.parts[number].tangents[node] = None

    def _uses(self) -> Iterable[tuple[fx.Node, set[int]]]:
        needed = self._needed()
        for node, stages in needed.items():
            for value in node.all_input_nodes:
                yield value, stages
        for part in self.parts:
            for _, value in part.results:
                if isinstance(value, fx.Node):
                    yield value, {part.number}

    def _needed(self) -> dict[fx.Node, set[int]]:
        """The stages that compute each operation; dead operations have none."""
        wanted: dict[fx.Node, set[int]] = {}
        for part in self.parts:
            for _, value in part.results:
                if isinstance(value, fx.Node):
                    wanted.setdefault(value, set()).add(part.number)
        needed: dict[fx.Node, set[int]] = {}
        for node in reversed(self.gm.graph.nodes):
            if node.op != "call_function" or node not in wanted:
                continue
            needed[node] = set(wanted[node]) if node in self.anywhere else {self.home[node]}
            for value in node.all_input_nodes:
                wanted.setdefault(value, set()).update(needed[node])
        return needed


def _graph(gm: fx.GraphModule, assignment: Assignment, parts: list[_Part], number: int) -> fx.GraphModule:
    part, last = parts[number], len(parts) - 1
    results = list(part.results)
    if number < last:
        results += [(Forwarded(i), node) for i, node in enumerate(parts[number + 1].received)]
    if number > 0:
        results += [(Returned(i), node) for i, node in enumerate(parts[number - 1].tangents)]

    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for role, node in placeholders(gm).items():
        if not isinstance(role, Tangent) or number == last:
            env[node] = graph.node_copy(node)
    for i, node in enumerate(part.received):
        env[node] = new_placeholder(graph, f"received_{node.name}", Forwarded(i), node)
    for i, node in enumerate(part.tangents):
        env[node] = new_placeholder(graph, f"returned_{node.name}", Returned(i), node)
    own = _own(gm, assignment, number, env, results)
    for node in gm.graph.nodes:
        if node in own:
            env[node] = graph.node_copy(node, env.__getitem__)
    add_output(graph, [(role, env[value] if isinstance(value, fx.Node) else value) for role, value in results])
    for node in [n for n in graph.nodes if n.op == "placeholder" and not n.users]:
        if not isinstance(ROLE.of(node), (Forwarded, Returned, Tangent)):
            graph.erase_node(node)
    graph.lint()
    return UnboundGraph(gm, graph)


def _own(
    gm: fx.GraphModule, assignment: Assignment, number: int, given: dict[fx.Node, fx.Node], results: Results
) -> set[fx.Node]:
    """The operations that the stage computes to get its results from its inputs."""
    stack = [value for _, value in results if isinstance(value, fx.Node)]
    own: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in given or node in own:
            continue
        assert node in assignment.anywhere or assignment.home[node] == number, f"{node} is not of stage {number}"
        own.add(node)
        stack.extend(node.all_input_nodes)
    return own
