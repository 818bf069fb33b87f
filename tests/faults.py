"""The faults that a pass could make: in a node it wrote, in what graphs give each other, in what is computed again.

A fault of a node that a pass wrote is blamed on that pass. Passes that move, copy or mark nodes write none: what they
can do wrong is to let a graph take or return another value than it should, or to compute something again from other
operands. Each of those places belongs to one pass, by the kind of the graph and of the role.

Not here, because no value shows it: the order of nodes (a graph that is valid in two orders has one value; deadlocks
are refused by ``check-program``); a value that is read before its wait, but for what memory held before (zeros here);
and an output that is a copy where it should be an alias, which only a later write by the user would show.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import EQUALS, MADE_BY, RECOMPUTE, REDUCES, ROLE
from shardgraph.ir.copies import WAIT_COPY
from shardgraph.mesh import axes_of, size_along
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.program import Program
from shardgraph.plans.annotations.constrain import CONSTRAIN
from shardgraph.plans.precision import AS_STORED

aten = torch.ops.aten
SCALES = {aten.div.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.full.default}
DERIVED = {"inputs": "split-backward", "weights": "split-backward", "backward": "drop-zero-tangents"}
ON_A_PART = {ir.local_part, ir.local_chunk, ir.first_only}
WAITS = {ir.WAIT, WAIT_COPY}
COPIES = {ir.TO_HOST, ir.TO_DEVICE}


@dataclass(frozen=True)
class Site:
    """A node of one of a program's graphs; of its output node, one result.

    ``absent`` are the tangents without which the graph was derived, if it was.
    """

    program: Program
    graph: str
    node: fx.Node
    result: int | None = None
    absent: frozenset[ir.Tangent] = frozenset()

    @property
    def kind(self) -> str:
        """The kind of the graph: ``"forward"``, ``"backward"``, ``"gather"``, ``"reduce"``."""
        return self.graph.rpartition("/")[2]

    @property
    def gm(self) -> fx.GraphModule:
        return self.program.graph(self.graph, self.absent)

    @property
    def derived_by(self) -> str | None:
        """The pass that derived the graph when it was first run; None if the program has it."""
        derived = self.absent or self.graph not in self.program.graphs
        return DERIVED[self.kind] if derived else None

    @property
    def results(self) -> list[Any]:
        """The graph's results with their roles."""
        return ir.outputs(self.gm)

    def sibling(self, kind: str) -> fx.GraphModule | None:
        return self.program.graphs.get(self.graph.removesuffix(self.kind) + kind)


@dataclass(frozen=True)
class Fault:
    """``made_by(site)`` is the pass that would have made the fault there, None where none is; ``write`` makes it."""

    made_by: Callable[[Site], str | None]
    write: Callable[[Site], Any]


# Faults in nodes that a pass wrote


def _written(applies: Callable[[fx.Node], Any], write: Callable[[fx.Node], Any]) -> Fault:
    """A fault of a node that a pass wrote."""

    def made_by(site: Site) -> str | None:
        here = site.result is None and site.node in MADE_BY and site.node.users and applies(site.node)
        return MADE_BY.of(site.node) if here else None

    return Fault(made_by, lambda site: write(site.node))


def _instead(node: fx.Node, make: Callable[[fx.Graph], fx.Node]) -> None:
    """Use what ``make`` writes after ``node`` in its place, with its name and all that the pass has noted of it."""
    with node.graph.inserting_after(node):
        made = make(node.graph)
    made.name, node.name = node.name, made.name
    made.meta.update(node.meta)
    node.meta = {key: node.meta[key] for key in ("val", MADE_BY.key)}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: made not in (user, *user.users))


def _applied(target: Callable[..., Any], *arguments: Any) -> Callable[[fx.Node], None]:
    return lambda node: _instead(node, lambda graph: graph.call_function(target, (node, *arguments)))


def _awaited(node: fx.Node) -> Any:
    """What follows the collective or copy that a wait is for."""
    return node.args[0]


def _is(*targets: Any) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_function" and node.target in targets


def _waits_for(target: Any) -> Callable[[fx.Node], bool]:
    return lambda node: node.target is ir.WAIT and _awaited(node).target is target


def _has_rows(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] > 1


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _computed(node: fx.Node) -> bool:
    """Whether it has a value, and not one that has yet to arrive."""
    return node.op == "call_function" and _floating(node) and node.target not in {*ir.COLLECTIVES, *COPIES}


def _own_part(node: fx.Node) -> None:
    operand, rows = _awaited(node).args[0], node.meta["val"].shape[0]
    _instead(node, lambda graph: graph.call_function(aten.slice.Tensor, (operand, 0, 0, rows)))


def _own_shard(node: fx.Node) -> None:
    operand, count = _awaited(node).args[0], _awaited(node).args[1]
    _instead(node, lambda graph: graph.call_function(aten.cat.default, ([operand] * int(count),)))


def _twice(node: fx.Node) -> None:
    start = _awaited(node)

    def again(graph: fx.Graph) -> fx.Node:
        second = graph.call_function(start.target, (node, *start.args[1:]))
        second.meta.update(start.meta)
        with graph.inserting_after(second):
            return graph.call_function(ir.WAIT, (second,))

    _instead(node, again)


def _dropped(node: fx.Node) -> None:
    operand = _awaited(node).args[0]
    _instead(node, lambda graph: graph.call_function(aten.alias.default, (operand,)))


def _other_operation(node: fx.Node) -> None:
    start = _awaited(node)
    start.update_arg(1, "max" if start.args[1] != "max" else "sum")


def _rolled(node: fx.Node, operand: Any, by: int) -> fx.Node:
    with node.graph.inserting_before(node):
        rolled = node.graph.call_function(torch.roll, (operand, by, 0))
    rolled.meta = {"val": operand.meta["val"], MADE_BY.key: MADE_BY.of(node)}
    return rolled


def _rounded(node: fx.Node) -> None:
    def there_and_back(graph: fx.Graph) -> fx.Node:
        rounded = graph.call_function(torch.Tensor.to, (node, torch.bfloat16))
        rounded.meta["val"] = node.meta["val"].to(torch.bfloat16)
        with graph.inserting_after(rounded):
            return graph.call_function(torch.Tensor.to, (rounded, node.meta["val"].dtype))

    _instead(node, there_and_back)


def _rounds(site: Site) -> str | None:
    """Of a program in its stored precision: where a plan rounds itself, one more rounding is within its tolerance."""
    here = site.result is None and site.node in MADE_BY and site.node.users and site.node.target in WAITS
    exact = site.program.plan.precision == AS_STORED
    return MADE_BY.of(site.node) if here and exact and _floating(site.node) else None


def _other_axis(site: Site) -> str | None:
    """Another group of mesh axes, with as many ranks as that of a collective."""
    if not ir.is_collective(site.node) or site.node.target is ir.send:
        return None
    mesh, group = site.program.plan.mesh, ir.group_of(site.node)
    fits = site.node.target is not ir.ALL_REDUCE
    others = (axis for axis, _ in mesh if axis not in axes_of(group) or len(axes_of(group)) > 1)
    return next((axis for axis in others if not fits or size_along(mesh, axis) == size_along(mesh, group)), None)


def _over_another_axis(site: Site) -> None:
    site.node.args = (*site.node.args[:-1], _other_axis(site))


def _form(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) and value.numel() else None


def _earlier(node: fx.Node, like: fx.Node, fits: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The last value before ``node`` that has the form of ``like`` and that ``fits``."""
    before = node.prev
    while before.op != "root":
        if before is not like and _form(before) == _form(like) and fits(before):
            return before
        before = before.prev
    return None


def _another_of_its_pass(node: fx.Node) -> fx.Node | None:
    """An earlier value of the same pass and operation: a stale one."""
    if not _floating(node) or node.target not in {*WAITS, aten._to_copy.default, aten.slice.Tensor, aten.mm.default}:
        return None
    return _earlier(node, node, lambda each: each.target is node.target and MADE_BY.get(each) == MADE_BY.get(node))


def _stale(node: fx.Node) -> None:
    other = _another_of_its_pass(node)
    _instead(node, lambda graph: graph.call_function(aten.alias.default, (other,)))


def _alike_in_bucket(node: fx.Node) -> tuple[int, int] | None:
    """The places of two tensors of one shape in a bucket."""
    if node.target is not ir.buckets.pack:
        return None
    shapes = [each.meta["val"].shape for each in node.args[0]]
    return next(((shapes.index(shape), i) for i, shape in enumerate(shapes) if shapes.index(shape) < i), None)


def _exchange_in_bucket(node: fx.Node) -> None:
    (one, other), tensors = _alike_in_bucket(node), list(node.args[0])
    tensors[one], tensors[other] = tensors[other], tensors[one]
    node.update_arg(0, tensors)


NODES: dict[str, Fault] = {
    "all-reduce dropped": _written(_waits_for(ir.ALL_REDUCE), _dropped),
    "all-reduce doubled": _written(_waits_for(ir.ALL_REDUCE), _twice),
    "all-reduce by maximum": _written(_waits_for(ir.ALL_REDUCE), _other_operation),
    "reduce-scatter by maximum": _written(_waits_for(ir.REDUCE_SCATTER), _other_operation),
    "reduce-scatter dropped": _written(_waits_for(ir.REDUCE_SCATTER), _own_part),
    "reduce-scatter in another order": _written(
        _is(ir.REDUCE_SCATTER), lambda node: node.update_arg(0, _rolled(node, node.args[0], node.meta["val"].shape[0]))
    ),
    "all-gather of the own shard": _written(_waits_for(ir.ALL_GATHER), _own_shard),
    "all-gather in another order": _written(
        lambda node: _waits_for(ir.ALL_GATHER)(node) and _has_rows(node),
        lambda node: _applied(torch.roll, _awaited(node).args[0].meta["val"].shape[0], 0)(node),
    ),
    "all-gather of an old shard": _written(
        lambda node: node.target is ir.ALL_GATHER and _has_rows(node.args[0]),
        lambda node: node.update_arg(0, _rolled(node, node.args[0], 1)),
    ),
    "all-to-all dropped": _written(_waits_for(ir.ALL_TO_ALL), _dropped),
    "a collective on another axis": Fault(
        lambda site: MADE_BY.get(site.node) if site.result is None and _other_axis(site) else None, _over_another_axis
    ),
    "read before it has arrived": _written(
        lambda node: node.target in WAITS and _floating(node), _applied(torch.zeros_like)
    ),
    "a stale value": _written(_another_of_its_pass, _stale),
    "a value twice as large": _written(_computed, _applied(aten.mul.Tensor, 2)),
    "a gradient scaled": _written(lambda node: node in REDUCES and _computed(node), _applied(aten.mul.Tensor, 0.99)),
    "another number": _written(
        lambda node: node.target in SCALES and any(isinstance(each, (int, float)) for each in node.args),
        lambda node: setattr(
            node, "args", tuple(each + 1 if isinstance(each, (int, float)) else each for each in node.args)
        ),
    ),
    "rounded to bfloat16": Fault(_rounds, lambda site: _rounded(site.node)),
    "another part": _written(
        lambda node: node.target in ON_A_PART and _has_rows(node.args[0]),
        lambda node: node.update_arg(0, _rolled(node, node.args[0], 1)),
    ),
    "two of a bucket exchanged": _written(lambda node: _alike_in_bucket(node) is not None, _exchange_in_bucket),
    "a bucket of other parts": _written(
        lambda node: _is(ir.buckets.pack)(node) and node.args[1] > 1, lambda node: node.update_arg(1, 1)
    ),
    "padding at the start": _written(_is(ir.pad_shard), _applied(torch.roll, 1, 0)),
}

# Faults in what graphs give each other, and return


def _gives(site: Site) -> str | None:
    """The pass that lets the graph return this result."""
    if site.result is None:
        return None
    role, value = site.results[site.result]
    if not isinstance(value, fx.Node) or not _floating(value):
        return None
    if site.derived_by:
        return site.derived_by if value not in REDUCES else None
    divides = site.program.plan.pipeline is not None
    if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):
        if divides and site.kind == "backward":
            return "keep-gradients-local" if value not in MADE_BY else None
        return None if value in REDUCES else "partition"
    if isinstance(role, ir.Saved):
        return "partition"
    if isinstance(role, (ir.Forwarded, ir.Returned)):
        return "divide-into-stages"
    return "gather-once" if isinstance(role, ir.Gathered) else None


def _partner(site: Site) -> int | None:
    """Another result of the same kind and form, with which this one can be exchanged."""
    results = site.results
    assert site.result is not None
    role, value = results[site.result]
    for i in range(site.result + 1, len(results)):
        other, node = results[i]
        if type(other) is type(role) and node is not value and _form(node) == _form(value) is not None:
            return i
    return None


def _exchange(site: Site) -> None:
    results, partner = site.results, _partner(site)
    first, second = results[site.result], results[partner]
    results[site.result], results[partner] = (first[0], second[1]), (second[0], first[1])
    ir.set_outputs(site.gm, results)


def _return(site: Site, target: Callable[..., Any], *arguments: Any) -> None:
    """Return what ``target`` gives for a result in its place."""
    results = site.results
    role, value = results[site.result]
    with site.node.graph.inserting_before(site.node):
        made = site.node.graph.call_function(target, (value, *arguments))
    made.meta = {key: each for key, each in value.meta.items() if key in ("val", "placements")}
    if _gives(site) == "keep-gradients-local":  # which changes a graph, and so is noted on new nodes
        MADE_BY.set(made, "keep-gradients-local")
    results[site.result] = (role, made)
    ir.set_outputs(site.gm, results)


def _mutation(site: Site) -> str | None:
    """The pass that lets the graph return the new value of a buffer."""
    if site.result is None:
        return None
    role, value = site.results[site.result]
    if not isinstance(role, ir.Mutation) or not isinstance(role.of, ir.Buffer) or not isinstance(value, fx.Node):
        return None
    return MADE_BY.get(value, "partition" if site.program.plan.pipeline is None else "divide-into-stages")


def _lose_mutation(site: Site) -> None:
    results = site.results
    role, _ = results[site.result]
    results[site.result] = (role, ir.placeholders(site.gm)[role.of])
    ir.set_outputs(site.gm, results)


def _accumulated(site: Site) -> str | None:
    role = ROLE.get(site.node)
    alike = isinstance(role, ir.Accumulated) and _other_input(site) is not None and site.node in EQUALS
    return "reduce-once" if alike else None


def _other_input(site: Site) -> fx.Node | None:
    """Another accumulated gradient of the same form."""
    alike = [each for each in site.gm.graph.find_nodes(op="placeholder") if _form(each) == _form(site.node)]
    return next((each for each in alike if each is not site.node), None)


def _exchange_inputs(site: Site) -> None:
    other = _other_input(site)
    mine, theirs = ROLE.of(site.node), ROLE.of(other)
    ROLE.set(site.node, theirs)
    ROLE.set(other, mine)


def _untrained(site: Site) -> str | None:
    """Only the first stage, of which no other needs a gradient, can lose its backward without an error."""
    first = site.result == 0 and site.kind == "backward" and site.graph.startswith("stage0/")
    return "drop-untrained" if first else None


RESULTS: dict[str, Fault] = {
    "two results exchanged": Fault(
        lambda site: _gives(site) and _partner(site) is not None and _gives(site), _exchange
    ),
    "a result lost": Fault(_gives, lambda site: _return(site, torch.zeros_like)),
    "a result scaled": Fault(_gives, lambda site: _return(site, aten.mul.Tensor, 2)),
    "a mutation lost": Fault(_mutation, _lose_mutation),
    "another gradient is reduced": Fault(_accumulated, _exchange_inputs),
    "a trained stage dropped": Fault(_untrained, lambda site: site.program.graphs.pop(site.graph)),
}

# Faults in what is copied, or computed again


def _copied_by(site: Site) -> str | None:
    """The pass that put a captured operation where it is, or lets backward compute it again."""
    if site.result is not None or site.node.op != "call_function" or site.node in MADE_BY or not site.node.users:
        return None
    again = "/recompute/" in site.graph
    plan = site.program.plan
    if plan.operators or plan.experts:
        return None  # not every operand can be compared there, and what is computed from it is blamed
    if site.derived_by:
        return site.derived_by
    if _marked(site) is not None:
        return "remove-constraints"
    if site.kind == "backward":
        if RECOMPUTE.get(site.node):
            return "recompute-stage" if again else "recompute"
        return "partition"
    if site.kind == "forward" and site.program.plan.pipeline is not None:
        return "copy-to-recompute" if again else "divide-into-stages"
    return None


def _marked(site: Site) -> int | None:
    """Which operand is a value that the captured graph has an annotation for."""
    return _marks(site.program.joint.module).get(site.node.name)


@lru_cache(maxsize=4)
def _marks(captured: fx.GraphModule) -> dict[str, int]:
    """Which operand of a captured node, by its name, is annotated."""
    operands = ((node.name, i, each) for node in captured.graph.nodes for i, each in enumerate(node.args))
    return {name: i for name, i, each in operands if isinstance(each, fx.Node) and each.target is CONSTRAIN}


def _replaceable(site: Site) -> tuple[int, fx.Node] | None:
    """An operand for which there is another value of its form, and that value."""
    for i, operand in enumerate(site.node.args):
        if _marked(site) not in (None, i):
            continue
        if isinstance(operand, fx.Node) and _floating(operand):
            other = _earlier(site.node, operand, lambda each: each not in MADE_BY)
            if other is not None and other not in site.node.args:
                return i, other
    return None


def _replace_operand(site: Site) -> None:
    i, other = _replaceable(site)
    site.node.update_arg(i, other)


def _drawn(site: Site) -> fx.Node | None:
    """What draws the random numbers that backward takes here."""
    forward = site.sibling("forward")
    role = ROLE.get(site.node)
    if site.kind != "backward" or not isinstance(role, ir.Saved) or forward is None:
        return None
    source = dict(ir.outputs(forward)).get(role)
    if not isinstance(source, fx.Node):
        return None
    return source if draws(source) or (source.target is operator.getitem and draws(source.args[0])) else None


def _drawn_by(site: Site) -> str | None:
    if site.result is not None or _drawn(site) is None:
        return None
    if "/recompute/" in site.graph:
        return "recompute-stage"
    return "recompute" if site.program.plan.recompute != "none" else None


def _draw_again(site: Site) -> None:
    """Compute random numbers again, as a pass that marks them would: of the same distribution, and others."""
    source = _drawn(site)
    graph, node = site.node.graph, site.node
    order = torch.randperm(node.meta["val"].numel(), generator=torch.Generator().manual_seed(0))
    with graph.inserting_after(max(site.gm.graph.find_nodes(op="placeholder"))):
        again = graph.create_node("call_function", _shuffled, (node, tuple(order.tolist())), {}, source.name)
    again.meta = {**source.meta, RECOMPUTE.key: True}
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _shuffled(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return tensor.flatten()[list(order)].view(tensor.shape)


def _loses_a_term(site: Site) -> str | None:
    """The pass that leaves out terms that are zero, where it could leave out another."""
    node = site.node
    if not site.absent or site.result is not None or node.target is not aten.add.Tensor or node in MADE_BY:
        return None
    alike = all(isinstance(each, fx.Node) and _form(each) == _form(node) for each in node.args)
    return site.derived_by if alike and not any(user in MADE_BY for user in node.users) else None


COPIES: dict[str, Fault] = {
    "another operand": Fault(
        lambda site: _copied_by(site) if _copied_by(site) and _replaceable(site) else None, _replace_operand
    ),
    "a term left out": Fault(_loses_a_term, lambda site: site.node.replace_all_uses_with(site.node.args[0])),
    "random numbers drawn again": Fault(_drawn_by, _draw_again),
}

FAULTS = {**NODES, **RESULTS, **COPIES}
