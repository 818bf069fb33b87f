"""The pipeline of a plan: its stages, and the schedule of microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardgraph.arguments import NAME, TEXT, WHOLE, check_fields, of_plan, one_of, sequence_of
from shardgraph.cost_models.actions import Order
from shardgraph.errors import expect
from shardgraph.plans.orders import check, find_schedule, pipeline_order, rank_of_stage
from shardgraph.sizes import is_whole

CHECKPOINTS = ("never", "except_last", "always")

_STAGES = sequence_of("the names of the modules with which stages begin, such as ('layers.4', 'layers.8')", NAME)
_BALANCE = sequence_of("the number of layers of each stage, such as (4, 4)", WHOLE)

_FIELDS = {
    "schedule": of_plan(TEXT),
    "axis": of_plan(NAME),
    "stages": _STAGES,
    "balance": _BALANCE,
    "checkpoint": of_plan(one_of(CHECKPOINTS)),
}


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a :class:`shardgraph.Plan`, along a mesh axis of its own.

    ``microbatches``
        Number of microbatches into which a rank's batch is cut along dimension 0; their rows differ by at most one.
        None: twice the number of stages.
    ``schedule``
        The order in which ranks run forward and backward of microbatches: ``"gpipe"``, ``"1f1b"``,
        ``"interleaved-1f1b"``, ``"looped-bfs"``, ``"interleaved-zero-bubble"``, ``"zbv"`` or ``"dualpipev"``.
    ``stages``
        The modules at which the stages after the first begin, in the order of forward. Empty: chosen for the shortest
        predicted step.
    ``balance``
        Instead of ``stages``, the number of layers of the model's longest stack in each stage.
    ``checkpoint``
        The microbatches whose backward recomputes a stage's forward from the stage's inputs, instead of saving it:
        ``"never"``, ``"always"``, or ``"except_last"`` (all but the last).
    ``ranks``, ``axis``
        The size and name of the mesh axis along which ranks have different stages.

    Raises:
        PlanError: a field has a value that is not allowed, or the schedule cannot run these numbers.
    """

    microbatches: int | None = None
    schedule: str = "1f1b"
    stages: tuple[str, ...] = ()
    balance: tuple[int, ...] = ()
    checkpoint: str = "never"
    ranks: int = 1
    axis: str = "pp"

    def __post_init__(self) -> None:
        where = "the pipeline's"
        check_fields(self, f"{where} ", **_FIELDS)
        some = self.microbatches is None or is_whole(self.microbatches, 1)
        expect(some, f"{where} microbatches", self.microbatches, "a whole number from 1, or None for the default")
        expect(is_whole(self.ranks, 1), f"{where} ranks", self.ranks, "a whole number from 1")
        once = not (self.stages and self.balance)
        expect(once, f"{where} balance", list(self.balance), "given instead of stages, not beside them")
        find_schedule(self.schedule)
        if self.ranks > 1:
            check(self.schedule, self.ranks, self._cuts or self.count, self.parts)

    @property
    def _cuts(self) -> int:
        """Number of stages that ``stages`` or ``balance`` defines; 0 without them."""
        return len(self.stages) + 1 if self.stages else len(self.balance)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages per rank: by default the least that the schedule allows."""
        return self._cuts // self.ranks if self._cuts else find_schedule(self.schedule).least

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.stages_per_rank * self.ranks

    @property
    def parts(self) -> int:
        """Number of microbatches per step."""
        return self.microbatches or 2 * self.count

    def rank_of(self, stage: int) -> int:
        """The position along the pipeline axis of the rank that has a stage."""
        return rank_of_stage(self.schedule, self.ranks, self.count)[stage]

    def places_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The positions along the pipeline axis that have any of these stages, ascending."""
        return tuple(sorted(set(map(self.rank_of, stages))))

    def recomputes(self, microbatch: int, count: int) -> bool:
        """Whether the backward of this one of ``count`` microbatches recomputes the forward of its stages."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and microbatch < count - 1)

    @property
    def order(self) -> Order:
        """The actions of each rank in a step."""
        return pipeline_order(self.schedule, self.ranks, self.count, self.parts)

    @property
    def prefetch(self) -> bool:
        """Whether ranks post receives ahead of the actions that need them."""
        return find_schedule(self.schedule).prefetch

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of the rank at this position along the pipeline axis."""
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)

    def __str__(self) -> str:
        recomputed = "" if self.checkpoint == "never" else f", recomputed {self.checkpoint.replace('_', ' ')}"
        begins = f", stages begin with {', '.join(self.stages)}" if self.stages else ""
        schedule = f"{self.count} stages, {self.schedule}, {self.parts} microbatches"
        return f"{self.axis}={self.ranks}: {schedule}{recomputed}{begins}"
