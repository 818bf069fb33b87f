"""A step of a program in one process: every stage's graphs, for all of its ranks, microbatch after microbatch.

The order in which a schedule interleaves microbatches changes no value; this one draws random numbers as the original.
Without a pipeline, several microbatches are calls one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from shardgraph.checks.lockstep import by_role, run_lockstep
from shardgraph.ir import (
    Accumulated,
    Buffer,
    Forwarded,
    Mutation,
    Parameter,
    Returned,
    Role,
    Saved,
    Tangent,
    placeholders,
)
from shardgraph.passes.parameters.accumulate_gradients import adding_to_earlier
from shardgraph.passes.program import Halves, Program, StageProgram, gradients_of
from shardgraph.runtime.pipeline.statistics import combined
from shardgraph.runtime.rng import HostState

Values = dict[Role, Any]
"""What one rank has, by role."""


@dataclass(frozen=True)
class Run:
    """One run of a graph: its name, and the number of the microbatch; None once per step."""

    graph: str
    number: int | None


Watch = Callable[[Run, fx.Node, list[Any]], None]
"""Sees every node of every run with its values, one per rank; of ``output``, each rank's results with their roles."""


@dataclass
class LockstepStep:
    """One training step of all stages; of a program without a pipeline, of the only one.

    ``programs`` are those of each microbatch, in order, and ``inputs`` its parameters, buffers and inputs on each rank
    of a stage; ``rng`` is as for :func:`shardgraph.checks.lockstep.run_lockstep`. ``tangents`` is called with the
    number of a microbatch and the results of its last stage on each rank, and returns, per rank, the gradients of the
    loss of the whole step with respect to them. ``weights`` are, per rank, what the loss of each microbatch counts for.
    ``watch`` sees all nodes as they run.
    """

    programs: Sequence[Program]
    inputs: Sequence[Sequence[Values]]
    rng: list[HostState]
    tangents: Callable[[int, list[Values]], list[dict[Tangent, Any]]]
    weights: Sequence[Sequence[float]]
    watch: Watch = lambda run, node, values: None

    def __post_init__(self) -> None:
        self.mesh, self.ranks = self.programs[0].plan.mesh, range(len(self.inputs[0]))
        self.calls = self.programs[0].plan.pipeline is None
        self.gradients: list[list[dict[str, Any]]] = [[{} for _ in self.ranks] for _ in self.programs[0].stages]
        self.reached: set[str] = set()  # by the loss of any rank

    def run(self) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
        """``(gradients, buffers)``: each rank's gradients of its parameters, and new values of buffers, by name."""
        gathered = [
            [Values() for _ in self.ranks]
            if stage.gather is None
            else self._run(Run(stage.prefix + "gather", None), stage.gather, self.inputs[0])
            for stage in self.programs[0].stages
        ]
        written: list[list[dict[str, torch.Tensor]]] = []
        for number, program in enumerate(self.programs):
            written.append(self._microbatch(number, program, gathered, written[-1] if self.calls and written else None))
        if self.calls:
            return self._reduced(), written[-1]
        start = {role.fqn: value for role, value in self.inputs[0][0].items() if isinstance(role, Buffer)}
        return self._reduced(), _averaged([combined(self.programs, start, each) for each in zip(*written, strict=True)])

    def _run(
        self, run: Run, graph: fx.GraphModule, inputs: Sequence[Values], rng: list[HostState] | None = None
    ) -> list[Values]:
        results = run_lockstep(graph, self.mesh, inputs, rng=rng, on_value=partial(self.watch, run))
        return list(map(by_role, results))

    def _microbatch(
        self,
        number: int,
        program: Program,
        gathered: list[list[Values]],
        before: list[dict[str, torch.Tensor]] | None,
    ) -> list[dict[str, torch.Tensor]]:
        """Forward and backward of all stages; returns the buffers that forward writes on each rank, given those that
        the call ``before`` has written, if there was one."""
        received = [
            Values({Buffer(fqn): value for fqn, value in each.items()}) for each in before or [{}] * len(self.ranks)
        ]
        saved: list[list[Values]] = []
        written: list[dict[str, torch.Tensor]] = [{} for _ in self.ranks]
        for stage in program.stages:
            inputs = [
                own | whole | values
                for own, whole, values in zip(self.inputs[number], gathered[stage.number], received, strict=True)
            ]
            halves = self._halves(number, stage)
            results = self._run(Run(halves.name("F"), number), halves.forward, inputs, self.rng)
            saved.append([_of_kind(Saved, result) for result in results])
            received = [_of_kind(Forwarded, result) for result in results]
            for mine, result in zip(written, results, strict=True):
                mine |= {
                    role.of.fqn: v for role, v in _of_kind(Mutation, result).items() if isinstance(role.of, Buffer)
                }
        tangents: Sequence[Mapping[Any, Any]] = self.tangents(number, results)
        if self.calls:
            present = {role for given in tangents for role, value in given.items() if value is not None}
            self.reached.update(*(program.reached[role] for role in present))
        for stage in reversed(program.stages):
            tangents = self._backward(number, stage, saved[stage.number], tangents)
        return written

    def _halves(self, number: int, stage: StageProgram) -> Halves:
        pipeline = stage.program.plan.pipeline
        return stage.again if pipeline and pipeline.recomputes(number, len(self.programs)) else stage.kept

    def _backward(
        self, number: int, stage: StageProgram, saved: list[Values], tangents: Sequence[Mapping[Any, Any]]
    ) -> list[Values]:
        """Run a stage's backward graphs in the schedule's order; returns the tangents of the previous stage."""
        program, halves, returned = stage.program, self._halves(number, stage), [Values() for _ in self.ranks]
        if halves.backward is None:
            return returned
        absent = absent_of(tangents) if program.plan.pipeline is None else frozenset()
        for name, backward in self._graphs(number, stage, halves, absent):
            inputs = [mine | with_zeros(theirs, backward) for mine, theirs in zip(saved, tangents, strict=True)]
            for mine, gradients in zip(inputs, self.gradients[stage.number], strict=True):
                mine |= _taken(gradients, backward)
            for rank, result in enumerate(self._run(Run(name, number), backward, inputs)):
                returned[rank] |= _of_kind(Returned, result)
                saved[rank] |= _of_kind(Saved, result)
                gradients = gradients_of(result.items())
                if not self.weights[rank][number]:  # whose loss may be the mean of nothing
                    gradients = {fqn: torch.zeros_like(value) for fqn, value in gradients.items()}
                _add(self.gradients[stage.number][rank], gradients)
        return returned

    def _graphs(
        self, number: int, stage: StageProgram, halves: Halves, absent: frozenset[Tangent]
    ) -> Iterator[tuple[str, fx.GraphModule]]:
        """The backward graphs of a microbatch by name, in the schedule's order."""
        program, plan = stage.program, stage.program.plan
        if not self.calls:
            actions = [a for place in program.actions for a in place]
            own = [a for a in actions if (a.stage, a.microbatch) == (stage.number, number) and a.kind != "F"]
            names = [halves.name(action.kind) for action in own]
        elif len(self.programs) == 1 or not plan.reduces_once:
            names = ["backward"]
        else:
            names = ["local" if number < len(self.programs) - 1 else "accumulate"]
        for name in names:
            graph = program.graph(name, absent)
            yield name, adding_to_earlier(graph) if name == "local" and number else graph

    def _reduced(self) -> list[dict[str, torch.Tensor]]:
        """The gradients of the step: reduced, and added up over the stages that are said to share a parameter."""
        totals: list[dict[str, torch.Tensor]] = [{} for _ in self.ranks]
        owners = self.programs[0].owners
        for stage, gradients in zip(self.programs[0].stages, self.gradients, strict=True):
            if stage.reduce is not None:
                inputs = [{Accumulated(Parameter(f)): v for f, v in mine.items()} for mine in gradients]
                reduced = self._run(Run(stage.prefix + "reduce", None), stage.reduce, inputs)
                for mine, result in zip(gradients, reduced, strict=True):
                    mine.update(gradients_of(result.items()))
            for total, mine in zip(totals, gradients, strict=True):
                _add(total, {fqn: value for fqn, value in mine.items() if stage.number in owners[fqn]})
        if self.calls:  # as the runtime leaves out those that no rank's loss reaches
            left_out = {*self.programs[0].optional} - self.reached
            return [{fqn: value for fqn, value in total.items() if fqn not in left_out} for total in totals]
        return totals


def _averaged(buffers: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The buffers after a step as the runtime of a pipeline averages them over ranks; without one, the graph does."""
    means = {
        name: torch.stack([each[name] for each in buffers]).mean(0)
        for name, value in buffers[0].items()
        if value.is_floating_point()
    }
    return [each | means for each in buffers]


def _taken(gradients: dict[str, torch.Tensor], graph: fx.GraphModule) -> Values:
    """The gradients of earlier calls that a graph takes, which are no longer held."""
    inputs = {role: node for role, node in placeholders(graph).items() if isinstance(role, Accumulated)}
    return {
        role: gradients.pop(role.of.fqn)
        if role.of.fqn in gradients
        else torch.zeros_like(node.meta["val"], device="cpu")
        for role, node in inputs.items()
    }


def absent_of(tangents: Sequence[Mapping[Any, torch.Tensor | None]]) -> frozenset[Tangent]:
    """The tangents that no rank's loss has."""
    return frozenset(role for role in tangents[0] if all(values[role] is None for values in tangents))


def with_zeros(tangents: Mapping[Any, torch.Tensor | None], gm: fx.GraphModule) -> dict[Any, torch.Tensor]:
    """The tangents that ``gm`` takes, in the memory layout that it was traced with; zeros for None."""
    inputs = {}
    for role, node in placeholders(gm).items():
        if role in tangents:
            like, value = node.meta["val"], tangents[role]
            inputs[role] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu").zero_()
            if value is not None:
                inputs[role].copy_(value)
    return inputs


def _of_kind(kind: type, values: Values) -> dict[Any, Any]:
    return {role: value for role, value in values.items() if isinstance(role, kind)}


def _add(totals: dict[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
    for fqn, value in gradients.items():
        totals[fqn] = totals[fqn] + value if fqn in totals else value
