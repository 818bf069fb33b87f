"""What a plan says of its pipeline: the stages, and the schedule by which ranks work on microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardgraph.cost_models.actions import Order
from shardgraph.errors import PlanError
from shardgraph.plans.orders import check, find_schedule, pipeline_order, rank_of_stage, stages_per_rank

CHECKPOINTS = ("never", "except_last", "always")


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a :class:`shardgraph.Plan`, along a mesh axis of its own.

    ``microbatches``
        How many parts a rank's batch is cut in along dimension 0, all of a size but the last, which may be smaller. 0:
        twice the number of stages.
    ``schedule``
        The order in which ranks run forward and backward of microbatches: ``"gpipe"``, ``"1f1b"``,
        ``"interleaved-1f1b"``, ``"looped-bfs"``, ``"interleaved-zero-bubble"``, ``"zbv"`` or ``"dualpipev"``.
    ``stages``
        The modules with which the stages after the first begin, in the order of forward. Empty: found so that the step
        is fastest.
    ``balance``
        Instead, how many layers of the model's longest stack each stage has.
    ``checkpoint``
        Which microbatches compute a stage's forward again in backward, from what the stage was given, instead of
        keeping it: ``"never"``, ``"always"``, or ``"except_last"``, which keeps that of the last.
    ``ranks``, ``axis``
        The size and name of the mesh axis along which ranks have different stages.
    """

    microbatches: int = 0
    schedule: str = "1f1b"
    stages: tuple[str, ...] = ()
    balance: tuple[int, ...] = ()
    checkpoint: str = "never"
    ranks: int = 1
    axis: str = "pp"

    def __post_init__(self) -> None:
        for name in ("stages", "balance"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check(self)

    @property
    def stages_per_rank(self) -> int:
        """How many stages a rank has."""
        given = len(self.stages) + 1 if self.stages else len(self.balance)
        return given // self.ranks if given else stages_per_rank(self.schedule)

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.stages_per_rank * self.ranks

    @property
    def parts(self) -> int:
        """How many microbatches a step has."""
        return self.microbatches or 2 * self.count

    def rank_of(self, stage: int) -> int:
        """Where along the axis a stage is."""
        return rank_of_stage(self.schedule, self.ranks, self.count)[stage]

    def places_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The places along the axis that have any of these stages, ascending."""
        return tuple(sorted(set(map(self.rank_of, stages))))

    def recomputes(self, microbatch: int, count: int) -> bool:
        """Whether this one of ``count`` microbatches computes its stages' forward again in backward."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and microbatch < count - 1)

    @property
    def order(self) -> Order:
        """What each rank does in a step."""
        return pipeline_order(self.schedule, self.ranks, self.count, self.parts)

    @property
    def prefetch(self) -> bool:
        """Whether ranks ask for messages ahead of what needs them."""
        return find_schedule(self.schedule).prefetch

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of the rank at this place along the axis."""
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)

    def __str__(self) -> str:
        again = "" if self.checkpoint == "never" else f", recomputed {self.checkpoint.replace('_', ' ')}"
        begins = f", stages begin with {', '.join(self.stages)}" if self.stages else ""
        return (
            f"{self.axis}={self.ranks}: {self.count} stages, {self.schedule}, {self.parts} microbatches{again}{begins}"
        )


def _check(pipeline: Pipeline) -> None:
    def refuse(field: str, value: object, allowed: str) -> None:
        raise PlanError(f"the pipeline's {field} is {value!r}; it may be {allowed}")

    if pipeline.checkpoint not in CHECKPOINTS:
        refuse("checkpoint", pipeline.checkpoint, " or ".join(map(repr, CHECKPOINTS)))
    for field, least in (("microbatches", 0), ("ranks", 1)):
        value = getattr(pipeline, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            refuse(field, value, f"a whole number from {least}")
    if pipeline.stages and pipeline.balance:
        refuse("balance", list(pipeline.balance), "given instead of stages, not beside them")
    find_schedule(pipeline.schedule)
    if pipeline.ranks > 1:
        given = len(pipeline.stages) + 1 if pipeline.stages else len(pipeline.balance)
        check(pipeline.schedule, pipeline.ranks, given or pipeline.count, pipeline.parts)
