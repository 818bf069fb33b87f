"""How a program runs on this rank: its graphs bound to the mesh and tied into autograd."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph import ir, torch_api
from shardgraph.errors import CollectiveError, ShardGraphError
from shardgraph.ir import (
    Accumulated,
    Buffer,
    Input,
    IntermediateBase,
    Mutation,
    Output,
    Parameter,
    Role,
    Saved,
    Tangent,
)
from shardgraph.passes.program import Emitted, Program
from shardgraph.runtime import host
from shardgraph.runtime.bind import bind
from shardgraph.runtime.rng import rank_generator
from shardgraph.torch_api import pytree


@dataclass(frozen=True)
class State:
    """What calls of one sharded module share: its tensors, and gradients that wait for their reduction."""

    model: nn.Module
    mesh: DeviceMesh | None
    unreduced: dict[str, torch.Tensor]
    device: torch.device

    def value(self, role: Role, leaves: Sequence[Any]) -> Any:
        """The tensor that a placeholder of this role stands for."""
        if isinstance(role, Parameter):
            return self.model.get_parameter(role.fqn)
        if isinstance(role, Buffer):
            return _attribute(self.model, role.fqn)
        assert isinstance(role, Input)
        return leaves[role.index]


def _attribute(model: nn.Module, fqn: str) -> Any:
    path, _, key = fqn.rpartition(".")
    return getattr(model.get_submodule(path), key)


class Executable:
    """A :class:`Program` bound to this rank, ready to be called."""

    def __init__(self, program: Program, state: State) -> None:
        self.program, self.state = program, state
        self.forward = Bound(program.forward, state.mesh)
        self._backwards: dict[tuple[str, frozenset[Tangent]], Bound] = {}

    @cached_property
    def through_autograd(self) -> list[int]:
        """Positions of forward's results that autograd returns: tensors that the user sees, or whose views."""

        def passes(role: Role | None, value: Any) -> bool:
            shown = isinstance(role, Output) and role.index not in self.program.aliases
            return isinstance(value, fx.Node) and (shown or isinstance(role, IntermediateBase))

        return [i for i, (role, value) in enumerate(self.forward.gives) if passes(role, value)]

    def backward(self, name: str, absent: frozenset[Tangent] = frozenset()) -> Bound:
        """The bound backward variant; see :meth:`Program.backward_variant`."""
        if (name, absent) not in self._backwards:
            variant = self.program.backward_variant(name, absent)
            self._backwards[name, absent] = Bound(variant, self.state.mesh)
        return self._backwards[name, absent]

    def __call__(self, leaves: Sequence[Any], sync: Callable[[], bool]) -> Any:
        """Run on the flattened inputs of a call; returns what the model would. ``sync()`` is asked in backward."""
        inputs = [self.state.value(role, leaves) for role in self.forward.takes]
        if self.program.backward is None:
            with torch.no_grad():
                results = self.run_forward([torch_api.local_tensor(value) for value in inputs], leaves)
        else:
            box: list[Any] = []
            tensors = _Run.apply(self, leaves, sync, box, *inputs)
            results = box[0]
            for position, tensor in zip(self.through_autograd, tensors, strict=True):
                results[position] = tensor
        return self._rebuild(results, leaves)

    def run_forward(self, inputs: list[Any], leaves: Sequence[Any]) -> list[Any]:
        """Run the forward graph on local tensors and write what it mutates; returns its raw results."""
        mesh, plan = self.state.mesh, self.program.plan
        if self.program.random and mesh is not None and plan.data_size > 1:
            with rank_generator(plan.data_rank(mesh_rank(mesh)), plan.data_size, self.state.device):
                results = self.forward(inputs)
        else:
            results = self.forward(inputs)
        for (role, _), value in zip(self.forward.gives, results, strict=True):
            if isinstance(role, Mutation):
                torch_api.local_tensor(self.state.value(role.of, leaves)).copy_(value)
        return results

    def _rebuild(self, results: list[Any], leaves: Sequence[Any]) -> Any:
        by_role = {role: value for (role, _), value in zip(self.forward.gives, results, strict=True)}
        return rebuild(self.program, by_role, leaves, self.state)


def rebuild(program: Emitted, by_role: Mapping[Any, Any], leaves: Sequence[Any], state: State) -> Any:
    """What the model returns, from the results of its program by role."""
    values = {role.index: value for role, value in by_role.items() if isinstance(role, Output)}
    for index, alias in program.aliases.items():
        base = leaves[alias.base.index] if isinstance(alias.base, Input) else by_role.get(alias.base)
        base = state.value(alias.base, leaves) if isinstance(alias.base, Buffer) else base
        if alias.size is None:
            values[index] = base
        else:
            values[index] = base.as_strided(alias.size, alias.stride, base.storage_offset() + alias.offset)
    return pytree.tree_unflatten([values[i] for i in range(len(values))], program.out_spec)


def mesh_rank(mesh: DeviceMesh) -> int:
    """This rank's position in the flattened mesh, row by row."""
    rank = 0
    for axis in range(mesh.ndim):
        rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    return rank


class Bound:
    """One graph bound to this rank, called with a list that it empties."""

    def __init__(self, gm: fx.GraphModule, mesh: DeviceMesh | None) -> None:
        self.module = bind(gm, mesh)
        self.takes = list(ir.placeholders(self.module))
        self.gives = ir.outputs(self.module)
        self._call = torch_api.boxed(self.module)
        self._continues = any(isinstance(role, Saved) for role, _ in self.gives)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        try:
            with torch_api.below_autograd():
                results = list(self._call(inputs))
            if not self._continues:  # the caller may change parameters, and reads gradients
                host.settle()
            return results
        except RuntimeError as error:
            node = self._failing_node(error)
            if node is None or isinstance(error, ShardGraphError):
                raise
            raise CollectiveError(
                f"{ir.describe_collective(node)} failed: {error}\n"
                "  another rank died, left this step early or runs another program; look at its output first"
            ) from error

    def _failing_node(self, error: BaseException) -> fx.Node | None:
        """The collective whose line of generated code raised, or None when another operation did."""
        trace, found = error.__traceback__, None
        while trace is not None:
            code = trace.tb_frame.f_code
            if "eval_with_key" in code.co_filename:
                line = re.match(r"\s*(\w+)", linecache.getline(code.co_filename, trace.tb_lineno))
                found = line.group(1) if line else found
            trace = trace.tb_next
        for node in self.module.graph.nodes:
            if node.name == found:
                if node.target is ir.WAIT:
                    node = node.args[0]
                return node if ir.is_collective(node) else None
        return None


class _Run(torch.autograd.Function):
    """Ties the two graphs into autograd. Parameters enter as DTensors and get DTensor gradients."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, leaves: Any, sync: Any, box: list[Any], *inputs: Any) -> Any:
        results = executable.run_forward([torch_api.local_tensor(value) for value in inputs], leaves)
        gives = executable.forward.gives
        saved = [value for (role, _), value in zip(gives, results, strict=True) if isinstance(role, Saved)]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)])
        ctx.constants = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.executable, ctx.sync = executable, sync
        ctx.set_materialize_grads(False)

        wanted = ir.placeholders(executable.program.backward)
        ctx.tangents = []
        for i in executable.through_autograd:
            role = gives[i][0]
            ctx.tangents.append(Tangent(role.index if isinstance(role, Output) else -1 - role.index))
            if ctx.tangents[-1] not in wanted:
                ctx.mark_non_differentiable(results[i])
        box.append(results)
        return tuple(results[i] for i in executable.through_autograd)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        executable: Executable = ctx.executable
        state, program = executable.state, executable.program
        tensors = list(ctx.saved_tensors)
        if not torch_api.keep_graph():
            ctx.maybe_clear_saved_tensors()
        restored = iter(tensors)
        saved = [next(restored) if value is None else value for value in ctx.constants]
        wanted = ir.placeholders(program.backward)
        tangents = {role: grad for role, grad in zip(ctx.tangents, grads, strict=True) if role in wanted}
        absent = frozenset(role for role, grad in tangents.items() if grad is None)
        del tensors, restored, grads

        local = not ctx.sync() and state.mesh is not None and program.plan.data_size > 1
        variant = executable.backward("local" if local else "accumulate" if state.unreduced else "reduce", absent)
        inputs = []
        for role, node in ir.placeholders(variant.module).items():
            if isinstance(role, Saved):
                inputs.append(saved[role.index])
            elif isinstance(role, Tangent):
                inputs.append(_tangent(tangents.pop(role), node.meta["val"]))
            elif isinstance(role, Accumulated):
                earlier = state.unreduced.pop(role.of.fqn, None)
                inputs.append(torch.zeros_like(node.meta["val"], device=state.device) if earlier is None else earlier)
        del saved, tangents
        values = {role.of: value for (role, _), value in zip(variant.gives, variant(inputs), strict=True)}
        return (
            None,
            None,
            None,
            None,
            *[_gradient(executable, role, values.get(role), local) for role in executable.forward.takes],
        )


def _tangent(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The incoming gradient in the memory layout that the graph was traced with."""
    if grad.stride() == like.stride():
        return grad
    return torch.empty_strided(like.shape, like.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def _gradient(executable: Executable, role: Role, value: torch.Tensor | None, local: bool) -> torch.Tensor | None:
    """What autograd gets for an input: a DTensor for a DTensor; nothing yet for a gradient kept local."""
    state = executable.state
    if value is None or not isinstance(role, Parameter):
        return value
    parameter = state.model.get_parameter(role.fqn)
    if not isinstance(parameter, DTensor):
        return value
    if local:
        earlier = state.unreduced.get(role.fqn)
        state.unreduced[role.fqn] = value if earlier is None else earlier + value
        return None
    return torch_api.as_placed(value, parameter)
