"""Finds the first node of a compiled program whose value differs from the captured graph's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from shardgraph import ir
from shardgraph.checks.blame import Blame
from shardgraph.checks.lockstep import along, by_role, run_lockstep
from shardgraph.checks.step import LockstepStep, Run, Values, with_zeros
from shardgraph.ir.attributes import (
    EQUALS,
    MADE_BY,
    MEAN_OF,
    PADDED,
    PADDED_SHARD,
    PART_OF,
    PLACEMENTS,
    REDUCES,
    ROLE,
    ROLES,
    ROW_ORDER,
    SHARD_OF,
    SOURCE,
    captured_name,
)
from shardgraph.mesh import Mesh, coordinates, group_along
from shardgraph.passes.program import Program, gradients_of
from shardgraph.passes.sharding.placements import cut_of, is_cut
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.shards import part_of
from shardgraph.runtime.rng import HostState

Tangents = Callable[[int, list[Values]], list[dict[ir.Tangent, Any]]]


@dataclass(frozen=True)
class Divergence:
    """A node whose value differs, the pass that made it, the user's line that it serves, and by how much."""

    node: str
    made_by: str
    source: str
    error: float

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.node}, made by {self.made_by}{where}, relative error {self.error:.1e}"


_UNWRITTEN = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
"""Operations whose values are whatever the memory held."""

_GIVEN = (ir.Saved, ir.Gathered, ir.Forwarded, ir.Returned, ir.Accumulated)
"""The roles of inputs that other graphs of the program give."""


class _Diverged(Exception):
    """Ends the run of a graph; its argument is the divergence."""


def first_divergence(
    programs: Sequence[Program],
    whole: Sequence[Sequence[Values]],
    local: Sequence[Sequence[Values]],
    tangents: Tangents,
    weights: Sequence[Sequence[float]],
    generators: Callable[[], list[HostState]],
    tolerance: float,
) -> Divergence | None:
    """Run the captured graph on ``whole`` inputs and a step of the program on ``local`` ones; compare node by node.

    ``programs``, ``whole`` and ``local`` are those of each microbatch; see :class:`LockstepStep` for the others. Nodes
    of the captured graph keep their names through the passes. A node made by a pass is compared if the pass recorded
    what it equals: ``EQUALS`` names the captured value, ``PART_OF`` the value of which it is a slice, ``MEAN_OF`` the
    value whose mean over ranks it is, ``SHARD_OF`` the parameter; ``PADDED`` and ``PADDED_SHARD`` the parameter that
    it is, or has a shard of, before padding. What graphs take from each other and what they return is compared too.
    Returns None if all comparable values agree.
    """
    rng = generators()
    parts = enumerate(zip(programs, whole, strict=True))
    expected = [_captured(program, inputs, rng, number, tangents) for number, (program, inputs) in parts]
    search = _Search(programs, expected, weights, tolerance)
    try:
        step = LockstepStep(programs, local, generators(), tangents, weights, search.compare)
        search.compare_step(step.run()[0])
    except _Diverged as diverged:
        found: Divergence = diverged.args[0]
        return found
    return None


def _captured(
    program: Program, inputs: Sequence[Values], rng: list[HostState], number: int, tangents: Tangents
) -> dict[str, list[Any]]:
    """The values of the captured graph's nodes for a microbatch, one per rank, by name."""
    joint, alone = program.joint.module, (("rank", len(inputs)),)
    whole = [_as_captured(each, joint) for each in inputs]
    zeros = with_zeros({role: None for role in ir.placeholders(joint) if isinstance(role, ir.Tangent)}, joint)
    results = run_lockstep(joint, alone, [each | zeros for each in whole], rng=list(rng))
    ways = tangents(number, list(map(by_role, results)))
    values: dict[str, list[Any]] = {}
    run_lockstep(
        joint,
        alone,
        [each | with_zeros(way, joint) for each, way in zip(whole, ways, strict=True)],
        rng=rng,
        on_value=lambda node, per_rank: values.update({node.name: per_rank}),
    )
    return values


@dataclass
class _Search:
    """Compares the nodes of a step as they run; raises _Diverged at the first that differs.

    ``expected`` has the captured values of each microbatch, ``unreduced`` those that another pass goes on with.
    """

    programs: Sequence[Program]
    expected: Sequence[Mapping[str, list[Any]]]
    weights: Sequence[Sequence[float]]
    tolerance: float
    unreduced: dict[fx.Node, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.programs[0]
        self.plan, self.mesh, self.blame = program.plan, program.plan.mesh, Blame(program)
        inputs = ir.placeholders(program.joint.module).items()
        self.parameters = {role.fqn: node.name for role, node in inputs if isinstance(role, ir.Parameter)}
        self.shared = {fqn for fqn, stages in program.owners.items() if len(stages) > 1}
        self.suspects: dict[str, str] = {}  # who would be to blame for a gradient of the step, by parameter

    def compare(self, run: Run, node: fx.Node, values: list[Any]) -> None:
        if node.op == "output":
            self._compare_results(run, node, values)
            return
        if node.op == "placeholder":
            self.blame.take(run, node)
        if any(user in MADE_BY and MADE_BY.get(user) != MADE_BY.get(node) for user in node.users):
            self.unreduced[node] = values
        own = node.op == "placeholder" and not isinstance(ROLE.get(node), _GIVEN)
        reference = None if own or node.target in _UNWRITTEN else self._reference(run, node)
        if reference is not None:
            blamed, placed = partial(self._blamed, run, node), _shard_of(node) is not None
            if self._check(node, reference, _summed(node, values, self.mesh), blamed, placed):
                self.blame.agreed.add(node)

    def compare_step(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Compare the gradients of the whole step: that none is missing, and each is right."""
        run = Run("reduce", None)
        for fqn, source in gradients_of(ir.outputs(self.programs[0].joint.module)).items():
            full = self._expected(run, source.name)
            blamed = partial(self.suspects.get, fqn, self.blame.of_step(fqn))
            if full is not None and fqn not in gradients[0] and any(value.any() for value in full):
                raise _Diverged(Divergence(f"gradient of {fqn}", blamed(), "", math.inf))
            if full is not None and fqn in gradients[0]:
                mine = [each[fqn] for each in gradients]
                self._check(source, self._mean_shards(full, fqn, mine[0].dtype), mine, blamed, placed=True)

    def _check(
        self,
        node: fx.Node,
        reference: list[Any],
        values: list[Any],
        blamed: Callable[[], str],
        placed: bool = False,
    ) -> bool:
        """Whether there was something to compare; ``placed`` says that the reference is each rank's part already."""
        compared = False
        for rank, (mine, whole) in enumerate(zip(values, reference, strict=True)):
            theirs = whole if placed else _placed(whole, node, rank, self.mesh)
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                compared = True
                if node in PADDED or node in PADDED_SHARD:
                    mine = mine[: len(theirs)]
                # A part may hold nothing but rounding, as the gradient of an attention's key bias does.
                largest = largest_of(whole)
                error = relative_error(mine, theirs, floor=0.0 if math.isinf(largest) else largest)
                if not error <= self.tolerance:
                    raise _Diverged(Divergence(node.name, blamed(), SOURCE.get(node, ""), error))
        return compared

    def _blamed(self, run: Run, node: fx.Node) -> str:
        full = self._expected(run, MEAN_OF.of(node)) if node in MEAN_OF else None
        return self._unreduced_blamed(run, node, full) or self.blame.of(run, node)

    def _unreduced_blamed(self, run: Run, node: fx.Node, full: list[Any] | None) -> str | None:
        """The pass that made the gradient of which a node is the reduced one, or what of it is in a bucket, if that is
        wrong already."""
        if full is None or node not in REDUCES:
            return None
        own, packed, ranks = _before_reduction(node, self.mesh)
        if own not in self.blame.agreed and (maker := self._local_blamed(run, node, own, ranks, full)):
            return maker
        return self.blame.of(run, packed) if packed is not None and self._is_packed_wrong(own, packed) else None

    def _is_packed_wrong(self, own: fx.Node, packed: fx.Node) -> bool:
        """Whether what is in a bucket is not the local gradient, padded or divided by the number of ranks."""
        local, put = self.unreduced.get(own), self.unreduced.get(packed)
        if own is packed or local is None or put is None:
            return False
        pairs = [(mine[: len(theirs)], theirs) for mine, theirs in zip(put, local, strict=True)]
        return not any(
            all(relative_error(mine * times, theirs) <= self.tolerance for mine, theirs in pairs)
            for times in (1, self.plan.data_size)
        )

    def _local_blamed(self, run: Run, node: fx.Node, own: fx.Node, ranks: int, full: list[Any]) -> str | None:
        """The pass that made ``own``, a local gradient of which ``node`` is reduced over ``ranks``, if it is wrong."""
        if (local := self.unreduced.get(own)) is None:
            return None
        if local[0].shape != full[0].shape:  # of the rank's own experts, summed over all tokens
            parts = self._mean_shards(full, REDUCES.of(node), local[0].dtype)
            errors = [relative_error(a / self.plan.data_size, b) for a, b in zip(local, parts, strict=True)]
            return self.blame.of(run, own) if ranks == 1 and max(errors) > self.tolerance else None
        # A reduction that is missing should have been over all ranks.
        factors = [count / self.plan.data_size for count in (ranks, len(full))]
        return None if _is_right(local, factors, full, self.tolerance) else self.blame.of(run, own)

    def _compare_results(self, run: Run, output: fx.Node, values: list[Any]) -> None:
        captured = dict(ir.outputs(self.programs[run.number or 0].joint.module))
        results: Any = output.args[0]
        for index, (role, node) in enumerate(zip(ROLES.of(output), results, strict=True)):
            self.blame.give(run, role, node)
            source = captured.get(role)
            full = self._expected(run, source.name) if isinstance(source, fx.Node) else None
            if full is None or not isinstance(node, fx.Node):
                continue
            mine = [results[index][1] for results in values]
            blamed = partial(self.blame.of_result, run, role, node)
            if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):
                fqn, shared = role.of.fqn, role.of.fqn in self.shared
                if node not in self.blame.agreed:
                    self.suspects[fqn] = blamed()
                if not shared and (run.graph.endswith("reduce") or self.plan.pipeline is None):
                    reference = self._mean_shards(full, fqn, node.meta["val"].dtype)
                    maker = self._unreduced_blamed(run, node, full)
                    self._check(
                        node, reference, mine, blamed if maker is None else lambda maker=maker: maker, placed=True
                    )
                elif not shared and node not in MADE_BY:
                    self._check(node, full, _summed(node, mine, self.mesh), blamed)
            elif isinstance(role, ir.Mutation) and isinstance(role.of, ir.Buffer):
                averaged = self.plan.pipeline is None and full[0].is_floating_point()
                reference = [torch.stack(full).mean(0)] * len(full) if averaged else full
                self._check(node, reference, mine, blamed, placed=True)
            elif isinstance(role, (ir.Output, ir.IntermediateBase)):
                self._check(node, full, mine, blamed, placed=True)

    def _expected(self, run: Run, name: str) -> list[Any] | None:
        """A captured value for a run, on every rank; for a graph that reduces, the sum over microbatches."""
        if run.number is not None:
            return self.expected[run.number].get(name)
        values = [each.get(name) for each in self.expected]
        if any(value is None for value in values) or not run.graph.endswith("reduce"):
            return values[0]
        return [
            sum(value[rank] for number, value in enumerate(values) if value is not None and weights[number])
            for rank, weights in enumerate(self.weights)
        ]

    def _reference(self, run: Run, node: fx.Node) -> list[Any] | None:
        """The node's expected value per rank; None if none is recorded."""
        if node in MEAN_OF:
            values = self._expected(run, MEAN_OF.of(node))
            if not values or not isinstance(values[0], torch.Tensor):
                return None
            return self._mean_shards(values, REDUCES.get(node, ""), node.meta["val"].dtype)
        if (fqn := _shard_of(node)) is not None:
            values = self._expected(run, self.parameters[fqn])
            return self._mean_shards(values, fqn, node.meta["val"].dtype) if values else None
        comparable = (
            is_cut(placement) or (isinstance(placement, Partial) and axis != self.plan.experts)
            for axis, placement in PLACEMENTS.get(node, {}).items()
        )
        if not all(comparable):
            return None
        if node in PART_OF:
            part, shape = PART_OF.of(node), node.meta["val"].shape
            return [part.of(value).reshape(shape) for value in self._expected(run, part.node) or ()] or None
        name = self.parameters[PADDED.of(node)] if node in PADDED else captured_name(node)
        values = None if name is None else self._expected(run, name)
        if values is None or node not in EQUALS:
            return values
        return [value[0] if isinstance(value, (tuple, list)) else value for value in values]  # the first of several

    def _mean_shards(self, values: list[torch.Tensor], fqn: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Each rank's part of the mean over ranks, in ``dtype``: of the gradient of a parameter if ``fqn`` is one."""
        mean = torch.stack([value.to(dtype) for value in values]).mean(0)
        entry = self.programs[0].parameters.get(fqn)
        return [mean] * len(values) if entry is None else shards_of(mean, entry, self.mesh)


def _shard_of(node: fx.Node) -> str | None:
    """The parameter whose shard a node has, padded or not."""
    fqn: str | None = SHARD_OF.get(node, PADDED_SHARD.get(node))
    return fqn


def _summed(node: fx.Node, values: list[Any], mesh: Mesh) -> list[Any]:
    """The values, summed over the axes along which they are partial."""
    for axis, placement in PLACEMENTS.get(node, {}).items():
        if isinstance(placement, Partial) and isinstance(values[0], torch.Tensor):
            groups = [group_along(mesh, axis, rank) for rank in range(len(values))]
            values = [torch.stack([values[rank] for rank in group]).sum(0) for group in groups]
    return values


def _as_captured(inputs: Mapping[Any, Any], gm: fx.GraphModule) -> dict[Any, Any]:
    """Inputs with parameters in the dtype that the graph was captured with."""
    nodes = {role: node for role, node in ir.placeholders(gm).items() if isinstance(role, ir.Parameter)}
    return {r: value.to(nodes[r].meta["val"].dtype) if r in nodes else value for r, value in inputs.items()}


def _placed(value: Any, node: fx.Node, rank: int, mesh: Mesh) -> Any:
    """The part of a value that the node gives on a rank, where axes of operators cut it; its rows in their order."""
    for axis, placement in PLACEMENTS.get(node, {}).items():
        if isinstance(value, torch.Tensor) and is_cut(placement):
            value = ir.take_part(value, *cut_of(placement), *along(mesh, axis, rank))
    if isinstance(value, torch.Tensor) and (order := ROW_ORDER.get(node)):
        value = value.reshape(*order, -1).transpose(0, 1).reshape(value.shape)
    return value


def _before_reduction(node: fx.Node, mesh: Mesh) -> tuple[fx.Node, fx.Node | None, int]:
    """The local gradient of which a node is the reduced one, what of it is in a bucket, if it is in one, and over how
    many ranks it is.

    If what is reduced is taken from the reduction of another parameter, it is what is taken.
    """
    fqn, packed, ranks = REDUCES.get(node), None, 1
    made_by = None if ir.buckets.packed_as(node) else MADE_BY.get(node)
    while fqn is not None and REDUCES.get(node, fqn) == fqn:
        ranks *= _ranks_of(node, mesh)
        if (before := ir.buckets.packed_as(node)) is not None:
            bucket = node.all_input_nodes[0]
            while bucket.target is not ir.buckets.pack:
                ranks *= _ranks_of(bucket, mesh)
                bucket = bucket.all_input_nodes[0]
            node = packed = before
            made_by = made_by or (MADE_BY.get(node) if node in REDUCES else None)
        elif made_by is None or MADE_BY.get(node) != made_by:
            break
        else:
            node = node.all_input_nodes[0]
    return node, packed, ranks


def _ranks_of(node: fx.Node, mesh: Mesh) -> int:
    """The ranks of a collective; 1 for other nodes."""
    return len(group_along(mesh, ir.group_of(node), 0)) if ir.is_collective(node) else 1


def _is_right(
    local: list[torch.Tensor], factors: Sequence[float], expected: list[torch.Tensor], tolerance: float
) -> bool:
    """Whether local gradients are the expected ones, or their mean, times one of ``factors``, is that of these."""
    if all(relative_error(mine, theirs) <= tolerance for mine, theirs in zip(local, expected, strict=True)):
        return True  # and nothing was to be summed
    own, mean = (torch.stack([value.double() for value in values]).mean(0) for values in (local, expected))
    return any(relative_error(own * factor, mean) <= tolerance for factor in factors)


def shards_of(full: torch.Tensor, entry: ParameterPlan, mesh: Mesh) -> list[torch.Tensor]:
    """Every rank's shard of a parameter, or of its gradient."""
    world = math.prod(size for _, size in mesh)
    return [part_of(full, entry, mesh, coordinates(mesh, rank)) for rank in range(world)]


def largest_of(tensor: torch.Tensor) -> float:
    """The largest magnitude of a tensor of floating-point numbers; 0 for others."""
    return _comparable(tensor).abs().max().item() if tensor.is_floating_point() and tensor.numel() else 0.0


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in a dtype that kernels compare: those of 8 bits they only cast."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def relative_error(mine: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> float:
    """Largest absolute difference over the reference's largest magnitude, or over ``floor`` where that is more.

    Infinite for another shape or dtype, for unequal integers and for NaN.
    """
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    if not theirs.numel():
        return 0.0
    if not theirs.is_floating_point() and not theirs.is_complex():
        return 0.0 if torch.equal(mine, theirs) else float("inf")
    mine, theirs = _comparable(mine), _comparable(theirs)
    # Masks hold infinities, whose difference from themselves is no number.
    difference = torch.where(mine == theirs, torch.zeros_like(mine), mine - theirs).abs().max().item()
    finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
    scale = max(finite.abs().max().item(), floor)
    # NaN compares as unequal to everything, so it must not pass for a small error.
    return 0.0 if difference == 0 else difference / scale if scale and difference == difference else float("inf")
