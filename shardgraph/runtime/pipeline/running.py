"""This rank's stages, run: a training step by a schedule of torch.distributed.pipelining, or forward alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from shardgraph import ir, torch_api
from shardgraph.passes.program import Program, gradients_of
from shardgraph.plans.orders import find_schedule
from shardgraph.plans.plan import Plan
from shardgraph.runtime import watch
from shardgraph.runtime.executor import Executor, State, mesh_rank
from shardgraph.runtime.gradients import on_any_data_rank
from shardgraph.runtime.loss_weight import weight_by_elements
from shardgraph.runtime.pipeline.messages import empty_like_traced, flat, in_layout
from shardgraph.runtime.pipeline.microbatches import loss_counts, weighted_sum
from shardgraph.runtime.pipeline.stage import Microbatch, RunningStage, Suspended
from shardgraph.runtime.pipeline.statistics import combined
from shardgraph.runtime.rng import common_draw, rank_seed
from shardgraph.runtime.shortened_rows import shorten_rows


@dataclass(frozen=True)
class Work:
    """One microbatch of a call: what runs it, and its flattened inputs."""

    executor: Executor
    leaves: Sequence[Any]

    def value(self, role: ir.Role) -> Any:
        """The value of an input or buffer."""
        return self.executor.state.value(role, self.leaves)


class RunningPipeline:
    """The stages of this rank; ``mesh`` is that of all ranks, None for one process that has them all."""

    def __init__(self, plan: Plan, state: State, mesh: DeviceMesh | None) -> None:
        assert plan.pipeline is not None
        self.plan, self.pipeline, self.state, self.mesh = plan, plan.pipeline, state, mesh
        self.group = None if mesh is None else mesh.get_group(self.pipeline.axis)
        self.rank = 0 if mesh is None else mesh.get_local_rank(self.pipeline.axis)
        self.numbers = self.pipeline.stages_of(self.rank)
        self.stages = [RunningStage(number, self.pipeline, state, self.group) for number in self.numbers]
        self._used: dict[str, None] = {}  # the parameters that losses depend on whose gradients are not reduced yet
        state.accumulated.append(self._used)
        if self.group is not None:
            watch.place.with_messages.add(str(self.group.group_name))
            watch.place.in_steps.setdefault(str(self.group.group_name), 0)
        self._schedules: dict[int, Any] = {}
        self._sharing: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    @property
    def neighbours(self) -> list[int]:
        """The global ranks that have the stages before and after this rank's."""
        stages = {number + step for number in self.numbers for step in (-1, 1)} & set(range(self.pipeline.count))
        places = [place for place in self.pipeline.places_of(stages) if place != self.rank]
        return [] if self.group is None else [dist.get_global_rank(self.group, place) for place in places]

    def train(self, work: Sequence[Work], reduce: bool, scale: float = 1.0, by_tokens: bool = False) -> torch.Tensor:
        """Forward and backward of all microbatches; returns the loss of the whole batch, detached, on every rank.

        Gradients are those of ``scale`` times the loss. With ``reduce`` they are reduced and become the parameters'
        ``grad``; else they are kept for the next step. ``by_tokens`` weighs the losses of data ranks by the elements
        that they are means of.
        """
        programs = [item.executor.program for item in work]
        reduction, rows, counts = loss_counts(programs, [item.value for item in work])
        weights = reduction.weights(rows, counts)
        if by_tokens:
            scale *= weight_by_elements(reduction.elements(rows, counts), self.plan, self.state)
        self._begin(work, [weight * scale for weight in weights])
        losses = self._one_by_one(len(work)) if self.group is None else self._by_schedule(len(work))
        self._write_buffers(work)
        program = programs[0]
        (traced,) = [v.meta["val"] for role, v in ir.outputs(program.joint.module) if role == ir.Output(0)]
        loss = torch.zeros((), dtype=traced.dtype, device=self.state.device)
        if losses:
            loss = weighted_sum([each.detach() for each in losses], weights).to(traced.dtype)
        self._used.update(dict.fromkeys(program.trained))
        if reduce:
            self._finish_gradients(program)
        leaves, gradients = self._input_gradients(work)
        if leaves:
            torch.autograd.backward(leaves, gradients)
        for stage in self.stages:
            stage.end()
        return self._from_last_stage(loss)

    def _begin(self, work: Sequence[Work], weights: Sequence[float] | None = None) -> None:
        """Give each stage its microbatches; ``weights`` are what their losses count for, None without backward. Rows of
        parameters that forward shortens are shortened before."""
        shorten_rows(work[0].executor.program, self.state, [(item.executor.program, item.value) for item in work])
        count, data_size = self.pipeline.count, self.plan.data_size
        data_rank = self.plan.data_rank(mesh_rank(self.state.mesh))
        alone = count == 1 and data_size == 1
        common = common_draw() if work[0].executor.program.random and not alone else None
        for stage in self.stages:
            microbatches = []
            for number, item in enumerate(work):
                recomputes = weights is not None and self.pipeline.recomputes(number, len(work))
                place = (number * count + stage.stage_index) * data_size + data_rank
                seed = None if common is None else rank_seed(common, place)
                program, weight = item.executor.program.stages[stage.stage_index], weights[number] if weights else 0.0
                microbatches.append(Microbatch(item.executor, program, item.leaves, weight, recomputes, seed))
            stage.begin(microbatches)

    def _one_by_one(self, count: int) -> list[torch.Tensor]:
        losses = []
        for number in range(count):
            results: Any = ()
            for stage in self.stages:
                stage.set_local_fwd_input(results, number)
                results = stage.forward_one_chunk(number)
            losses.append(results)
            gradients: Any = ()
            for stage in reversed(self.stages):
                stage.set_local_bwd_input(gradients, number)
                stage.backward_one_chunk(number)
                gradients = stage.get_local_bwd_output(number)
        return losses

    def _by_schedule(self, count: int) -> list[torch.Tensor]:
        if count not in self._schedules:
            kind: Any = get_schedule_class(find_schedule(self.pipeline.schedule).torch_name)
            stages: Any = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
            self._schedules[count] = kind(stages, count, loss_fn=lambda loss, _: loss)
        losses: list[torch.Tensor] = []
        with torch.enable_grad():  # required by torch, though not by our graphs
            self._schedules[count].step(target=torch.zeros(count, device="cpu"), losses=losses, return_outputs=False)
        return losses

    def _write_buffers(self, work: Sequence[Work]) -> None:
        written = [{f: v for stage in self.stages for f, v in stage.written[i].items()} for i in range(len(work))]
        if not written[0]:
            return
        start = {fqn: self.state.model.get_buffer(fqn) for fqn in written[0]}
        axes = tuple(axis for axis, _ in self.plan.data_mesh)
        for fqn, value in combined([item.executor.program for item in work], start, written).items():
            if self.state.mesh is not None and self.plan.data_size > 1 and value.is_floating_point():
                value = value.contiguous()
                dist.all_reduce(value, group=torch_api.group_along(self.state.mesh, axes))
                value = value / self.plan.data_size
            start[fqn].copy_(value)

    def _finish_gradients(self, program: Program) -> None:
        """Reduce the gradients of this rank's stages, add up those of shared parameters, and set ``grad``."""
        totals: dict[str, torch.Tensor] = {}
        for stage in self.stages:
            self._add_reduced(stage, totals)
        shared = {fqn: self.pipeline.places_of(program.owners[fqn]) for fqn in program.trained}
        shared = {fqn: ranks for fqn, ranks in shared.items() if len(ranks) > 1 and self.rank in ranks}
        for fqn in sorted({*totals, *shared}):  # in one order on all ranks
            local = torch_api.local_tensor(self.state.layout.parameter(fqn))
            if fqn not in totals:  # a stage may use a parameter without computing a gradient of it
                totals[fqn] = torch.zeros_like(local)
            elif totals[fqn].stride() != local.stride():
                totals[fqn] = torch.empty_like(local).copy_(totals[fqn])
            if fqn in shared:
                dist.all_reduce(totals[fqn], group=self._sharing[shared[fqn]])
        self._leave_out(totals, program)
        layout = self.state.layout
        self.state.add_gradients({fqn: each for fqn, each in totals.items() if layout.parameter(fqn).requires_grad})

    def _add_reduced(self, stage: RunningStage, totals: dict[str, torch.Tensor]) -> None:
        """Add the gradients of a stage to ``totals``, reduced; they are in memory of their own."""
        own = stage.take_gradients()
        if reduce := stage.work[0].once("reduce"):
            inputs = [own.pop(role.of.fqn) for role, _ in reduce.inputs if isinstance(role, ir.Accumulated)]
            own |= gradients_of(zip([role for role, _ in reduce.results], reduce(inputs), strict=True))
        for fqn, value in own.items():
            totals[fqn] = totals[fqn].add_(value) if fqn in totals else value

    def _leave_out(self, gradients: dict[str, torch.Tensor], program: Program) -> None:
        """Drop the gradients, of zero, of parameters that no loss of any data rank depends on, as in PyTorch."""
        if program.optional:
            used = on_any_data_rank([fqn in self._used for fqn in program.optional], self.plan, self.state)
            for fqn in itertools.compress(program.optional, [not each for each in used]):
                gradients.pop(fqn, None)
        self._used.clear()

    def _input_gradients(self, work: Sequence[Work]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs that require a gradient, and their gradients, on every rank of the pipeline."""
        tensors, gradients = [], []
        for number, item in enumerate(work):
            for index, leaf in enumerate(item.leaves):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    parts = [stage.input_gradients[number].get(index) for stage in self.stages]
                    total = sum(
                        (part for part in parts if part is not None), torch.zeros_like(leaf, requires_grad=False)
                    )
                    if self.group is not None:
                        dist.all_reduce(total, group=self.group)
                    tensors.append(leaf)
                    gradients.append(total)
        return tensors, gradients

    def prepare(self, owners: Mapping[str, tuple[int, ...]]) -> None:
        """Make the groups over which the gradients of shared parameters are added up; all ranks must call it."""
        for fqn in sorted(owners):
            ranks = self.pipeline.places_of(owners[fqn])
            if len(ranks) == self.pipeline.ranks:
                self._sharing[ranks] = self.group
            elif len(ranks) > 1 and self.mesh is not None and ranks not in self._sharing:
                columns = self.mesh.mesh.reshape(self.pipeline.ranks, -1).t()  # the pipeline's axis is the outermost
                groups, backend = columns[:, list(ranks)].tolist(), dist.get_backend(self.group)
                assert self.group is not None
                timeout = torch_api.wait_of(self.group)
                self._sharing[ranks], _ = dist.new_subgroups_by_enumeration(groups, timeout, backend)

    def infer(self, work: Sequence[Work]) -> list[dict[Any, Any]]:
        """Forward of all microbatches alone; returns the model's outputs for each, by role, on every rank."""
        self._begin(work)
        results = self._forward(work)
        for stage in self.stages:
            stage.end()
        return results

    def forward(self, work: Sequence[Work]) -> tuple[list[dict[Any, Any]], list[Suspended]]:
        """As :meth:`infer`, of a step that :meth:`backward` continues; returns each stage's part of it too."""
        self._begin(work, [1.0] * len(work))
        results = self._forward(work)
        self._write_buffers(work)
        return results, [stage.suspend() for stage in self.stages]

    def backward(
        self,
        work: Sequence[Work],
        step: Sequence[Suspended],
        tangents: Sequence[Mapping[ir.Tangent, torch.Tensor]],
        reduce: bool,
    ) -> list[torch.Tensor]:
        """Backward of all microbatches from the gradients of their outputs, for parameters as in :meth:`train`.

        Returns:
            the gradients of the inputs that require one, microbatch by microbatch.
        """
        for stage, suspended in zip(self.stages, step, strict=True):
            stage.resume(suspended, tangents)
        local = dict(zip(self.numbers, self.stages, strict=True))
        sends: list[Any] = []
        for stage, number in itertools.product(reversed(self.stages), range(len(work))):
            if following := local.get(stage.stage_index + 1):
                stage.set_local_bwd_input(following.get_local_bwd_output(number), number)
            else:
                for receive in _start(stage.get_bwd_recv_ops(number)):
                    receive.wait()
            stage.backward_one_chunk(number)
            if stage.stage_index - 1 not in local:
                sends += _start(stage.get_bwd_send_ops(number))
        for send in sends:
            send.wait()
        program = work[0].executor.program
        for role in {role for each in tangents for role in each}:
            self._used.update(dict.fromkeys(program.reached[role]))
        if reduce:
            self._finish_gradients(program)
        _, gradients = self._input_gradients(work)
        for stage in self.stages:
            stage.end()
        return gradients

    def _forward(self, work: Sequence[Work]) -> list[dict[Any, Any]]:
        """Stage after stage, all microbatches."""
        local = dict(zip(self.numbers, self.stages, strict=True))
        sends: list[Any] = []
        for stage, number in itertools.product(self.stages, range(len(work))):
            if previous := local.get(stage.stage_index - 1):
                stage.set_local_fwd_input(previous.leaving.pop(("forward", number)), number)
            else:
                for receive in _start(stage.get_fwd_recv_ops(number)):
                    receive.wait()
            stage.forward_one_chunk(number)
            if stage.stage_index + 1 not in local:
                sends += _start(stage.get_fwd_send_ops(number))
        for send in sends:
            send.wait()
        return [self._outputs(number, item) for number, item in enumerate(work)]

    def _outputs(self, number: int, item: Work) -> dict[Any, Any]:
        last = next((stage for stage in self.stages if stage.is_last), None)
        results: dict[Any, Any] = {}
        for role, node in ir.outputs(item.executor.program.stages[-1].kept.forward):
            if isinstance(role, (ir.Output, ir.IntermediateBase)):
                if not hasattr(node, "meta"):
                    results[role] = node  # a constant of the program
                elif last is None:
                    results[role] = self._from_last_stage(empty_like_traced(node.meta["val"], self.state.device))
                else:
                    results[role] = self._from_last_stage(in_layout(last.outputs[number][role], node.meta["val"]))
        return results

    def _from_last_stage(self, value: torch.Tensor) -> torch.Tensor:
        """The value on the rank of the last stage, on every rank of the pipeline."""
        if self.group is not None and value.numel():
            dist.broadcast(flat(value), group=self.group, group_src=self.pipeline.rank_of(self.pipeline.count - 1))
        return value

    def to_first_rank(
        self, tensor: torch.Tensor, place: int, gathered: Callable[[torch.Tensor, bool], torch.Tensor]
    ) -> torch.Tensor:
        """The whole of a tensor, from the ranks at ``place`` along the pipeline, in CPU memory of global rank 0.

        It is empty on other ranks. All ranks must call it.
        """
        first_column = mesh_rank(self.state.mesh) == 0
        whole = gathered(tensor, first_column) if self.rank == place else tensor.new_empty(0, device="cpu")
        if place == 0 or self.group is None or not first_column:
            return whole
        if self.rank == place:
            dist.send(whole.to(self.state.device), group=self.group, group_dst=0)
        elif self.rank == 0:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.state.device)
            dist.recv(buffer, group=self.group, group_src=place)
            return buffer.cpu()
        return tensor.new_empty(0, device="cpu")


def _start(operations: list[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(operations) if operations else []
