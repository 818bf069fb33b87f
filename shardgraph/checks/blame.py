"""Which pass wrote what differs: the attributes of nodes tell, and for passes that write no nodes, the place."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.checks.step import Run
from shardgraph.ir.attributes import AVERAGES, GIVEN_BY, MADE_BY, PLACEMENTS, RECOMPUTE, REDUCES, ROLE, ROLES
from shardgraph.passes.program import Program
from shardgraph.plans.annotations.constrain import CONSTRAIN

_GIVEN_BY: dict[type[ir.Role], str] = {
    ir.Gathered: "gather-once",
    ir.Accumulated: "reduce-once",
    ir.Forwarded: "divide-into-stages",
    ir.Returned: "divide-into-stages",
    ir.Saved: "partition",
}
"""The pass that lets one graph take from another what has this role."""

_DERIVED_BY = {"inputs": "split-backward", "weights": "split-backward", "backward": "drop-zero-tangents"}
"""The pass that derives each kind of graph from the program's backward graph, where it is not that graph itself."""


@dataclass
class Blame:
    """What is known of a step of ``program`` so far: the nodes that ``agreed``, and which gave each graph's inputs."""

    program: Program
    agreed: set[fx.Node] = field(default_factory=set)
    _given: dict[Any, Any] = field(default_factory=dict)
    _giver: dict[fx.Node, tuple[Any, str | None]] = field(default_factory=dict)

    def take(self, run: Run, node: fx.Node) -> None:
        """Note that ``node``, an input, has what an earlier graph gave for its role."""
        self._giver[node] = self._given.get(_key(run, ROLE.get(node)), (None, None))

    def give(self, run: Run, role: Any, value: Any) -> None:
        """Note that a graph has returned ``value``, a node, as ``role``."""
        if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):
            accumulated = ir.Accumulated(role.of)
            earlier, _ = self._given.get(_key(run, accumulated), (None, None))
            if value in self.agreed and earlier is not None and earlier not in self.agreed:
                return  # of another microbatch, which is the one to doubt
            self._given[_key(run, accumulated)] = value, None
        else:
            self._given[_key(run, role)] = value, self._given_otherwise(run, role, value)

    def of(self, run: Run, node: fx.Node) -> str:
        """The pass that made a node that differs, or of what it is computed from the latest that was not compared.

        If all that was compared and is from the capture, it is the pass that last wrote the node where it is.
        """
        return self._maker(node) or self._writer(run, node)

    def of_result(self, run: Run, role: Any, node: fx.Node) -> str:
        """The pass that made a graph return ``node`` as ``role``, from which it differs."""
        maker = None if node in self.agreed else self._maker(node)
        maker = maker or self._given_otherwise(run, role, node)
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
        return _averages(node.graph, role.of.fqn) if averages and isinstance(role, ir.Mutation) else divides

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
            giver, otherwise = self._giver.get(each, (None, None))
            given_by = _GIVEN_BY.get(type(ROLE.get(each)))
            if given_by != "reduce-once" and isinstance(giver, fx.Node) and GIVEN_BY.of(each) != giver.name:
                return otherwise or given_by
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
        if derived := self._written_otherwise(run, node):
            return derived
        again = "/recompute/" in run.graph
        if kind != "forward" and RECOMPUTE.get(node):
            return "recompute-stage" if again else "recompute"
        if again and kind == "forward":
            return "copy-to-recompute"
        for axis in PLACEMENTS.get(node, {}):
            return "divide-experts" if axis == plan.experts else "shard-operators"
        captured = next((each for each in self.program.joint.module.graph.nodes if each.name == node.name), node)
        if any(each.target is CONSTRAIN for each in captured.all_input_nodes):
            return "remove-constraints"
        if kind != "forward":
            return "partition"
        return "capture" if plan.pipeline is None else "divide-into-stages"

    def _original(self, run: Run) -> tuple[str, fx.Graph] | None:
        """The pass that derived a run's graph, and the backward graph from which it did; None if the program has it."""
        kind = run.graph.rpartition("/")[2]
        backward = self.program.graphs.get(run.graph.removesuffix(kind) + "backward")
        if kind not in _DERIVED_BY or backward is None:
            return None
        return _DERIVED_BY[kind], backward.graph

    def _written_otherwise(self, run: Run, node: fx.Node) -> str | None:
        """The pass that derived a graph, if the operation of ``node`` is not that of the graph it was derived from."""
        derived_by, original = self._original(run) or ("", node.graph)
        if original is node.graph:
            return None
        zero = _zero(original, node.graph)
        copied = any(each.name == node.name and _text(each, zero) == _text(node) for each in original.nodes)
        return None if copied else derived_by

    def _given_otherwise(self, run: Run, role: Any, value: Any) -> str | None:
        """The pass that derived a graph, if that returns another node as ``role`` than what it was derived from."""
        derived_by, original = self._original(run) or ("", None)
        if original is None or not isinstance(value, fx.Node) or original is value.graph:
            return None
        output = original.output_node()
        results: Any = zip(ROLES.of(output), output.args[0], strict=True)
        same = any(each == role and getattr(node, "name", None) == value.name for each, node in results)
        return None if same else derived_by


def _averages(graph: fx.Graph, fqn: str) -> str:
    """The pass that a buffer's average is from: if it is in a graph that does not return it, the one that wrote it."""
    written = (MADE_BY.of(node) for node in graph.nodes if ir.is_collective(node) and fqn in AVERAGES.get(node, ()))
    return next(written, "average-buffers")


def _text(node: fx.Node, zero: Set[fx.Node] = frozenset()) -> Any:
    """An operation and its operands, by the names that they have where they are computed, without adding ``zero``."""

    def name(operand: fx.Node) -> str:
        if operand.target is torch.ops.aten.add.Tensor and not zero.isdisjoint(operand.all_input_nodes):
            rest = [each for each in operand.all_input_nodes if each not in zero]
            return name(rest[0]) if len(rest) == 1 else operand.name
        return GIVEN_BY.get(operand, operand.name)

    return node.target, fx.node.map_arg((node.args, node.kwargs), name)


def _zero(original: fx.Graph, derived: fx.Graph) -> set[fx.Node]:
    """The values of a backward graph that are zero without the tangents that a derived graph does not take.

    They depend on those tangents and on no other: all that backward computes is linear in tangents.
    """
    taken = {ROLE.get(node) for node in derived.find_nodes(op="placeholder")}
    depends: dict[fx.Node, set[bool]] = {}  # on tangents that are taken, and on others
    for node in original.nodes:
        role = ROLE.get(node) if node.op == "placeholder" else None
        own = {role in taken} if isinstance(role, ir.Tangent) else set()
        depends[node] = own.union(*(depends[each] for each in node.all_input_nodes))
    return {node for node, on in depends.items() if on == {False}}


def _key(run: Run, role: Any) -> Any:
    """What tells the results of one graph from those of others: neighbours exchange values, the rest is a stage's."""
    stage = run.graph.partition("/")[0] if "/" in run.graph else ""
    return role if isinstance(role, (ir.Forwarded, ir.Returned)) else (stage, role)
