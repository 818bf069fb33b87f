"""Programs of an earlier start: what was lowered from the same captured graph under the same plan, and proved.

Lowering asks nothing but the graph and the plan: the prices that order a schedule are of one described device. An entry
is written once its program is proved, so one that is read needs no proof. Its graphs are read one by one as they are
needed, and what is asked of all of them before the first step is beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from shardgraph.cache import entries
from shardgraph.cache.graphs import graph_data, graph_of
from shardgraph.cache.made_once import Ranks, made_once, shared
from shardgraph.cache.results import entry_name
from shardgraph.cache.values import Reader, Writer, well_formed
from shardgraph.ir import JointGraph
from shardgraph.passes.base import Context, of_kind
from shardgraph.passes.lowering import lower
from shardgraph.passes.pipeline.batch_norm import BatchNorm
from shardgraph.passes.program import Program, schedule
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.plan import Plan
from shardgraph.proof.prove import prove

_GRAPH = "graph "
_RECORDS = ("shapes", "facts", "notes", "sums", "activations")  # of a context, as they are


def lowered(
    joint: JointGraph,
    plan: Plan,
    shapes: Mapping[str, torch.Size],
    show: Callable[[str], None] = lambda stage: None,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
) -> Program:
    """:func:`shardgraph.passes.lowering.lower`, and its proof; or the program on disk, or of another of ``ranks``, that
    both made before. The graph is for ``device``.

    Raises:
        PlanError, DeadlockError: as :func:`shardgraph.passes.lowering.lower`.
        GraphInvariantError: :func:`shardgraph.proof.prove.prove` finds the program wrong.
    """

    def proved() -> Program:
        program = lower(joint, plan, shapes, show)
        show("prove")
        # Derived graphs are made by the same passes when they are needed, and take as long again.
        prove(program, derived=False).raise_if_wrong()
        return program

    name = entry_name(joint.kept, "program", plan.to_yaml(), dict(shapes)) if shared(ranks) else None
    if name is None:
        return proved()
    read = partial(_program_of, joint=joint, plan=plan, shapes=shapes, device=device)
    return made_once("the program", name, proved, partial(_entry, device=device), read, ranks)


def _entry(program: Program, device: torch.device | None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    writer = Writer(device)
    return _program_data(program, writer), writer.tensors


def _program_data(program: Program, writer: Writer) -> dict[str, Any]:
    """The parts of an entry: each graph, what the passes recorded, and what is asked before all graphs are read."""
    context, write = program.context, writer.write
    return {
        **{_GRAPH + name: graph_data(gm, writer) for name, gm in program.graphs.items()},
        "facts": {name: write(getattr(program, name)) for name in _facts(program)},
        "parameters": write({fqn: astuple(entry) for fqn, entry in context.parameters.items()}),
        "batch norms": write({i: tuple(map(astuple, norms)) for i, norms in context.batch_norms.items()}),
        "records": [write(getattr(context, name)) for name in _RECORDS],
    }


@well_formed
def _program_of(
    parts: entries.Parts,
    tensors: list[torch.Tensor],
    joint: JointGraph,
    plan: Plan,
    shapes: Mapping[str, torch.Size],
    device: torch.device | None,
) -> Program:
    reader = Reader(joint.fake_mode, tensors, device)
    names = [part.removeprefix(_GRAPH) for part in parts if part.startswith(_GRAPH)]
    graphs = _Graphs({name: partial(_graph, parts, name, reader) for name in names})
    context = Context(
        plan,
        joint.fake_mode,
        parameters={fqn: ParameterPlan(*each) for fqn, each in reader.read(parts["parameters"]).items()},
        stored=MappingProxyType(dict(joint.stored)),
        batch_norms={
            i: tuple(BatchNorm(*each) for each in norms) for i, norms in reader.read(parts["batch norms"]).items()
        },
        **dict(zip(_RECORDS, map(reader.read, parts["records"]), strict=True)),
    )
    actions = schedule(plan, any(of_kind(graphs, "backward")))
    program = Program(joint, graphs, actions, plan, context.parameters, shapes, context)
    facts = parts["facts"]
    vars(program).update({name: reader.read(facts[name]) for name in _facts(program)})  # as if they had been asked for
    return program


def _facts(program: Program) -> tuple[str, ...]:
    """The cached properties of a program that are asked for before its first step and follow from all its graphs."""
    return "digest", "communication", "trained", "owners", *(["reached"] if program.differentiable else [])


def _graph(parts: entries.Parts, name: str, reader: Reader) -> fx.GraphModule:
    return graph_of(parts[_GRAPH + name], reader)


class _Graphs(Mapping[str, fx.GraphModule]):
    """Graphs by name, each read when it is first asked for."""

    def __init__(self, unread: dict[str, Callable[[], fx.GraphModule]]) -> None:
        self._names, self._unread = tuple(unread), unread
        self._graphs: dict[str, fx.GraphModule] = {}

    def __getitem__(self, name: str) -> fx.GraphModule:
        if name in self._unread:
            self._graphs[name] = self._unread[name]()
            del self._unread[name]
        return self._graphs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
