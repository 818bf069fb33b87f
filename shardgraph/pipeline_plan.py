"""What a plan says of its pipeline: the stages, and the schedule by which ranks work on microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.errors import PlanError, nearest

LOOPED = ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
"""Schedules in which a rank has two stages or more, every so many-th one."""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules in which a rank has two stages: stages go through the ranks and back."""
SCHEDULES = ("gpipe", "1f1b", *LOOPED, *V_SHAPED)
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
        if self.stages or self.balance:
            return (len(self.stages) + 1 if self.stages else len(self.balance)) // self.ranks
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.stages_per_rank * self.ranks

    @property
    def parts(self) -> int:
        """How many microbatches a step has."""
        return self.microbatches or 2 * self.count

    def rank_of(self, stage: int) -> int:
        """Where along the axis a stage is: stages go round the ranks, or for V schedules there and back."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule in V_SHAPED and turn % 2 else place

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

    if pipeline.schedule not in SCHEDULES:
        refuse(
            "schedule", pipeline.schedule, f"{', '.join(map(repr, SCHEDULES))}{nearest(pipeline.schedule, SCHEDULES)}"
        )
    if pipeline.checkpoint not in CHECKPOINTS:
        refuse("checkpoint", pipeline.checkpoint, " or ".join(map(repr, CHECKPOINTS)))
    for field, least in (("microbatches", 0), ("ranks", 1)):
        value = getattr(pipeline, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            refuse(field, value, f"a whole number from {least}")
    if pipeline.stages and pipeline.balance:
        refuse("balance", list(pipeline.balance), "given instead of stages, not beside them")
    given = len(pipeline.stages) + 1 if pipeline.stages else len(pipeline.balance)
    if given and pipeline.ranks > 1:
        _check_count(pipeline, given, "balance" if pipeline.balance else "stages")


def _check_count(pipeline: Pipeline, given: int, field: str) -> None:
    ranks, schedule = pipeline.ranks, pipeline.schedule
    if schedule in V_SHAPED:
        right, wanted = given == 2 * ranks, f"{2 * ranks}, two for each rank"
    elif schedule in LOOPED:
        right, wanted = given % ranks == 0, f"a multiple of the {ranks} ranks"
    else:
        right, wanted = given == ranks, f"{ranks}, one for each rank"
    if not right:
        raise PlanError(
            f"the pipeline's {field} makes {given} stages, and with the schedule {schedule!r} on {ranks} ranks there "
            f"must be {wanted}"
        )
