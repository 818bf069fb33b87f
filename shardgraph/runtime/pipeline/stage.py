"""A stage as the schedules of torch.distributed.pipelining drive it: its microbatches run our graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph import torch_api
from shardgraph.cost_models.actions import Kind
from shardgraph.ir import (
    Buffer,
    Forwarded,
    Gathered,
    Gradient,
    IntermediateBase,
    Mutation,
    Output,
    Parameter,
    Returned,
    Role,
    Saved,
    Tangent,
)
from shardgraph.passes.program import StageProgram
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.runtime.executor import Bound, Executor, State
from shardgraph.runtime.pipeline.messages import empty_like_traced, flat, in_layout
from shardgraph.runtime.rng import seeded


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step on one stage, whose graphs ``executor`` has.

    ``share`` is the gradient of the step's loss, scaled if it is, by the microbatch's; ``again`` says to compute
    forward a second time; ``seed`` is what the stage's random numbers come from, None for those of the default
    generator.
    """

    executor: Executor
    stage: StageProgram
    leaves: Sequence[Any]
    share: float
    again: bool
    seed: int | None

    @property
    def trains(self) -> bool:
        """Whether there is a backward of it."""
        return self.stage.kept.backward is not None

    def graph(self, kind: Kind) -> Bound:
        """What an action of this kind runs."""
        halves = self.stage.again if self.again else self.stage.kept
        return self.executor.graph(halves.name(kind))

    def once(self, name: str) -> Bound | None:
        """What a step runs once on the stage, ``"gather"`` or ``"reduce"``, if there is that to do."""
        name = self.stage.prefix + name
        return self.executor.graph(name) if name in self.executor.program.graphs else None


class RunningStage(torch_api.PipelineStageBase):
    """One stage of this rank.

    A step begins with :meth:`begin`; then a schedule calls the methods that it knows of a stage, in its order; then
    ``outputs``, ``gradients`` and ``written`` have what came of it.
    """

    def __init__(self, number: int, pipeline: Pipeline, state: State, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            super().__init__(nn.Module(), number, pipeline.count, state.device, group)
        self.stage_index, self.num_stages, self.group, self.state = number, pipeline.count, group, state
        self.stage_index_to_group_rank = {stage: pipeline.rank_of(stage) for stage in range(pipeline.count)}
        self.args_recv_info, self.act_send_info = {0: ()}, {}  # what torch's validation looks at
        self.work: list[Microbatch] = []
        self.gathered: dict[Role, Any] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()  # the gradients that are in memory of their own

    # -- a step ------------------------------------------------------------------------------------

    def begin(self, work: list[Microbatch]) -> None:
        """Forget the last step and gather what is kept for all microbatches of this one."""
        self.work = work
        self.arrived: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.leaving: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.saved: dict[int, dict[Role, Any]] = {}
        self.outputs: dict[int, dict[Role, Any]] = {}
        self.written: dict[int, dict[str, torch.Tensor]] = {}
        gather = work[0].once("gather")
        if gather is not None:
            values = gather([torch_api.local_tensor(self.state.value(role, ())) for role, _ in gather.takes])
            self.gathered = {role: value for (role, _), value in zip(gather.gives, values, strict=True) if role}

    def end(self) -> None:
        """Let go of what only the step needs."""
        self.gathered, self.saved, self.arrived, self.leaving = {}, {}, {}, {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Forward of a microbatch; gives what goes to the next stage, or the loss of the last."""
        mine = self.work[fwd_chunk_id]
        bound = mine.graph("F")
        arrived = self.arrived.pop(("forward", fwd_chunk_id), [])
        inputs = [self._input(role, mine, arrived) for role, _ in bound.takes]
        del arrived
        with seeded(mine.seed, self.state.device):
            results = bound(inputs)
        forwarded: list[torch.Tensor] = []
        saved: dict[Role, Any] = {}
        written: dict[str, torch.Tensor] = {}
        outputs: dict[Role, Any] = {}
        for (role, traced), value in zip(bound.gives, results, strict=True):
            if isinstance(role, Forwarded):
                forwarded.append(in_layout(value, traced))
            elif isinstance(role, Saved):
                saved[role] = value
            elif isinstance(role, Mutation) and isinstance(role.of, Buffer):
                written[role.of.fqn] = value
            elif isinstance(role, (Output, IntermediateBase)):
                outputs[role] = value
        if self.has_backward:
            self.saved[fwd_chunk_id] = saved
        self.written[fwd_chunk_id], self.outputs[fwd_chunk_id] = written, outputs
        self.leaving["forward", fwd_chunk_id] = forwarded
        return outputs.get(Output(0)) if self.is_last else tuple(forwarded)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of a microbatch, or the half of it for which the stage before waits."""
        if self.has_backward:
            self._differentiate(bwd_chunk_id, "B" if full_backward else "I")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The other half: gradients of the weights."""
        if self.has_backward:
            self._differentiate(bwd_chunk_id, "W")

    def _differentiate(self, number: int, kind: Kind) -> None:
        mine = self.work[number]
        self.leaving.setdefault(("backward", number), [])
        if not mine.trains:
            self.saved.pop(number, None)
            return
        saved = self.saved[number]
        saved |= {Returned(i): value for i, value in enumerate(self.arrived.pop(("backward", number), []))}
        bound = mine.graph(kind)
        inputs = [self._tangent(role, traced, mine, saved) for role, traced in bound.takes]
        if kind == "I":  # the other half has its own uses of them
            left = {role for role, _ in mine.graph("W").takes}
            self.saved[number] = {role: value for role, value in saved.items() if role in left}
        else:
            del self.saved[number]
        del saved
        returned = []
        for (role, traced), value in zip(bound.gives, bound(inputs), strict=True):
            if isinstance(role, Returned):
                returned.append(in_layout(value, traced))
            elif isinstance(role, Saved):
                self.saved[number][role] = value
            elif isinstance(role, Gradient) and isinstance(role.of, Parameter) and value is not None:
                self._add(role.of.fqn, value)
        if kind != "W":
            self.leaving["backward", number] = returned

    def _input(self, role: Role, mine: Microbatch, arrived: Sequence[torch.Tensor]) -> Any:
        if isinstance(role, Forwarded):
            return arrived[role.index]
        if isinstance(role, Gathered):
            return self.gathered[role]
        return torch_api.local_tensor(self.state.value(role, mine.leaves))

    def _tangent(self, role: Role, like: torch.Tensor, mine: Microbatch, saved: Mapping[Role, Any]) -> Any:
        if isinstance(role, Tangent):  # of the loss
            return torch.full(like.shape, mine.share, dtype=like.dtype, device=self.state.device)
        return saved[role]

    def _add(self, fqn: str, gradient: torch.Tensor) -> None:
        if fqn in self._summed:
            self.gradients[fqn].add_(gradient)
        elif fqn in self.gradients:  # may share memory with what backward gave to others
            self.gradients[fqn] = self.gradients[fqn] + gradient
            self._summed.add(fqn)
        else:
            self.gradients[fqn] = gradient

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """This rank's own gradients, added up since they were last taken."""
        taken, self.gradients, self._summed = self.gradients, {}, set()
        return taken

    # -- messages: what a schedule sends and receives between stages -----------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what the stage before gives."""
        return [] if self.is_first else self._receive("forward", fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients that the stage after gives."""
        if self.is_last or not self.has_backward:
            return []
        return self._receive("backward", bwd_chunk_id, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the stage after what it takes."""
        return [] if self.is_last else self._send("forward", fwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the stage before the gradients that it takes."""
        if self.is_first or not self.has_backward:
            return []
        return self._send("backward", bwd_chunk_id, self.stage_index - 1)

    def _receive(self, way: str, number: int, source: int) -> list[dist.P2POp]:
        stage = self.work[number].stage
        traced = stage.received if way == "forward" else stage.returned
        buffers = [empty_like_traced(each, self.state.device) for each in traced]
        self.arrived[way, number] = buffers
        return self._operations(dist.irecv, buffers, source)

    def _send(self, way: str, number: int, target: int) -> list[dist.P2POp]:
        return self._operations(dist.isend, self.leaving.pop((way, number)), target)

    def _operations(
        self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor], peer: int
    ) -> list[dist.P2POp]:
        assert self.group is not None
        rank = dist.get_global_rank(self.group, self.stage_index_to_group_rank[peer])
        return [dist.P2POp(operation, flat(each), rank, self.group) for each in tensors if each.numel()]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take from a stage of the same rank what it gives."""
        self.arrived["forward", mb_index] = list(prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Give a stage of the same rank the gradients that it takes."""
        return tuple(self.leaving.pop(("backward", mb_index)))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from a stage of the same rank."""
        self.arrived["backward", mb_index] = list(next_stage_bwd_outputs)

    # -- what torch does for stages that it traces itself, and a compiled one needs not ----------------

    def clear_runtime_states(self) -> None:
        """A step begins with :meth:`begin`."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Each microbatch has its share of the loss already."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Gradients are reduced after the schedule."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()
