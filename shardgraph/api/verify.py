"""``shardgraph.verify``: checks that a program trains like the original, with all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.casting import cast_buffers
from shardgraph.capture.private_copy import whole_copy
from shardgraph.checks.bisect import Divergence
from shardgraph.checks.comparison import Comparison, PipelineComparison
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ShardGraphError
from shardgraph.mesh import Mesh
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.pipeline.microbatches import batch_size, microbatches
from shardgraph.search.decide import decide
from shardgraph.search.machine import default_mesh
from shardgraph.search.question import Question
from shardgraph.torch_api import pytree

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Report:
    """The result of a verification.

    ``errors`` maps the name of each compared tensor to its largest absolute difference relative to the tensor's own
    largest magnitude; for gradients and weights, to at least a thousandth of the largest in the model, since a
    tensor whose true value is zero (the bias of an attention key) holds only rounding error.
    ``uncompared`` counts weights whose gradient is rounding noise, which Adam's normalisation amplifies; with
    ``fp64=True`` everything is compared.
    """

    plan: Plan
    tolerance: float
    steps: int
    errors: Mapping[str, float]
    batch: str
    uncompared: int = 0
    first_divergence: Divergence | None = None

    @property
    def worst(self) -> tuple[str, float]:
        """The name of the tensor with the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: item[1], default=("nothing", 0.0))

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        return self.worst[1] <= self.tolerance

    def raise_if_failed(self) -> None:
        """Raise ShardGraphError with this report when it is not ok."""
        if not self.ok:
            raise ShardGraphError(str(self))

    def __str__(self) -> str:
        name, error = self.worst
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'}: plan {self.plan.name} on {self.plan.world_size} ranks, "
            f"{self.steps} steps, {self.batch}",
            f"  largest relative error {error:.2e} (tolerance {self.tolerance:.0e}): {name}; "
            f"{len(self.errors)} tensors compared",
        ]
        if self.uncompared:
            lines.append(
                f"  {self.uncompared} weights have only rounding for a gradient and were left out; see fp64=True"
            )
        if self.first_divergence is not None:
            lines.append(f"  first divergence: {self.first_divergence}")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    plan: str | Path | Plan = "fsdp",
    *,
    world_size: int = 2,
    mesh: Mapping[str, int] | None = None,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
    cluster: Cluster | str | Path | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
    steps: int = 1,
    fp64: bool = False,
    recompute: str | None = None,
    memory: int | str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Compare ``model`` with its program under ``plan`` on ``world_size`` ranks, without a launcher.

    The model is unchanged. It must be small enough to train twice in this process's memory.

    Args:
        model: a module with real weights, on the CPU; its training mode is kept.
        example_inputs: positional inputs of the whole batch, split along dim 0 into equal parts for the ranks if all
            tensors allow it; otherwise every rank gets the whole batch (the report says which).
        plan: as for ``shardgraph.compile``.
        world_size: number of ranks; ``mesh`` (axis sizes by name) overrides it.
        pipeline: for a preset with ``"pp"``, as for ``shardgraph.compile``.
        precision: as for ``shardgraph.compile``; the original is computed in it too.
        cluster: the hardware for which plans and stages are priced, as for ``shardgraph.analyze``; None: this machine.
        example_kwargs: keyword inputs, likewise.
        loss_fn: scalar of the model's output. Default: ``output.loss`` where there is one, the output if it is one
            number, else the mean square of the floating tensors in it. With a pipeline it is part of the program, as
            for ``train_step``, and the batch that each data-parallel rank has is not divided in the original.
        optimizer: ``optimizer(parameters)`` returns the optimizer; default AdamW with a learning rate of 1e-3.
        steps: number of training steps to compare.
        fp64: compute in double precision, to tell a bug from rounding.
        recompute: what backward recomputes, as for ``shardgraph.compile``.
        memory: limit on the predicted peak of a rank, likewise.
        loss_chunk: bytes of a cross-entropy's logits per chunk, likewise.
        offload: what is kept in host memory, likewise; here the memory of the same process.
        tolerance: the largest relative error that passes; default by the coarsest dtype of the computation: 1e-4 in
            single and 1e-5 in double precision.
        seed: seed of each step's random numbers.

    Raises:
        CaptureError, PlanError: as ``shardgraph.compile``.
        ShardGraphError: the loss of a batch does not follow from those of a pipeline's microbatches.
    """
    original = whole_copy(model)
    call: Any = (tuple(example_inputs), dict(example_kwargs or {}))
    if fp64:
        original = original.double()
        call = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, call)
    mesh_of = partial(_mesh, mesh, world_size)
    question = Question.of(
        original, plan, mesh_of, mesh is None, pipeline, precision, recompute, memory, loss_chunk, offload, cluster
    )
    cast_buffers(original, question.plan.precision, question.plan.annotations)
    captures = Captures()
    parts, _ = _cut_batch(call, question.plan.data_size)
    loss = loss_fn or default_loss
    args, kwargs = parts[0]
    chosen = decide(question.about(args, kwargs, loss if question.plan.pipeline else None), captures)
    parts, batch = _cut_batch(call, chosen.data_size)
    if chosen.pipeline is None:
        programs = _programs(original, chosen, parts[:1], captures, None)
        comparison = Comparison(original, chosen, programs, [[part] for part in parts], loss, seed, exact=fp64)
    else:
        cut = [microbatches(part, chosen.pipeline.parts) for part in parts]
        programs = _programs(original, chosen, cut[0], captures, loss)
        comparison = PipelineComparison(original, chosen, programs, cut, loss, seed, exact=fp64, batches=parts)
        batch += comparison.reference
    if tolerance is None:
        tolerance = max((_TOLERANCES.get(dtype, 1e-4) for dtype in comparison.dtypes.values()), default=1e-4)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    divergence = comparison.train(make, steps, tolerance)
    uncompared = sum(int(noise.sum()) for noise in comparison.noise.values())
    return Report(chosen, tolerance, steps, comparison.errors, batch, uncompared, divergence)


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss``, an output that is one number, or else the mean square of every floating tensor in it, summed."""
    loss = own_loss(output)
    if isinstance(loss, torch.Tensor) and not loss.dim():
        return loss
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.stack([t.square().mean() for t in tensors if t.is_floating_point() and t.numel()]).sum()


def _mesh(mesh: Mapping[str, int] | None, world_size: int, plan: str | Plan) -> Mesh:
    if mesh:
        return tuple(mesh.items())
    if isinstance(plan, Plan):
        return plan.whole_mesh
    return default_mesh(plan, world_size, max(world_size // 2, 1))


def _programs(model: nn.Module, plan: Plan, parts: list[Any], captures: Captures, loss_fn: Any) -> list[Program]:
    shapes, of_size = named_shapes(model), {batch_size(part): part for part in parts}
    built = {
        n: lower(captures.take(Call(model, *part, loss_fn=loss_fn), plan), plan, shapes) for n, part in of_size.items()
    }
    return [built[batch_size(part)] for part in parts]


def _cut_batch(call: Any, ranks: int) -> tuple[list[Any], str]:
    sizes = {leaf.shape[:1] for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)}
    rows = next(iter(sizes))[0] if len(sizes) == 1 and next(iter(sizes)) else 0
    if not rows or rows % ranks:
        return [call] * ranks, "every rank on the whole batch"
    cut = [pytree.tree_map_only(torch.Tensor, lambda t, r=r: t.chunk(ranks)[r].clone(), call) for r in range(ranks)]
    return cut, f"a batch of {rows} cut among the ranks"
