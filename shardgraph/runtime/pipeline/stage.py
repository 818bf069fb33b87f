"""A stage as the schedules of torch.distributed.pipelining drive it: its microbatches run our graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph import ir, torch_api
from shardgraph.cost_models.actions import Kind
from shardgraph.passes.program import StageProgram
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.runtime.checked import check
from shardgraph.runtime.executor import Bound, Executor, State
from shardgraph.runtime.pipeline.messages import empty_like_traced, flat, in_layout
from shardgraph.runtime.rng import seeded


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step on one stage, whose graphs ``executor`` has.

    ``weight`` is the gradient of the step's (scaled) loss by the microbatch's; with ``recomputes`` backward repeats
    forward; ``seed`` is the seed of the stage's random numbers, None to use the default generator as it is.
    """

    executor: Executor
    stage: StageProgram
    leaves: Sequence[Any]
    weight: float
    recomputes: bool
    seed: int | None

    def graph(self, kind: Kind, adds: bool = False) -> Bound:
        """The graph that an action of this kind runs; if it ``adds``, the one that takes earlier gradients."""
        halves = self.stage.again if self.recomputes else self.stage.kept
        return self.executor.adding(halves.name(kind)) if adds else self.executor.graph(halves.name(kind))

    def once(self, name: str) -> Bound | None:
        """The graph that a step runs once on the stage, ``"gather"`` or ``"reduce"``; None if there is none."""
        name = self.stage.prefix + name
        return self.executor.graph(name) if name in self.executor.program.graphs else None


@dataclass(frozen=True)
class Suspended:
    """A step of a stage between its forward and its backward."""

    work: Sequence[Microbatch]
    saved: defaultdict[int, dict[ir.Role, Any]]
    gathered: dict[ir.Role, Any]


class RunningStage(torch_api.PipelineStageBase):
    """One stage of this rank.

    A step begins with :meth:`begin`; then a schedule calls the methods that it knows of a stage, in its order; the
    results are then in ``outputs``, ``gradients``, ``input_gradients`` and ``written``.
    """

    def __init__(self, number: int, pipeline: Pipeline, state: State, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            super().__init__(nn.Module(), number, pipeline.count, state.device, group)
        self.stage_index, self.num_stages, self.group, self.state = number, pipeline.count, group, state
        self.stage_index_to_group_rank = {stage: pipeline.rank_of(stage) for stage in range(pipeline.count)}
        self.args_recv_info, self.act_send_info = {0: ()}, {}  # read by torch's validation
        self.gradients: dict[str, torch.Tensor] = {}
        state.accumulated.append(self.gradients)
        self._own: dict[str, None] = {}  # the gradients that have memory of their own
        state.accumulated.append(self._own)
        self.tangents: Sequence[Mapping[ir.Tangent, torch.Tensor]] | None = None

    def begin(self, work: Sequence[Microbatch], gathers: bool = True) -> None:
        """Forget the last step, and gather the parameters that are kept for all microbatches of this one."""
        self.work, self.tangents = work, None
        self.arrived: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.leaving: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self.saved: defaultdict[int, dict[ir.Role, Any]] = defaultdict(dict)
        self.outputs: defaultdict[int, dict[ir.Role, Any]] = defaultdict(dict)
        self.written: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self.input_gradients: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self.gathered: dict[ir.Role, Any] = {}
        if gathers and (gather := work[0].once("gather")):
            values = gather([torch_api.local_tensor(self.state.value(role, ())) for role, _ in gather.inputs])
            self.gathered = {role: value for (role, _), value in zip(gather.results, values, strict=True) if role}

    def suspend(self) -> Suspended:
        """What backward of this step needs, so that another step may begin before it."""
        suspended = Suspended(self.work, self.saved, self.gathered)
        self.saved, self.gathered = defaultdict(dict), {}
        return suspended

    def resume(self, step: Suspended, tangents: Sequence[Mapping[ir.Tangent, torch.Tensor]]) -> None:
        """Go on with backward of a step; ``tangents`` are the incoming gradients of each microbatch's outputs."""
        self.begin(step.work, gathers=False)
        self.saved, self.gathered, self.tangents = step.saved, step.gathered, tangents

    def end(self) -> None:
        """Release all that only the step needs."""
        for values in (self.gathered, self.saved, self.arrived, self.leaving, self.written):
            values.clear()

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Forward of a microbatch; returns what goes to the next stage, or the loss of the last."""
        microbatch = self.work[fwd_chunk_id]
        bound = microbatch.graph("F")
        arrived = self.arrived.pop(("forward", fwd_chunk_id), [])
        inputs = [self._input(role, microbatch, arrived) for role, _ in bound.inputs]
        del arrived
        with seeded(microbatch.seed, self.state.device, microbatch.executor.program.draws_on_host):
            results = bound(inputs, fwd_chunk_id)
        for (role, traced), value in zip(bound.results, results, strict=True):
            if isinstance(role, ir.Forwarded):
                self.leaving["forward", fwd_chunk_id].append(in_layout(value, traced))
            elif isinstance(role, ir.Saved):
                self.saved[fwd_chunk_id][role] = value
            elif isinstance(role, ir.Mutation) and isinstance(role.of, ir.Buffer):
                self.written[fwd_chunk_id][role.of.fqn] = value
            elif isinstance(role, (ir.Output, ir.IntermediateBase)):
                self.outputs[fwd_chunk_id][role] = value
            elif isinstance(role, ir.Checked):
                check(role, value)
        if self.is_last:
            return self.outputs[fwd_chunk_id].get(ir.Output(0))
        return tuple(self.leaving["forward", fwd_chunk_id])

    def _input(self, role: ir.Role, microbatch: Microbatch, arrived: Sequence[torch.Tensor]) -> Any:
        if isinstance(role, ir.Forwarded):
            return arrived[role.index]
        if isinstance(role, ir.Gathered):
            return self.gathered[role]
        return torch_api.local_tensor(self.state.value(role, microbatch.leaves))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of a microbatch, or the half of it that the previous stage waits for."""
        self._differentiate(bwd_chunk_id, "B" if full_backward else "I")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The other half: gradients of the weights."""
        self._differentiate(bwd_chunk_id, "W")

    def _differentiate(self, number: int, kind: Kind) -> None:
        microbatch, values = self.work[number], self.saved.pop(number, {})
        if microbatch.stage.kept.backward is None:
            return
        values |= {ir.Returned(i): value for i, value in enumerate(self.arrived.pop(("backward", number), []))}
        # One that counts for nothing may have no loss to be differentiated, such as a mean of nothing: it adds nothing.
        adds = kind != "I" and bool(self.gradients) and bool(microbatch.weight)
        bound = microbatch.graph(kind, adds)
        inputs = [self._given(number, role, traced, values) for role, traced in bound.inputs]
        if kind == "I":  # the other half has its own uses of them
            weights = {role for role, _ in microbatch.graph("W").inputs}
            self.saved[number] = {role: value for role, value in values.items() if role in weights}
        del values
        for (role, traced), value in zip(bound.results, bound(inputs, number), strict=True):
            if isinstance(role, ir.Returned):
                self.leaving["backward", number].append(in_layout(value, traced))
            elif isinstance(role, ir.Saved):
                self.saved[number][role] = value
            elif isinstance(role, ir.Gradient) and value is not None:
                gradient = value if microbatch.weight else torch.zeros_like(value)
                if isinstance(role.of, ir.Parameter):
                    self._keep(role.of.fqn, gradient, own=role in bound.own or not microbatch.weight)
                elif isinstance(role.of, ir.Input):
                    self.input_gradients[number][role.of.index] = gradient

    def _given(self, number: int, role: ir.Role, traced: torch.Tensor, values: Mapping[ir.Role, Any]) -> Any:
        """An input of a backward graph; a gradient that it adds to is no longer the stage's."""
        if isinstance(role, ir.Tangent):
            return self._tangent(number, role, traced)
        if isinstance(role, ir.Accumulated):
            fqn = role.of.fqn
            return self._take(fqn) if fqn in self.gradients else empty_like_traced(traced, self.state.device).zero_()
        return values[role]

    def _tangent(self, number: int, role: ir.Tangent, traced: torch.Tensor) -> torch.Tensor:
        """The incoming gradient of an output: what the caller gives, or what the microbatch's loss counts for."""
        if self.tangents is not None and role in self.tangents[number]:
            return in_layout(self.tangents[number][role], traced)
        value = self.work[number].weight if self.tangents is None else 0.0
        return torch.full(traced.shape, value, dtype=traced.dtype, device=self.state.device)

    def _keep(self, fqn: str, gradient: torch.Tensor, own: bool) -> None:
        """Keep a gradient of the first microbatch, or the sum of one with those before."""
        if fqn in self.gradients:
            return  # a microbatch that counts for nothing has added nothing
        self.gradients[fqn] = gradient
        if own:
            self._own[fqn] = None

    def _take(self, fqn: str) -> torch.Tensor:
        """Give away a gradient, in memory of its own."""
        gradient, own = self.gradients.pop(fqn), fqn in self._own
        self._own.pop(fqn, None)
        return gradient if own else gradient.clone()

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """This rank's own gradients, added up since they were last taken, each in memory of its own."""
        return {fqn: self._take(fqn) for fqn in list(self.gradients)}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the results of the previous stage; the first stage receives nothing."""
        return self._receive("forward", fwd_chunk_id, self.work[fwd_chunk_id].stage.received, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients that the next stage returns."""
        return self._receive("backward", bwd_chunk_id, self.work[bwd_chunk_id].stage.returned, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the inputs of the next stage; the last stage sends nothing."""
        return self._messages(dist.isend, self.leaving.pop(("forward", fwd_chunk_id), []), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send gradients to the previous stage."""
        return self._messages(dist.isend, self.leaving.pop(("backward", bwd_chunk_id), []), self.stage_index - 1)

    def _receive(self, direction: str, number: int, traced: Sequence[torch.Tensor], source: int) -> list[dist.P2POp]:
        self.arrived[direction, number] = [empty_like_traced(each, self.state.device) for each in traced]
        return self._messages(dist.irecv, self.arrived[direction, number], source)

    def _messages(self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        return [
            dist.P2POp(operation, flat(each), group=self.group, group_peer=self.stage_index_to_group_rank[peer])
            for each in tensors
            if each.numel()
        ]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the results of a stage of the same rank."""
        self.arrived["forward", mb_index] = list(prev_stage_outputs)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from a stage of the same rank."""
        self.arrived["backward", mb_index] = list(next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Give gradients to a stage of the same rank."""
        return tuple(self.leaving.pop(("backward", mb_index), []))

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        """What torch prepares, clears, scales and reduces for its own stages is not needed for compiled ones."""
        return ()

    clear_runtime_states = scale_grads = perform_reduce_grad = _get_init_p2p_neighbors_ops = _nothing
    _prepare_forward_infra = _prepare_backward_infra = _create_grad_recv_info = _nothing
