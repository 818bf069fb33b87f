"""Products of float8 values: linear layers of a captured graph whose operands are scaled and cast to 8 bits.

Micikevicius et al., "FP8 formats for deep learning", 2022, https://arxiv.org/abs/2209.05433: values in e4m3, gradients
in e5m2, each tensor with one scale, by which its largest magnitude is the largest of the format, as in torchao's
tensorwise recipe. A product in forward and the two of its derivative are scaled together or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.capture.casting import annotated_precision
from shardgraph.ir.attributes import SEQUENCE, UNSCALED, VALUE, Change, carried, write
from shardgraph.ir.fake_values import Propagation
from shardgraph.plans.annotations.match import Annotated

aten = torch.ops.aten

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""What kernels need the three sizes of a product to be a multiple of."""
LEAST = 1e-12
"""The smallest magnitude that a scale is for, so that a tensor of zeros has one."""

_PRODUCTS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}  # with the places of the two factors
_VIEWS = (aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.detach)


def scale_products(joint: ir.JointGraph, annotations: Sequence[Annotated]) -> None:
    """Make products with parameters in ``joint`` those of float8 values, in place; what is left says why (UNSCALED)."""
    _Scaling(joint).run(annotations)


def reason_not_to(fqn: str, sizes: Sequence[int], annotations: Sequence[Annotated]) -> str | None:
    """Why a product of these sizes (rows, terms of its sums, columns) with parameter ``fqn`` is not one of float8
    values; None if it is."""
    if annotated_precision(fqn, annotations):
        return "its precision is annotated"
    if any(size % MULTIPLE for size in sizes):
        return f"its sizes {' x '.join(map(str, sizes))} are not all multiples of {MULTIPLE}"
    return None


def is_view(target: Any) -> bool:
    """Whether an operation gives all elements of a tensor in another shape or order."""
    return getattr(target, "overloadpacket", None) in _VIEWS


@dataclass
class _Scaling:
    joint: ir.JointGraph
    scaled: dict[tuple[fx.Node, torch.dtype], tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    """Values in 8 bits, and what one of their units is worth, by value and format."""

    def __post_init__(self) -> None:
        self.graph = self.joint.module.graph
        self.values = Propagation(self.joint.fake_mode, ())
        self.late = _after_tangents(self.joint.module)

    def run(self, annotations: Sequence[Annotated]) -> None:
        parameters = {n: r.fqn for r, n in ir.placeholders(self.joint.module).items() if isinstance(r, ir.Parameter)}
        derivatives: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.graph.find_nodes(op="call_function", target=aten.mm.default):
            if node in self.late and node in SEQUENCE:
                derivatives[SEQUENCE.of(node)].append(node)
        products: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.target not in _PRODUCTS or node in self.late:
                continue
            factors = _factors(node)
            names = [parameters[root] for root in map(_root, factors) if root in parameters]
            if len(names) == 1:
                sizes = (*factors[0].meta["val"].shape, factors[1].meta["val"].shape[1])
                if reason := reason_not_to(names[0], sizes, annotations):
                    UNSCALED.set(node, f"{names[0]} ({reason})")
                else:
                    known = set(map(_root, factors))
                    of_it = derivatives.get(SEQUENCE.get(node, -1), ())
                    products += [node, *(d for d in of_it if known & set(map(_root, _factors(d))))]
        for node in sorted(products):
            self._scale(node)
        self.graph.eliminate_dead_code()

    def _scale(self, node: fx.Node) -> None:
        """Replace a product of the graph by that of its factors in 8 bits."""
        left, right = _factors(node)
        dtype = node.meta["val"].dtype
        build = _Builder(self.graph, self.values, node)
        one, unit = self._cast(build, left)
        other, other_unit = self._cast(build, right)
        if dtype == torch.float64:  # which kernels do not compute: the same arithmetic in double precision
            wide = (build(aten._to_copy.default, each, dtype=dtype) for each in (one, other))
            value = build(aten.mul.Tensor, build(aten.mm.default, *wide), build(aten.mul.Tensor, unit, other_unit))
        else:
            one, other = build.rows_first(one), build.columns_first(other)
            value = build(aten._scaled_mm.default, one, other, unit, other_unit, out_dtype=dtype)
        if node.target is aten.addmm.default:
            value = build(aten.add.Tensor, value, node.args[0])
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def _cast(self, build: _Builder, factor: fx.Node) -> tuple[fx.Node, fx.Node]:
        """A factor in 8 bits and its unit, both from the tensor that it is a view of, which other products may use."""
        root = _root(factor)
        to = GRADIENTS if factor in self.late else VALUES
        if (root, to) not in self.scaled:
            self.scaled[root, to] = build.scaled(root, to)
        value, unit = self.scaled[root, to]
        return build.viewed(value, factor, root), unit


class _Builder:
    """Adds nodes before ``at``, with its attributes."""

    def __init__(self, graph: fx.Graph, values: Propagation, at: fx.Node) -> None:
        self._graph, self._values, self._at = graph, values, at
        self._labels = carried(Change.REWRITTEN, at)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._at):
            node = self._graph.call_function(target, args, kwargs)
        write(node, self._labels)
        VALUE.set(node, self._values.value(target, args, kwargs))
        return node

    def scaled(self, tensor: fx.Node, to: torch.dtype) -> tuple[fx.Node, fx.Node]:
        """``tensor`` in units of its largest magnitude over the largest number of ``to``, in ``to``; and the unit."""
        given = tensor.meta["val"].dtype
        within = torch.promote_types(given, torch.float32)
        largest = self(aten.amax.default, self(aten.abs.default, tensor))
        if given != within:
            largest = self(aten._to_copy.default, largest, dtype=within)
            tensor = self(aten._to_copy.default, tensor, dtype=within)
        unit = self(aten.div.Tensor, self(aten.clamp_min.default, largest, LEAST), torch.finfo(to).max)
        return self(aten._to_copy.default, self(aten.div.Tensor, tensor, unit), dtype=to), unit

    def viewed(self, value: fx.Node, as_: fx.Node, of: fx.Node) -> fx.Node:
        """``value`` viewed as the node ``as_`` views ``of``."""
        if as_ is of:
            return value
        inner = as_.args[0]
        assert isinstance(inner, fx.Node)
        return self(as_.target, self.viewed(value, inner, of), *as_.args[1:], **as_.kwargs)

    def rows_first(self, matrix: fx.Node) -> fx.Node:
        """With rows side by side in memory, as kernels take the left factor."""
        if matrix.meta["val"].is_contiguous():
            return matrix
        return self(aten.clone.default, matrix, memory_format=torch.contiguous_format)

    def columns_first(self, matrix: fx.Node) -> fx.Node:
        """With columns side by side in memory, as kernels take the right factor."""
        if matrix.meta["val"].t().is_contiguous():
            return matrix
        return self(aten.t.default, self.rows_first(self(aten.t.default, matrix)))


def unscaled(gm: fx.GraphModule) -> str | None:
    """A note on the products with parameters that are left as they are; None if there are none."""
    left = list(dict.fromkeys(UNSCALED.of(node) for node in gm.graph.nodes if node in UNSCALED))
    return f"not of float8 values: the products with {', '.join(left)}" if left else None


def _factors(node: fx.Node) -> tuple[Any, Any]:
    one, other = _PRODUCTS[node.target]
    return node.args[one], node.args[other]


def _root(node: fx.Node) -> fx.Node:
    """What a node is a view of all of."""
    while is_view(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _after_tangents(gm: fx.GraphModule) -> set[fx.Node]:
    late = {node for role, node in ir.placeholders(gm).items() if isinstance(role, ir.Tangent)}
    for node in gm.graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late
