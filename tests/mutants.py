"""Programs with a fault each, as a wrong pass would write them, and an independent judge of which of them differ.

A fault is made in a node that a pass wrote. The judge runs a program on all ranks in double precision, with random
weights, inputs and directions, and compares with the original's own autograd; it shares nothing with ``verify`` but
the interpreter of graphs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from shardgraph import ir
from shardgraph.checks.lockstep import by_role, run_lockstep
from shardgraph.ir.attributes import MADE_BY
from shardgraph.mesh import coordinates
from shardgraph.passes.program import Program
from shardgraph.plans.shards import part_of

aten = torch.ops.aten
SCALES = {aten.div.Tensor, aten.mul.Tensor, aten.mul.Scalar}
ON_A_PART = {ir.local_part, ir.local_chunk, ir.first_only}


@dataclass(frozen=True)
class Mutant:
    """A fault of a node that ``made_by`` wrote, in one graph of a program."""

    made_by: str
    fault: str
    graph: str
    node: str

    def __str__(self) -> str:
        return f"{self.made_by}: {self.fault} at {self.node} in {self.graph}"

    def of(self, program: Program) -> Program:
        """The program with the fault."""
        graphs = {name: ir.copy_graph(gm) if name == self.graph else gm for name, gm in program.graphs.items()}
        graph = graphs[self.graph].graph
        (node,) = (node for node in graph.nodes if node.name == self.node)
        FAULTS[self.fault].write(node)
        graph.eliminate_dead_code()
        return replace(program, graphs=graphs)


@dataclass(frozen=True)
class Fault:
    """What is wrong in a mutant: ``write(node)`` makes it wrong, where ``applies(node)``."""

    applies: Callable[[fx.Node], bool]
    write: Callable[[fx.Node], Any]


def _instead(node: fx.Node, make: Callable[[fx.Graph], fx.Node]) -> None:
    """Use what ``make`` writes after ``node`` in its place, with all that the pass has noted of it."""
    with node.graph.inserting_after(node):
        made = make(node.graph)
    made.meta.update(node.meta)
    node.meta = {"val": node.meta["val"]}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: made not in (user, *user.users))


def _applied(target: Callable[..., Any], *arguments: Any) -> Callable[[fx.Node], None]:
    return lambda node: _instead(node, lambda graph: graph.call_function(target, (node, *arguments)))


def _awaited(node: fx.Node) -> fx.Node:
    """What follows the collective that a wait is for."""
    return node.args[0]  # type: ignore[return-value]


def _is(*targets: Any) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_function" and node.target in targets


def _waits_for(target: Any) -> Callable[[fx.Node], bool]:
    return lambda node: node.target is ir.WAIT and _awaited(node).target is target


def _has_rows(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] > 1


def _own_part(node: fx.Node) -> None:
    operand, count = _awaited(node).args[0], _awaited(node).args[2]
    rows = node.meta["val"].shape[0]
    assert isinstance(count, int)
    _instead(node, lambda graph: graph.call_function(aten.slice.Tensor, (operand, 0, 0, rows)))


def _own_shard(node: fx.Node) -> None:
    operand, count = _awaited(node).args[0], _awaited(node).args[1]
    _instead(node, lambda graph: graph.call_function(aten.cat.default, ([operand] * int(count),)))  # type: ignore[call-overload]


def _twice(node: fx.Node) -> None:
    start = _awaited(node)

    def again(graph: fx.Graph) -> fx.Node:
        second = graph.call_function(start.target, (node, *start.args[1:]))  # type: ignore[arg-type]
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


FAULTS: dict[str, Fault] = {
    "all-reduce dropped": Fault(_waits_for(ir.ALL_REDUCE), _dropped),
    "all-reduce doubled": Fault(_waits_for(ir.ALL_REDUCE), _twice),
    "all-reduce by maximum": Fault(_waits_for(ir.ALL_REDUCE), _other_operation),
    "reduce-scatter by maximum": Fault(_waits_for(ir.REDUCE_SCATTER), _other_operation),
    "reduce-scatter dropped": Fault(_waits_for(ir.REDUCE_SCATTER), _own_part),
    "reduce-scatter in another order": Fault(
        lambda node: node.target is ir.REDUCE_SCATTER,
        lambda node: node.update_arg(0, _rolled(node, node.args[0], node.meta["val"].shape[0])),
    ),
    "all-gather of the own shard": Fault(_waits_for(ir.ALL_GATHER), _own_shard),
    "all-gather in another order": Fault(
        lambda node: _waits_for(ir.ALL_GATHER)(node) and _has_rows(node),
        lambda node: _applied(torch.roll, _awaited(node).args[0].meta["val"].shape[0], 0)(node),  # type: ignore[union-attr]
    ),
    "all-to-all dropped": Fault(_waits_for(ir.ALL_TO_ALL), _dropped),
    "a value twice as large": Fault(
        lambda node: node.op == "call_function" and _floating(node) and node.target not in ir.COLLECTIVES,
        _applied(aten.mul.Tensor, 2),
    ),
    "another number": Fault(
        lambda node: node.target in SCALES and any(isinstance(each, (int, float)) for each in node.args),
        lambda node: setattr(
            node, "args", tuple(each + 1 if isinstance(each, (int, float)) else each for each in node.args)
        ),
    ),
    "rounded to bfloat16": Fault(
        lambda node: node.target is ir.WAIT and _floating(node),
        lambda node: _instead(node, lambda graph: _rounded(graph, node)),
    ),
    "another part": Fault(
        lambda node: node.target in ON_A_PART and _has_rows(node.args[0]),  # type: ignore[arg-type]
        lambda node: node.update_arg(0, _rolled(node, node.args[0], 1)),
    ),
    "padding at the start": Fault(_is(ir.pad_shard), lambda node: _applied(torch.roll, 1, 0)(node)),
}


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _rolled(node: fx.Node, operand: Any, by: int) -> fx.Node:
    with node.graph.inserting_before(node):
        rolled = node.graph.call_function(torch.roll, (operand, by, 0))
    rolled.meta["val"] = operand.meta["val"]
    return rolled


def _rounded(graph: fx.Graph, node: fx.Node) -> fx.Node:
    rounded = graph.call_function(torch.Tensor.to, (node, torch.bfloat16))
    with graph.inserting_after(rounded):
        return graph.call_function(torch.Tensor.to, (rounded, node.meta["val"].dtype))


def mutants(program: Program) -> Iterator[Mutant]:
    """All faults that can be made in what passes wrote."""
    for name, gm in program.graphs.items():
        for node in gm.graph.nodes:
            for fault, kind in FAULTS.items():
                if node in MADE_BY and node.users and kind.applies(node):
                    yield Mutant(MADE_BY.of(node), fault, name, node.name)


def differs(program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> bool:
    """Whether a program without a pipeline gives other outputs, gradients or buffers than ``model`` on any rank."""
    plan, generator = program.plan, torch.Generator().manual_seed(seed)
    model = _with_random_weights(model, generator)
    world, size = math.prod(count for _, count in plan.mesh), plan.data_size
    inputs, expected, directions, buffers = [], [], [], []
    parameters = dict(model.named_parameters())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for rank in range(size):
        part = torch.utils._pytree.tree_map(lambda leaf, rank=rank: leaf.chunk(size)[rank], (args, kwargs))
        for name, buffer in model.named_buffers():
            buffer.data.copy_(before[name])
        leaves = torch.utils._pytree.tree_leaves(model(*part[0], **part[1]))
        inputs.append(torch.utils._pytree.tree_leaves(part))
        directions.append([_direction(leaf, generator) for leaf in leaves])
        loss = sum((leaf * way).sum() for leaf, way in zip(leaves, directions[-1], strict=True) if way is not None)
        (loss / size).backward()  # type: ignore[union-attr]
        expected.append([leaf.detach() for leaf in leaves])
        buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    roles = []
    for rank in range(world):
        where = coordinates(plan.mesh, rank)
        shards = {ir.Parameter(f): _part(p.detach(), program, f, where) for f, p in parameters.items()}
        leaves = inputs[plan.data_rank(rank)]
        roles.append(
            {**shards, **{ir.Buffer(n): b for n, b in before.items()}, **{ir.Input(i): x for i, x in enumerate(leaves)}}
        )
    forward = [by_role(result) for result in run_lockstep(program.forward, plan.mesh, roles)]
    tangents = [
        {r: v for r, v in result.items() if isinstance(r, ir.Saved)}
        | {ir.Tangent(i): way for i, way in enumerate(directions[plan.data_rank(rank)])}
        for rank, result in enumerate(forward)
    ]
    backward = [by_role(result) for result in run_lockstep(program.graph("backward"), plan.mesh, tangents)]
    for rank in range(world):
        batch, where = plan.data_rank(rank), coordinates(plan.mesh, rank)
        pairs = [(forward[rank][ir.Output(i)], value) for i, value in enumerate(expected[batch])]
        for fqn, parameter in parameters.items():
            assert parameter.grad is not None
            mine = backward[rank][ir.Gradient(ir.Parameter(fqn))]
            pairs.append((mine, _part(parameter.grad, program, fqn, where)))
        for name, value in before.items():
            new = forward[rank].get(ir.Mutation(ir.Buffer(name)), value)
            after = torch.stack([each[name] for each in buffers])
            pairs.append((new, after.mean(0) if value.is_floating_point() else after[0]))
        if not all(map(_equal, *zip(*pairs, strict=True))):
            return True
    return False


def _with_random_weights(model: nn.Module, generator: torch.Generator) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = None
        noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        parameter.data.add_(noise, alpha=0.05)
    return model


def _direction(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    if not leaf.is_floating_point() or not leaf.requires_grad:
        return None
    return torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)


def _part(tensor: torch.Tensor, program: Program, fqn: str, where: tuple[int, ...]) -> torch.Tensor:
    return part_of(tensor, program.parameters[fqn], program.plan.mesh, where).contiguous()


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return mine.shape == theirs.shape and torch.allclose(
        mine.double(),
        theirs.double(),
        rtol=1e-9,
        atol=1e-9 * max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0),
    )
