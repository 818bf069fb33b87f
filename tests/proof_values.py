"""Programs of a few operations that are typed, and run on all ranks: what ranks have is what their types say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph import ir
from shardgraph.ir import fused
from shardgraph.ir.attributes import ROLE
from shardgraph.proof.held import Held, of_term
from shardgraph.proof.shards import part
from shardgraph.proof.terms import Atom, Term, Terms, View
from shardgraph.proof.typing import Typing

aten = torch.ops.aten
AXIS = "tp"


class Small:
    """A program on a few ranks of one axis, written operation by operation, and run at once."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.graph, self.terms = ranks, fx.Graph(), Terms()
        self.values: dict[fx.Node, list[Any]] = {}
        self.held: dict[ir.Role, Held] = {}
        self.wholes: dict[str, torch.Tensor] = {}

    def input(self, whole: torch.Tensor, dim: int | None = None, blocks: int = 1) -> fx.Node:
        """An operand, of which each rank has its part along ``dim``."""
        role = ir.Input(len(self.wholes))
        node = self.graph.placeholder(f"input{role.index}")
        ROLE.set(node, role)
        held = of_term(self.terms.make("input", [repr(role)], whole.shape))
        own = [whole] * self.ranks
        if dim is not None:
            held = part(held, dim, blocks, AXIS, self.ranks)
            own = [ir.take_part(whole, dim, blocks, self.ranks, rank) for rank in range(self.ranks)]
        self.held[role], self.wholes[repr(role)] = held, whole
        return self._add(node, own)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An operation, on every rank."""
        node = self.graph.call_function(target, args, kwargs)
        taken = [
            pytree.tree_map_only(fx.Node, lambda n, r=rank: self.values[n][r], (args, kwargs))
            for rank in range(self.ranks)
        ]
        return self._add(node, self._run(target, taken))

    def typed(self, result: fx.Node) -> Any:
        """What the ranks hold of a result; None if it is not known, as :attr:`why` says."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.graph, copies)
        for node, copy in copies.items():
            copy.meta.update(node.meta)
            if node.op == "placeholder":
                ROLE.set(copy, ROLE.of(node))
        ir.add_output(graph, [(ir.Output(0), copies[result])])
        typing = Typing(self.terms, lambda _: self.ranks, frozenset())
        found = typing.run(fx.GraphModule({}, graph), lambda role, _: self.held[role])[ir.Output(0)]
        self.why = [why for _, why in typing.untyped]
        return found

    def check(self, result: fx.Node) -> Held:
        """What the ranks hold of a result, after it is compared with what they computed.

        Raises:
            AssertionError: they computed something else.
        """
        held = self.typed(result)
        assert isinstance(held, Held), self.why
        own = self.values[result]
        if held.partial:
            assert held.partial == {(AXIS, "sum")}
            own = [sum(own)] * self.ranks
        for rank, value in enumerate(own):
            expected = self.value(replace(held, partial=frozenset()), rank)
            torch.testing.assert_close(value.to(expected.dtype), expected)
        return held

    def value(self, held: Held, rank: int = 0) -> torch.Tensor:
        """What a rank holds, computed from the inputs of the whole program."""
        return held.factor * _seen(self.of(held.term), held.dims, {AXIS: rank})

    def of(self, term: Term) -> torch.Tensor:
        """The value of a term."""
        return _VALUES.get(term.operation, _called)(self, term)

    def view(self, view: View) -> torch.Tensor:
        """The value of a view."""
        value = _seen(self.of(view.term), view.dims, {})
        return value if view.factor == 1 else view.factor * value

    def _add(self, node: fx.Node, values: list[Any]) -> fx.Node:
        self.values[node] = values
        node.meta["val"] = values[0]
        return node

    def _run(self, target: Any, taken: list[Any]) -> list[Any]:
        ranks = range(self.ranks)
        if target is ir.first_row:
            return [taken[r][0][0] * r for r in ranks]
        if target is ir.from_later:
            return [int(r < taken[r][0][0]) for r in ranks]
        if target is ir.send:
            return [taken[r - 1][0][0] for r in ranks]
        if target is ir.local_part:
            return [_part(self.ranks, r, *taken[r][0]) for r in ranks]
        if target is ir.ALL_REDUCE:
            stacked = torch.stack([args[0] for args, _ in taken])
            return [stacked.sum(0) if taken[0][0][1] == "sum" else stacked.amax(0)] * self.ranks
        if target is ir.ALL_GATHER:
            return [torch.cat([args[0] for args, _ in taken])] * self.ranks
        if target is ir.ALL_TO_ALL:
            rows = [args[0].split(args[2]) for args, _ in taken]
            return [torch.cat([each[rank] for each in rows]) for rank in ranks]
        if target is ir.WAIT:
            return [args[0] for args, _ in taken]
        return [target(*args, **kwargs) for args, kwargs in taken]


def _part(ranks: int, rank: int, full: torch.Tensor, dim: int, blocks: int, _: str, back: int = 0) -> torch.Tensor:
    return ir.take_part(full, dim, blocks, ranks, (rank - back) % ranks)


def _seen(value: torch.Tensor, dims: Any, coordinates: dict[str, int]) -> torch.Tensor:
    """The elements of a term that dimensions of digits show, with a rank's coordinates where they are digits."""
    shape = [_local(dim) for dim in dims]
    index = [torch.zeros(shape, dtype=torch.long) for _ in value.shape]
    for k, dim in enumerate(dims):
        place, rest = torch.arange(shape[k]), shape[k]
        for atom in dim:
            if atom.axis is None:
                rest //= atom.size
                digit = place // rest % atom.size
            else:
                digit = torch.full_like(place, coordinates[atom.axis])
            if atom.source is not None:
                index[atom.source] += (digit * atom.stride).view([-1 if j == k else 1 for j in range(len(shape))])
    return value[tuple(index)] if value.dim() else value.expand(shape)


def _local(dim: tuple[Atom, ...]) -> int:
    size = 1
    for atom in dim:
        size *= atom.size if atom.axis is None else 1
    return size


# -- terms -----------------------------------------------------------------------------------------------------


def _called(small: Small, term: Term) -> torch.Tensor:
    (target, index), (views, constants) = term.operation, term.operands
    tensors = [small.view(view) for view in views]
    if isinstance(constants, list) and len(constants) == 2 and isinstance(constants[1], dict):  # element by element
        return target(*_filled(constants[0], tensors), **constants[1])
    return _FUNCTIONS[target](index, constants, *tensors)


def _filled(constants: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    rest = iter(tensors)
    args = [next(rest) if each is None else each for each in constants]
    return [*args, *rest]


def _total(small: Small, term: Term) -> torch.Tensor:
    views, factors = term.operands
    return sum(factor * small.view(view) for view, factor in zip(views, factors, strict=True))


def _of_elements(small: Small, term: Term) -> torch.Tensor:
    (view,), (labels, keep) = term.operands
    return small.view(view).sum([int(label[1:]) for label in labels], keep)


def _of_piece(small: Small, term: Term) -> torch.Tensor:
    base, begin, length, step = term.operands
    return small.view(base)[begin : begin + length * step : step]


def _of_padded(small: Small, term: Term) -> torch.Tensor:
    base, begin, total = term.operands
    value = small.view(base)
    result = value.new_zeros(total, *value.shape[1:])
    result[begin : begin + value.shape[0]] = value
    return result


def _of_part(small: Small, term: Term) -> torch.Tensor:
    """A sum of which all but a part is set to zero: each operation is linear in its first operand."""
    sums, label, place = term.operands
    views, constants = sums.term.operands
    value, *rest = [small.view(view) for view in views]
    dim = 1 if label == "k" else int(label[1:])
    kept = torch.zeros(place.before, place.total, place.after, dtype=value.dtype)
    kept[:, place.begin : place.begin + place.length] = 1
    value = value * kept.view([-1 if k == dim else 1 for k in range(value.dim())])
    if sums.term.operation[0] == "sum of elements":
        full = value.sum([int(each[1:]) for each in constants[0]], constants[1])
    else:
        full = _FUNCTIONS[sums.term.operation[0]](0, constants, value, *rest)
    return _seen(full, sums.dims, {})


def _of_placed(small: Small, term: Term) -> torch.Tensor:
    (index, values), (dim, total) = term.operands
    at, what = small.view(index), small.view(values)
    result = what.new_zeros([total if k == dim else size for k, size in enumerate(what.shape)])
    inside = (at >= 0) & (at < total)
    return result.scatter(dim, at * inside, what * inside)


_VALUES: dict[Any, Callable[[Small, Term], torch.Tensor]] = {
    "input": lambda small, term: small.wholes[term.operands[0]],
    "one": lambda small, term: torch.tensor(float(term.operands[0]) if term.operands else 1.0, dtype=torch.float64),
    ("sum", 0): _total,
    ("sum of elements", 0): _of_elements,
    ("placed", 0): _of_placed,
    ("cat", 0): lambda small, term: torch.cat([small.view(v) for v in term.operands[0]], term.operands[1]),
    "arranged": lambda small, term: small.view(term.operands[0]),
    "piece": _of_piece,
    "padded": _of_padded,
    "part of a sum": _of_part,
}
_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.mm.default: lambda _, __, left, right: left @ right,
    aten.amax.default: lambda _, constants, value: value.amax(*constants),
    aten.gather.default: lambda _, dim, value, index: value.gather(dim, index.clamp(0, value.shape[dim] - 1)),
    aten.embedding.default: lambda _, __, table, index: table[index],
    aten.embedding_dense_backward.default: lambda _, constants, *tensors: aten.embedding_dense_backward(
        *tensors, *constants
    ),
    fused.ATTENTION: lambda index, constants, *tensors: _attention(*tensors, *constants)[index],
    fused.ATTENTION_BACKWARD: lambda index, constants, *tensors: _attention_backward(*tensors, *constants)[index],
}


def _attention(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    mask, causal, scale = rest if len(rest) == 3 else (None, *rest)
    return fused.ATTENTION(query, key, value, mask, causal, scale)


def _attention_backward(*args: Any) -> Any:
    *tensors, causal, scale = args
    mask = tensors[6] if len(tensors) > 6 else None
    return fused.ATTENTION_BACKWARD(*tensors[:6], mask, causal, scale)
