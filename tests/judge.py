"""An independent judge of which programs differ from the original: all ranks, stages and microbatches, in fp64.

It runs a program with random weights, inputs and directions, and compares with the original's own autograd. It shares
nothing with ``verify`` but the interpreter of graphs, and names graphs as ``shardgraph.passes.program`` documents them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shardgraph import ir
from shardgraph.checks.lockstep import by_role, run_lockstep
from shardgraph.mesh import coordinates
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import part_of
from shardgraph.runtime.rng import HostState

Values = list[dict[Any, Any]]
"""What each rank has, by role."""


@dataclass
class Judge:
    """What a model gives for random weights, inputs and directions, with which its programs under ``plan`` must agree.

    ``loss_fn`` is the loss that a pipeline's program has in it, a mean over rows; its microbatches have equally many.
    No gradient comes back for the outputs ``absent``.
    """

    plan: Plan
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    absent: frozenset[ir.Tangent] = frozenset()

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.model = _with_random_weights(self.model, generator)
        self.count = self.plan.pipeline.parts if self.plan.pipeline else 1
        parts = _cut(self.plan, (self.args, self.kwargs), self.count)
        self.expected = _Expected.of(self.model, parts, self.loss_fn, self.seed, generator, self.absent)

    def differs(self, program: Program) -> bool:
        """Whether a program gives other outputs, gradients or buffers than the model on any rank."""
        return not _Steps(program, self.expected, self.model, self.count, self.seed, self.absent).agree()


def _cut(plan: Plan, call: Any, count: int) -> list[list[Any]]:
    """The microbatches of each data rank."""
    size = plan.data_size

    def part(leaf: Any, rank: int, number: int) -> Any:
        return leaf.chunk(size)[rank].chunk(count)[number].contiguous()

    return [
        [pytree.tree_map(lambda leaf, r=rank, n=number: part(leaf, r, n), call) for number in range(count)]
        for rank in range(size)
    ]


@dataclass
class _Expected:
    """What the original gives: per data rank and microbatch inputs, outputs, directions and buffers; all gradients."""

    inputs: list[list[list[Any]]]
    outputs: list[list[list[torch.Tensor]]]
    directions: list[list[list[torch.Tensor | None]]]
    buffers: list[list[dict[str, torch.Tensor]]]
    before: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        parts: list[list[Any]],
        loss_fn: Any,
        seed: int,
        generator: torch.Generator,
        absent: frozenset[ir.Tangent],
    ) -> _Expected:
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        found = cls([], [], [], [], before, {})
        for rank, calls in enumerate(parts):
            torch.manual_seed(_seed_of(seed, rank))
            found.inputs.append([pytree.tree_leaves(call) for call in calls])
            for kept in (found.outputs, found.directions, found.buffers):
                kept.append([])
            for args, kwargs in calls:
                for name, buffer in model.named_buffers():
                    buffer.data.copy_(before[name])
                output = model(*args, **kwargs)
                leaves = pytree.tree_leaves(output if loss_fn is None else loss_fn(output))
                ways = [_direction(leaf, generator) for leaf in leaves]
                ways = [None if ir.Tangent(i) in absent else way for i, way in enumerate(ways)]
                if loss_fn is not None:
                    ways = [torch.full_like(leaves[0], 1 / len(calls))]
                pairs = zip(leaves, ways, strict=True)
                loss = sum((leaf * way).sum() for leaf, way in pairs if way is not None)
                (loss / len(parts)).backward()
                found.outputs[-1].append([leaf.detach() for leaf in leaves])
                found.directions[-1].append(ways)
                found.buffers[-1].append({name: buffer.clone() for name, buffer in model.named_buffers()})
        found.gradients = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
        return found


class _Steps:
    """A step of a program on all ranks, compared as it goes."""

    def __init__(
        self, program: Program, expected: _Expected, model: nn.Module, count: int, seed: int, absent: Any
    ) -> None:
        self.program, self.expected, self.count, self.absent = program, expected, count, absent
        plan = program.plan
        self.mesh, self.ranks = plan.mesh, range(math.prod(size for _, size in plan.mesh))
        self.batch = [plan.data_rank(rank) for rank in self.ranks]
        self.stages = [""] if plan.pipeline is None else [f"stage{i}/" for i in range(plan.pipeline.count)]
        self.shards = [
            {ir.Parameter(f): self.part(p.detach(), f, rank) for f, p in model.named_parameters()}
            for rank in self.ranks
        ]
        self.rng = []
        for rank in self.ranks:
            torch.manual_seed(_seed_of(seed, self.batch[rank]))
            self.rng.append(HostState.now())

    def part(self, tensor: torch.Tensor, fqn: str, rank: int) -> torch.Tensor:
        where = coordinates(self.mesh, rank)
        return part_of(tensor, self.program.parameters[fqn], self.mesh, where).contiguous()

    def run(self, name: str, inputs: Values, rng: Any = None) -> Values:
        """The results of a graph; nothing if the program has neither it nor the backward graph it is derived from."""
        stage, _, kind = name.rpartition("/")
        given_by = f"{stage}/backward" if kind in ("inputs", "weights") else name
        if given_by not in self.program.graphs:
            return [{} for _ in self.ranks]
        gm = _in_double(self.program.graph(name, self.absent if kind == "backward" else frozenset()))
        return list(map(by_role, run_lockstep(gm, self.mesh, inputs, rng=rng)))

    def agree(self) -> bool:
        """Whether all outputs, buffers and gradients are the original's."""
        gathered = {stage: self.run(stage + "gather", self.shards) for stage in self.stages}
        sums: dict[str, Values] = {stage: [{} for _ in self.ranks] for stage in self.stages}
        for number in range(self.count):
            pipeline = self.program.plan.pipeline
            again = "recompute/" if pipeline is not None and pipeline.recomputes(number, self.count) else ""
            last, saved, written = self._forward(number, again, gathered)
            if not self._forward_agrees(number, last, written):
                return False
            self._backward(number, again, saved, sums)
        totals: Values = [{} for _ in self.ranks]
        for stage in self.stages:
            inputs = [{ir.Accumulated(role.of): v for role, v in mine.items()} for mine in sums[stage]]
            reduced = self.run(stage + "reduce", inputs)
            for total, own, after in zip(totals, sums[stage], reduced, strict=True):
                _add(total, own | after)
        return all(
            ir.Gradient(ir.Parameter(fqn)) in totals[rank]
            and _equal(totals[rank][ir.Gradient(ir.Parameter(fqn))], self.part(gradient, fqn, rank))
            for fqn, gradient in self.expected.gradients.items()
            for rank in self.ranks
        )

    def _forward(
        self, number: int, again: str, gathered: dict[str, Values]
    ) -> tuple[Values, dict[str, Values], Values]:
        received: Values = [{} for _ in self.ranks]
        saved: dict[str, Values] = {}
        written: Values = [{} for _ in self.ranks]
        for stage in self.stages:
            inputs = []
            for rank in self.ranks:
                leaves = self.expected.inputs[self.batch[rank]][number]
                buffers = {ir.Buffer(name): value for name, value in self.expected.before.items()}
                own = {ir.Input(i): x for i, x in enumerate(leaves)}
                inputs.append({**self.shards[rank], **buffers, **own, **gathered[stage][rank], **received[rank]})
            results = self.run(self._of(stage, again) + "forward", inputs, self.rng)
            received, saved[stage] = _only(ir.Forwarded, results), _only(ir.Saved, results)
            for mine, each in zip(written, _only(ir.Mutation, results), strict=True):
                mine.update(each)
        return results, saved, written

    def _of(self, stage: str, again: str) -> str:
        return stage + again if stage + again + "forward" in self.program.graphs else stage

    def _forward_agrees(self, number: int, results: Values, written: Values) -> bool:
        for rank in self.ranks:
            for i, value in enumerate(self.expected.outputs[self.batch[rank]][number]):
                if not _equal(results[rank][ir.Output(i)], value):
                    return False
            for name, value in self.expected.before.items():
                after = self.expected.buffers[self.batch[rank]][number][name]
                if value.is_floating_point() and self.program.plan.pipeline is None:
                    after = torch.stack([each[number][name] for each in self.expected.buffers]).mean(0)
                if not _equal(written[rank].get(ir.Mutation(ir.Buffer(name)), value), after):
                    return False
        return True

    def _backward(self, number: int, again: str, saved: dict[str, Values], sums: dict[str, Values]) -> None:
        tangents: Values = [
            {ir.Tangent(i): way for i, way in enumerate(self.expected.directions[self.batch[rank]][number])}
            for rank in self.ranks
        ]
        for index, stage in reversed(list(enumerate(self.stages))):
            given, tangents = tangents, [{} for _ in self.ranks]
            for kind in self._kinds(index, number):
                inputs = [mine | theirs for mine, theirs in zip(saved[stage], given, strict=True)]
                results = self.run(self._of(stage, again) + kind, inputs)
                _update(tangents, _only(ir.Returned, results))
                _update(saved[stage], _only(ir.Saved, results))
                for mine, each in zip(sums[stage], _only(ir.Gradient, results), strict=True):
                    _add(mine, {role: v for role, v in each.items() if isinstance(role.of, ir.Parameter)})

    def _kinds(self, stage: int, number: int) -> list[str]:
        """The graphs of a stage's backward for a microbatch: the whole, or its two halves."""
        kinds = {"B": "backward", "I": "inputs", "W": "weights"}
        actions = itertools.chain(*self.program.actions)
        return [kinds[a.kind] for a in actions if (a.stage, a.microbatch) == (stage, number) and a.kind in kinds]


def _seed_of(seed: int, rank: int) -> int:
    return 1000 * seed + rank


def _only(kind: type, results: Values) -> Values:
    return [{role: v for role, v in result.items() if isinstance(role, kind)} for result in results]


def _update(values: Values, more: Values) -> None:
    for mine, each in zip(values, more, strict=True):
        mine.update(each)


def _add(totals: dict[Any, Any], values: dict[Any, Any]) -> None:
    for role, value in values.items():
        if value is not None:
            totals[role] = totals[role] + value if role in totals else value


def _in_double(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its own casts to a coarser dtype made exact; a fault's rounding is of ``Tensor.to`` and stays."""

    def widened(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    gm = ir.copy_graph(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not torch.Tensor.to:
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), widened)
    return gm


def _with_random_weights(model: nn.Module, generator: torch.Generator) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = None
        noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        parameter.data.add_(noise, alpha=0.05)
    return model


def _direction(leaf: Any, generator: torch.Generator) -> torch.Tensor | None:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not leaf.requires_grad:
        return None
    return torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    mine, theirs = mine.double(), theirs.double()
    largest = max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9 * largest)
