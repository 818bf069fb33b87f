"""A program: the result of lowering a captured graph for one kind of call, the same text on every rank.

It has named graphs, and actions that each run one of them: ``forward`` and ``backward`` or, with a pipeline, graphs of
each stage, such as ``stage0/forward``. Those run for each microbatch, ``stage0/gather`` and ``stage0/reduce`` once per
step, and ``stage0/recompute/forward`` and ``.../backward`` for microbatches that recompute forward in backward.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.cost_models.actions import Action, Kind, Order
from shardgraph.passes.analysis.loss_reduction import LossReduction, loss_reductions
from shardgraph.passes.analysis.parameter_readers import Names, in_memory_of
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, run_on_graphs, sibling
from shardgraph.passes.parameters.accumulate_gradients import (
    AddAccumulated,
    KeepGradientsLocal,
    ReduceAlone,
    local_gradient,
)
from shardgraph.passes.parameters.shadow import Shadow
from shardgraph.passes.parameters.update_parameters import UpdateParameters
from shardgraph.passes.partition.drop_zero_tangents import DropZeroTangents
from shardgraph.passes.pipeline.batch_norm import BatchNorm
from shardgraph.passes.pipeline.weight_gradients import SplitBackward
from shardgraph.passes.schedule.follow import form as _form
from shardgraph.passes.schedule.follow import in_words, put_in_order
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.plan import Plan

# The passes that derive each kind of graph from the backward graph beside it.
_DERIVED: dict[str, tuple[GraphsPass, ...]] = {
    "local": (KeepGradientsLocal(),),  # inside no_sync
    "accumulate": (AddAccumulated(),),  # ends no_sync
    "reduce": (ReduceAlone(),),  # ends it for parameters that the program which ends it does not have
    "inputs": (SplitBackward(),),  # the half of backward that the previous stage waits for
    "weights": (SplitBackward(),),  # the other half
}
_GRAPH_OF: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}


@dataclass(frozen=True, eq=False)
class Halves:
    """The graphs of one stage for one microbatch, whose names begin with ``prefix``."""

    program: Program
    prefix: str

    def name(self, kind: Kind) -> str:
        """The name of the graph that an action of this kind runs."""
        return self.prefix + _GRAPH_OF[kind]

    @property
    def forward(self) -> fx.GraphModule:
        """Forward."""
        return self.program.graphs[self.prefix + "forward"]

    @property
    def backward(self) -> fx.GraphModule | None:
        """This rank's gradients, in a pipeline whole and unreduced; None if no stage up to this one is trained."""
        return self.program.graphs.get(self.prefix + "backward")

    @property
    def parts(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The two halves of backward: gradients of the stage's inputs, and of its weights."""
        return self.program.graph(self.name("I")), self.program.graph(self.name("W"))


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One stage, the same text on all its ranks: the program's graphs whose names begin with ``prefix``.

    ``batch_norms`` are those whose running statistics a training step of a pipeline updates.
    """

    program: Program
    number: int
    prefix: str
    batch_norms: tuple[BatchNorm, ...]

    @property
    def gather(self) -> fx.GraphModule | None:
        """Gathers, once per step, the parameters that are kept."""
        return self.program.graphs.get(self.prefix + "gather")

    @property
    def reduce(self) -> fx.GraphModule | None:
        """Reduces, once per step, the gradients accumulated over microbatches."""
        return self.program.graphs.get(self.prefix + "reduce")

    @cached_property
    def kept(self) -> Halves:
        """The graphs of microbatches whose activations are saved for backward."""
        return Halves(self.program, self.prefix)

    @cached_property
    def again(self) -> Halves:
        """The graphs of microbatches whose forward is recomputed in backward."""
        prefix = self.prefix + "recompute/"
        return Halves(self.program, prefix) if prefix + "forward" in self.program.graphs else self.kept

    @cached_property
    def parameters(self) -> list[str]:
        """The names of the parameters that the stage uses."""
        graphs = [graph for graph in (self.gather, self.kept.forward) if graph is not None]
        return [role.fqn for graph in graphs for role in ir.placeholders(graph) if isinstance(role, ir.Parameter)]

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that get a gradient here."""
        backward = self.kept.backward
        return frozenset() if backward is None else frozenset(gradients_of(ir.outputs(backward)))

    @cached_property
    def written(self) -> list[str]:
        """The names of the buffers that the stage writes."""
        roles = [role for role, _ in ir.outputs(self.kept.forward)]
        return [role.of.fqn for role in roles if isinstance(role, ir.Mutation) and isinstance(role.of, ir.Buffer)]

    @cached_property
    def received(self) -> list[torch.Tensor]:
        """The values from the previous stage, as fake tensors in order."""
        return _inputs_of(self.kept.forward, ir.Forwarded)

    @cached_property
    def returned(self) -> list[torch.Tensor]:
        """The gradients from the next stage in backward, as fake tensors in order."""
        return [] if self.kept.backward is None else _inputs_of(self.kept.backward, ir.Returned)


@dataclass(frozen=True, eq=False)
class Program:
    """Named graphs, the same on every rank, the actions that run them, and what is needed to call them.

    ``joint`` is the graph as captured, before any rewrite. ``actions`` are what each pipeline rank does in a step.
    ``parameters`` and ``shapes`` are the plan of each parameter and its unsharded shape, by name; ``context`` is the
    context of the passes.
    """

    joint: ir.JointGraph
    graphs: Mapping[str, fx.GraphModule]
    actions: Order
    plan: Plan
    parameters: Mapping[str, ParameterPlan]
    shapes: Mapping[str, torch.Size]
    context: Context
    _made: dict[tuple[str, frozenset[ir.Tangent]], fx.GraphModule] = field(default_factory=dict, init=False, repr=False)

    @property
    def differentiable(self) -> bool:
        """Whether a program without a pipeline has a backward graph."""
        return "backward" in self.graphs

    @property
    def forward(self) -> fx.GraphModule:
        """The forward graph of a program without a pipeline."""
        return self.graphs["forward"]

    @property
    def backward(self) -> fx.GraphModule | None:
        """Its backward graph, where it is differentiable."""
        return self.graphs.get("backward")

    @cached_property
    def stages(self) -> tuple[StageProgram, ...]:
        """The stages of the pipeline; without one, the only stage."""
        names = of_kind(self.graphs, "forward")
        prefixes = dict.fromkeys(sibling(name, "").removesuffix("recompute/") for name in names)
        norms = self.context.batch_norms
        return tuple(StageProgram(self, i, prefix, norms.get(i, ())) for i, prefix in enumerate(prefixes))

    def graph(self, name: str, absent: frozenset[ir.Tangent] = frozenset()) -> fx.GraphModule:
        """A graph by name; ``local``, ``accumulate``, ``reduce``, ``update``, ``inputs`` and ``weights`` are made from
        backward on first use.

        ``absent`` are the tangents that are undefined because the loss does not depend on their outputs.
        """
        if name in self.graphs and not absent:
            return self.graphs[name]
        if (name, absent) not in self._made:
            self._made.update({(made, absent): gm for made, gm in self._derived(name, absent).items()})
        return self._made[name, absent]

    def glimpse(self, name: str) -> fx.GraphModule:
        """As :meth:`graph`, but one that is made for this is not kept for later."""
        known = name in self.graphs or (name, frozenset()) in self._made
        return self.graph(name) if known else self._derived(name, frozenset())[name]

    def _derived(self, name: str, absent: frozenset[ir.Tangent]) -> Graphs:
        """What is made from backward for a graph of this name: that, and what is made with it."""
        backward = sibling(name, "backward")
        graphs: Graphs = {backward: ir.copy_graph(self.graphs[backward])}
        steps: list[GraphsPass] = [DropZeroTangents(absent)] if absent else []
        steps += [UpdateParameters(self._saved)] if name == "update" else _DERIVED.get(name.rpartition("/")[2], ())
        run_on_graphs(graphs, steps, self.context.of_graph())
        return {(name if made == backward else made): gm for made, gm in graphs.items()}

    def shadow(self, name: str) -> fx.GraphModule:
        """What a rank without a batch runs while others run graph ``name``; see :class:`Shadow`."""
        key = f"shadow of {name}", frozenset[ir.Tangent]()
        if key not in self._made:
            graphs: Graphs = {name: self.graph(name)}
            run_on_graphs(graphs, [Shadow()], self.context.of_graph())
            self._made[key] = graphs[name]
        return self._made[key]

    @cached_property
    def _saved(self) -> dict[ir.Role, Names]:
        """The parameters in whose memory forward may have left each value that it saves."""
        parameters = (role for role in ir.placeholders(self.forward) if isinstance(role, ir.Parameter))
        names = in_memory_of(self.forward, {role: frozenset({role.fqn}) for role in parameters})
        results = ir.outputs(self.forward)
        return {role: names[value] for role, value in results if role is not None and isinstance(value, fx.Node)}

    @property
    def without(self) -> list[frozenset[ir.Tangent]]:
        """The tangents that were undefined in backward graphs made so far."""
        return list(dict.fromkeys(absent for _, absent in self._made if absent))

    @property
    def notes(self) -> list[str]:
        """Decisions of the passes that are worth knowing, such as what every rank computes whole."""
        return self.context.notes

    @cached_property
    def random(self) -> bool:
        """Whether forward draws random numbers."""
        return any(draws(node) for stage in self.stages for node in stage.kept.forward.graph.nodes)

    @cached_property
    def draws_on_host(self) -> bool:
        """Whether forward draws random numbers by NumPy."""
        stages = (stage.kept.forward.graph for stage in self.stages)
        return any(graph.find_nodes(op="call_function", target=ir.DRAWN_MASK) for graph in stages)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that get a gradient."""
        return frozenset().union(*(stage.trained for stage in self.stages))

    @cached_property
    def losses(self) -> dict[int, LossReduction]:
        """How each 0-dimensional output is reduced over the rows of the batch, by its index.

        Raises:
            ShardGraphError: one is not a weighted sum of sums and means over rows; the message has the line.
        """
        return loss_reductions(self.joint)

    @cached_property
    def needed(self) -> frozenset[str]:
        """The parameters that backward needs the value of: forward saves it, or what follows from it alone."""
        alone: dict[Any, str] = {
            node: role.fqn for role, node in ir.placeholders(self.forward).items() if isinstance(role, ir.Parameter)
        }
        for node in self.forward.graph.nodes:
            packed = ir.buckets.packed_as(node)
            sources = {alone.get(each) for each in ([packed] if packed else node.all_input_nodes)}
            if len(sources) == 1 and (fqn := sources.pop()) is not None:
                alone[node] = fqn
        saved = (value for role, value in ir.outputs(self.forward) if isinstance(role, ir.Saved))
        return frozenset(alone[value] for value in saved if value in alone)

    @cached_property
    def reached(self) -> dict[ir.Tangent, frozenset[str]]:
        """The parameters whose gradients depend on each incoming gradient, of a program that has any."""
        gm = self.joint.module if self.backward is None else self.backward  # a pipeline's stages have parts of it
        inputs = ir.placeholders(gm)
        depends: dict[fx.Node, frozenset[ir.Role]] = {
            node: frozenset({role}) for role, node in inputs.items() if isinstance(role, ir.Tangent)
        }
        for node in gm.graph.nodes:
            depends.setdefault(node, frozenset().union(*(depends[each] for each in node.all_input_nodes)))
        # Each gradient before it is reduced: in a bucket all depend on each other.
        gradients = {fqn: local_gradient(value) for fqn, value in gradients_of(ir.outputs(gm)).items()}
        tangents = [role for role in inputs if isinstance(role, ir.Tangent)]
        return {role: frozenset(f for f, value in gradients.items() if role in depends[value]) for role in tangents}

    @cached_property
    def optional(self) -> list[str]:
        """The parameters that a loss may leave out, since not every differentiable output depends on them."""
        reached = self.reached.values()
        return sorted(frozenset().union(*reached) - frozenset.intersection(*reached)) if reached else []

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter or compute a partial gradient of it; unused ones belong to the first."""
        used = [{*stage.parameters, *stage.trained} for stage in self.stages]
        return {fqn: tuple(i for i, names in enumerate(used) if fqn in names) or (0,) for fqn in self.shapes}

    @cached_property
    def text(self) -> str:
        """All graphs as text, the same on every rank."""
        graphs = ((f"graph {name}:", *map(fx.Node.format_node, gm.graph.nodes)) for name, gm in self.graphs.items())
        return "\n".join(line or "" for line in itertools.chain.from_iterable(graphs))

    @cached_property
    def digest(self) -> str:
        """The number of lines of the text and a digest of it: what ranks compare before they run."""
        return f"{len(self.text.splitlines())} nodes, digest {hashlib.sha256(self.text.encode()).hexdigest()}"

    @cached_property
    def communication(self) -> str:
        """The communication of a call as text, in order; ranks may mix programs for which it is equal."""
        lines = [f"{name}: {line}" for name, gm in self.graphs.items() for line in self._communication_of(gm)]
        if lines and self.differentiable and self.optional:  # backward asks all ranks for those
            lines.append(f"which of {self.optional} have a gradient")
        if any(size > 1 for _, size in self.plan.mesh):
            lines += [f"which rows of {each.fqn} are shortened" for each in self.joint.shortened]
        return "\n".join(lines)

    def _communication_of(self, gm: fx.GraphModule) -> Iterator[str]:
        yield from map(in_words, ir.collectives(gm))
        if self.plan.pipeline is not None:  # messages between stages, and reductions outside the graphs
            yield f"results {[(role, _form(value)) for role, value in ir.outputs(gm)]}"

    def following(self, communication: str) -> Program:
        """The same program with its collectives in the order of that ``communication``, of another program.

        Schedules follow from times, and so from the sizes of a batch, but which collectives there are does not. The
        program itself if what it communicates is something else, or cannot be in that order.
        """
        if sorted(self.communication.splitlines()) != sorted(communication.splitlines()):
            return self
        graphs = {name: ir.copy_graph(gm) for name, gm in self.graphs.items()}
        for name, gm in graphs.items():
            prefix = f"{name}: "
            order = [line.removeprefix(prefix) for line in communication.splitlines() if line.startswith(prefix)]
            if not put_in_order(gm, order):
                return self
        return Program(self.joint, graphs, self.actions, self.plan, self.parameters, self.shapes, self.context)


def schedule(plan: Plan, trains: bool) -> Order:
    """The actions of each pipeline rank in a step; without a pipeline forward, then backward."""
    order: Order = ((Action(0, "F", 0), Action(0, "B", 0)),) if plan.pipeline is None else plan.pipeline.order
    return order if trains else tuple(tuple(a for a in actions if a.kind == "F") for actions in order)


def gradients_of(results: Iterable[tuple[ir.Role | None, Any]]) -> dict[str, Any]:
    """The gradients of parameters among results by role, by the parameter's name."""
    return {
        role.of.fqn: value
        for role, value in results
        if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter) and value is not None
    }


def _inputs_of(gm: fx.GraphModule, kind: type[ir.Forwarded | ir.Returned]) -> list[torch.Tensor]:
    inputs = {role.index: node.meta["val"] for role, node in ir.placeholders(gm).items() if isinstance(role, kind)}
    return [inputs[index] for index in sorted(inputs)]
