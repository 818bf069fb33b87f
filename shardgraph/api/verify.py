"""Checks that a sharded program equals the original: both run here, in one process, and are compared.

The original runs eagerly on each data-parallel rank's part of the batch, and its gradients are averaged over ranks, as
in data parallelism. The emitted program runs on all ranks in lockstep (:mod:`shardgraph.checks.lockstep`). Outputs,
losses, gradients, weights after optimizer steps and buffers must agree.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.casting import cast_buffers, casting, computed_dtypes
from shardgraph.checks.bisect import Divergence, first_divergence, relative_error
from shardgraph.checks.step import LockstepStep
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ShardGraphError
from shardgraph.ir import Buffer, Input, IntermediateBase, Output, Parameter, Tangent, placeholders
from shardgraph.mesh import Mesh, coordinates
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.plans.shards import named_shapes, part_of
from shardgraph.runtime.pipeline.microbatches import batch_size, microbatches, shares
from shardgraph.runtime.pipeline.statistics import combined
from shardgraph.runtime.rng import rank_generator
from shardgraph.search.decide import decide
from shardgraph.search.machine import default_mesh
from shardgraph.search.question import Question
from shardgraph.torch_api import pytree

Step = tuple[list[list[tuple[Any, torch.Tensor]]], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""One step: ``(output, loss)`` of each rank's microbatches, each rank's gradients by name, and buffers."""

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# A gradient below this fraction of the model's largest one, or below the resolution of a coarse dtype, is rounding
# error, which Adam amplifies into noise.
_NOISE = 1e-5
_CPU = torch.device("cpu")


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
    first_divergence: Divergence | None = field(default=None)

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
        loss_fn: scalar of the model's output. Default: ``output.loss`` where there is one, else the mean
            square of the floating tensors in the output.
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
    """
    original = copy.deepcopy(model)
    call: Any = (tuple(example_inputs), dict(example_kwargs or {}))
    if fp64:
        original = original.double()
        call = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, call)
    question = Question.of(
        original,
        plan,
        partial(_mesh, mesh, world_size),
        free_mesh=mesh is None,
        pipeline=pipeline,
        precision=precision,
        recompute=recompute,
        memory=memory,
        loss_chunk=loss_chunk,
        offload=offload,
        cluster=cluster,
    )
    cast_buffers(original, question.plan.precision, question.plan.annotations)
    captures = Captures()
    parts, _ = _cut_batch(call, question.plan.data_size)
    chosen = decide(question.about(*parts[0]), captures)
    parts, batch = _cut_batch(call, chosen.data_size)
    cut = [_microbatches(part, chosen) for part in parts]
    programs = _programs(original, chosen, cut[0], captures)
    run = _Comparison(original, chosen, programs, cut, loss_fn or default_loss, seed, exact=fp64)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    limit = tolerance if tolerance is not None else _default_tolerance(run.dtypes)
    divergence = run.train(make, steps, limit)
    return Report(chosen, limit, steps, run.errors, batch, run.uncompared(), divergence)


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss``, or the mean square of every floating tensor in the output, summed."""
    loss = own_loss(output)
    if loss is not output:
        return loss
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.stack([t.square().mean() for t in tensors if t.is_floating_point() and t.numel()]).sum()


def _mesh(mesh: Mapping[str, int] | None, world_size: int, plan: str | Plan) -> Mesh:
    if isinstance(plan, Plan):
        return plan.whole_mesh
    return tuple(mesh.items()) if mesh else default_mesh(plan, world_size, max(world_size // 2, 1))


def _default_tolerance(dtypes: Mapping[str, torch.dtype]) -> float:
    return max((_TOLERANCES.get(dtype, 1e-4) for dtype in dtypes.values()), default=1e-4)


def _microbatches(part: Any, plan: Plan) -> list[Any]:
    """The microbatches of a rank's part of the batch, in order."""
    return [part] if plan.pipeline is None else microbatches(part, plan.pipeline.parts)


def _programs(model: nn.Module, plan: Plan, parts: list[Any], captures: Captures) -> list[Program]:
    """The program of each microbatch."""
    built: dict[int, Program] = {}
    for part in parts:
        if (size := batch_size(part)) not in built:
            built[size] = lower(captures.take(Call(model, *part), plan), plan, named_shapes(model))
    return [built[batch_size(part)] for part in parts]


def _cut_batch(call: Any, ranks: int) -> tuple[list[Any], str]:
    sizes = {leaf.shape[:1] for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)}
    rows = next(iter(sizes))[0] if len(sizes) == 1 and next(iter(sizes)) else 0
    if not rows or rows % ranks:
        return [call] * ranks, "every rank on the whole batch"
    cut = [pytree.tree_map_only(torch.Tensor, lambda t, r=r: t.chunk(ranks)[r].clone(), call) for r in range(ranks)]
    return cut, f"a batch of {rows} cut among the ranks"


class _Comparison:
    """The original and the program, trained side by side."""

    def __init__(
        self,
        original: nn.Module,
        plan: Plan,
        programs: Sequence[Program],
        parts: list[list[Any]],
        loss_fn: Any,
        seed: int,
        *,
        exact: bool,
    ) -> None:
        self.original, self.programs, self.parts = original, programs, parts
        self.parameters, self.shapes = programs[0].parameters, programs[0].shapes
        self.loss_fn, self.seed, self.exact = loss_fn, seed, exact
        self.mesh, self.world = plan.mesh, math.prod(size for _, size in plan.mesh)
        self.precision, self.annotations = plan.precision, plan.annotations
        computed = computed_dtypes(original, plan.precision, plan.annotations)
        self.rounding = max((torch.finfo(dtype).eps for dtype in computed.values()), default=0.0)
        self.dtypes = {name: computed.get(name, p.dtype) for name, p in original.named_parameters()}
        self.batches = plan.data_size
        self.batch_of = [plan.data_rank(rank) for rank in range(self.world)]
        self.shares = shares(parts[0])
        self.shards = [self._cut(rank) for rank in range(self.world)]
        self.buffers = {name: buffer.clone() for name, buffer in _tensors(original).items()}
        self.noise: dict[str, torch.Tensor] = {}
        self.errors: dict[str, float] = {}

    # -- state -------------------------------------------------------------------------------------

    def _cut(self, rank: int) -> dict[str, torch.Tensor]:
        shards = {}
        for fqn, parameter in self.original.named_parameters():
            entry = self.parameters[fqn]
            value = part_of(parameter.detach(), entry, self.mesh, coordinates(self.mesh, rank))
            shards[fqn] = value.contiguous().clone().requires_grad_(parameter.requires_grad)
        return shards

    def _join(self, fqn: str, pieces: list[torch.Tensor]) -> torch.Tensor:
        """The full tensor, from each rank's shard."""
        entry, shape = self.parameters[fqn], self.shapes[fqn]
        where = torch.arange(shape.numel()).view(shape)
        whole = pieces[0].new_zeros(shape.numel())
        for rank, piece in enumerate(pieces):
            whole[part_of(where, entry, self.mesh, coordinates(self.mesh, rank)).flatten()] = piece.flatten()
        return whole.view(shape)

    # -- training ----------------------------------------------------------------------------------

    def train(self, make: Callable[..., torch.optim.Optimizer], steps: int, limit: float) -> Divergence | None:
        names = [n for n, p in self.original.named_parameters() if p.requires_grad]
        theirs = make([p for p in self.original.parameters() if p.requires_grad])
        ours = [make([self.shards[rank][name] for name in names]) for rank in range(self.world)]
        for step in range(steps):
            before = {n: p.detach().clone() for n, p in self.original.named_parameters()}
            buffers = {n: b.clone() for n, b in self.buffers.items()}
            self._compare_step(step)
            if max(self.errors.values(), default=0.0) > limit:
                return self._bisect(step, before, buffers, limit)
            for each in (theirs, *ours):
                each.step()
                each.zero_grad()
            self._compare_weights(step)
            if max(self.errors.values(), default=0.0) > limit:
                return None  # gradients agreed: the optimizer diverges, which no node represents
        return None

    def _compare_step(self, step: int) -> None:
        start = {name: buffer.clone() for name, buffer in self.buffers.items()}
        expected = self._reference(step)
        outputs, gradients, mutated = self._run(step, start)
        for rank, results in enumerate(outputs):
            for number, (mine, theirs) in enumerate(zip(results, expected[self.batch_of[rank]], strict=True)):
                where = f"rank {rank} at step {step}" + (f", microbatch {number}" if len(results) > 1 else "")
                pairs = zip(pytree.tree_leaves(mine[0]), pytree.tree_leaves(theirs[0]), strict=True)
                for i, (a, b) in enumerate(pairs):
                    if isinstance(b, torch.Tensor):
                        self._record(f"output {i} of {where}", a, b)
                self._record(f"loss of {where}", mine[1], theirs[1])
        for fqn, value in mutated.items():
            self._record(f"buffer {fqn} after step {step}", value, self.buffers[fqn])
        self._compare_gradients(step, gradients)

    def _compare_gradients(self, step: int, gradients: list[dict[str, torch.Tensor]]) -> None:
        parameters = dict(self.original.named_parameters())
        largest = max((p.grad.abs().max().item() for p in parameters.values() if _has(p.grad)), default=0.0)
        for fqn, parameter in parameters.items():
            pieces = [gradients[rank].get(fqn) for rank in range(self.world)]
            where = f"gradient of {fqn} at step {step}"
            if parameter.grad is None or pieces[0] is None:
                self.errors[where] = 0.0 if parameter.grad is None and pieces[0] is None else float("inf")
                continue
            self._record(where, self._join(fqn, pieces), parameter.grad, floor=1e-3 * largest)
            if not self.exact:
                noise = parameter.grad.abs() < max(_NOISE, self.rounding) * largest
                self.noise[fqn] = self.noise.get(fqn, noise) | noise
            for rank, piece in enumerate(pieces):
                self.shards[rank][fqn].grad = piece.clone()

    def _reference(self, step: int) -> list[list[tuple[Any, torch.Tensor]]]:
        """``(output, loss)`` of every microbatch of every rank, and the gradients and buffers of the step."""
        results, after = [], []
        for rank, several in enumerate(self.parts):
            torch.manual_seed(self.seed + step)
            with rank_generator(rank, self.batches, _CPU):
                done, written = zip(
                    *(self._reference_part(part, share) for part, share in self._shared(several)), strict=True
                )
            results.append(list(done))
            after.append(combined(self.programs, self.buffers, written) if len(written) > 1 else written[0])
        for name in self.buffers:
            values = [each.get(name, self.buffers[name]) for each in after]
            self.buffers[name] = torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]
        return results

    def _shared(self, several: list[Any]) -> Iterable[tuple[Any, float]]:
        return zip(several, self.shares, strict=True)

    def _reference_part(self, part: Any, share: float) -> tuple[tuple[Any, torch.Tensor], dict[str, torch.Tensor]]:
        _write(self.original, self.buffers)
        output = self._original(*part)
        loss = self.loss_fn(output)
        if loss.requires_grad:
            (loss * (share / self.batches)).backward()
        written = {name: buffer.clone() for name, buffer in _tensors(self.original).items()}
        return (pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output), loss.detach()), written

    def _original(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The original's output, in the plan's precision."""
        cast = {name: p.to(self.dtypes[name]) for name, p in self.original.named_parameters()}
        with casting(self.original, self.precision, self.annotations):
            return torch.func.functional_call(self.original, cast, args, dict(kwargs))

    def _run(self, step: int, buffers: dict[str, torch.Tensor]) -> Step:
        """One step of the program."""
        outputs: list[list[tuple[Any, torch.Tensor]]] = [[] for _ in range(self.world)]

        def tangents(number: int, results: list[dict[Any, Any]]) -> list[dict[Tangent, Any]]:
            found = [self.evaluate(result, rank, number) for rank, result in enumerate(results)]
            for mine, (output, loss, _) in zip(outputs, found, strict=True):
                mine.append((output, loss))
            share = self.shares[number]
            return [{role: None if t is None else t * share for role, t in given.items()} for _, _, given in found]

        inputs = [self._inputs(self.shards, buffers, number) for number in range(len(self.programs))]
        run = LockstepStep(self.programs, inputs, self.generators(step), tangents)
        gradients, mutated = run.run()
        return outputs, gradients, mutated

    def _inputs(
        self, parameters: list[dict[str, torch.Tensor]], buffers: dict[str, torch.Tensor], number: int = 0
    ) -> list[Any]:
        return [
            {Parameter(n): p.detach() for n, p in parameters[rank].items()}
            | {Buffer(n): b for n, b in buffers.items()}
            | {Input(i): leaf for i, leaf in enumerate(pytree.tree_leaves(self.parts[self.batch_of[rank]][number]))}
            for rank in range(self.world)
        ]

    def generators(self, step: int) -> list[torch.Tensor]:
        """Each rank's generator state at the start of a step's forward."""
        states = []
        for rank in range(self.world):
            torch.manual_seed(self.seed + step)
            with rank_generator(self.batch_of[rank], self.batches, _CPU):
                states.append(torch.get_rng_state())
        return states

    def evaluate(
        self, result: Mapping[Any, Any], rank: int, number: int = 0
    ) -> tuple[Any, torch.Tensor, dict[Tangent, Any]]:
        """``(output, loss, tangents)`` of one rank from its forward results by role, for one microbatch.

        A tangent is None where the loss does not depend on the output.
        """
        leaves: dict[Any, Any] = {}
        for role, value in result.items():
            if isinstance(role, (Output, IntermediateBase)):
                differentiable = isinstance(value, torch.Tensor) and value.is_floating_point()
                leaves[role] = value.detach().clone().requires_grad_() if differentiable else value
        values = {role.index: leaf for role, leaf in leaves.items() if isinstance(role, Output)}
        inputs, program = pytree.tree_leaves(self.parts[self.batch_of[rank]][number]), self.programs[number]
        for index, alias in program.aliases.items():
            base = inputs[alias.base.index] if isinstance(alias.base, Input) else leaves[alias.base]
            values[index] = base if alias.size is None else base.as_strided(alias.size, alias.stride, alias.offset)
        output = pytree.tree_unflatten([values[i] for i in range(len(values))], program.out_spec)
        loss = self.loss_fn(output)
        wanted = placeholders(program.joint.module)
        tangents: dict[Tangent, Any] = {}
        for role, leaf in leaves.items():
            tangent = Tangent(role.index if isinstance(role, Output) else -1 - role.index)
            if tangent in wanted:
                (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
                tangents[tangent] = grad
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output), loss.detach(), tangents

    def _compare_weights(self, step: int) -> None:
        largest = max((p.detach().abs().max().item() for p in self.original.parameters() if p.numel()), default=0.0)
        for fqn, parameter in self.original.named_parameters():
            mine = self._join(fqn, [self.shards[rank][fqn].detach() for rank in range(self.world)])
            theirs = parameter.detach()
            if fqn in self.noise:
                keep = ~self.noise[fqn]
                mine, theirs = mine[keep], theirs[keep]
            self._record(f"weight {fqn} after step {step}", mine, theirs, floor=1e-3 * largest)

    def uncompared(self) -> int:
        return sum(int(mask.sum()) for mask in self.noise.values())

    def _record(self, name: str, mine: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> None:
        self.errors[name] = relative_error(mine, theirs, floor)

    def _bisect(self, step: int, parameters: Any, buffers: Any, limit: float) -> Divergence | None:
        """Run the captured graph and the emitted ones again from the same state, and compare node by node."""
        (program, *more) = self.programs
        if more or program.plan.pipeline is not None:
            return None
        whole = self._inputs([parameters] * self.world, buffers)
        _restore(self.original, parameters)
        local = self._inputs([self._cut(rank) for rank in range(self.world)], buffers)
        return first_divergence(program, whole, local, self.evaluate, lambda: self.generators(step), limit)


def _has(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.numel() > 0


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers and plain tensor attributes: the buffers of a captured graph."""
    found = dict(model.named_buffers())
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{key}" if path else key] = value
    return found


def _write(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(values[name])


def _restore(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
