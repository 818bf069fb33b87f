"""A program without a pipeline as an autograd function: its forward graph, and its backward graph in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from shardgraph import ir, torch_api
from shardgraph.passes.program import Program
from shardgraph.runtime.executor import Executor, State, mesh_rank
from shardgraph.runtime.pipeline.messages import in_layout
from shardgraph.runtime.rng import common_draw, rank_seed, seeded


class Differentiable(Executor):
    """An :class:`Executor` of a program of one stage, called like the model."""

    def __init__(self, program: Program, state: State) -> None:
        super().__init__(program, state)
        self.forward = self.graph("forward")
        self.inputs = [role for role, _ in self.forward.inputs]
        self.results = [role for role, _ in self.forward.results]
        self.saved = [i for i, role in enumerate(self.results) if isinstance(role, ir.Saved)]
        self.mutated = [(i, role.of) for i, role in enumerate(self.results) if isinstance(role, ir.Mutation)]
        inputs = () if program.backward is None else ir.placeholders(program.backward)
        # Position and tangent of each result that autograd returns, because the user sees it or a view of it; the
        # tangent is None if backward does not take it.
        self.returned = [
            (i, tangent if tangent in inputs else None)
            for i, (role, value) in enumerate(ir.outputs(self.forward.module))
            if isinstance(value, fx.Node) and (tangent := _tangent_of(role, program)) is not None
        ]

    def __call__(self, leaves: Sequence[Any], sync: Callable[[], bool]) -> Any:
        """Run on the flattened inputs of a call; returns the model's output. ``sync()`` is called in backward."""
        inputs = [self.state.value(role, leaves) for role in self.inputs]
        if self.program.backward is None:
            with torch.no_grad():
                results = self.run_forward(inputs, leaves)
        else:
            box: list[Any] = []
            tensors = _Run.apply(self, leaves, sync, box, *inputs)
            results = box[0]
            for (position, _), tensor in zip(self.returned, tensors, strict=True):
                results[position] = tensor
        return self.rebuild(dict(zip(self.results, results, strict=True)), leaves)

    def run_forward(self, inputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Run the forward graph on the local tensors of ``inputs`` and write its mutations; returns its raw results."""
        mesh, plan, seed = self.state.mesh, self.program.plan, None
        if self.program.random and mesh is not None and plan.data_size > 1:
            seed = rank_seed(common_draw(), plan.data_rank(mesh_rank(mesh)))
        with seeded(seed, self.state.device):
            results = self.forward([torch_api.local_tensor(value) for value in inputs])
        for i, role in self.mutated:
            torch_api.local_tensor(self.state.value(role, leaves)).copy_(results[i])
        return results

    def run_backward(self, saved: list[Any], tangents: dict[ir.Tangent, Any], sync: bool) -> list[torch.Tensor | None]:
        """Run the backward graph, consuming ``saved`` and ``tangents``; returns each input's gradient for autograd."""
        state = self.state
        local = not sync and state.mesh is not None and self.program.plan.data_size > 1
        absent = frozenset(role for role, grad in tangents.items() if grad is None)
        bound = self.graph("local" if local else "accumulate" if state.unreduced else "backward", absent)
        inputs = []
        for role, traced in bound.inputs:
            if isinstance(role, ir.Saved):
                inputs.append(saved[role.index])
            elif isinstance(role, ir.Tangent):
                inputs.append(in_layout(tangents.pop(role), traced))
            elif isinstance(role, ir.Accumulated):
                earlier = state.unreduced.pop(role.of.fqn, None)
                inputs.append(torch.zeros_like(traced, device=state.device) if earlier is None else earlier)
        saved.clear()
        tangents.clear()
        results = zip(bound.results, bound(inputs), strict=True)
        values: dict[ir.Role, Any] = {role.of: value for (role, _), value in results if isinstance(role, ir.Gradient)}
        return [self._gradient(role, values.get(role), local) for role in self.inputs]

    def _gradient(self, role: ir.Role, value: torch.Tensor | None, local: bool) -> torch.Tensor | None:
        """The gradient of an input for autograd: a DTensor for a DTensor; None while a gradient is kept local."""
        if value is None or not isinstance(role, ir.Parameter):
            return value
        parameter: torch.Tensor = self.state.layout.parameter(role.fqn)
        if not isinstance(parameter, DTensor):
            return value
        if local:
            earlier = self.state.unreduced.get(role.fqn)
            self.state.unreduced[role.fqn] = value if earlier is None else earlier + value
            return None
        return torch_api.as_placed(value, parameter)


def _tangent_of(role: ir.Role | None, program: Program) -> ir.Tangent | None:
    """The incoming gradient of a result, if autograd returns that result."""
    if isinstance(role, ir.Output):
        return None if role.index in program.joint.aliases else ir.Tangent(role.index)
    return ir.Tangent(-1 - role.index) if isinstance(role, ir.IntermediateBase) else None


class _Run(torch.autograd.Function):
    """The two graphs as an autograd function. Parameters are DTensors and get DTensor gradients."""

    @staticmethod
    def forward(ctx: Any, executor: Differentiable, leaves: Any, sync: Any, box: list[Any], *inputs: Any) -> Any:
        results = executor.run_forward(inputs, leaves)
        saved = [results[i] for i in executor.saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)])
        ctx.constants = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.executor, ctx.sync = executor, sync
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[results[i] for i, tangent in executor.returned if tangent is None])
        box.append(results)
        return tuple(results[i] for i, _ in executor.returned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        executor: Differentiable = ctx.executor
        tensors = list(ctx.saved_tensors)
        if not torch_api.keep_graph():
            ctx.maybe_clear_saved_tensors()
        restored = iter(tensors)
        saved = [next(restored) if value is None else value for value in ctx.constants]
        pairs = zip(executor.returned, grads, strict=True)
        tangents = {tangent: grad for (_, tangent), grad in pairs if tangent is not None}
        del tensors, restored, grads, pairs
        return (None, None, None, None, *executor.run_backward(saved, tangents, ctx.sync()))
