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
    absent: frozenset[ir.Tangent] = frozenset()

    def __str__(self) -> str:
        where = self.node if self.result is None else f"result {self.result}"
        return f"{self.made_by}: {self.fault} at {where} in {self.graph}"

    def of(self, program: Program) -> Program:
        """The program with the fault."""
        right, graphs = program, dict(program.graphs)
        gm = ir.copy_graph(right.graph(self.graph, self.absent))
        program = replace(right, graphs=graphs)
        if self.graph in graphs and not self.absent:
            graphs[self.graph] = gm  # what is derived from it has the fault too
        else:
            program._made.update({**right._made, (self.graph, self.absent): gm})
        (node,) = (node for node in gm.graph.nodes if node.name == self.node)
        FAULTS[self.fault].write(Site(program, self.graph, node, self.result, self.absent))
        gm.graph.eliminate_dead_code()
        return program


def mutants(program: Program) -> Iterator[Mutant]:
    """All faults that passes could have made in a program, and in the graphs that running it has derived."""
    whole: frozenset[ir.Tangent] = frozenset()
    for name, absent in [*((name, whole) for name in program.graphs), *program._made]:
        gm = program.graph(name, absent)
        output = gm.graph.output_node()
        sites = [Site(program, name, node, absent=absent) for node in gm.graph.nodes if node is not output]
        sites += [Site(program, name, output, i, absent) for i in range(len(ir.outputs(gm)))]
        for site in sites:
            for fault, kind in FAULTS.items():
                made_by = kind.made_by(site)
                if made_by and site.derived_by in (None, made_by):
                    yield Mutant(made_by, fault, name, site.node.name, site.result, absent)


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
