"""A step of a program in one process: every stage's graphs, for all of its ranks, microbatch after microbatch.

Each microbatch runs the graphs of its actions in the schedule. The order in which a schedule interleaves microbatches
changes no value, so they run one after the other, as in the original, which draws random numbers in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardgraph.checks.bisect import absent_of, with_zeros
from shardgraph.checks.lockstep import Results, run_lockstep
from shardgraph.cost_models.actions import Kind
from shardgraph.ir import Accumulated, Buffer, Forwarded, Mutation, Parameter, Returned, Role, Saved, Tangent
from shardgraph.passes.program import Halves, Program, StageProgram, gradients_of
from shardgraph.runtime.pipeline.statistics import combined

Values = dict[Role, Any]
"""What one rank has, by role."""


class LockstepStep:
    """One training step of all stages; of a program without a pipeline, of the only one.

    Args:
        programs: of each microbatch, in order.
        inputs: of each microbatch, for each rank of a stage: parameters, buffers and inputs by role.
        rng: per rank, the state of its generator, as for :func:`shardgraph.checks.lockstep.run_lockstep`.
        tangents: called with the number of a microbatch and what each rank's last stage returned for it by role; gives,
            per rank, the gradients of the loss of the whole step by those outputs.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        inputs: Sequence[Sequence[Values]],
        rng: list[torch.Tensor],
        tangents: Callable[[int, list[Values]], list[dict[Tangent, Any]]],
    ) -> None:
        self.programs, self.inputs, self.rng, self.tangents = programs, inputs, rng, tangents
        self.mesh = programs[0].plan.mesh
        self.ranks = len(inputs[0])
        self.local: list[dict[tuple[int, str], Any]] = [{} for _ in range(self.ranks)]

    def run(self) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """``(gradients, buffers)``: each rank's gradients of its parameters by name, and the new values of buffers."""
        gathered = [self._gather(stage) for stage in self.programs[0].stages]
        written: list[dict[str, torch.Tensor]] = []
        for number, program in enumerate(self.programs):
            written.append(self._microbatch(number, program, gathered))
        start = {role.fqn: value for role, value in self.inputs[0][0].items() if isinstance(role, Buffer)}
        return self._reduced(), combined(self.programs, start, written)

    def _gather(self, stage: StageProgram) -> list[Values]:
        if stage.gather is None:
            return [{} for _ in range(self.ranks)]
        return _by_role(run_lockstep(stage.gather, self.mesh, self.inputs[0]))

    def _microbatch(self, number: int, program: Program, gathered: list[list[Values]]) -> dict[str, torch.Tensor]:
        given: list[Values] = [{} for _ in range(self.ranks)]
        saved: list[list[Values]] = []
        written: dict[str, torch.Tensor] = {}
        for stage in program.stages:
            inputs = [
                {**mine, **whole, **received}
                for mine, whole, received in zip(self.inputs[number], gathered[stage.number], given, strict=True)
            ]
            halves = self._halves(number, program, stage)
            results = _by_role(run_lockstep(halves.forward, self.mesh, inputs, rng=self.rng))
            saved.append([{r: v for r, v in each.items() if isinstance(r, Saved)} for each in results])
            given = [{r: v for r, v in each.items() if isinstance(r, Forwarded)} for each in results]
            for role, value in results[0].items():
                if isinstance(role, Mutation) and isinstance(role.of, Buffer):
                    every = [dict(each)[role] for each in results]
                    written[role.of.fqn] = torch.stack(every).mean(0) if value.is_floating_point() else value
        tangents: Sequence[Mapping[Any, Any]] = self.tangents(number, results)
        for stage in reversed(program.stages):
            tangents = self._backward(number, program, stage, saved[stage.number], tangents)
        return written

    def _halves(self, number: int, program: Program, stage: StageProgram) -> Halves:
        pipeline = program.plan.pipeline
        return stage.again if pipeline and pipeline.recomputes(number, len(self.programs)) else stage.kept

    def _backward(
        self,
        number: int,
        program: Program,
        stage: StageProgram,
        saved: list[Values],
        tangents: Sequence[Mapping[Any, Any]],
    ) -> list[Values]:
        halves, returned = self._halves(number, program, stage), [Values() for _ in range(self.ranks)]
        if halves.backward is None:
            return returned
        absent = absent_of(tangents) if program.plan.pipeline is None else frozenset()
        for kind in _kinds(program, stage.number, number):
            backward = program.graph(halves.name(kind), absent)
            inputs = [mine | with_zeros(theirs, backward) for mine, theirs in zip(saved, tangents, strict=True)]
            for rank, result in enumerate(_by_role(run_lockstep(backward, self.mesh, inputs))):
                returned[rank] |= {r: v for r, v in result.items() if isinstance(r, Returned)}
                saved[rank] |= {r: v for r, v in result.items() if isinstance(r, Saved)}
                mine = self.local[rank]
                for fqn, value in gradients_of(result.items()).items():
                    key = stage.number, fqn
                    mine[key] = mine[key] + value if key in mine else value
        return returned

    def _reduced(self) -> list[dict[str, torch.Tensor]]:
        """The gradients of the step: reduced, and added up over the stages that share a parameter."""
        totals: list[dict[str, torch.Tensor]] = [{} for _ in range(self.ranks)]
        for stage in self.programs[0].stages:
            own = [{f: v for (number, f), v in mine.items() if number == stage.number} for mine in self.local]
            if stage.reduce is not None:
                inputs: list[Values] = [{Accumulated(Parameter(f)): v for f, v in mine.items()} for mine in own]
                for mine, result in zip(own, run_lockstep(stage.reduce, self.mesh, inputs), strict=True):
                    mine.update(gradients_of(result))
            for total, mine in zip(totals, own, strict=True):
                for fqn, value in mine.items():
                    total[fqn] = total[fqn] + value if fqn in total else value
        return totals


def _kinds(program: Program, stage: int, microbatch: int) -> list[Kind]:
    """The schedule's backward actions for a stage's microbatch, in order."""
    actions = [a for place in program.actions for a in place if (a.stage, a.microbatch) == (stage, microbatch)]
    return [action.kind for action in actions if action.kind != "F"]


def _by_role(results: Iterable[Results]) -> list[Values]:
    return [{role: value for role, value in each if role is not None} for each in results]
