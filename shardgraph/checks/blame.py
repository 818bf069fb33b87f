"""Which pass wrote what differs: the attributes of nodes tell, and for passes that write no nodes, the place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardgraph import ir
from shardgraph.checks.step import Run
from shardgraph.ir.attributes import MADE_BY, PLACEMENTS, RECOMPUTE, REDUCES, ROLE
from shardgraph.passes.program import Program

_GIVEN_BY: dict[type[ir.Role], str] = {
    ir.Gathered: "gather-once",
    ir.Accumulated: "reduce-once",
    ir.Forwarded: "divide-into-stages",
    ir.Returned: "divide-into-stages",
    ir.Saved: "partition",
}
"""The pass that lets one graph take from another what has this role."""


@dataclass
class Blame:
    """What is known of a step of ``program`` so far: the nodes that ``agreed``, and which gave each graph's inputs."""

    program: Program
    agreed: set[fx.Node] = field(default_factory=set)
    _given: dict[Any, Any] = field(default_factory=dict)
    _giver: dict[fx.Node, Any] = field(default_factory=dict)

    def take(self, run: Run, node: fx.Node) -> None:
        """Note that ``node``, an input, has what an earlier graph gave for its role."""
        self._giver[node] = self._given.get(_key(run, ROLE.get(node)))

    def give(self, run: Run, role: Any, value: Any) -> None:
        """Note that a graph has returned ``value``, a node, as ``role``."""
        if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):
            role = ir.Accumulated(role.of)
        self._given[_key(run, role)] = value

    def of(self, run: Run, node: fx.Node) -> str:
        """The pass that made a node that differs, or of what it is computed from the latest that was not compared.

        If all that was compared and is from the capture, it is the pass that last wrote the node where it is.
        """
        seen, pending = {node}, [node]
        while pending:
            each = pending.pop(0)
            if each in MADE_BY:
                return MADE_BY.of(each)
            sources = [self._giver.get(each)] if each.op == "placeholder" else each.all_input_nodes
            for source in sources:
                if isinstance(source, fx.Node) and source not in seen and source not in self.agreed:
                    seen.add(source)
                    pending.append(source)
        return self._writer(run, node)

    def of_result(self, run: Run, role: Any, node: fx.Node) -> str:
        """The pass that made a graph return ``node`` as ``role``, from which it differs."""
        if node not in self.agreed and (node in MADE_BY or node.op != "placeholder"):
            return self.of(run, node)
        plan = self.program.plan
        divides = "partition" if plan.pipeline is None else "divide-into-stages"
        if isinstance(role, ir.Gradient):
            reduced = run.graph.endswith("reduce") or plan.pipeline is None
            if node in REDUCES and isinstance(role.of, ir.Parameter) and REDUCES.of(node) == role.of.fqn:
                return MADE_BY.of(node)
            return (divides if plan.pipeline is None else "reduce-once") if reduced else "keep-gradients-local"
        averages = isinstance(role, ir.Mutation) and node.meta["val"].is_floating_point() and plan.data_size > 1
        return "average-buffers" if averages else divides

    def of_missing(self, fqn: str) -> str:
        """The pass that lost the gradient of a parameter that no graph returns."""
        if self.program.plan.pipeline is None:
            return "partition"
        stages = [stage for stage in self.program.stages if fqn in stage.parameters]
        lost = any(stage.kept.backward is None for stage in stages)
        return "drop-untrained" if lost else "keep-gradients-local"

    def _writer(self, run: Run, node: fx.Node) -> str:
        plan, kind = self.program.plan, run.graph.rpartition("/")[2]
        given = _GIVEN_BY.get(type(ROLE.get(node)))
        if given is not None:
            return given
        again = "/recompute/" in run.graph
        if kind != "forward" and RECOMPUTE.get(node):
            return "recompute-stage" if again else "recompute"
        if again and kind == "forward":
            return "copy-to-recompute"
        for axis in PLACEMENTS.get(node, {}):
            return "divide-experts" if axis == plan.experts else "shard-operators"
        if kind != "forward":
            return "partition"
        return "capture" if plan.pipeline is None else "divide-into-stages"


def _key(run: Run, role: Any) -> Any:
    """What tells the results of one graph from those of others: neighbours exchange values, the rest is a stage's."""
    stage = run.graph.partition("/")[0] if "/" in run.graph else ""
    return role if isinstance(role, (ir.Forwarded, ir.Returned)) else (stage, role)
