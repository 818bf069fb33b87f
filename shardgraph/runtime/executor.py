"""Runs a program on this rank: its named graphs, bound to the mesh and called with values by role."""

from __future__ import annotations

import linecache
import re
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph import ir, torch_api
from shardgraph.errors import CollectiveError, RankFailedError, RankMismatchError, ShardGraphError
from shardgraph.passes.analysis.liveness import settle_memory
from shardgraph.passes.base import sibling
from shardgraph.passes.parameters.accumulate_gradients import adding_to_earlier
from shardgraph.passes.program import Program
from shardgraph.runtime import host, watch
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.backends import Backend, eager
from shardgraph.runtime.bind import bind
from shardgraph.runtime.gradient_statistics import GradientStatistics
from shardgraph.runtime.layout import Layout
from shardgraph.runtime.ranges import in_ranges
from shardgraph.runtime.side_by_side import Stored
from shardgraph.torch_api import pytree


class State:
    """State shared by calls of one sharded module: its tensors, and gradients not yet reduced.

    ``stored`` says which shards lie side by side, ``steps`` how often they were all changed together, ``updates`` what
    optimizers that do so remember.
    ``unreduced`` are gradients of backward passes under ``no_sync`` by parameter, which those of ``unsynced`` computed.
    ``statistics`` are what is measured of gradients. ``accumulated`` are all dictionaries that are cleared with the
    gradients of parameters: those of a pipeline's stages too. ``mesh`` is that of the ``replica`` of this number;
    ``backend`` makes what runs its graphs, ``agreement`` is that of its ranks; ``random`` is whose random numbers they
    draw (:mod:`shardgraph.runtime.sample_rows`).
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None,
        device: torch.device,
        replica: int = 0,
        backend: Backend = eager.backend,
        agreement: Agreement | None = None,
        random: str = "ranks",
    ) -> None:
        self.model, self.mesh, self.device, self.replica, self.backend = model, mesh, device, replica, backend
        self.agreement, self.random = agreement, random
        self.joining: Any = None  # what ranks without data are told by, while there may be any
        self.hook: Any = None  # what reduces gradients in place of programs
        self.layout = Layout(model)
        self.stored = Stored()
        self._unarranged: list[fx.GraphModule] = []
        self.steps = 0
        self.updates: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self.unreduced: dict[str, torch.Tensor] = {}
        self.statistics = GradientStatistics()
        measured = self.statistics.own, self.statistics.measured
        self.accumulated: list[dict[str, Any]] = [self.unreduced, *measured]
        self.unsynced: dict[Executor, None] = {}  # in the order of their first, which all ranks have in common

    def arrange(self, *graphs: fx.GraphModule) -> None:
        """Store shards side by side as these graphs gather them; as soon as parameters are shards."""
        self._unarranged += graphs
        if self.layout.settled:
            for gm in self._unarranged:
                self.stored.arrange(gm, self.layout.parameter)
            self._unarranged.clear()

    def add_gradients(self, local: Mapping[str, torch.Tensor]) -> None:
        """Add this rank's shards of gradients to those that parameters have, by way of the hooks of a parameter."""
        for fqn, value in local.items():
            parameter = self.layout.parameter(fqn)
            placed = torch_api.as_placed(value, parameter) if isinstance(parameter, DTensor) else value
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                torch.autograd.backward(parameter, placed)
                continue
            parameter.grad = placed if parameter.grad is None else parameter.grad + placed

    def value(self, role: ir.Role, leaves: Sequence[Any]) -> Any:
        """The value of a placeholder with this role."""
        if isinstance(role, ir.Parameter):
            return self.layout.parameter(role.fqn)
        if isinstance(role, ir.Buffer):
            return self.layout.buffer(role.fqn)
        assert isinstance(role, ir.Input)
        return leaves[role.index]


class Executor:
    """The graphs of a :class:`Program`, each bound to this rank when it is first needed."""

    def __init__(self, program: Program, state: State) -> None:
        self.program, self.state = program, state
        self._bound: dict[tuple[str, frozenset[ir.Tangent]], Bound] = {}
        # Views are rebuilt by strides, and a pass may have given what they are of another layout than was traced.
        viewed = {alias.base for alias in program.joint.aliases.values() if alias.size is not None}
        results = ir.outputs(program.joint.module) if viewed else []
        values = ((role, value) for role, value in results if role in viewed)
        self._viewed = {role: value.meta["val"].stride() for role, value in values if isinstance(value, fx.Node)}

    def graph(self, name: str, absent: frozenset[ir.Tangent] = frozenset()) -> Bound:
        """The bound graph ``name``; see :meth:`Program.graph`."""
        if (name, absent) not in self._bound:
            gm = self.program.graph(name, absent)
            self.state.arrange(gm)
            self._bound[name, absent] = self._bind(gm, name)
        return self._bound[name, absent]

    def adding(self, name: str, absent: frozenset[ir.Tangent] = frozenset()) -> Bound:
        """The bound graph ``name`` as a call or microbatch after the first runs it; see :func:`adding_to_earlier`."""
        key = f"adding of {name}", absent
        if key not in self._bound:
            self._bound[key] = self._bind(adding_to_earlier(self.program.graph(name, absent)), name)
        return self._bound[key]

    def _bind(self, gm: fx.GraphModule, name: str) -> Bound:
        state, forward = self.state, self.program.graphs.get(sibling(name, "forward"))
        # Ranks of a pipeline run their own graphs, and count steps instead.
        agreement = state.agreement if self.program.plan.pipeline is None else None
        return Bound(self.as_run(gm), state.mesh, state.backend, forward, state.model, agreement, name)

    def as_run(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A graph of the program as it is bound."""
        return gm

    def shadow(self, name: str) -> Bound:
        """The bound graph that a rank without a batch runs while others run ``name``."""
        key = f"shadow of {name}", frozenset[ir.Tangent]()
        if key not in self._bound:
            made = self.program.shadow(name)
            self._bound[key] = Bound(made, self.state.mesh, eager.backend, None, self.state.model, self.state.agreement)
        return self._bound[key]

    def deliver(self, by_role: Mapping[Any, Any], leaves: Sequence[Any]) -> Any:
        """The model's output, from the results of its program by role. Sets the attributes that are results too."""
        output, values = self.rebuild(by_role, leaves)
        for attribute, value in zip(self.program.joint.results, values, strict=True):
            attribute.set(self.state.model, value)
        return output

    def rebuild(self, by_role: Mapping[Any, Any], leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The model's output and the values of the attributes that it sets, from the results of its program by role."""
        by_role = {**by_role, **{r: torch_api.with_strides(by_role[r], strides) for r, strides in self._viewed.items()}}
        values = {role.index: value for role, value in by_role.items() if isinstance(role, ir.Output)}
        for index, alias in self.program.joint.aliases.items():
            is_input = isinstance(alias.base, (ir.Input, ir.Buffer))
            base = self.state.value(alias.base, leaves) if is_input else by_role.get(alias.base)
            view = alias.view(base)
            values[index] = view.detach() if alias.detached and view.requires_grad else view
        joint = self.program.joint
        made = pytree.tree_unflatten([values[i] for i in range(len(values))], joint.out_spec)
        return made if joint.results else (made, [])


def mesh_rank(mesh: DeviceMesh | None) -> int:
    """This rank's position in the flattened mesh, row by row; 0 without a mesh."""
    rank = 0
    for axis in range(mesh.ndim) if mesh is not None else ():
        rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    return rank


class Bound:
    """One graph bound to this rank, called with a list of inputs that it empties.

    ``inputs`` has the roles of its inputs with the values that they were traced with; ``results`` likewise for its
    results, of which those of ``own`` share memory with nothing else. ``after`` is the forward graph that ran before
    and may have left copies in flight, ``model`` the one that was captured. While there is an ``observer``, it runs the
    graphs of all, with the same inputs, and the number of the microbatch in a pipeline. One that communicates tells the
    ``agreement`` that it begins.
    """

    observer: ClassVar[Callable[[Bound, list[Any], int | None], Sequence[Any]] | None] = None

    def __init__(
        self,
        gm: fx.GraphModule,
        mesh: DeviceMesh | None,
        backend: Backend = eager.backend,
        after: fx.GraphModule | None = None,
        model: nn.Module | None = None,
        agreement: Agreement | None = None,
        name: str = "",
    ) -> None:
        self.module, self.model, self.name = bind(gm, mesh), model, name
        self._agreement = agreement if any(map(ir.is_collective, gm.graph.nodes)) else None
        self.inputs: list[tuple[ir.Role, Any]] = [
            (role, node.meta.get("val")) for role, node in ir.placeholders(self.module).items()
        ]
        self.results: list[tuple[ir.Role | None, Any]] = [
            (role, value.meta.get("val") if isinstance(value, fx.Node) else value)
            for role, value in ir.outputs(self.module)
        ]
        self.own = settle_memory(self.module)
        self._call = backend(self.module)
        watch.place.know(self._call, self.module)
        self._has_ranges = backend is eager.backend
        continues = any(isinstance(role, ir.Saved) for role, _ in self.results)
        copies = any(ir.is_copy(node) for each in (gm, after) if each is not None for node in each.graph.nodes)
        # After a step's last graph the caller may change parameters, and read gradients, in host memory.
        self.settles = copies and not continues

    def __call__(self, inputs: list[Any], microbatch: int | None = None) -> list[Any]:
        if self._agreement is not None:
            watch.begin_graph()
            self._agreement.go_on()
        try:
            with torch_api.below_autograd():
                observed = Bound.observer
                results = list(self._run(inputs) if observed is None else observed(self, inputs, microbatch))
        except Exception as error:
            node = self._failing_collective(error)
            if node is None or not isinstance(error, RuntimeError) or isinstance(error, ShardGraphError):
                if self._agreement is not None and not isinstance(error, RankFailedError):
                    watch.abandon(error)  # others may wait in this graph
                raise
            if self._agreement is not None and (verdict := self._agreement.verdict_against()) is not None:
                raise RankMismatchError(verdict) from error
            what = ir.describe_collective(node)
            if (cause := watch.failed(error, what)) is not None:
                raise cause from error
            said = watch.plain(error) if watch.is_of_others(error) else error
            raise CollectiveError(f"{what} failed: {said}\n  {_whose(error)}") from error
        if self.settles:
            host.settle()
        return results

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph; in named ranges while a profiler records, for which there is other code."""
        if not torch_api.is_profiled() or not self._has_ranges:
            return self._call(inputs)
        return self._ranged(inputs)

    @cached_property
    def _ranged(self) -> Callable[[list[Any]], Sequence[Any]]:
        made: Callable[[list[Any]], Sequence[Any]] = in_ranges(self.module, self.name)
        return made

    def _failing_collective(self, error: BaseException) -> fx.Node | None:
        """The collective whose line of generated code raised, or None if another operation did."""
        name = None
        for frame, number in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if "eval_with_key" in file and (line := re.match(r"\s*(\w+)", linecache.getline(file, number))):
                name = line.group(1)
        node = next((node for node in self.module.graph.nodes if node.name == name), None)
        if node is not None and node.target is ir.WAIT:
            node = node.args[0]
        return node if node is not None and ir.is_collective(node) else None


def _whose(error: RuntimeError) -> str:
    """Text that says whether a collective failed because of another rank or of this rank's own call."""
    if watch.is_of_others(error):
        return "another rank died, left this step early or runs another program; look at its output first"
    return "this rank's own call was refused, for what it was called with: no other rank is the cause"
