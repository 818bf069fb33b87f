"""The compiled module of a plan with a pipeline: this rank's stages."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgraph import torch_api
from shardgraph.capture.capture import output_shapes
from shardgraph.capture.captures import Call
from shardgraph.capture.pytrees import flatten
from shardgraph.capture.subclasses import check_transforms
from shardgraph.errors import PlanError, ShardGraphError
from shardgraph.module import checkpoint
from shardgraph.module.compiled import Setup
from shardgraph.module.decided import check_decided_alike
from shardgraph.module.gradient_norm import clip_by, combined, nothing, total_norm
from shardgraph.module.sharded import ShardedModule, on_device
from shardgraph.passes.program import Program
from shardgraph.plans.declared_stages import declared_owners
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.proof.microbatches import rows_of, rows_of_call
from shardgraph.runtime.executor import Executor
from shardgraph.runtime.pipeline.differentiable import differentiable
from shardgraph.runtime.pipeline.failure import report_failure
from shardgraph.runtime.pipeline.microbatches import batch_size, can_merge, merged, microbatches
from shardgraph.runtime.pipeline.running import RunningPipeline, Work
from shardgraph.torch_api import map_tensors, pytree


class PipelinedModule(ShardedModule):
    """A model compiled under a plan with a pipeline.

    It has the parameters that its stages use; the others stay on ``meta`` in the modules and are not in
    ``parameters()`` or ``state_dict()``. All ranks of the pipeline are called with the same batch.
    """

    pipeline: Pipeline
    owners: Mapping[str, tuple[int, ...]]  # stages that use each parameter, as declared or from the first program
    _running: RunningPipeline
    _written: dict[str, int]  # the stage that writes each buffer
    _mergeable: dict[tuple[Executor, ...], bool]  # whether outputs of these for microbatches can be merged

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh | None, setup: Setup) -> None:
        super().__init__(model, plan, mesh[plan.axes] if mesh is not None and plan.axes else None, setup)
        assert plan.pipeline is not None
        running = RunningPipeline(plan, self._state, mesh)
        self._own(pipeline=plan.pipeline, owners={}, _running=running, _written={}, _mergeable={})
        _PIPELINES.add(self)
        _watch_optimizers()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward; every rank of the pipeline returns its output.

        In training mode with gradients enabled, ``backward()`` of a loss of the output, which every rank must compute,
        runs backward of all microbatches: the order of GPipe, whatever the schedule, so that a rank holds what all of
        them save for backward. :meth:`train_step` holds less, and computes the loss on the last stage alone.
        Gradients of parameters become their ``grad``; ``torch.autograd.grad`` has those of inputs alone.
        """
        if torch.is_grad_enabled() and self.training:
            work = self._work(args, kwargs, None)
            results = differentiable(self._running, work, lambda: self._sync, self._guarded)
            return self._without_padding(self._delivered(work, results), args, kwargs)
        with torch.no_grad():
            work = self._work(args, kwargs, None)
            with self._guarded():
                results = self._running.infer(work)
            return self._without_padding(self._delivered(work, results), args, kwargs)

    def _delivered(self, work: list[Work], results: list[dict[Any, Any]]) -> Any:
        """The output of the batch, from the results of its microbatches."""
        outputs = [item.executor.deliver(result, item.leaves) for item, result in zip(work, results, strict=True)]
        return merged(outputs, [item.executor.program for item in work], [item.value for item in work])

    def _guarded(self) -> AbstractContextManager[None]:
        """What reports a failing step alike on every rank."""
        return report_failure(self._setup.agreement, self._running.group, self._running.neighbours)

    def train_step(self, *args: Any, scaler: torch.amp.GradScaler | None = None, **kwargs: Any) -> torch.Tensor:
        """Forward, the loss and backward of all microbatches; see :meth:`ShardedModule.train_step`.

        Returns:
            the loss of the batch, on every rank of the pipeline.

        Raises:
            ShardGraphError: also if the loss of a batch does not follow from those of its microbatches.
        """
        with torch.enable_grad():
            work = self._work(args, kwargs, self._loss_of(kwargs))
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self._state.device)))
        with self._guarded():
            return self._running.train(work, self._sync, scale, by_tokens=self._setup.loss_weight == "tokens")

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """See :meth:`ShardedModule.clip_grad_norm_`."""
        gradients = {fqn: p.grad for fqn, p in self.named_parameters() if p.grad is not None}
        first = {fqn: self.pipeline.places_of(self.owners[fqn])[0] for fqn in gradients}
        counted = [grad for fqn, grad in gradients.items() if first[fqn] == self._running.rank]
        order, device = float(norm_type), self._state.device
        norm = total_norm(counted, order, device).double() if counted else nothing(order, device)
        if self._running.group is not None:
            norm = combined(norm.reshape(1), order, self._running.group).reshape(())
        clip_by(gradients.values(), norm, max_norm, error_if_nonfinite)
        return norm

    def _work(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Callable[..., Any] | None) -> list[Work]:
        """The microbatches of a call; forward alone has one if it cannot be cut, or its outputs cannot be merged."""
        check_transforms()
        self._watched()
        device, padded = self._state.device, self._padded(args, kwargs)
        flatten(padded)  # so that its types are known
        call = map_tensors(lambda t: t if t.is_meta else on_device(t, device), padded)
        count = self.pipeline.parts if loss_fn is not None or batch_size(call) >= self.pipeline.parts else 1
        work = self._cut(microbatches(call, count) if count > 1 else [call], loss_fn)
        if count > 1:
            check_decided_alike([item.executor.program.joint for item in work], pytree.tree_leaves(call))
        if loss_fn is None and count > 1 and not self._can_merge(call, [item.executor for item in work]):
            work = self._cut([call], loss_fn)
        self._programs.set_attributes()
        return work

    def _can_merge(self, call: tuple[tuple[Any, ...], dict[str, Any]], executors: list[Executor]) -> bool:
        key = tuple(executors)
        if key not in self._mergeable:
            shapes = output_shapes(self.original, *call, self._state.device)
            programs = [executor.program for executor in executors]
            mergeable = shapes is not None and can_merge(programs, shapes)
            self._mergeable[key] = mergeable and all(rows_of(program.joint).apart for program in programs)
            if not self._mergeable[key] and self.training and torch.is_grad_enabled():
                warnings.warn(
                    "the batch goes through the pipeline as one microbatch, stage after stage, since the outputs of "
                    "microbatches cannot be put together to those of the batch: return what has a row for each of the "
                    "batch's, or use train_step",
                    stacklevel=5,
                )
        return self._mergeable[key]

    def _cut(self, parts: list[Any], loss_fn: Callable[..., Any] | None) -> list[Work]:
        calls, (spec, *_) = zip(*map(pytree.tree_flatten, parts), strict=True)
        executors = self._executables(calls, spec, loss_fn)
        return [Work(e, self._programs.lift(leaves, spec)) for e, leaves in zip(executors, calls, strict=True)]

    def declare_owners(self) -> None:
        """Set the stages of parameters as the model's text has them, before a call of it is captured."""
        self.owners = declared_owners(self.original, self.pipeline)
        self._running.prepare(self.owners)

    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made._own(owners=self.owners, _written=dict(self._written))
        made._programs.trained = self._programs.trained
        made._running.prepare(self.owners)
        return made

    def _why_not_as_written(self) -> str | None:
        return (
            "a pipeline has the model's layers on several ranks, so that only its forward runs there: load "
            "full_state_dict() into a copy of the original to call its methods or submodules"
        )

    def compile_for(self, call: Call) -> None:
        """See :meth:`ShardedModule.compile_for`."""
        with torch.set_grad_enabled(call.training):
            self._work(call.args, dict(call.kwargs), call.loss_fn)

    def _program(self, call: Call, show: Callable[[str], None]) -> Program:
        program = super()._program(call, show)
        if call.loss_fn is not None:
            program.losses  # noqa: B018  # raises if those of microbatches cannot be added up
            rows = rows_of_call(program.joint, call, self.plan, self._setup.captures)
            rows.raise_if_mixed()
            for line in rows.warnings():
                warnings.warn(line, stacklevel=2)
        for fqn in self.owners:
            used, had = (self.pipeline.places_of(owners[fqn]) for owners in (program.owners, self.owners))
            if missing := set(used) - set(had):
                raise PlanError(
                    f"with these inputs {fqn!r} is used on the pipeline's ranks {sorted(missing)}, which lack it: "
                    "forward takes another way through the model than with those that it was compiled for"
                )
        return program

    def _bound(self, program: Program) -> Executor:
        if not self.owners:
            self.owners = program.owners
            self._running.prepare(self.owners)
        self._written |= {fqn: stage.number for stage in program.stages for fqn in stage.written}
        return Executor(program, self._state)

    def _graph(self, half: str) -> Any:
        raise ShardGraphError(f"a pipeline has a {half} graph for every stage: sharded.program.stages[i].kept.{half}")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``, for this rank's stages."""
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in named if not parameter.is_meta)

    def _of_stages(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of ``state`` this rank's stages have; a buffer that a stage writes is in that stage's state.

        ``torch.distributed.checkpoint`` combines the ranks' states; a checkpoint loads under any other plan.
        """
        here = set(self._running.numbers)
        return {
            name: value
            for name, value in state.items()
            if not (isinstance(value, torch.Tensor) and value.is_meta) and self._written.get(name, min(here)) in here
        }

    def _whole(self, name: str, tensor: torch.Tensor, keep: bool) -> torch.Tensor:
        stages = self.owners.get(name, (self._written.get(name, 0),))
        return self._running.to_first_rank(tensor, self.pipeline.rank_of(stages[0]), checkpoint.gathered)


_PIPELINES: weakref.WeakSet[PipelinedModule] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    torch_api.before_every_step(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise ShardGraphError for an optimizer of a pipeline's parameters that needs all of them."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) in own for module in _PIPELINES for parameter in module.parameters()):
        raise ShardGraphError(
            "LBFGS takes products over all parameters of the model, and a pipeline has them on several ranks: use it "
            "under a plan without a pipeline"
        )
