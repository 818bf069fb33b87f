"""Whether what a model computes for a row of a batch depends on that row alone, so that a batch may be cut by rows.

The graph has the sizes of a microbatch: of a view it is not known which of its sizes would grow with the batch, and the
one that lies where the rows lay is taken to. Of one row that cannot be told, and its first row is all of it, so forward
is captured again, for two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.capture.captures import Call, Captures
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import SOURCE
from shardgraph.passes.analysis.loss_reduction import loss_reductions
from shardgraph.passes.analysis.random_state import draws
from shardgraph.plans.plan import Plan
from shardgraph.proof.held import Held, MixedError, divided, patterns, whole_size
from shardgraph.proof.labels import Pattern
from shardgraph.proof.terms import Terms
from shardgraph.proof.typing import Typing

aten = torch.ops.aten

ROWS = "microbatch"
"""The axis along which microbatches have rows of a batch."""

_BY_MICROBATCH = {
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm.default,
    aten.fill.Tensor,  # with a number that is the same for all microbatches here
}
"""What is documented to be computed for each microbatch as for a batch, or is the same either way."""

_OF_SHAPES = {
    each.default
    for each in (aten.ones_like, aten.zeros_like, aten.full_like, aten.new_ones, aten.new_zeros, aten.new_full)
}
"""What does not depend on the values of its operand: derivatives of a number begin with a 1 that is made so."""

_BAGS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}


@dataclass(frozen=True)
class Rows:
    """``mixed`` are the operations that combine rows of a batch, with the reason; of ``unknown`` it is not known."""

    mixed: Mapping[fx.Node, str]
    unknown: Mapping[fx.Node, str]

    @property
    def apart(self) -> bool:
        """Whether each row is known to be computed from itself alone."""
        return not self.mixed and not self.unknown

    def raise_if_mixed(self) -> None:
        """Raise ShardGraphError with the first line of the model that combines rows."""
        for node, why in self.mixed.items():
            raise ShardGraphError(
                f"the rows of a batch are not computed apart: at {SOURCE.get(node) or node.name} {why}. Microbatches "
                "would see their own rows alone, and give another loss than the batch: compute it from each row, or "
                "train without a pipeline"
            )

    def warnings(self) -> Iterator[str]:
        """A line for each kind of operation of which it is not known."""
        kinds: dict[str, fx.Node] = {}
        for node in self.unknown:
            kinds.setdefault(str(node.target), node)
        for kind, node in kinds.items():
            yield (
                f"it is not known whether {kind} at {SOURCE.get(node) or node.name} computes each row of a batch "
                "apart; in a pipeline it sees the rows of a microbatch"
            )


def rows_of(joint: ir.JointGraph) -> Rows:
    """How forward of a captured graph, that of a microbatch, treats the rows of its batch.

    Its tensors with dimension 0 as long as the batch are typed as parts of a batch of twice the rows: what computes
    each row apart gives parts of the batch's values. Numbers are left to the analysis of the loss.
    """
    typing = _RowTyping(Terms(), lambda axis: 2, frozenset(), forward=_forward(joint), rows=joint.rows)

    def inputs(role: ir.Role, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        cut = isinstance(role, ir.Input) and value.dim() > 0 and value.shape[0] == joint.rows
        return typing.made([repr(role)], value, typing.by_rows if cut else None)

    returned = dict(ir.outputs(joint.module))
    for role, value in typing.run(joint.module, inputs).items():
        if isinstance(role, ir.Output) and isinstance(value, Held) and value.dims and value.partial:
            typing.mixed[returned[role]] = "sums over the rows are returned"
    unknown = {node: why for node, why in typing.untyped if node in typing.forward}
    if joint.rows == 1:  # which does not say which dimension of size 1 the rows are
        return Rows({}, typing.mixed | unknown)
    return Rows(typing.mixed, unknown)


def rows_of_call(joint: ir.JointGraph, call: Call, plan: Plan, captures: Captures) -> Rows:
    """:func:`rows_of` the graph of ``call``, a microbatch; where that has one row, of forward of the same with two."""
    if joint.rows == 1:
        with suppress(ShardGraphError):  # of inputs whose values forward asks for, there are no two rows
            return rows_of(captures.take(replace(call.resized(2), training=False), plan))
    return rows_of(joint)


def check_cut(joint: ir.JointGraph, call: Call, plan: Plan, captures: Captures) -> None:
    """Raise ShardGraphError if what a captured call computes of microbatches does not add up to what it computes of
    their batch, with the line."""
    loss_reductions(joint)
    rows_of_call(joint, call, plan, captures).raise_if_mixed()


def _forward(joint: ir.JointGraph) -> set[fx.Node]:
    """The nodes that outputs depend on."""
    roles = (ir.Output, ir.IntermediateBase)
    pending = [value for role, value in ir.outputs(joint.module) if isinstance(role, roles)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, fx.Node) and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


@dataclass
class _RowTyping(Typing):
    forward: set[fx.Node] = field(default_factory=set)
    rows: int = 0
    mixed: dict[fx.Node, str] = field(default_factory=dict)
    numbers: set[fx.Node] = field(default_factory=set)  # that depend on the batch

    @property
    def by_rows(self) -> Pattern:
        """The division of a dimension whose elements are the rows of a batch."""
        return (("mark", 2, ROWS), ("own", self.rows, None))

    def made(self, operands: Sequence[Any], value: torch.Tensor, first: Pattern | None) -> Held:
        """A value of its own, whose first dimension is divided as ``first`` says."""
        patterns_of: list[Pattern] = [(("own", size, None),) for size in value.shape]
        if first is not None:
            patterns_of[0] = first
        term = self.terms.make("given", operands, list(map(whole_size, patterns_of)))
        return Held(term, 1.0, tuple(divided(dim, pattern) for dim, pattern in enumerate(patterns_of)))

    def _typed(self, gm: fx.GraphModule, node: fx.Node, known: Any, inputs: Any) -> Any:
        if node.op == "call_function":
            if node not in self.forward:
                return None
            operands = {each: known[each] for each in node.all_input_nodes}
            rows = any(_on_rows(held) for held in operands.values())
            if _is_number(node) and node.target in _OF_SHAPES:
                return self._same(node)
            if _is_number(node) or (not rows and self.numbers & set(operands)):
                self._reduce(node, operands)
                return None if node in self.numbers or None in operands.values() else self._same(node)
            if node.target in _BAGS and _on_rows(known[node.args[2]]):
                self.mixed[node] = (
                    "offsets say where bags begin among the indices of the whole batch: give indices as a matrix, with "
                    "a row for each bag (padding_idx= fills short ones)"
                )
            if _looks_up_among_rows(node, known):
                self.mixed[node] = (
                    "positions are looked up among as many offsets as the batch has rows, which are cut with them: "
                    "give the number of each position's document instead, a row for each of the batch's"
                )
            if rows:
                for number in self.numbers & set(operands):
                    self.mixed[node] = f"it depends on {number.name}, a value of the whole batch"
        return super()._typed(gm, node, known, inputs)

    def _same(self, node: fx.Node) -> Any:
        """Numbers that are the same for all microbatches, such as a scale that is learned."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self.made([node.name], value, None)
        return [self.made([node.name, index], each, None) for index, each in enumerate(value)]

    def _reduce(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> None:
        """Note a number, or what numbers are put together to, that depends on the batch; the analysis of the loss says
        how it is reduced over rows."""
        if any(_on_rows(held) for held in operands.values()) or self.numbers & set(operands):
            self.numbers.add(node)
        if any(isinstance(held, Held) and held.dims and held.partial for held in operands.values()):
            self.mixed[node] = "it reduces what was summed over rows before: reduce over rows and elements at once"

    def _checked(self, node: fx.Node, value: Any, original: fx.Node | None) -> Any:
        """A microbatch of one row does not say which of leading dimensions of size 1 is the batch's: the first is."""
        value = super()._checked(node, value, original)
        if self.rows > 1 or not isinstance(value, Held) or ROWS not in value.marks:
            return value
        lead = next(k for k, dim in enumerate(value.dims) if dim)
        first, *rest = value.dims[lead]
        if not lead or first.axis != ROWS:
            return value
        return value.with_dims([(first,), *value.dims[1:lead], rest, *value.dims[lead + 1 :]])

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target in _BY_MICROBATCH or draws(node) or _writes_within_rows(node, args):
            return self._apart(node, args)
        try:
            return super()._called(node, args, kwargs)
        except MixedError as error:
            self.mixed[node] = str(error)
            raise

    def _apart(self, node: fx.Node, args: Any) -> Any:
        """What each microbatch has of its own, divided as the first operand where it has its rows."""
        operand = next((each for each in args if isinstance(each, Held)), None)
        first = self.by_rows if operand is None else patterns(operand.dims[0])
        value = node.meta["val"]
        values = [value] if isinstance(value, torch.Tensor) else value
        results = [
            self.made([node.name, index], each, first if each.shape[:1] == (_local(first),) else None)
            for index, each in enumerate(values)
        ]
        return results[0] if isinstance(value, torch.Tensor) else results


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, (list, tuple)) else []
    return bool(values) and all(isinstance(each, torch.Tensor) and not each.dim() for each in values)


def _looks_up_among_rows(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Whether a node takes the rows for numbers in order, among which it looks up others."""
    places = known[node.args[0]] if node.target is aten.searchsorted.Tensor else None
    return _on_rows(places) and len(places.dims) == 1


def _writes_within_rows(node: fx.Node, args: Sequence[Any]) -> bool:
    """Whether a node puts a value, which has the rows too or is the same for all, in one place of each row."""
    if node.target is not aten.select_scatter.default:
        return False
    to, value, dim, _ = args
    return dim % node.meta["val"].dim() > 0 and isinstance(to, Held) and isinstance(value, Held)


def _on_rows(held: Any) -> bool:
    return isinstance(held, Held) and held.on(ROWS)


def _local(pattern: Pattern) -> int:
    return whole_size([each for each in pattern if each[0] == "own"])
