"""A pipeline called like the model: all microbatches forward, and in backward all of them backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardgraph import ir, torch_api
from shardgraph.errors import BackwardError
from shardgraph.passes.program import Program
from shardgraph.runtime.gradients import check_plain, check_unchanged, tangent_of
from shardgraph.runtime.pipeline.running import RunningPipeline, Work


def differentiable(
    pipeline: RunningPipeline,
    work: Sequence[Work],
    sync: Callable[[], bool],
    guarded: Callable[[], AbstractContextManager[None]],
) -> list[dict[Any, Any]]:
    """Forward of all microbatches; returns the model's outputs for each, by role, which autograd can differentiate.

    ``sync()`` is called in backward, which reduces gradients if it is true. Both run inside of ``guarded()``. Every
    rank of the pipeline must differentiate its outputs, the same ones: each returns what the last stage has computed.
    """
    results: list[dict[Any, Any]] = []
    leaves = [leaf for item in work for leaf in item.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    anchor = torch.empty(0, requires_grad=True, device="cpu")  # gradients of parameters do not go through autograd
    tensors = _Step.apply(pipeline, work, sync, guarded, results, anchor, *leaves)
    for (number, role, _), tensor in zip(_returned(work), tensors, strict=True):
        results[number][role] = tensor
    return results


def _returned(work: Sequence[Work]) -> list[tuple[int, ir.Role, ir.Tangent]]:
    """The outputs that autograd returns, by microbatch, and the roles of their gradients."""
    return [
        (number, role, tangent)
        for number, item in enumerate(work)
        for role, tangent in _differentiable_outputs(item.executor.program)
    ]


def _differentiable_outputs(program: Program) -> list[tuple[ir.Role, ir.Tangent]]:
    halves = program.stages[-1].kept
    inputs = {} if halves.backward is None else ir.placeholders(halves.backward)
    roles = [role for role, _ in ir.outputs(halves.forward)]
    return [(role, tangent) for role in roles if (tangent := tangent_of(role, program)) in inputs and role is not None]


class _Step(torch.autograd.Function):
    """One step. Gradients of parameters become their ``grad``, as in ``train_step``; those of inputs are returned."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: RunningPipeline, work: Any, sync: Any, guarded: Any, results: list[Any], *_: Any
    ) -> Any:
        with guarded():
            made, ctx.step = pipeline.forward(work)
        results += made
        ctx.pipeline, ctx.work, ctx.sync, ctx.guarded = pipeline, work, sync, guarded
        ctx.versions = _versions(pipeline, work[0].executor.program)
        ctx.set_materialize_grads(False)
        return tuple(made[number][role] for number, role, _ in _returned(work))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if ctx.step is None:
            raise BackwardError("backward of a pipeline's step has run, and runs once: call the module again")
        check_unchanged(ctx.versions)
        check_plain(gradients)
        tangents: list[dict[ir.Tangent, torch.Tensor]] = [{} for _ in ctx.work]
        for (number, _, tangent), gradient in zip(_returned(ctx.work), gradients, strict=True):
            if gradient is not None:
                tangents[number][tangent] = gradient
        step, ctx.step = ctx.step, None
        with ctx.guarded():
            inputs = ctx.pipeline.backward(ctx.work, step, tangents, ctx.sync())
        return (None,) * 6 + tuple(inputs)


def _versions(pipeline: RunningPipeline, program: Program) -> list[tuple[str, torch.Tensor, int]]:
    """The trained parameters of this rank, as they are now."""
    here = (fqn for fqn in program.trained if pipeline.rank in pipeline.pipeline.places_of(program.owners[fqn]))
    shards = ((fqn, torch_api.local_tensor(pipeline.state.layout.parameter(fqn))) for fqn in here)
    return [(fqn, shard, shard._version) for fqn, shard in shards]
