"""Which pass wrote what differs: the attributes of nodes tell, and for passes that write no nodes, the place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardgraph import ir
from shardgraph.checks.step import Run
from shardgraph.ir.attributes import GIVEN_BY, MADE_BY, PLACEMENTS, RECOMPUTE, REDUCES, ROLE
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
            earlier = self._given.get(_key(run, role))
            if value in self.agreed and earlier is not None and earlier not in self.agreed:
                return  # of another microbatch, which is the one to doubt
        self._given[_key(run, role)] = value

    def of(self, run: Run, node: fx.Node) -> str:
        """The pass that made a node that differs, or of what it is computed from the latest that was not compared.

        If all that was compared and is from the capture, it is the pass that last wrote the node where it is.
        """
        return self._maker(node) or self._writer(run, node)

    def of_result(self, run: Run, role: Any, node: fx.Node) -> str:
        """The pass that made a graph return ``node`` as ``role``, from which it differs."""
        maker = None if node in self.agreed else self._maker(node)
        if maker is not None:
            return maker
        plan = self.program.plan
        divides = "partition" if plan.pipeline is None else "divide-into-stages"
        if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):
            if REDUCES.get(node) == role.of.fqn:
                return MADE_BY.of(node)
            if plan.pipeline is None:
                return divides
            return "reduce-once" if run.graph.endswith("reduce") else "keep-gradients-local"
        averages = plan.pipeline is None and plan.data_size > 1 and node.meta["val"].is_floating_point()
        return "average-buffers" if averages and isinstance(role, ir.Mutation) else divides

    def of_step(self, fqn: str) -> str:
        """The pass that lost a stage's gradient of a parameter, each of those that are there being right."""
        if self.program.plan.pipeline is None:
            return "partition"
        stages = [self.program.stages[number] for number in self.program.owners[fqn]]
        return "drop-untrained" if any(self._dropped(stage.prefix) for stage in stages) else "divide-into-stages"

    def _dropped(self, prefix: str) -> bool:
        """Whether a forward graph of a stage has no backward."""
        graphs = self.program.graphs
        return any(
            prefix + of + "forward" in graphs and prefix + of + "backward" not in graphs for of in ("", "recompute/")
        )

    def _maker(self, node: fx.Node) -> str | None:
        """The pass that made the node or, walking back over what was not compared, the first that made something.

        A graph that takes another value than it was made to take is certain to be wrong, whoever made the rest.
        """
        seen, pending, maker = {node}, [node], None
        while pending:
            each = pending.pop(0)
            maker = maker or MADE_BY.get(each)
            giver = self._giver.get(each)
            given_by = _GIVEN_BY.get(type(ROLE.get(each)))
            if given_by != "reduce-once" and isinstance(giver, fx.Node) and GIVEN_BY.of(each) != giver.name:
                return given_by
            sources = [giver] if each.op == "placeholder" else each.all_input_nodes
            for source in sources:
                if isinstance(source, fx.Node) and source not in seen and source not in self.agreed:
                    seen.add(source)
                    pending.append(source)
        return maker

    def _writer(self, run: Run, node: fx.Node) -> str:
        plan, kind = self.program.plan, run.graph.rpartition("/")[2]
        given = _GIVEN_BY.get(type(ROLE.get(node)))
        if given is not None:
            lost = given == "reduce-once" and self._dropped(run.graph.removesuffix(kind))
            return "drop-untrained" if lost else given
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
