"""``shardgraph.verify``: checks that a program trains like the original, with all ranks in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.options import MAKES_OPTIMIZER, OPTIONS
from shardgraph.api.unsharded import check_unsharded
from shardgraph.arguments import BOOL, NOT_NEGATIVE, SEED, WHOLE, checked
from shardgraph.capture.capture import returns_loss, takes
from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.casting import cast_buffers, computed_dtypes
from shardgraph.capture.double import traced_in_double
from shardgraph.capture.private_copy import whole_copy
from shardgraph.capture.synchronized import synchronized_batch_norms
from shardgraph.checks.bisect import Divergence
from shardgraph.checks.calls import CallsComparison
from shardgraph.checks.comparison import Comparison, PipelineComparison
from shardgraph.checks.coverage import Coverage
from shardgraph.checks.loss import default_loss
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError, ShardGraphError, expect
from shardgraph.mesh import Mesh
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.plans.shards import named_shapes
from shardgraph.proof.microbatches import check_cut, rows_of_call
from shardgraph.proof.prove import Proof, prove
from shardgraph.runtime.pipeline.microbatches import batch_size, microbatches
from shardgraph.search.answer import answer
from shardgraph.search.machine import default_mesh
from shardgraph.search.planner import choose_plan
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from shardgraph.torch_api import map_tensors, pytree

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

_CALLS = 3
"""How many calls of a step are made at most."""

_WHOLE = "every rank on the whole batch"

_COVERED = 0.99
"""The share of the elements that the loss reaches whose weights must be compared."""


@dataclass(frozen=True)
class Report:
    """The result of a verification.

    ``errors`` maps the name of each compared tensor to its largest absolute difference relative to the tensor's own
    largest magnitude; and at least to a thousandth of the largest of its kind in the model, since a tensor whose true
    value is zero (the bias of an attention key) holds only rounding error. Gradients, weights and buffers are compared
    on every rank. ``coverage`` says what share of the parameters that is. ``settled``: single precision differed
    by more than the tolerance, or could not be compared, and the errors are those of double precision. ``proof`` is
    what follows from the program's text alone; see :func:`shardgraph.prove`.
    """

    plan: Plan
    tolerance: float
    steps: int
    errors: Mapping[str, float]
    batch: str
    coverage: Coverage
    proof: Proof
    first_divergence: Divergence | None = None
    settled: bool = False

    @property
    def worst(self) -> tuple[str, float]:
        """The name of the tensor with the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: item[1], default=("nothing", 0.0))

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance, and at least 99% of what the loss reaches was compared.

        By the program's text nothing may be wrong either; what is not known by it does not count.
        """
        return self.worst[1] <= self.tolerance and self.coverage.share >= _COVERED and not self.proof.wrong

    def raise_if_failed(self) -> None:
        """Raise ShardGraphError with this report when it is not ok."""
        if not self.ok:
            raise ShardGraphError(str(self))

    def __str__(self) -> str:
        name, error = self.worst
        equal = error <= self.tolerance and not self.proof.wrong
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        verdict = "equal" if self.ok else "NOT EQUAL" if not equal else "NOT SHOWN EQUAL, too little was compared"
        lines = [
            f"{verdict}: plan {self.plan.name} on {self.plan.world_size} ranks, {steps}, {self.batch}",
            f"  largest relative error {error:.2e} (tolerance {self.tolerance:.0e}): {name}; "
            f"{len(self.errors)} tensors compared",
            f"  {self.coverage}",
            f"  by its text {self.proof.summary}",
        ]
        if self.settled:
            lines.append("  in double precision: in single precision rounding alone was larger than the tolerance")
        if self.first_divergence is not None:
            lines.append(f"  first divergence: {self.first_divergence}")
        return "\n".join(lines)


@checked(
    OPTIONS, world_size=WHOLE, optimizer=MAKES_OPTIMIZER, steps=WHOLE, fp64=BOOL, tolerance=NOT_NEGATIVE, seed=SEED
)
def verify(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    plan: str | Path | Plan = "fsdp",
    *,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
    cluster: Cluster | str | Path | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
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
        model: a module with real weights; its training mode is kept. It is compared with weights that are moved by a
            little noise: a fault in what handles a bias of zeros, or a norm's weight of ones, shows then. Weights and
            inputs on a GPU are copied, since ranks are compared on the CPU.
        example_inputs: positional inputs of the whole batch, split along dim 0 into equal parts for the ranks if all
            tensors allow it; otherwise every rank gets the whole batch (the report says which).
        plan: as for ``shardgraph.compile``.
        world_size: number of ranks; None: those of ``mesh`` (axis sizes by name) or of a plan file, else 2.
        pipeline: for a preset with ``"pp"``, as for ``shardgraph.compile``.
        precision: as for ``shardgraph.compile``; the original is computed in it too.
        cluster: the hardware for which plans and stages are priced, as for ``shardgraph.analyze``; None: this machine.
        example_kwargs: keyword inputs, likewise.
        global_batch: with ``plan="auto"``: samples of one step over all ranks, for which the layouts of
            ``shardgraph.plan`` are searched, pipelines among them; the chosen one is compared for the example inputs.
        loss_fn: scalar of the model's output, or ``loss_fn(output, target)`` with a ``target`` in ``example_kwargs``.
            Default: ``output.loss`` where there is one, the output if it is one number, else a fixed projection of all
            floating tensors in it, on which every parameter that can have a gradient has an effect. With a target or a
            pipeline it is part of the program, as for ``train_step``. With a pipeline the batch that each data-parallel
            rank has is not divided in the original.
        optimizer: ``optimizer(parameters)`` returns the optimizer; default AdamW with a learning rate of 1e-3.
        steps: number of training steps to compare.
        fp64: compute in double precision from the start, casts of the model's own included. Otherwise a difference in
            single precision is looked at again in double precision, to tell a bug from rounding.
        recompute: what backward recomputes, as for ``shardgraph.compile``.
        memory: limit on the predicted peak of a rank, likewise.
        loss_chunk: bytes of a cross-entropy's logits per chunk, likewise.
        offload: what is kept in host memory, likewise; here the memory of the same process.
        tolerance: the largest relative error that passes; default by the coarsest dtype of the computation: 1e-4 in
            single and 1e-5 in double precision.
        seed: seed of each step's random numbers.

    Raises:
        CaptureError, PlanError: as ``shardgraph.compile``; or ``world_size`` is not the number of ranks of the mesh.
        ShardGraphError: the loss of a batch does not follow from those of a pipeline's microbatches, an argument is not
            allowed, or the model is compiled already.
    """

    def question(model: nn.Module, precision: str | Precision | None = precision) -> Question:
        options = precision, recompute, memory, loss_chunk, offload, cluster
        mesh_of = partial(_mesh, mesh, world_size)
        return Question.of(model, plan, mesh_of, mesh is None, pipeline, *options, total=global_batch)

    check_unsharded(model)
    possible = global_batch is None or (plan == "auto" and model.training)
    expect(possible, "global_batch", global_batch, "for plan='auto' and a model in training mode")
    trial = _Trial(loss_fn or default_loss, optimizer or _adamw, steps, tolerance, seed)
    call: Any = map_tensors(_on_cpu, (tuple(example_inputs), dict(example_kwargs or {})))
    if not fp64:
        report = trial.run(original := _copied(model), question(original), call, exact=False)
        given = report.plan.precision
        if report.ok or not (given.products or _computes_in(torch.float32, model, report.plan)):
            return report
        if given.products:  # rounding to 8 bits makes much of a small difference
            precision = Precision(products=given.products)
    double = map_tensors(lambda t: t.double() if t.is_floating_point() else t, call)
    try:
        exact = trial.run(original := _copied(model).double(), question(original, precision), double, exact=True)
    except (NotImplementedError, RuntimeError):
        if fp64:
            raise
        return report  # of a model with an operation that has no kernel in double precision
    return replace(exact, settled=not fp64)


@dataclass(frozen=True)
class _Trial:
    """How programs are compared; see :func:`verify`."""

    loss_fn: Callable[..., torch.Tensor]
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    steps: int
    tolerance: float | None
    seed: int

    def run(self, original: nn.Module, question: Question, call: Any, exact: bool) -> Report:
        """Train the ``original``, which is changed, and its program; ``exact`` if in double precision."""
        _move_weights(original, self.seed)
        cast_buffers(original, question.plan.precision, question.plan.annotations)
        captures = Captures()
        exact = exact and _computes_in(torch.float64, original, question.plan)
        parts, _ = _cut_batch(original, call, question.plan.data_size)
        with traced_in_double(exact):
            plan = self._decided(question, parts[0], captures)
        own = [fqn for fqn, each in original.named_parameters() if each.requires_grad and plan.ignores(fqn)]
        if own and plan.data_size > 1:
            raise ShardGraphError(
                f"{own[0]!r} is ignored(), so that each rank trains its own, and verify compares all ranks with one "
                "model: shardgraph.prove proves its gradients, or freeze it with requires_grad_(False) meanwhile"
            )
        parts, batch = _cut_batch(original, call, plan.data_size)
        loss = self._in_program(plan, call)
        how = self.loss_fn, self.seed, exact, loss is not None
        comparison: Comparison
        if plan.pipeline is None:
            cut = _cut_calls(original, plan, parts)
            programs = _programs(original, plan, cut[0], captures, loss, exact)
            if not all(_decide_alike(programs, calls) for calls in cut):
                parts, batch = [call] * plan.data_size, f"{_WHOLE}, of whose parts forward takes other ways"
                cut = [[call]] * plan.data_size
                programs = _programs(original, plan, cut[0], captures, loss, exact)
            if programs[0].joint.results and plan.calls > 1:  # which each call takes from the one before
                cut = [[part] for part in parts]
                programs = _programs(original, plan, cut[0], captures, loss, exact)
            if len(programs) > 1:
                comparison = CallsComparison(original, plan, programs, cut, *how)
                batch += f", in {len(programs)} calls of each"
                batch += " reduced in the last" if plan.reduces_once else ""
            else:
                comparison = Comparison(original, plan, programs, cut, *how)
                batch += ", in one call of each" if plan.calls > 1 else ""
        else:
            cut = [microbatches(part, plan.pipeline.parts) for part in parts]
            programs = _programs(original, plan, cut[0], captures, loss, exact)
            comparison = PipelineComparison(original, plan, programs, cut, *how, batches=parts)
            batch += comparison.reference
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = max((_TOLERANCES.get(dtype, 1e-4) for dtype in comparison.dtypes.values()), default=1e-4)
        divergence = comparison.train(self.optimizer, self.steps, tolerance)
        proof = prove(programs[0])
        return Report(plan, tolerance, self.steps, comparison.errors, batch, comparison.coverage, proof, divergence)

    def _decided(self, question: Question, part: Any, captures: Captures) -> Plan:
        """The plan for a rank's part of the batch; for steps of a total of samples among all layouts."""
        args, kwargs = part
        if question.automatic and question.total is not None:
            source = Source(question.about(args, kwargs, self.loss_fn), captures=captures, check_cut=check_cut)
            question = question.settled(choose_plan(source, own_batches=False))
        return answer(question.about(args, kwargs, self._in_program(question.plan, part)), captures)

    def _in_program(self, plan: Plan, call: Any) -> Callable[..., torch.Tensor] | None:
        """The loss, if it is part of the program of ``plan``."""
        of_target = "target" in call[1] and self.loss_fn is not default_loss and takes(self.loss_fn, 2)
        return self.loss_fn if plan.pipeline is not None or of_target else None


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.is_cuda else tensor


def _copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in which gradients of embeddings are dense, as those of programs are."""
    copied = whole_copy(model)
    if any(tensor.is_cuda for tensor in (*copied.parameters(), *copied.buffers())):
        copied.cpu()
    for module in copied.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    return copied


@torch.no_grad()
def _move_weights(model: nn.Module, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter.dtype)
            parameter.add_(noise * (0.1 * parameter.square().mean().sqrt() + 0.02))


def _adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _computes_in(dtype: torch.dtype, model: nn.Module, plan: Plan) -> bool:
    """Whether all parameters are computed with in one dtype."""
    computed = computed_dtypes(model, plan.precision, plan.annotations).values()
    return all(each is dtype for each in computed)


def _mesh(mesh: Mapping[str, int] | None, world_size: int | None, plan: str | Plan) -> Mesh:
    if not mesh and not isinstance(plan, Plan):
        ranks = world_size or 2
        return default_mesh(plan, ranks, max(ranks // 2, 1))
    axes = tuple(mesh.items()) if mesh else plan.whole_mesh
    if world_size not in (None, ranks := math.prod(size for _, size in axes)):
        whose = "" if mesh else " of the plan"
        raise PlanError(
            f"the mesh {dict(axes)}{whose} is of {ranks} ranks, and world_size is {world_size}: leave it out"
        )
    return axes


def _programs(
    model: nn.Module, plan: Plan, parts: list[Any], captures: Captures, loss_fn: Any, exact: bool
) -> list[Program]:
    shapes, of_size = named_shapes(model), {batch_size(part): part for part in parts}
    with traced_in_double(exact):
        calls = {n: Call(model, *part, loss_fn=loss_fn) for n, part in of_size.items()}
        joints = {n: captures.take(call, plan) for n, call in calls.items()}
    built = {n: lower(joint, plan, shapes) for n, joint in joints.items()}
    if plan.pipeline is not None:
        with traced_in_double(exact):
            for n, joint in joints.items():
                rows_of_call(joint, calls[n], plan, captures).raise_if_mixed()
    return [built[batch_size(part)] for part in parts]


def _decide_alike(programs: list[Program], parts: list[Any]) -> bool:
    """Whether forward takes the way of each of the programs for a part of the batch."""
    leaves = map(pytree.tree_leaves, parts)
    pairs = zip((program.joint for program in programs), leaves, strict=True)
    return all(each.of(given) == each.value for joint, given in pairs for each in joint.conditions)


def _cut_calls(model: nn.Module, plan: Plan, parts: list[Any]) -> list[list[Any]]:
    """What each data-parallel rank calls the program with in a step: of many calls, all but the first and the last are
    alike. Statistics of the rows of all ranks are those of one call."""
    calls = 1 if any(synchronized_batch_norms(model)) else min(plan.calls, _CALLS)
    return [_cut_batch(model, part, calls)[0] for part in parts]


def _cut_batch(model: nn.Module, call: Any, ranks: int) -> tuple[list[Any], str]:
    sizes = {leaf.shape[:1] for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)}
    rows = next(iter(sizes))[0] if len(sizes) == 1 and next(iter(sizes)) else 0
    # Of a loss over the rows of all ranks, the rank's part is not known.
    lost = any(synchronized_batch_norms(model)) and returns_loss(model, call[0], call[1], torch.device("cpu"))
    if lost or not rows or rows % ranks:
        return [call] * ranks, _WHOLE
    cut = [map_tensors(lambda t, r=r: t.chunk(ranks)[r].clone(), call) for r in range(ranks)]
    return cut, f"a batch of {rows} cut among the ranks"
