"""Leaves rows of activations in the order in which they are gathered, where that saves copies.

Ranks of an axis that divides sequences hold positions of every sequence. What is gathered has the first rank's rows of
all sequences first, then the second rank's; and a reduce-scatter takes rows in that order. Between the two, rows are
copied into the order of the batch and back, though most operations, products above all, do the same for every row. So
the rows of each value are in one order or in the other, whichever copies least: a minimum cut, as of any two labels
with costs between neighbours (J. Kleinberg and É. Tardos, "Algorithm Design", 2006, section 7.10).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import networkx as nx
import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir import Parameter, Tangent, placeholders
from shardgraph.ir.attributes import EQUALS, MADE_BY, RECOMPUTE, ROLE, ROW_ORDER, Change, captured_name, carried
from shardgraph.ir.fake_values import Propagation
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder, can_view
from shardgraph.passes.sharding.by_rows import SUMMED, TURNED, WHOLE, Form, form_of, leading
from shardgraph.passes.sharding.legal import Value, draws, value_of
from shardgraph.passes.sharding.options import is_operation, operands

aten = torch.ops.aten


class _Order(NamedTuple):
    """Rows of ``sequences``, of which each of ``parts`` ranks has a ``run``; gathered, those of a rank are together."""

    sequences: int
    parts: int
    run: int

    @property
    def ends_together(self) -> bool:
        """Whether ``[sequences, positions]`` of rows as gathered are of whole sequences of a rank, or of whole parts of
        one. Of others a proof could not say which they are."""
        return self.run > 1 and (self.parts % self.sequences == 0 or self.sequences % self.parts == 0)


_BATCH, _RANKS = "as in the batch", "as gathered"
"""The orders of rows."""


@dataclass(frozen=True)
class _Copy:
    """A copy of gathered rows into the order of the batch, or of the batch's rows into that of a reduce-scatter."""

    node: fx.Node
    gathered: bool

    @property
    def permuted(self) -> fx.Node:
        """What is copied."""
        return self.node.all_input_nodes[0]

    @property
    def source(self) -> fx.Node:
        """The rows before, as ``[ranks, sequences, run, elements]``, or with ``sequences`` first."""
        return self.permuted.all_input_nodes[0]

    @property
    def width(self) -> int:
        """The elements of a row; 1 if it is columns that are gathered, or scattered."""
        return int(self.source.meta["val"].shape[-1])

    @property
    def order(self) -> _Order:
        """The order that it is to or from."""
        first, second, run, _ = self.source.meta["val"].shape
        return _Order(second, first, run) if self.gathered else _Order(first, second, run)


@dataclass(frozen=True)
class OrderRows(Pass):
    """Takes a joint graph; gives one in which values between an all-gather and a reduce-scatter of rows may have them
    in the order of the ranks, in place of the batch's.

    Must not change: shapes; the order of rows in inputs, in results and where random numbers are drawn.
    """

    name = "order-rows"
    excludes = frozenset({"split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for order in sorted({copy.order for copy in _copies(gm) if copy.width > 1}):
            if order.ends_together:
                _Ordering(gm, order, context.values).run()


def _copies(gm: fx.GraphModule) -> Iterator[_Copy]:
    for node in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
        (permuted,) = node.all_input_nodes
        alone = len(permuted.users) == 1
        if permuted.target is aten.permute.default and list(permuted.args[1]) == [1, 0, 2, 3] and alone:
            gathered = ir.is_wait(_unviewed(permuted.all_input_nodes[0]))
            if gathered or any(ir.is_collective(user) for user in _seen_by(node)):
                yield _Copy(node, gathered)


def _unviewed(node: fx.Node) -> fx.Node:
    while node.target in (aten.view.default, aten.view.dtype):
        (node,) = node.all_input_nodes
    return node


def _seen_by(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node, those of its views in their place."""
    for user in node.users:
        yield from _seen_by(user) if user.target in (aten.view.default, aten.view.dtype) else (user,)


class _Ordering:
    """Puts the rows of a graph's values in the ``order`` of the ranks where that copies less."""

    def __init__(self, gm: fx.GraphModule, order: _Order, values: Propagation) -> None:
        self.gm, self.order, self.values = gm, order, values
        self.rows = math.prod(order)
        self.copies = [copy for copy in _copies(gm) if copy.order == order]
        self.given = {copy.node for copy in self.copies if copy.gathered}
        self.taken = {copy.permuted: copy.node for copy in self.copies if not copy.gathered}
        self.forms, self.layouts = self._row_wise()

    def run(self) -> None:
        """Decide, and rewrite."""
        by_ranks = self._by_ranks()
        moved: dict[fx.Node, list[fx.Node]] = {}
        for value in self.gm.graph.nodes:
            readers = [
                each for each, by in self._readers(value) if (by in by_ranks) != (self._maker(value) in by_ranks)
            ]
            if readers:
                moved[value] = readers
        for value, readers in reversed(moved.items()):  # what is read of a copy before the copy itself goes
            self._move(value, readers, self._maker(value) not in by_ranks)
        for copy in self.copies:
            if copy.node in by_ranks:
                self._leave_out(copy)
        for value in self.gm.graph.nodes:
            if self._maker(value) in by_ranks:
                self._mark(value)

    def _leave_out(self, copy: _Copy) -> None:
        build = Builder(self.gm.graph, self.values, carried(Change.REWRITTEN, copy.node), after=copy.node)
        copy.node.replace_all_uses_with(build.view(copy.source, copy.node.meta["val"].shape))
        for node in (copy.node, copy.permuted):
            self.gm.graph.erase_node(node)

    def _mark(self, value: fx.Node) -> None:
        """Record that rows are in the order of the ranks; a matrix in which they are columns is compared with none."""
        if self.layouts[value_of(value)] == TURNED:
            MADE_BY.set(value, MADE_BY.get(value, OrderRows.name))
            value.meta.pop(EQUALS.key, None)
        else:
            ROW_ORDER.set(value, (self.order.sequences, self.order.parts))

    def _row_wise(self) -> tuple[dict[fx.Node, Form], dict[Value, int]]:
        """The operations that do the same for every row, and the layouts of what they give by row."""
        forms: dict[fx.Node, Form] = {}
        layouts: dict[Value, int] = {}
        of_weights: set[fx.Node] = set()
        taken = set(self.taken.values())
        for node in self.gm.graph.nodes:
            sources = [value_of(each) for each in operands(node)]
            if isinstance(ROLE.get(node), Parameter) or (sources and all(each in of_weights for each, _ in sources)):
                of_weights.add(node)  # which may have as many rows by chance
            elif node in self.given:
                layouts[node, 0] = 3
            elif node in taken:
                continue
            elif is_operation(node) and (form := self._form(node, [layouts.get(each) for each in sources])):
                forms[node] = form
                layouts |= {
                    (node, at): layout for at, layout in enumerate(form.results) if layout not in (WHOLE, SUMMED)
                }
        return forms, layouts

    def _form(self, node: fx.Node, known: Sequence[int | None]) -> Form | None:
        """How an operation does the same for every row; None if it does not, or if it draws random numbers."""
        form = None if draws(node) else form_of(node, self.rows, known)
        read = set() if form is None else set(zip(operands(node), form.inputs, strict=True))
        return form if len(read) == len({operand for operand, _ in read}) else None  # else one is read in two ways

    def _maker(self, value: fx.Node) -> fx.Node | None:
        """The operation that decides how a value's rows are ordered; None: they are in the order of the batch."""
        made = value_of(value)
        return made[0] if made in self.layouts else None

    def _readers(self, value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | None]]:
        """The users of a value that read its rows, each with the operation that decides in which order; None: in the
        order of the batch."""
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return
        for user in value.users:
            if user in self.taken:
                yield user, self.taken[user]
            elif user not in self.forms:
                yield user, None
            else:
                yield user, None if WHOLE in self._read_as(value, user) else user

    def _by_ranks(self) -> set[fx.Node]:
        """The operations whose rows are to be in the order of the ranks."""
        links = self._links()
        found: set[fx.Node] = set()
        inner = links.subgraph(links.nodes - {_BATCH, _RANKS})
        for part in list(nx.weakly_connected_components(inner)):
            if not any(links.has_edge(node, _RANKS) for node in part):
                continue
            _, (_, by_ranks) = nx.minimum_cut(links.subgraph(part | {_BATCH, _RANKS}), _BATCH, _RANKS)
            found |= {node for node in by_ranks if isinstance(node, fx.Node)}
        return found

    def _links(self) -> nx.DiGraph:
        """Operations, linked by the bytes that are copied if one is in the order of the batch and the next is not."""
        links: nx.DiGraph = nx.DiGraph()
        links.add_nodes_from((_BATCH, _RANKS))

        def link(first: Hashable, second: Hashable, nbytes: float = math.inf) -> None:
            before = links.get_edge_data(first, second, {"capacity": 0})["capacity"]
            links.add_edge(first, second, capacity=before + nbytes)

        for value in self.gm.graph.nodes:
            maker = self._maker(value) or _BATCH
            readers = {by or _BATCH for _, by in self._readers(value)} - {maker}
            if not readers:
                continue
            # One copy serves all readers that want the other order.
            to_ranks, to_batch = (value, _RANKS), (value, _BATCH)
            link(maker, to_ranks, self._price(value))
            link(to_batch, maker, self._price(value))
            for reader in readers:
                link(to_ranks, reader)
                link(reader, to_batch)
        for copy in self.copies:
            link(copy.node, _RANKS, self._copied(copy.node))
        return links

    def _price(self, value: fx.Node) -> float:
        """The bytes of a copy of a value in the other order; infinite where its rows are columns."""
        if self.layouts.get(value_of(value)) == TURNED or self._is_read_by_columns(value):
            return math.inf
        return 0 if all(map(_makes_contiguous, value.users)) else self._copied(value)  # all its users copy it anyway

    def _is_read_by_columns(self, value: fx.Node) -> bool:
        """Whether rows of the batch are columns of a value, as those who read it say, of whose own it is not known."""
        return any(TURNED in self._read_as(value, user) for user in value.users if user in self.forms)

    def _read_as(self, value: fx.Node, user: fx.Node) -> list[int]:
        """The layouts by row in which an operation that does the same for every row reads a value."""
        taken = zip(operands(user), self.forms[user].inputs, strict=True)
        return [layout for each, layout in taken if each is value]

    @cached_property
    def _of_backward(self) -> set[fx.Node]:
        found = {node for role, node in placeholders(self.gm).items() if isinstance(role, Tangent)}
        for node in self.gm.graph.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _copied(self, value: fx.Node) -> int:
        """The bytes that copies of a value take in a step: backward makes those that it reads again."""
        twice = value not in self._of_backward and not self._of_backward.isdisjoint(_seen_by(value))
        return int(value.meta["val"].nbytes * (2 if twice else 1))

    def _move(self, value: fx.Node, readers: Sequence[fx.Node], to_ranks: bool) -> None:
        """Have ``readers`` read a copy of the value with its rows in the other order; it is not saved for backward."""
        after = list(placeholders(self.gm).values())[-1] if value.op == "placeholder" else value
        name = captured_name(value)
        labels = carried(Change.REWRITTEN, value) | {MADE_BY: OrderRows.name, RECOMPUTE: True}
        build = Builder(self.gm.graph, self.values, labels, after=after)
        sequences, parts, run = self.order
        outer = (sequences, parts) if to_ranks else (parts, sequences)
        shape = value.meta["val"].shape
        inner = shape[leading(shape, self.rows) :]
        whole = [*outer, run, *inner]
        apart = build.call(aten.view.default, value if can_view(value, whole) else build.contiguous(value), whole)
        turned = build.call(aten.permute.default, apart, [1, 0, *range(2, 3 + len(inner))])
        moved = build.view(build.contiguous(turned), tuple(shape))
        if name is not None:
            EQUALS.set(moved, name)
        if to_ranks:
            ROW_ORDER.set(moved, (sequences, parts))
        for reader in readers:
            if _makes_contiguous(reader):
                reader.replace_all_uses_with(moved)
                self.gm.graph.erase_node(reader)
            else:
                reader.replace_input_with(value, moved)


def _makes_contiguous(node: fx.Node) -> bool:
    """Whether a node is a copy for the sake of the memory layout."""
    if node.target is not aten.clone.default or node.kwargs.get("memory_format") is not torch.contiguous_format:
        return False
    return not node.all_input_nodes[0].meta["val"].is_contiguous()
