"""The options of every operation in a graph: legal, evenly divided, in the block counts that its neighbours need."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.passes.sharding import dtensor_rules, elementwise_rules, grouped, image_rules  # noqa: F401  (rules)
from shardgraph.passes.sharding.dtensor_rules import Refused
from shardgraph.passes.sharding.layout_rules import LAYOUTS
from shardgraph.passes.sharding.options import Operation, Option, operands, operations, replicated, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks, cut_of, divides, is_cut
from shardgraph.passes.sharding.rules import ANY_BLOCKS, REPLACES, rule_of

Value = tuple[fx.Node, int]
"""A tensor of a graph: the node that produces it and its index among the node's results."""


def value_of(node: fx.Node) -> Value:
    """The tensor that an operand refers to."""
    if node.target is operator.getitem:
        maker, index = node.args
        assert isinstance(maker, fx.Node) and isinstance(index, int)
        return maker, index
    return node, 0


def placed_operands(node: fx.Node, option: Option) -> list[tuple[Value, Placement]]:
    """An operation's operands, each with its placement in the option."""
    return [(value_of(operand), p) for operand, p in zip(operands(node), option.operands, strict=True)]


def placed_values(node: fx.Node, option: Option) -> list[tuple[Value, Placement]]:
    """An operation's operands and results, each with its placement in the option."""
    made = [((node, index), p) for index, p in enumerate(option.results) if p is not None]
    return [*placed_operands(node, option), *made]


def all_divide(placed: Iterable[tuple[Value, Placement]], parts: int) -> bool:
    """Whether each of the values is split into equal, non-empty shards."""
    return all(divides(placement, results(maker)[index].shape, parts) for (maker, index), placement in placed)


def has_rule(node: fx.Node) -> bool:
    """Whether any rule or strategy says how the operation may be sharded."""
    return node.target in LAYOUTS or rule_of(node.target) is not None or dtensor_rules.has_strategy(node.target)


def draws(node: fx.Node) -> bool:
    """Whether the operation draws random numbers. DTensor's strategies have each rank draw for its shard, with numbers
    that are not the whole model's: without a rule of ours every rank draws for the whole tensor."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_coarse(node: fx.Node) -> bool:
    """Whether an operation gives numbers of 8 bits, whose sum over ranks would be far from the sum in more."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize == 1


def spread(
    nodes: Sequence[fx.Node], known: dict[Value, set[Placement]], options: Callable[[fx.Node], Iterable[Option]]
) -> None:
    """Add shardings in ``options`` to those ``known`` of values, on which options depend, until there are no more."""
    sources = {node: [value_of(operand) for operand in operands(node)] for node in nodes}
    users: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in nodes:
        for source, _ in sources[node]:
            users[source].add(node)
    grown = set(nodes)
    while grown:
        last, grown = grown, set()
        for node in [node for node in nodes if node in last]:
            for option in options(node):
                values = [*sources[node], *((node, index) for index in range(len(option.results)))]
                for value, placement in zip(values, option.operands + option.results, strict=True):
                    if _shards(placement) and placement not in known[value]:
                        known[value].add(placement)
                        grown |= users[value[0]] | {value[0]}


def _shards(placement: Placement | None) -> bool:
    """Whether a placement is neither whole nor a sum: most are one of these two objects."""
    same = placement is None or placement is REPLICATE or placement is PARTIAL
    return not same and (is_cut(placement) or placement not in (REPLICATE, PARTIAL))


class Legal:
    """Options of the operations of ``gm`` over ``parts`` ranks.

    Shardings start in one block, plus those in ``starts``. Views, splits and the like turn them into shardings in
    several blocks, which are propagated to producers and users until a fixed point. ``refused`` counts what DTensor's
    strategies refuse.
    """

    def __init__(
        self, gm: fx.GraphModule, parts: int, starts: Mapping[Value, Iterable[Placement]], refused: Refused
    ) -> None:
        self.parts, self._refused = parts, refused
        self.nodes = operations(gm)
        self._sources = {node: [value_of(operand) for operand in operands(node)] for node in self.nodes}
        self.cuts: dict[Value, set[Placement]] = defaultdict(set)
        self._templates: dict[fx.Node, list[Option]] = {}
        self._in_blocks: dict[tuple[fx.Node, int, int], Option] = {}
        self._shapes: dict[Value, torch.Size] = {}
        self._options: dict[fx.Node, list[Option]] = {}
        for node in gm.graph.nodes:
            for index, value in enumerate(results(node)):
                if isinstance(value, torch.Tensor):
                    self._shapes[node, index] = value.shape
                    plain = (blocks(dim, 1) for dim in range(value.dim()))
                    self.cuts[node, index].update(cut for cut in plain if divides(cut, value.shape, parts))
        for value, cuts in starts.items():
            self.cuts[value].update(cuts)
        spread(self.nodes, self.cuts, self._cut_options)

    def options(self, node: fx.Node) -> list[Option]:
        """The legal options of a node; the first is fully replicated."""
        if node not in self._options:
            self._options[node] = list(dict.fromkeys([replicated(node), *self._cut_options(node)]))
        return self._options[node]

    def _cut_options(self, node: fx.Node) -> Iterator[Option]:
        """The evenly divided options, which may repeat."""
        for option in self._layout(node) if node.target in LAYOUTS else self._table(node):
            placed = self._placed(node, option)
            if all(not _shards(p) or divides(p, self._shapes[value], self.parts) for value, p in placed):
                yield option

    def _placed(self, node: fx.Node, option: Option) -> list[tuple[Value, Placement]]:
        """Like :func:`placed_values`, with the operands cached."""
        taken = list(zip(self._sources[node], option.operands, strict=True))
        return taken + [((node, index), p) for index, p in enumerate(option.results) if p is not None]

    def _layout(self, node: fx.Node) -> Iterator[Option]:
        layout, operation = LAYOUTS[node.target], Operation(node, self.parts)
        produced = len(results(node))
        elements = [operand.meta["val"].numel() for operand in operands(node)]

        def all_operands(placement: Placement) -> tuple[Placement, ...]:
            # Beside others a tensor without elements (an empty cache that keys are appended to) adds nothing to the
            # result, whose shape is of the others' placement.
            return tuple(placement if count or not any(elements) else REPLICATE for count in elements)

        def cuts_of(values: Iterable[Value]) -> list[Placement]:
            # Sets are unordered, and all ranks must list the options in the same order.
            return sorted({cut for value in values for cut in self.cuts[value]}, key=cut_of)

        if results(node)[0].is_floating_point() and not _is_coarse(node):
            yield Option(all_operands(PARTIAL), (PARTIAL,) * produced)
        for cut in cuts_of(self._sources[node]):
            if (out := layout.down(operation, cut)) is not None:
                yield Option(all_operands(cut), (out,) * produced)
        for cut in cuts_of((node, index) for index in range(produced)):
            if (needed := layout.up(operation, cut)) is not None:
                yield Option(all_operands(needed), (cut,) * produced)

    def _table(self, node: fx.Node) -> Iterator[Option]:
        if node not in self._templates:
            operation, own = Operation(node, self.parts), rule_of(node.target)
            options = list(own(operation)) if own else []
            if node.target not in REPLACES and not draws(node) and dtensor_rules.has_strategy(node.target):
                options += dtensor_rules.strategies(operation, self._refused)
            if _is_coarse(node):
                options = [option for option in options if PARTIAL not in option.operands]
            self._templates[node] = options
        for place, option in enumerate(self._templates[node]):
            yield option
            if option.lowering not in ANY_BLOCKS and any(is_cut(p) for p in option.operands + option.results):
                continue  # valid only for one block
            counts = {
                cut_of(known)[1]
                for value, placement in self._placed(node, option)
                for known in (self.cuts[value] if is_cut(placement) else ())
                if cut_of(known)[0] == cut_of(placement)[0]
            }
            for count in sorted(counts - {1}):
                if (key := (node, place, count)) not in self._in_blocks:
                    before, after = _in_blocks(option.operands, count), _in_blocks(option.results, count)
                    self._in_blocks[key] = replace(option, operands=before, results=after)
                yield self._in_blocks[key]


def _in_blocks(placements: tuple[Placement | None, ...], count: int) -> tuple[Placement | None, ...]:
    return tuple(blocks(cut_of(p)[0], count) if is_cut(p) else p for p in placements)


def reached(legal: Legal, starts: Mapping[Value, Iterable[Placement]]) -> dict[Value, set[Placement]]:
    """The shardings that follow, down the graph, from sharding ``starts``; used to identify the batch dimension.

    A result's sharding follows if a legal option has it together with an operand's sharding that follows.
    """
    known: dict[Value, set[Placement]] = {value: set(cuts) for value, cuts in starts.items()}
    for node in legal.nodes:
        if not any(known.get(value_of(operand)) for operand in operands(node)):
            continue
        for option in legal.options(node):
            if any(is_cut(p) and p in known.get(source, ()) for source, p in placed_operands(node, option)):
                for index, placement in enumerate(option.results):
                    if is_cut(placement):
                        known.setdefault((node, index), set()).add(placement)
    return known
