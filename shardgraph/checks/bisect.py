"""Finds the first node of a compiled program whose value differs from the captured graph's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.checks.lockstep import along, by_role, run_lockstep
from shardgraph.ir.attributes import EQUALS, MADE_BY, MEAN_OF, PLACEMENTS, REDUCES, ROLE, SOURCE
from shardgraph.mesh import Mesh, coordinates, group_along
from shardgraph.passes.program import Program
from shardgraph.passes.sharding.placements import cut_of, is_cut
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.shards import part_of


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


class _Diverged(Exception):
    """Ends the run of a graph; its argument is the divergence."""


def first_divergence(
    program: Program,
    whole: list[Mapping[Any, Any]],
    local: list[Mapping[Any, Any]],
    evaluate: Callable[[Mapping[Any, Any], int], tuple[Any, Any, dict[Any, Any]]],
    generators: Callable[[], list[torch.Tensor]],
    tolerance: float,
) -> Divergence | None:
    """Run the captured graph on ``whole`` inputs and the emitted graphs on ``local`` ones; compare node by node.

    Nodes of the captured graph keep their names through the passes. A node made by a pass is compared if the pass
    recorded what it equals: ``EQUALS`` names the captured value, ``MEAN_OF`` the value whose mean over ranks it is.
    The gradients that come out are compared too. ``evaluate`` returns ``(output, loss, tangents)`` for a rank's
    results. Returns None if all comparable values agree.
    """
    joint, mesh, alone = program.joint.module, program.plan.mesh, (("rank", len(whole)),)
    expected: dict[str, list[Any]] = {}
    whole = [_as_captured(inputs, joint) for inputs in whole]
    zeros = with_zeros({role: None for role in ir.placeholders(joint) if isinstance(role, ir.Tangent)}, joint)
    results = run_lockstep(joint, alone, [inputs | zeros for inputs in whole], rng=generators())
    tangents = [evaluate(by_role(result), rank)[2] for rank, result in enumerate(results)]
    joint_inputs = [inputs | with_zeros(t, joint) for inputs, t in zip(whole, tangents, strict=True)]
    run_lockstep(
        joint, alone, joint_inputs, rng=generators(), on_value=lambda node, values: expected.update({node.name: values})
    )

    agreed: set[fx.Node] = set()
    saved_by: dict[Any, Any] = {}  # the nodes of forward whose values backward takes, by role
    unreduced: dict[fx.Node, list[Any]] = {}

    def check(node: fx.Node, reference: list[Any], values: list[Any], made_by: str | None = None) -> None:
        compared = False
        for rank, (mine, whole) in enumerate(zip(values, reference, strict=True)):
            theirs = whole if made_by is not None else _placed(whole, node, rank, mesh)
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                compared = True
                # A part may hold nothing but rounding, as the gradient of an attention's key bias does.
                largest = whole.abs().max().item() if whole.is_floating_point() and whole.numel() else 0.0
                error = relative_error(mine, theirs, floor=0.0 if math.isinf(largest) else largest)
                if not error <= tolerance:
                    blamed = made_by or _made_by(node, agreed, saved_by)
                    raise _Diverged(Divergence(node.name, blamed, SOURCE.get(node, ""), error))
        if compared:
            agreed.add(node)

    def compare(node: fx.Node, values: list[Any]) -> None:
        if any(user in MADE_BY and MADE_BY.get(user) != MADE_BY.get(node) for user in node.users):
            unreduced[node] = values
        reference = _reference(node, expected, program)
        if reference is not None and node.op != "placeholder" and node.target not in _UNWRITTEN:
            check(node, reference, values)

    try:
        forward = run_lockstep(program.forward, mesh, local, rng=generators(), on_value=compare)
        saved_by.update(ir.outputs(program.forward))
        if program.backward is not None:
            backward = program.graph("backward", absent_of(tangents))
            saved = [{role: v for role, v in result if isinstance(role, ir.Saved)} for result in forward]
            inputs = [values | with_zeros(t, backward) for values, t in zip(saved, tangents, strict=True)]
            results = run_lockstep(backward, mesh, inputs, on_value=compare)
            made = [by_role(result) for result in results]
            captured = dict(ir.outputs(joint))
            for role, node in ir.outputs(backward):
                if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter) and isinstance(node, fx.Node):
                    full = expected[captured[role].name]
                    parts = _mean_shards(full, program.parameters[role.of.fqn], node, program)
                    own, ranks = _before_reduction(node, mesh)
                    # A reduction that is missing should have been over all ranks.
                    factors = [count / program.plan.data_size for count in (ranks, len(made))]
                    wrong = own in unreduced and not _is_right(unreduced[own], factors, full, tolerance)
                    blamed = _made_by(own if wrong else node, agreed, saved_by)
                    check(node, parts, [result[role] for result in made], blamed)
    except _Diverged as diverged:
        return diverged.args[0]
    return None


def absent_of(tangents: list[Mapping[Any, torch.Tensor | None]]) -> frozenset[ir.Tangent]:
    """The tangents that no rank's loss has."""
    return frozenset(role for role in tangents[0] if all(values[role] is None for values in tangents))


def with_zeros(tangents: Mapping[Any, torch.Tensor | None], gm: fx.GraphModule) -> dict[Any, torch.Tensor]:
    """The tangents that ``gm`` takes, in the memory layout that it was traced with; zeros for None."""
    inputs = {}
    for role, node in ir.placeholders(gm).items():
        if role in tangents:
            like, value = node.meta["val"], tangents[role]
            inputs[role] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
            if value is not None:
                inputs[role].copy_(value)
    return inputs


def _as_captured(inputs: Mapping[Any, Any], gm: fx.GraphModule) -> dict[Any, Any]:
    """Inputs with parameters in the dtype that the graph was captured with."""
    nodes = {role: node for role, node in ir.placeholders(gm).items() if isinstance(role, ir.Parameter)}
    return {r: value.to(nodes[r].meta["val"].dtype) if r in nodes else value for r, value in inputs.items()}


def _reference(node: fx.Node, expected: Mapping[str, list[Any]], program: Program) -> list[Any] | None:
    """The node's expected value per rank; None if none is recorded."""
    if node in MEAN_OF:
        values = expected.get(MEAN_OF.of(node))
        if not values or not isinstance(values[0], torch.Tensor):
            return None
        entry = program.parameters.get(REDUCES.get(node, ""))  # each rank's part of it is the gradient of a parameter
        return _mean_shards(values, entry, node, program)
    if node in EQUALS:  # of an operation with several results the first
        values = expected.get(EQUALS.of(node))
        return values and [value[0] if isinstance(value, (tuple, list)) else value for value in values]
    if node in MADE_BY or not all(map(is_cut, PLACEMENTS.get(node, {}).values())):
        return None
    return expected.get(node.name)


def _mean_shards(
    values: list[torch.Tensor], entry: ParameterPlan | None, node: fx.Node, program: Program
) -> list[torch.Tensor]:
    """Each rank's part of the mean over ranks, in the dtype of the node that has it."""
    mean = torch.stack([value.to(node.meta["val"].dtype) for value in values]).mean(0)
    return [mean] * len(values) if entry is None else shards_of(mean, entry, program.plan.mesh)


def _before_reduction(node: fx.Node, mesh: Mesh) -> tuple[fx.Node, int]:
    """The local gradient of which a node is the reduced one, and over how many ranks it is."""
    made_by, ranks = MADE_BY.get(node) if node in REDUCES else None, 1
    while made_by is not None and MADE_BY.get(node) == made_by:
        if ir.is_collective(node):
            ranks *= len(group_along(mesh, ir.group_of(node), 0))
        node = node.all_input_nodes[0]
    return node, ranks


def _is_right(
    local: list[torch.Tensor], factors: Sequence[float], expected: list[torch.Tensor], tolerance: float
) -> bool:
    """Whether local gradients are the expected ones, or their mean, times one of ``factors``, is that of these."""
    if all(relative_error(mine, theirs) <= tolerance for mine, theirs in zip(local, expected, strict=True)):
        return True  # and nothing was to be summed
    own, mean = (torch.stack([value.double() for value in values]).mean(0) for values in (local, expected))
    return any(relative_error(own * factor, mean) <= tolerance for factor in factors)


def _made_by(node: fx.Node, agreed: Set[fx.Node], saved_by: Mapping[Any, Any]) -> str:
    """The pass that made a node that differs, or of what it is computed from the latest that was not compared."""
    seen, pending = {node}, [node]
    while pending:
        each = pending.pop(0)
        if each in MADE_BY:
            return MADE_BY.of(each)
        sources = [saved_by.get(ROLE.get(each))] if each.op == "placeholder" else each.all_input_nodes
        for source in sources:
            if isinstance(source, fx.Node) and source not in seen and source not in agreed:
                seen.add(source)
                pending.append(source)
    return "capture"


def _placed(value: Any, node: fx.Node, rank: int, mesh: Mesh) -> Any:
    """The part of a value that the node gives on a rank, where axes of operators cut it."""
    for axis, placement in PLACEMENTS.get(node, {}).items():
        if isinstance(value, torch.Tensor) and is_cut(placement):
            value = ir.take_part(value, *cut_of(placement), *along(mesh, axis, rank))
    return value


def shards_of(full: torch.Tensor, entry: ParameterPlan, mesh: Mesh) -> list[torch.Tensor]:
    """Every rank's shard of a parameter, or of its gradient."""
    world = math.prod(size for _, size in mesh)
    return [part_of(full, entry, mesh, coordinates(mesh, rank)) for rank in range(world)]


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
    # Masks hold infinities, whose difference from themselves is no number.
    difference = torch.where(mine == theirs, torch.zeros_like(mine), mine - theirs).abs().max().item()
    finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
    scale = max(finite.abs().max().item(), floor)
    # NaN compares as unequal to everything, so it must not pass for a small error.
    return 0.0 if difference == 0 else difference / scale if scale and difference == difference else float("inf")
