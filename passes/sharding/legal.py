"""The options of every operation in a graph: legal, evenly divided, in the block counts that its neighbours need."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.passes.sharding import dtensor_rules, grouped, image_rules  # noqa: F401  (two register rules)
from shardgraph.passes.sharding.layout_rules import LAYOUTS
from shardgraph.passes.sharding.options import Operation, Option, operands, replicated, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks, cut_of, divides, is_cut
from shardgraph.passes.sharding.rules import ANY_BLOCKS, REPLACES, own_options, rule_of

Value = tuple[fx.Node, int]
"""A tensor of a graph: the node that produces it and its index among the node's results."""


def value_of(node: fx.Node) -> Value:
    """The tensor that an operand refers to."""
    if node.target is operator.getitem:
        maker, index = node.args
        assert isinstance(maker, fx.Node) and isinstance(index, int)
        return maker, index
    return node, 0


def placed_values(node: fx.Node, option: Option) -> list[tuple[Value, Placement]]:
    """An operation's operands and results, each with its placement in the option."""
    taken = [(value_of(operand), p) for operand, p in zip(operands(node), option.operands, strict=True)]
    return taken + [((node, index), p) for index, p in enumerate(option.results) if p is not None]


def has_rule(node: fx.Node) -> bool:
    """Whether any rule or strategy says how the operation may be sharded."""
    return node.target in LAYOUTS or rule_of(node.target) is not None or dtensor_rules.has_strategy(node.target)


class Legal:
    """Options of the operations of ``gm`` over ``parts`` ranks.

    Shardings start in one block, plus those in ``starts``. Views, splits and the like turn them into shardings in
    several blocks, which are propagated to producers and users until a fixed point. ``refused`` counts what DTensor's
    strategies refuse.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        parts: int,
        starts: Mapping[Value, Iterable[Placement]] | None = None,
        refused: dtensor_rules.Refused | None = None,
    ) -> None:
        self.parts, self._refused = parts, dtensor_rules.Refused() if refused is None else refused
        self.nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self._sources = {node: [value_of(operand) for operand in operands(node)] for node in self.nodes}
        self.cuts: dict[Value, set[Placement]] = defaultdict(set)
        self._templates: dict[fx.Node, list[Option]] = {}
        self._options: dict[fx.Node, list[Option]] = {}
        for node in gm.graph.nodes:
            for index, value in enumerate(results(node)):
                if isinstance(value, torch.Tensor):
                    plain = (blocks(dim, 1) for dim in range(value.dim()))
                    self.cuts[node, index].update(cut for cut in plain if divides(cut, value.shape, parts))
        for value, cuts in (starts or {}).items():
            self.cuts[value].update(cuts)
        self._spread()

    def options(self, node: fx.Node) -> list[Option]:
        """The legal options of a node; the first is fully replicated."""
        if node not in self._options:
            self._options[node] = list(dict.fromkeys([replicated(node), *self._cut_options(node)]))
        return self._options[node]

    def _spread(self) -> None:
        grown = set(self.nodes)
        users: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self.nodes:
            for source, _ in self._sources[node]:
                users[source].add(node)
        while grown:
            again: set[fx.Node] = set()
            for node in self.nodes:
                if node in grown:
                    for source in self._learn(node):
                        again |= users[source] | ({source} if source.op == "call_function" else set())
            grown = again

    def _learn(self, node: fx.Node) -> Iterator[fx.Node]:
        """Add the shardings in a node's options to its values; yields the nodes whose values gained any."""
        for option in self._cut_options(node):
            for value, placement in self._placed(node, option):
                if is_cut(placement) and placement not in self.cuts[value]:
                    self.cuts[value].add(placement)
                    yield value[0]

    def _cut_options(self, node: fx.Node) -> Iterator[Option]:
        for option in self._layout(node) if node.target in LAYOUTS else self._table(node):
            if self._even(node, option):
                yield option

    def _even(self, node: fx.Node, option: Option) -> bool:
        return all(
            divides(placement, results(maker)[index].shape, self.parts)
            for (maker, index), placement in self._placed(node, option)
        )

    def _placed(self, node: fx.Node, option: Option) -> list[tuple[Value, Placement]]:
        """Like :func:`placed_values`, with the operands cached."""
        taken = list(zip(self._sources[node], option.operands, strict=True))
        return taken + [((node, index), p) for index, p in enumerate(option.results) if p is not None]

    def _layout(self, node: fx.Node) -> Iterator[Option]:
        layout, operation = LAYOUTS[node.target], Operation(node, self.parts)
        produced = len(results(node))
        elements = [operand.meta["val"].numel() for operand in operands(node)]

        def all_operands(placement: Placement) -> tuple[Placement, ...]:
            # A tensor without elements (an empty cache that keys are appended to) is the same in every placement.
            return tuple(placement if count else REPLICATE for count in elements)

        if results(node)[0].is_floating_point():
            yield Option(all_operands(PARTIAL), (PARTIAL,) * produced)
        # Sets are unordered, and all ranks must list the options in the same order.
        for cut in _sorted(set().union(*(self.cuts[source] for source in self._sources[node]))):
            if (out := layout.down(operation, cut)) is not None:
                yield Option(all_operands(cut), (out,) * produced)
        for cut in _sorted(set().union(*(self.cuts[node, i] for i in range(produced)))):
            if (needed := layout.up(operation, cut)) is not None:
                yield Option(all_operands(needed), (cut,) * produced)

    def _table(self, node: fx.Node) -> Iterator[Option]:
        if node not in self._templates:
            operation = Operation(node, self.parts)
            options = list(own_options(operation))
            if node.target not in REPLACES and dtensor_rules.has_strategy(node.target):
                options += dtensor_rules.strategies(operation, self._refused)
            self._templates[node] = options
        for option in self._templates[node]:
            yield option
            if option.lowering not in ANY_BLOCKS and any(is_cut(p) for p in option.operands + option.results):
                continue  # valid only for one block
            for count in sorted(self._block_counts(self._placed(node, option))):
                yield replace(
                    option, operands=_in_blocks(option.operands, count), results=_in_blocks(option.results, count)
                )

    def _block_counts(self, values: Iterable[tuple[Value, Placement]]) -> set[int]:
        counts = set()
        for value, placement in values:
            if is_cut(placement):
                dim, _ = cut_of(placement)
                counts |= {count for at, count in map(cut_of, self.cuts[value]) if at == dim and count > 1}
        return counts


def _in_blocks(placements: tuple[Placement | None, ...], count: int) -> tuple[Placement | None, ...]:
    return tuple(blocks(cut_of(p)[0], count) if is_cut(p) else p for p in placements)


def _sorted(cuts: Iterable[Placement]) -> list[Placement]:
    return sorted(cuts, key=cut_of)


def reached(legal: Legal, starts: Mapping[Value, Iterable[Placement]]) -> dict[Value, set[Placement]]:
    """The shardings that follow, down the graph, from sharding ``starts``; used to identify the batch dimension.

    A result's sharding follows if a legal option has it together with an operand's sharding that follows.
    """
    known: dict[Value, set[Placement]] = {value: set(cuts) for value, cuts in starts.items()}
    for node in legal.nodes:
        sources = [value_of(operand) for operand in operands(node)]
        if not any(known.get(source) for source in sources):
            continue
        for option in legal.options(node):
            pairs = zip(sources, option.operands, strict=True)
            if any(is_cut(p) and p in known.get(source, ()) for source, p in pairs):
                for index, placement in enumerate(option.results):
                    if is_cut(placement):
                        known.setdefault((node, index), set()).add(placement)
    return known
