"""How a loss is reduced over the rows of a batch, read off the captured graph.

A batch that is cut into parts, as a pipeline cuts it into microbatches, has the loss of the whole only if the losses of
the parts are added up as they are reduced: sums as they are, means by their rows, means over counted elements (such as
the tokens that are not ignored) by the counts, which depend on the data.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import ROLE, SOURCE

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Term:
    """A term of a loss: a ``"sum"`` or ``"mean"`` over rows, or a sum divided by a count (``"counted"``).

    ``count`` computes the count from inputs and buffers, which are its placeholders by role.
    """

    kind: Literal["sum", "mean", "counted"]
    count: fx.GraphModule | None = None


@dataclass(frozen=True, eq=False)
class LossReduction:
    """The terms of a loss, and its line in the model."""

    terms: tuple[Term, ...]
    source: str

    def counts(self, value: Callable[[ir.Role], Any]) -> list[float]:
        """The count of each term, 0 for one without; ``value(role)`` are inputs and buffers."""
        counts = []
        for term in self.terms:
            inputs = () if term.count is None else map(value, ir.placeholders(term.count))
            counts.append(0.0 if term.count is None else float(term.count(*inputs)))
        return counts

    def elements(self, rows: Sequence[int], counts: Sequence[Sequence[float]]) -> float:
        """How many elements the loss is a mean of; see :meth:`weights`.

        Raises:
            ShardGraphError: it is a sum, or a sum of means over unequally many elements.
        """
        of_terms = zip(self.terms, zip(*counts, strict=True), strict=True)
        totals = {sum(rows) if term.kind == "mean" else sum(values) for term, values in of_terms}
        if len(totals) > 1 or any(term.kind == "sum" for term in self.terms):
            raise ShardGraphError(
                f"loss_weight='tokens' is for a loss that is one mean, and that at {self.source} adds up "
                f"{self._reduced}: reduce it by one mean, or leave loss_weight out"
            )
        return float(totals.pop())

    def weights(self, rows: Sequence[int], counts: Sequence[Sequence[float]]) -> list[float]:
        """What the loss of each part counts for in that of the batch, from the :meth:`counts` and ``rows`` of each.

        Raises:
            ShardGraphError: the terms are reduced differently, and for these data that makes a difference.
        """
        of_terms = zip(self.terms, zip(*counts, strict=True), strict=True)
        first, *others = (_weights(term, rows, values) for term, values in of_terms)
        for other in others:
            if any(not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(first, other, strict=True)):
                raise ShardGraphError(
                    f"the loss at {self.source} adds up {self._reduced}, which weigh the microbatches of this batch "
                    "differently: reduce all of its terms alike, or train without a pipeline"
                )
        return first

    @property
    def _reduced(self) -> str:
        return " and ".join(dict.fromkeys(map(_named, self.terms)))


def _weights(term: Term, rows: Sequence[int], counts: Sequence[float]) -> list[float]:
    if term.kind == "sum":
        return [1.0] * len(rows)
    return _shares(rows) if term.kind == "mean" else _shares(counts)


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else math.nan for count in counts]


def _named(term: Term) -> str:
    return {"sum": "a sum", "mean": "a mean over rows", "counted": "a mean over counted elements"}[term.kind]


def loss_reduction(
    gm: fx.GraphModule, loss: fx.Node, rows: int, numbers: Sequence[ir.RowNumber] | None
) -> LossReduction:
    """How ``loss``, a 0-dimensional value of a captured graph for a batch of ``rows``, is reduced over them.

    ``numbers`` are those that forward computes from ``rows``, None if they are not known.

    Raises:
        ShardGraphError: it is not a weighted sum of sums and means over rows; the message has the line.
    """
    reader = _Reader(gm, rows, numbers)
    terms = tuple(dict.fromkeys(reader.terms(loss)))
    reader.check_numbers(loss)
    return LossReduction(terms, SOURCE.get(loss) or "the end of forward")


def loss_reductions(joint: ir.JointGraph) -> dict[int, LossReduction]:
    """How each 0-dimensional output of a captured model is reduced over the rows of its batch, by its index; errors are
    those of :func:`loss_reduction`."""
    values = {
        role.index: value
        for role, value in ir.outputs(joint.module)
        if isinstance(role, ir.Output) and role.index < joint.returned
        if isinstance(value, fx.Node) and not value.meta["val"].dim()
    }
    numbers = joint.row_numbers() if values else []
    return {i: loss_reduction(joint.module, value, joint.rows, numbers) for i, value in values.items()}


_SAME = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.neg.default,
    aten.view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.expand.default,
}
_SUMMED = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar}
_REDUCED = {  # by the position of the argument that is 1 for a mean and 2 for a sum
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
_NLL = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_MEANS = {aten.mean.default, aten.mean.dim}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_FILLED = {  # by the position of the number that all elements are
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
_ONES = {aten.ones.default, aten.new_ones.default, aten.ones_like.default}
_ALIKE = {*_FILLED, *_ZEROS, *_ONES}
_AT_LEAST = {aten.clamp.default, aten.clamp_min.default, aten.maximum.default}

_CONSTANT = Term("mean")
"""Of a term that is the same for all parts, in place of its own."""


class _Reader:
    """Reads the reduction of values of one graph, from the value towards the inputs."""

    def __init__(self, gm: fx.GraphModule, rows: int, numbers: Sequence[ir.RowNumber] | None) -> None:
        self.gm, self.rows = gm, rows
        self.numbers = None if numbers is None else {(each.function, each.number): each for each in numbers}
        self.scaled: set[fx.Node] = set()  # nodes whose number of rows is understood
        self.varying: set[fx.Node] = set()  # values that differ between the parts of a batch
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val")
                cut = isinstance(ROLE.of(node), ir.Input) and isinstance(value, torch.Tensor) and value.dim() > 0
                varies = cut and value.shape[0] == rows
            else:
                filled = _is_filled(node) and not node.meta["val"].dim()
                varies = not filled and bool(self.varying & set(node.all_input_nodes))
            if varies:
                self.varying.add(node)

    def terms(self, node: Any) -> list[Term]:
        """The terms of a 0-dimensional value."""
        if not isinstance(node, fx.Node) or node not in self.varying:
            return [_CONSTANT]
        target, args = node.target, node.args
        if target in _SAME:
            return self.terms(args[0])
        if target in _SUMMED:
            operands = [each for each in args[:2] if getattr(each, "target", None) not in _ZEROS]
            return self._added([self.terms(each) for each in operands], node)
        if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            return self._scaled(node)
        if target in _SUMS | _MEANS and isinstance(args[0], fx.Node):
            stacked = args[0].target in (aten.stack.default, aten.cat.default)
            if stacked and all(each.meta["val"].numel() == 1 for each in args[0].args[0]):
                return self._added([self.terms(each) for each in args[0].args[0]], node)
            return [self._by_rows(args[0], "sum" if target in _SUMS else "mean", node)]
        if target in _REDUCED:
            position = _REDUCED[target]
            reduction = args[position] if len(args) > position else 1
            return [self._by_rows(args[0], "mean" if reduction == 1 else "sum", node)]
        if target is operator.getitem and args[0].target in _NLL and args[1] == 0:
            self._by_rows(args[0].args[0], "sum", node)
            return [Term("sum") if args[0].args[3] == 2 else Term("counted", self._total_weight(args[0]))]
        return self._refuse(node)

    def _added(self, operands: Sequence[list[Term]], node: fx.Node) -> list[Term]:
        terms = [term for each in operands for term in each]
        varying = [term for term in terms if term is not _CONSTANT]
        if len(varying) < len(terms) and any(term.kind == "sum" for term in varying):
            return self._refuse(node, "to a sum over rows it adds what is the same for all of them")
        return varying or terms

    def _scaled(self, node: fx.Node) -> list[Term]:
        one, other = node.args[:2]
        divides = node.target in (aten.div.Tensor, aten.div.Scalar)
        if not divides and other in self.varying:
            one, other = other, one
        terms = self.terms(one)
        if other in self.varying:
            if not divides or any(term.kind != "sum" for term in terms):
                return self._refuse(node)
            return [Term("counted", self._count(other))]
        return self._by_constant(terms, node, other, divides)

    def _by_constant(self, terms: list[Term], node: fx.Node, factor: Any, divides: bool) -> list[Term]:
        """Terms times, or divided by, what is the same for all parts of a batch, unless it counts the rows of one."""
        place, number = _number(self.gm, node, factor)
        if place is None:
            if not any(each.op in ("placeholder", "get_attr") for each in [factor, *_sources(factor)]):
                self._refuse(node, f"it is scaled by {factor}, which may count rows: use a mean")
            return terms
        if self.numbers is None:
            ratio = number if divides else 1 / (number or math.inf)
            if abs(ratio) >= 1 and math.isclose(ratio / self.rows, round(ratio / self.rows), rel_tol=1e-6):
                self._refuse(node, f"it is scaled by {factor}, which may be a number of rows: use a mean")
            return terms
        if (from_rows := self.numbers.get((_name(place), number))) is None:
            return terms
        self.scaled.add(place)
        # 1 of a number in proportion to the rows, -1 of one in proportion to their inverse.
        power = (
            math.log(from_rows.longer / number) / math.log1p(1 / self.rows) if from_rows.longer * number > 0 else 0.0
        )
        kinds = {term.kind for term in terms}
        if not from_rows.also_constant:
            if kinds == {"sum"} and math.isclose(power, 1 if divides else -1, rel_tol=1e-4):
                return [Term("mean")]
            if kinds == {"mean"} and math.isclose(power, -1 if divides else 1, rel_tol=1e-4):
                return [Term("sum")]
        return self._refuse(node, f"it is scaled by {number:g}, which comes from the number of rows: use a mean")

    def check_numbers(self, loss: fx.Node) -> None:
        """Raise ShardGraphError if ``loss`` depends on a number of rows other than as the scale of a term."""
        unseen = dict(self.numbers or {})
        for node in self.gm.graph.nodes:
            unseen = {key: each for key, each in unseen.items() if not _takes(self.gm, node, *key)}
        for node in (loss, *_sources(loss)):
            if node not in self.scaled:
                for function, number in self.numbers or ():
                    if _takes(self.gm, node, function, number):
                        self._refuse(node, f"it computes with {number:g}, which comes from the number of rows")
        for function, number in unseen:
            self._refuse(loss, f"{function} computes with {number:g} before it, which comes from the number of rows")

    def _by_rows(self, of: fx.Node, kind: Literal["sum", "mean"], node: fx.Node) -> Term:
        """A reduction of all elements of a value that has rows, and that is computed for each row alone."""
        if node.meta["val"].numel() != 1 or of.meta["val"].numel() % self.rows:
            self._refuse(node)
        for each in _sources(of):
            value = each.meta.get("val")
            if each in self.varying and isinstance(value, torch.Tensor) and not value.dim():
                self._refuse(node, f"what it reduces depends on {each.name}, a value of the whole batch")
        return Term(kind)

    def _count(self, node: fx.Node) -> fx.GraphModule:
        """The graph of a count that divides a sum; one that is at least a small number counts as it is."""
        while isinstance(node, fx.Node) and node.target in _AT_LEAST | _SAME:
            node = node.args[0]  # type: ignore[assignment]
        if not isinstance(node, fx.Node) or any(term.kind != "sum" for term in self.terms(node)):
            self._refuse(node)
        return self._extracted(node, lambda graph, copy: copy(node))

    def _total_weight(self, loss: fx.Node) -> fx.GraphModule:
        """The graph of the sum of the weights of the targets that are not ignored."""
        _, target, weight, _, ignored = loss.args

        def count(graph: fx.Graph, copy: Any) -> fx.Node:
            call, targets = graph.call_function, copy(target)
            counted = call(aten.ne.Scalar, (targets, ignored))
            if weight is not None:
                place = call(aten.mul.Tensor, (targets, counted))
                counted = call(aten.mul.Tensor, (call(aten.index.Tensor, (copy(weight), [place])), counted))
            return call(aten.sum.default, (counted,))

        return self._extracted(loss, count)

    def _extracted(self, of: fx.Node, build: Any) -> fx.GraphModule:
        """A graph of its own for a count, of inputs and buffers alone."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node.op == "placeholder" and not isinstance(ROLE.of(node), (ir.Input, ir.Buffer)):
                    self._refuse(of, "the count that divides it is computed from parameters")
                for each in node.all_input_nodes:
                    copy(each)
                copies[node] = graph.node_copy(node, copies.__getitem__)
            return copies[node]

        graph.output(build(graph, copy))
        return ir.UnboundGraph(self.gm, graph)

    def _refuse(self, node: Any, why: str = "it is not a weighted sum of sums and means over rows") -> Any:
        where = SOURCE.get(node) if isinstance(node, fx.Node) else None
        raise ShardGraphError(
            f"the loss of a batch does not follow from those of its microbatches: at {where or 'its last operation'} "
            f"{why}. A pipeline can add up losses that are reduced by sum, mean, or a mean over counted elements "
            "(cross_entropy with ignore_index)"
        )


def _is_filled(node: fx.Node) -> bool:
    """Whether all elements are one number, whatever the tensor holds that a node is like."""
    return node.target in _ALIKE


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Every value that a value depends on."""
    seen, pending = {node}, [node]
    while pending:
        node = pending.pop()
        for each in () if _is_filled(node) else node.all_input_nodes:
            if each not in seen:
                seen.add(each)
                pending.append(each)
                yield each


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _takes(gm: fx.GraphModule, node: fx.Node, function: str, number: float) -> bool:
    """Whether a node is this function of this number."""
    return _name(node) == function and any(_number(gm, node, each) == (node, number) for each in node.args)


def _number(gm: fx.GraphModule, node: fx.Node, value: Any) -> tuple[fx.Node | None, float]:
    """The number that an argument of a node is, with the node that has it as an argument; else None and nan."""
    while isinstance(value, fx.Node) and value.target in _SAME | {aten.lift_fresh_copy.default}:
        value = value.args[0]
    if isinstance(value, fx.Node) and value.op == "get_attr":
        constant = operator.attrgetter(str(value.target))(gm)
        value = constant.item() if isinstance(constant, torch.Tensor) and constant.numel() == 1 else None
    elif isinstance(value, fx.Node) and value.target in _FILLED:
        node, value = value, value.args[_FILLED[value.target]]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return node, float(value)
    return None, math.nan
