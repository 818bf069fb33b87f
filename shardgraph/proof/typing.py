"""Types every node of a graph: what each rank holds of which term."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardgraph.ir import Role, buckets, outputs
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.random_state import draws

# They register rules, definitions and lemmas.
from shardgraph.proof import (  # noqa: F401
    definitions,
    dimensions,
    experts,
    grouped,
    handed,
    joins,
    lookups,
    norms,
    of_rank,
    ranges,
    ring,
    shifts,
    vocabulary,
)
from shardgraph.proof.arranged import settled
from shardgraph.proof.collectives import EXCHANGES
from shardgraph.proof.held import Held, UntypedError, of_term, sized, tidy
from shardgraph.proof.labels import apply, lifted
from shardgraph.proof.moves import MOVES
from shardgraph.proof.packed import Packed, packed
from shardgraph.proof.recall import Recall
from shardgraph.proof.rules import RULES, pointwise
from shardgraph.proof.terms import Terms
from shardgraph.torch_api import pytree

aten = torch.ops.aten

Ranks = Callable[[str], int]
Typed = Any
"""What ranks hold, a number, or a list of these; None: not known."""


@dataclass(frozen=True)
class _Seen:
    """A node that neither writes nor draws random numbers, with what its operands and it are."""

    node: fx.Node
    operands: list[Typed]
    value: Typed

    def is_of(self, node: fx.Node, operands: Mapping[fx.Node, Typed]) -> bool:
        """Whether a node of another graph does the same."""
        if node.target is not self.node.target or list(operands.values()) != self.operands:
            return False
        names = [fx.map_arg((each.args, dict(each.kwargs)), _name) for each in (node, self.node)]
        return names[0] == names[1] and node.meta.get("val") is self.node.meta.get("val")


def _name(node: fx.Node) -> str:
    return f"%{node.name}"


@dataclass
class Typing:
    """Types graphs one after another, with terms in common.

    ``originals`` are the nodes of the captured graph by name; the shapes of their values and operands only say where a
    rank's coordinate stands among the dimensions. ``untyped`` are the nodes of whose operands all are known and whose
    result is not, with the reason.
    """

    terms: Terms
    ranks: Ranks
    data: frozenset[str]
    originals: Mapping[str, fx.Node] = field(default_factory=dict)
    untyped: list[tuple[fx.Node, str]] = field(default_factory=list)
    drawn: int = 0
    recall: Recall | None = None
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def run(
        self,
        gm: fx.GraphModule,
        inputs: Callable[[Role, fx.Node], Held],
        cuts: Collection[fx.Node] = (),
        *,
        derived: bool = False,
    ) -> dict[Role, Typed]:
        """What ranks hold of a graph's results, by role. What the nodes in ``cuts`` give is cut. Of a graph that is
        ``derived`` from the one before, nodes that do the same are not typed again."""
        if not derived:
            self._seen = {}
        known: dict[fx.Node, Typed] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            try:
                known[node] = self._typed(gm, node, known, inputs)
            except UntypedError as error:
                self.untyped.append((node, str(error)))
                known[node] = None
            except Exception as error:  # arguments that a rule was not written for are no proof either
                self.untyped.append((node, f"its rule raises {type(error).__name__}: {error}"))
                known[node] = None
            if node in cuts and isinstance(value := known[node], Held):
                known[node] = replace(value, term=self.terms.cut(value.term))
        return {role: known.get(value) if isinstance(value, fx.Node) else value for role, value in outputs(gm) if role}

    def _typed(
        self, gm: fx.GraphModule, node: fx.Node, known: Mapping[fx.Node, Typed], inputs: Callable[[Role, fx.Node], Held]
    ) -> Typed:
        if node.op == "placeholder":
            return inputs(ROLE.of(node), node)
        if node.op == "get_attr":
            return of_term(self._constant(getattr(gm, str(node.target))))
        operands = {each: known[each] for each in node.all_input_nodes}
        if any(value is None for value in operands.values()):
            return None
        if (seen := self._seen.get(node.name)) is not None and seen.is_of(node, operands):
            return seen.value
        value = self._typed_anew(gm, node, operands)
        if not _writes(node.target) and not draws(node):
            self._seen[node.name] = _Seen(node, list(operands.values()), value)
        return value

    def _typed_anew(self, gm: fx.GraphModule, node: fx.Node, operands: dict[fx.Node, Typed]) -> Typed:
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor) and not fake.numel():  # which is all that there is to know of it
            return of_term(self.terms.make("no elements", [], fake.shape))
        original = self.originals.get(definitions.captured(node))
        call = self.recall and self.recall.call(node, original, list(operands.values()))
        if self.recall and call and (recalled := self.recall.result(call)) is not None:
            return recalled
        operands = _placed_as(original, node, operands)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
        value = self._checked(node, self._called(node, args, kwargs), original)
        if self.recall and call:
            self.recall.keep(call, value)
        return value

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Typed:
        target: Any = node.target
        if target is buckets.pack:
            return packed(*args)
        if args and isinstance(args[0], Packed):
            rest = args[1:]
            return args[0].then(target, rest, self.ranks, lambda each: self._called(node, (each, *rest), kwargs))
        if _writes(target) and not _alone(node):
            raise UntypedError(f"{target} writes a value that something else reads, or that it shares")
        if of_rank.depends(args, kwargs):
            value = of_rank.computed(self, node, args, kwargs)
            if value is not None:
                return value
            args, kwargs = of_rank.as_held(args, kwargs)
        if target is operator.getitem:
            if args[0][args[1]] is None:
                raise UntypedError("a result of an operation that is not known")
            return args[0][args[1]]
        if target in MOVES:
            return MOVES[target](*args, **kwargs)
        if target in EXCHANGES:
            return EXCHANGES[target](self.terms, self.ranks, *args, **kwargs)
        try:
            if target in definitions.DEFINED:
                return definitions.DEFINED[target](self, node, *args, **kwargs)
            return self._ruled(target, args, kwargs)
        except UntypedError:
            if not all(each.replicated for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Held)):
                raise
        return self._opaque(node, args, kwargs)

    def _ruled(self, target: Any, args: Any, kwargs: Any) -> Typed:
        ruled = RULES.get(target) or RULES.get(str(target))
        if ruled is not None:
            tensors, constants, rule = ruled(*args, **kwargs)
            results = apply(self.terms, target, tensors, constants, rule)
            return results if len(rule.results) > 1 else results[0]
        tags = getattr(target, "tags", ())
        if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
            return pointwise(self.terms, target, args, kwargs)
        raise UntypedError(f"there is no rule for {target} of what ranks do not have whole")

    def _opaque(self, node: fx.Node, args: Any, kwargs: Any) -> Typed:
        """An operation of which nothing is known: the same on ranks that have the same operands, whole."""
        whole = pytree.tree_map_only(Held, lambda held: lifted(self.terms, held).view, (args, kwargs))
        varies: frozenset[str] = frozenset()
        if draws(node):
            self.drawn += 1
            whole, varies = (*whole, self.drawn), self.data
        value = node.meta.get("val")
        if not isinstance(value, (torch.Tensor, list, tuple)):
            raise UntypedError(f"{getattr(node.target, '__name__', node.target)} gives no tensor")
        if isinstance(value, torch.Tensor):
            return of_term(self.terms.make((node.target, 0), whole, value.shape, varies))
        return [
            of_term(self.terms.make((node.target, index), whole, each.shape, varies))
            if isinstance(each, torch.Tensor)
            else each
            for index, each in enumerate(value)
        ]

    def _constant(self, value: torch.Tensor) -> Any:
        text = str(value.tolist()) if value.numel() < 10_000 else id(value)
        return self.terms.make("constant", [str(value.dtype), text], value.shape)

    def _checked(self, node: fx.Node, value: Typed, original: fx.Node | None) -> Typed:
        """The value, if its sizes are the node's; what ranks share is put where the captured graph had it."""
        if not isinstance(value, Held):
            return value
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor) and tuple(fake.shape) != value.shape:
            raise UntypedError(f"it is {list(fake.shape)}, and {list(value.shape)} would be right")
        return _placed(settled(value), original)


def _placed_as(original: fx.Node | None, node: fx.Node, operands: dict[fx.Node, Typed]) -> dict[fx.Node, Typed]:
    """What the node is computed from, placed as where the captured graph computes the same."""
    if original is None or original.target != node.target or len(original.all_input_nodes) != len(operands):
        return operands
    pairs = zip(operands.items(), original.all_input_nodes, strict=True)
    return {each: _placed(value, whole) for (each, value), whole in pairs}


def _placed(value: Typed, original: fx.Node | None) -> Typed:
    """The same elements, with ranks' coordinates where they make the dimensions those of the captured value."""
    if not isinstance(value, Held) or not value.marks:
        return value
    fake = None if original is None else original.meta.get("val")
    if not isinstance(fake, torch.Tensor) or fake.dim() != len(value.dims):
        return replace(value, dims=tidy(value.dims))
    dims = sized(value.dims, fake.shape) or sized(tidy(value.dims), fake.shape)
    return value if dims is None else replace(value, dims=dims)


_NEW = (
    aten.mm.default,
    aten.addmm.default,
    aten.addmm_.default,
    aten.add.Tensor,
    aten.add_.Tensor,
    aten._to_copy.default,
)
"""Operations whose result is memory of its own, or of an operand that they write."""


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _alone(node: fx.Node) -> bool:
    """Whether nothing but the node can see what it writes."""
    written = node.args[0]
    return isinstance(written, fx.Node) and written.target in _NEW and list(written.users) == [node]
