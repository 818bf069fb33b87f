"""Writes the graph in which a region is computed in chunks of rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph.ir import ALL_REDUCE, WAIT, add_output, outputs
from shardgraph.ir.attributes import (
    CHUNK,
    EQUALS,
    PART_OF,
    PLACEMENTS,
    RECOMPUTE,
    ROW_ORDER,
    Attribute,
    Change,
    Labels,
    captured_name,
    carried,
    write,
)
from shardgraph.ir.fake_values import Propagation
from shardgraph.passes.builder import Builder
from shardgraph.passes.chunking.region import NotByRowsError, Region, pieces
from shardgraph.passes.partition.split import forward_nodes
from shardgraph.passes.sharding.by_rows import SUMMED, TURNED, WHOLE, Form
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.options import operands, results

aten = torch.ops.aten

Bounds = Sequence[tuple[int, int]]
"""The first row of each chunk, and the one after its last."""
Loop = tuple[fx.Node, ...]
"""Operations to be run chunk by chunk: all of them for one chunk before the next."""


def write_chunks(gm: fx.GraphModule, region: Region, bounds: Bounds, values: Propagation) -> None:
    """Rewrite ``gm`` in place: the operations of ``region`` for the rows of each of ``bounds``, one after the other.

    Large values are marked ``RECOMPUTE``: backward recomputes them, chunk by chunk.

    Raises:
        NotByRowsError: an operation on a row needs a sum over all rows.
    """
    inside = forward_nodes(gm)
    forward = tuple(node for node in region.forms if node in inside)
    backward = tuple(node for node in region.forms if node not in inside)
    order = _order(gm, [loop for loop in (forward, backward) if loop])
    _Chunks(gm, region, bounds, backward, values).run(order)


def _order(gm: fx.GraphModule, loops: Sequence[Loop]) -> list[fx.Node | Loop]:
    """Nodes and loops in topological order, otherwise in the order of the graph."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    unit: dict[fx.Node, fx.Node | Loop] = {node: node for node in place}
    for loop in loops:
        unit |= dict.fromkeys((*loop, *(piece for node in loop for piece in pieces(node))), loop)
    last = {unit[node]: at for node, at in place.items()}
    dependencies: nx.DiGraph = nx.DiGraph()
    dependencies.add_nodes_from(last)
    for node in place:
        dependencies.add_edges_from((unit[value], unit[node]) for value in node.all_input_nodes)
    dependencies.remove_edges_from(list(nx.selfloop_edges(dependencies)))
    try:
        return list(nx.lexicographical_topological_sort(dependencies, key=last.__getitem__))
    except nx.NetworkXUnfeasible:
        raise NotByRowsError("something of a row depends on a sum over all of them") from None


class _Chunks:
    """Writes the graph; ``whole`` has values that exist in full, ``chunks`` the values of each chunk."""

    def __init__(self, gm: fx.GraphModule, region: Region, bounds: Bounds, backward: Loop, values: Propagation) -> None:
        self.gm, self.region, self.bounds, self.backward = gm, region, bounds, set(backward)
        self.write = Builder(fx.Graph(), values, prefix="chunk")
        self.whole: dict[Value, fx.Node] = {}
        self.chunks: list[dict[Value, fx.Node]] = [{} for _ in bounds]
        self.slices: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.flat: dict[tuple[fx.Node, int], fx.Node] = {}
        self.totals: dict[Value, fx.Node] = {}

    def run(self, order: Sequence[fx.Node | Loop]) -> None:
        for each in order:
            if isinstance(each, tuple):
                self._loop(each)
            elif each.op != "output":
                self.whole[each, 0] = self.write.graph.node_copy(each, self._get)
        results = [(role, self._get(v) if isinstance(v, fx.Node) else v) for role, v in outputs(self.gm)]
        add_output(self.write.graph, results)
        self.gm.graph = self.write.graph

    def _get(self, node: fx.Node) -> fx.Node:
        return self.whole[node, 0] if (node, 0) in self.whole else self.whole[value_of(node)]

    def _loop(self, loop: Loop) -> None:
        for number, (start, end) in enumerate(self.bounds):
            for node in loop:
                self._operation(node, number, end - start)
        for node in loop:
            self.write.labels = self._labels(node, recompute=False)
            for index, layout in enumerate(self.region.forms[node].results):
                if layout == SUMMED:
                    self.whole[node, index] = self._total(node, index)
                elif self._is_used(node):
                    self.whole[node, index] = self._joined(node, layout)
            if self.region.forms[node].mean:
                self.whole[node, 0] = self.write.call(aten.div.Tensor, self.whole[node, 0], self.whole[node, 1])
            if (node, 0) in self.whole:
                _is_equal(self.whole[node, 0], node)

    def _operation(self, node: fx.Node, number: int, rows: int) -> None:
        form, chunk = self.region.forms[node], self.chunks[number]
        self.write.labels = self._labels(node, recompute=True, number=number)
        taken = [self._operand(each, take, number) for each, take in zip(operands(node), form.inputs, strict=True)]
        if form.target is None:
            chunk[node, 0] = taken[0]
            return
        self.write.labels = self._labels(node, recompute=node in self.region.large, number=number)
        if node in self.backward and node.target is aten.mm.default and (node, 0) in self.totals:
            self.totals[node, 0] = self._add_product(self.totals[node, 0], *taken)
            return
        result = self._call(node, form, rows, taken, number)
        parts = [result]
        if len(form.results) > 1:
            parts = [self.write.call(operator.getitem, result, index) for index in range(len(form.results))]
        for index, (layout, part) in enumerate(zip(form.results, parts, strict=True)):
            if layout == SUMMED:
                self._add((node, index), part)
            else:
                chunk[node, index] = part

    def _call(self, node: fx.Node, form: Form, rows: int, taken: list[fx.Node], number: int) -> fx.Node:
        if node.target in (ALL_REDUCE, WAIT):
            return self.write.on(node, taken[0])
        if form.target is aten.view.default:
            taken = [self.write.contiguous(taken[0])]
        places = dict(zip(operands(node), taken, strict=True))  # one operand in two places has one layout
        args, kwargs = pytree.tree_map_only(
            # A node that is no operand is a number, such as the position of a rank's first row.
            fx.Node,
            lambda n: places[n] if n in places else self._get(n),
            (form.args(rows), dict(node.kwargs)),
        )
        return self.write.named(f"chunk{number}_{node.name}", form.target, args, kwargs)

    @staticmethod
    def _labels(node: fx.Node, recompute: bool, number: int | None = None) -> Labels:
        of_chunk = {} if number is None else {CHUNK: number}
        return carried(Change.CHUNKED, node) | {RECOMPUTE: recompute} | of_chunk

    def _operand(self, node: fx.Node, take: int, number: int) -> fx.Node:
        """An operand for a chunk; sliced by rows if it exists in full."""
        if take == WHOLE:
            return self._get(node)
        if value_of(node) in self.chunks[number]:
            return self.chunks[number][value_of(node)]
        if (node, take, number) not in self.slices:
            start, end = self.bounds[number]
            dim = 1 if take == TURNED else 0
            rows = self.write.call(aten.slice.Tensor, self._flat(node, take), dim, start, end)
            self.slices[node, take, number] = rows
        return self.slices[node, take, number]

    def _flat(self, node: fx.Node, take: int) -> fx.Node:
        """A value that exists in full, with its rows as one dimension."""
        whole = self._get(node)
        if take in (TURNED, 1):
            return whole
        if (node, take) not in self.flat:
            shape = whole.meta["val"].shape
            self.flat[node, take] = self.write.view(whole, (self.region.rows, *shape[take:]))
        return self.flat[node, take]

    def _is_used(self, node: fx.Node) -> bool:
        """Whether an operation outside the region reads a value of ``node``."""
        users = {user for each in (node, *pieces(node)) for user in each.users}
        return any(user not in self.region.forms and user.target is not operator.getitem for user in users)

    def _joined(self, node: fx.Node, layout: int) -> fx.Node:
        assert layout > 0, f"{node} leaves the chunks transposed"
        rows = self.write.call(aten.cat.default, [chunk[node, 0] for chunk in self.chunks])
        return self.write.view(rows, tuple(results(node)[0].shape))

    def _add(self, value: Value, part: fx.Node) -> None:
        """Accumulate a chunk's term of a sum, at least in single precision, to round once and not once per chunk."""
        if _is_low(part):
            part = self.write.call(aten._to_copy.default, part, dtype=torch.float32)
        total = self.totals.get(value)
        self.totals[value] = part if total is None else self.write.call(aten.add.Tensor, total, part)

    def _add_product(self, total: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node:
        """Accumulate a chunk's term of a weight's gradient in place: nothing else reads the running total."""
        if _is_low(left):
            return self.write.call(aten.add_.Tensor, total, self.write.call(aten.mm.default, left, right))
        return self.write.call(aten.addmm_.default, total, left, right)

    def _total(self, node: fx.Node, index: int) -> fx.Node:
        total, dtype = self.totals[node, index], results(node)[index].dtype
        if total.meta["val"].dtype != dtype:
            total = self.write.call(aten._to_copy.default, total, dtype=dtype)
        return self.write.view(total, tuple(results(node)[index].shape))


def _is_equal(whole: fx.Node, node: fx.Node) -> None:
    """Record that ``whole``, made of all chunks, must be what ``node`` was."""
    facts: tuple[Attribute[Any], ...] = (PART_OF, PLACEMENTS, ROW_ORDER)
    write(whole, {each: each.of(node) for each in facts if node in each})
    if name := captured_name(node):
        EQUALS.set(whole, name)


def _is_low(node: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return bool(dtype.is_floating_point and torch.finfo(dtype).bits < 32)
