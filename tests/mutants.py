"""Programs with a fault each, as a wrong pass would write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from shardgraph import ir
from shardgraph.passes.program import Program
from tests.faults import FAULTS, Site


@dataclass(frozen=True)
class Mutant:
    """A fault that ``made_by`` could have made at a node of one of a program's graphs, or at one of its results."""

    made_by: str
    fault: str
    graph: str
    node: str
    result: int | None = None

    def __str__(self) -> str:
        where = self.node if self.result is None else f"result {self.result}"
        return f"{self.made_by}: {self.fault} at {where} in {self.graph}"

    def of(self, program: Program) -> Program:
        """The program with the fault."""
        graphs = {name: ir.copy_graph(gm) if name == self.graph else gm for name, gm in program.graphs.items()}
        program = replace(program, graphs=graphs)
        graph = graphs[self.graph].graph
        (node,) = (node for node in graph.nodes if node.name == self.node)
        FAULTS[self.fault].write(Site(program, self.graph, node, self.result))
        graph.eliminate_dead_code()
        return program


def mutants(program: Program) -> Iterator[Mutant]:
    """All faults that passes could have made in a program."""
    for name, gm in program.graphs.items():
        output = gm.graph.output_node()
        sites = [Site(program, name, node) for node in gm.graph.nodes if node is not output]
        sites += [Site(program, name, output, i) for i in range(len(ir.outputs(gm)))]
        for site in sites:
            for fault, kind in FAULTS.items():
                made_by = kind.made_by(site)
                if made_by:
                    yield Mutant(made_by, fault, name, site.node.name, site.result)


def chosen(program: Program, seed: int, per_pass: int) -> list[Mutant]:
    """Some of each pass's mutants, of as many faults as there are."""
    order = list(mutants(program))
    Random(seed).shuffle(order)
    picked = []
    for made_by in sorted({mutant.made_by for mutant in order}):
        taken: dict[str, list[Mutant]] = {}
        for mutant in order:
            if mutant.made_by == made_by:
                taken.setdefault(mutant.fault, []).append(mutant)
        rounds = max(map(len, taken.values()))
        picked += [each[i] for i in range(rounds) for each in taken.values() if i < len(each)][:per_pass]
    return picked
