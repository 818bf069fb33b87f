"""The orders in which torch.distributed.pipelining runs a schedule."""

from __future__ import annotations

from typing import Any


class _RecordingStage:
    """The part of a pipeline stage that torch's schedules use: it computes nothing and records the calls."""

    is_first = is_last = False
    submod = None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.recorded: list[PipelineAction] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.recorded.append((self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.recorded.append((self.stage_index, "B", microbatch))

    def _messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _messages

    def perform_reduce_grad(self, scale: int) -> None:
        """Gradients are reduced once all microbatches are done."""


PipelineAction = tuple[int, str, int]
"""A stage, what it does (F, B, I or W: forward, backward, or the input's or the weights' part of it), a microbatch."""


def pipeline_actions(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[list[PipelineAction]]]:
    """What torch's ``schedule`` runs on each rank, in order; what it overlaps is in one list.

    A schedule of one stage per rank is run, with stages that record: what its ``pipeline_order`` says of the last stage
    is not what it does (torch 2.13: in 1F1B it forwards microbatches 1 to m there, where 0 to m - 1 are run).

    Raises:
        ValueError: torch's schedule does not take these numbers.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind: Any = get_schedule_class(schedule)
    if not issubclass(kind, PipelineScheduleSingle):
        order = kind([_RecordingStage(0, stages, ranks) for _ in range(stages // ranks)], microbatches).pipeline_order
        return [[_leaves(action) for action in order[rank] if action is not None] for rank in range(ranks)]
    recording = [_RecordingStage(index, stages, ranks) for index in range(stages)]
    for stage in recording:
        runner = kind(stage, microbatches)
        runner._initialize_stage = lambda *args, **kwargs: None  # there is nothing to allocate for messages
        runner._step_microbatches()
    return [[[action] for action in stage.recorded] for stage in recording]


def _leaves(action: Any) -> list[PipelineAction]:
    leaves = action.sub_actions or (action,)
    return [(each.stage_index, each.computation_type.value, each.microbatch_index) for each in leaves]
