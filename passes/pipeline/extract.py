"""Extracts the joint graph of each stage, with the values that it receives from and sends to its neighbours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import PlanError
from shardgraph.ir.attributes import MADE_BY, VALUE, Change, carried, write
from shardgraph.ir.subgraph import subgraph
from shardgraph.passes.base import Context, Graphs, GraphsPass
from shardgraph.passes.pipeline.assign import Assignment, assign_stages
from shardgraph.passes.pipeline.batch_norm import batch_norms
from shardgraph.passes.pipeline.cuts import beginnings_of

aten = torch.ops.aten


@dataclass(frozen=True)
class DivideIntoStages(GraphsPass):
    """Takes the joint graph of a microbatch; returns one joint graph per pipeline stage. The stages after the first
    begin with the modules ``begin``.

    A stage takes parameters, buffers and inputs as the whole graph does, ``Forwarded`` values from the previous stage
    and ``Returned`` ones from the next stage, and sends values of the same roles to its neighbours; values for stages
    further away are passed on. The last stage returns the outputs and takes the tangents; a buffer is written by the
    stage that computes it. A parameter that several stages use is taken by each, and each returns its own partial
    gradient.

    Must not change: what is computed.

    Raises:
        PlanError: a module is unknown or out of order, or one stage writes a buffer that another reads.
    """

    begin: tuple[str, ...]

    name = "divide-into-stages"
    requires = frozenset({"recomputed"})
    provides = frozenset({"divided-into-stages"})
    excludes = frozenset({"divided-into-stages", "sharded-parameters", "split"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        gm = graphs.pop("joint")
        parts = _parts(gm, assign_stages(gm, beginnings_of(gm, self.begin)))
        stages = [_stage_graph(gm, parts, number) for number in range(len(parts))]
        _check_written(stages)
        for number, stage in enumerate(stages):
            graphs[f"stage{number}/joint"] = stage
            context.batch_norms[number] = tuple(batch_norms(stage))


def _check_written(stages: Sequence[fx.GraphModule]) -> None:
    """Raise PlanError if a stage writes an input of the call, or a buffer that another stage reads."""
    taken = {number: ir.placeholders(gm) for number, gm in enumerate(stages)}
    for number, gm in enumerate(stages):
        for role, _ in ir.outputs(gm):
            if isinstance(role, ir.Mutation) and isinstance(role.of, ir.Input):
                raise PlanError(
                    f"forward writes to input {role.of.index} of the call in place, in stage {number}, and neither "
                    "other microbatches nor other ranks would see what is written: let it compute a new tensor"
                )
            written = isinstance(role, ir.Mutation) and isinstance(role.of, ir.Buffer)
            if written and (others := [other for other in taken if other != number and role.of in taken[other]]):
                raise PlanError(
                    f"the buffer {role.of.fqn!r} is written in stage {number} and read in stage {others[0]}, whose "
                    "ranks would not see what is written: let stages begin so that both are in one"
                )


def crossings(gm: fx.GraphModule, assignment: Assignment) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """For each stage the values that it receives from the previous stage, and from the next one."""
    return [(part.received, part.tangents) for part in _parts(gm, assignment)]


@dataclass
class _Part:
    """The nodes that one stage computes for its ``results``, and those that it receives from its neighbours."""

    results: list[tuple[ir.Role | None, Any]] = field(default_factory=list)
    computed: set[fx.Node] = field(default_factory=set)
    received: list[fx.Node] = field(default_factory=list)  # forward values, from the previous stage
    tangents: list[fx.Node] = field(default_factory=list)  # backward values, from the next stage


def _parts(gm: fx.GraphModule, assignment: Assignment) -> list[_Part]:
    parts = [_Part() for _ in range(assignment.count)]
    _assign_results(gm, assignment, parts)
    users: defaultdict[fx.Node, set[int]] = defaultdict(set)  # the stages that use each value; dead values have none
    for number, part in enumerate(parts):
        for _, value in part.results:
            if isinstance(value, fx.Node):
                users[value].add(number)
    for node in reversed(gm.graph.nodes):
        if node in users:
            stages = users[node] if node in assignment.anywhere else {assignment.home[node]}
            for number in stages:
                parts[number].computed.add(node)
            for value in node.all_input_nodes:
                users[value] |= stages
    for node in gm.graph.nodes:
        if node in users and node not in assignment.anywhere:
            for number in range(assignment.home[node] + 1, max(users[node]) + 1):
                parts[number].received.append(node)
            for number in range(min(users[node]), assignment.home[node]):
                parts[number].tangents.append(node)
    return parts


def _assign_results(gm: fx.GraphModule, assignment: Assignment, parts: Sequence[_Part]) -> None:
    """Give each stage its results of the whole graph; gradient sums over several stages are split into partials."""
    for role, value in ir.outputs(gm):
        if isinstance(role, (ir.Output, ir.IntermediateBase)) or not isinstance(value, fx.Node):
            if not (isinstance(role, ir.Gradient) and value is None):
                parts[-1].results.append((role, value))
        elif isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):
            terms: defaultdict[int, list[fx.Node]] = defaultdict(list)
            for term in _terms(value, assignment):
                terms[assignment.home.get(term, 0)].append(term)
            for number, summands in terms.items():
                parts[number].results.append((role, _sum(gm, assignment, number, summands)))
        else:
            parts[assignment.home.get(value, 0)].results.append((role, value))


def _terms(node: fx.Node, assignment: Assignment) -> list[fx.Node]:
    operands = [value for value in node.args if isinstance(value, fx.Node)]
    adds = node.target is aten.add.Tensor and len(operands) == 2 and len(node.users) == 1 and not node.kwargs
    if not adds or any(operand.meta["val"].shape != node.meta["val"].shape for operand in operands):
        return [node]
    terms = [term for operand in operands for term in _terms(operand, assignment)]
    apart = {assignment.home.get(term) for term in terms} != {assignment.home.get(node)}
    return terms if apart else [node]


def _sum(gm: fx.GraphModule, assignment: Assignment, number: int, terms: list[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        with gm.graph.inserting_before(gm.graph.output_node()):
            added = gm.graph.call_function(aten.add.Tensor, (total, term))
        write(added, carried(Change.MERGED, total, term) | {VALUE: term.meta["val"], MADE_BY: DivideIntoStages.name})
        assignment.home[added] = number
        total = added
    return total


def _stage_graph(gm: fx.GraphModule, parts: Sequence[_Part], number: int) -> fx.GraphModule:
    part, last, results = parts[number], len(parts) - 1, list(parts[number].results)
    if number < last:
        results += [(ir.Forwarded(i), node) for i, node in enumerate(parts[number + 1].received)]
    if number > 0:
        results += [(ir.Returned(i), node) for i, node in enumerate(parts[number - 1].tangents)]
    received = [(f"received_{node.name}", ir.Forwarded(i), node) for i, node in enumerate(part.received)]
    returned = [(f"returned_{node.name}", ir.Returned(i), node) for i, node in enumerate(part.tangents)]
    nodes = set(part.computed)
    if number == last:
        nodes |= {node for role, node in ir.placeholders(gm).items() if isinstance(role, ir.Tangent)}
    return subgraph(gm, [node for node in gm.graph.nodes if node in nodes], [*received, *returned], results)
