"""What the layers of a model cost on one rank, read off analysed programs of a few of them.

The estimates of the search (:mod:`shardgraph.search.estimate`) are made of these. The programs are for the axes of
operators alone: data axes, stages and microbatches are added by the estimate. One more layer adds its cost, so two
programs give that of a layer, and of all else. Where nothing runs beside the computation one is enough: a layer costs
what passes from the end of one of the equal layers to the end of the next. Where layers of several kinds follow each
other in turns, that is found for a unit of them, one of each kind, of which each layer here costs an equal part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from shardgraph.capture.stacks import Stack, layer_of
from shardgraph.cost_models import compute
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.timeline import COMPUTE, COPIES
from shardgraph.ir import Parameter, placeholders
from shardgraph.ir.attributes import CAST_OF, ROLE
from shardgraph.passes.analysis.local import shard_bytes, shard_shape
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.analysis.rows import Row
from shardgraph.passes.program import Program
from shardgraph.report.analysis import Analysis

_LASTING = ("parameters", "buffers", "inputs", "gradients", "optimizer state", "gathered parameters")
"""Kinds of memory that no layer's microbatch adds to."""

_PADDED = 1.01
"""Shards with so many times the rows that there are count as larger; fewer are no more than estimates are off."""


class Part(NamedTuple):
    """A part of the model on a rank, for one microbatch.

    ``forward`` and ``backward`` are seconds of the two halves, with what collectives along operator axes add to them;
    ``started`` and ``started_back`` are those of them that a microbatch of any size takes, to start operations, and
    ``called`` and ``called_back`` what Python takes to call them, for which the device may have to wait; ``sent`` are
    the seconds of those collectives, in both halves, ``latency`` those of them that they take whatever they send, and
    ``exposed`` and ``exposed_back`` those for which computation waits, as it does for copies of activations for
    ``copied`` seconds of both halves. ``cast`` are the seconds to cast the rank's part of the parameters to the dtype
    that they are computed in, which is in neither half. ``saved`` are bytes kept for backward, ``parameters`` those of
    the rank's part of the trained parameters as they are stored, ``gathered`` as they are computed with and ``reduced``
    of their gradients as they are reduced; ``tensors`` is the number of these parameters.
    """

    forward: float = 0.0
    backward: float = 0.0
    started: float = 0.0
    started_back: float = 0.0
    called: float = 0.0
    called_back: float = 0.0
    sent: float = 0.0
    latency: float = 0.0
    exposed: float = 0.0
    exposed_back: float = 0.0
    copied: float = 0.0
    cast: float = 0.0
    saved: float = 0.0
    parameters: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0
    tensors: float = 0.0

    def plus(self, other: Part, times: float = 1.0) -> Part:
        """This and so many of the other."""
        return Part(*[mine + times * theirs for mine, theirs in zip(self, other, strict=True)])

    def with_links_faster(self, factor: float) -> Part:
        """The part with collectives along operator axes whose bytes take as much less time."""
        less = (1 - self.latent) * (1 - 1 / factor)
        saved, saved_back = self.exposed * less, self.exposed_back * less
        return self._replace(
            forward=max(0.0, self.forward - saved),
            backward=max(0.0, self.backward - saved_back),
            sent=self.sent - (self.sent - self.latency) * (1 - 1 / factor),
            exposed=self.exposed - saved,
            exposed_back=self.exposed_back - saved_back,
        )

    @property
    def latent(self) -> float:
        """The part of the seconds of collectives that does not depend on what is sent."""
        return min(1.0, max(0.0, self.latency / self.sent)) if self.sent > 0 else 0.0

    @property
    def waiting(self) -> float:
        """The part of its time in which computation waits for that."""
        whole = self.forward + self.backward
        return (self.exposed + self.exposed_back) * self.latent / whole if whole else 0.0

    def seconds(self, scale: float) -> tuple[float, float]:
        """Forward and backward of a microbatch that is ``scale`` times as large."""
        fixed = min(self.started + self.exposed * self.latent, self.forward)
        fixed_back = min(self.started_back + self.exposed_back * self.latent, self.backward)
        return (
            max(self.called, fixed + (self.forward - fixed) * scale),
            max(self.called_back, fixed_back + (self.backward - fixed_back) * scale),
        )

    @property
    def positive(self) -> Part:
        """Without what is below zero, which differences of simulated times may be."""
        return Part(*(max(0.0, value) for value in self))


@dataclass(frozen=True)
class LayerCosts:
    """A model as what comes before its equal layers, so many of them, and what comes after.

    Stages of a pipeline have a multiple of ``unit`` layers. For microbatches of ``batch`` samples. ``working`` are the
    bytes beside those saved at the peak, of activations and temporaries; ``crossing`` those that one layer passes to
    the next; ``shares`` the parts of the bytes of a layer's parameters, or of all where there are no equal layers, that
    each of them has, and ``rows`` how many rows each has.
    """

    head: Part
    layer: Part
    tail: Part
    layers: int
    batch: int
    working: float
    crossing: float
    shares: tuple[float, ...]
    rows: tuple[float, ...]
    unit: int = 1

    @property
    def whole(self) -> Part:
        """All of the model."""
        return self.head.plus(self.tail).plus(self.layer, self.layers)

    def in_blocks(self, blocks: int, crossing: float) -> LayerCosts:
        """The costs of a model without equal layers as those of so many equal blocks, from each of which ``crossing``
        bytes pass to the next."""
        shares = tuple(min(1.0, share * blocks) for share in self.shares)
        layer = Part().plus(self.head, 1 / blocks)
        return replace(self, head=Part(), layer=layer, layers=blocks, crossing=crossing, shares=shares)

    def with_links_faster(self, factor: float) -> LayerCosts:
        """The costs with links inside a node whose bandwidth is ``factor`` times as large."""
        if factor == 1:
            return self
        parts = {name: getattr(self, name).with_links_faster(factor) for name in ("head", "layer", "tail")}
        return replace(self, **parts)

    def stored_by(self, ranks: int) -> LayerCosts:
        """The costs with the rows of a layer's parameters that are stored, gathered and reduced where so many ranks
        have equally many of them: of fewer rows than ranks some ranks have rows of nothing."""
        if not self.rows or ranks == 1:
            return self
        padded = sum(
            share * ranks * math.ceil(rows / ranks) / rows for share, rows in zip(self.shares, self.rows, strict=True)
        )
        factor = padded / sum(self.shares)
        if factor < _PADDED:
            return self
        sizes = {name: factor * getattr(self.layer, name) for name in ("parameters", "gathered", "reduced")}
        return replace(self, layer=self.layer._replace(**sizes))

    def without(self, tail: Part, working: float, share: float) -> LayerCosts:
        """The costs less a ``share`` of what the end of the model has of ``tail``, and of ``working`` bytes."""
        less = self.tail.plus(tail, -share).positive
        return replace(self, tail=less, working=max(0.0, self.working - share * working))

    def with_some_as(self, other: LayerCosts, layers: int) -> LayerCosts:
        """The costs if so many of the layers cost as those of ``other``."""
        share = layers / self.layers
        layer = self.layer.plus(self.layer, -share).plus(other.layer, share)
        return replace(self, layer=layer, working=max(self.working, other.working))

    def divided_by(self, degree: int, other: LayerCosts, of_other: int) -> LayerCosts:
        """The costs with operators divided among ``degree`` ranks, where these are undivided, and ``other`` are those
        of a division among ``of_other``: what is divided shrinks with the degree, the rest does not."""
        reached = (1 - 1 / degree) / (1 - 1 / of_other)

        def line(one: float, divided: float) -> float:
            return one + (divided - one) * reached

        def part(one: Part, divided: Part) -> Part:
            return Part(*map(line, one, divided))

        rows = tuple(map(line, self.rows, other.rows)) if len(self.rows) == len(other.rows) else self.rows
        return replace(
            self,
            rows=rows,
            head=part(self.head, other.head),
            layer=part(self.layer, other.layer),
            tail=part(self.tail, other.tail),
            working=line(self.working, other.working),
            crossing=line(self.crossing, other.crossing),
        )


def whole_costs(program: Program, analysis: Analysis) -> LayerCosts:
    """The costs of a model without equal layers, from its program."""
    whole, working = _costs_of(program, analysis)
    shares, rows = _shares(program, program.trained)
    return LayerCosts(whole, Part(), Part(), 0, max(1, analysis.samples), working, 0.0, shares, rows)


Analysed = tuple[Program, Analysis]


def layer_costs(few: Analysed, more: Analysed | None, stack: Stack, units: int) -> LayerCosts:
    """The costs of a model with all layers of ``stack``, from the program of a copy with ``units``, three or more, and
    from one with one more, if :func:`takes_another`."""
    whole, working = _costs_of(*few)
    unit = (_unit(*few, stack) if more is None else _costs_of(*more)[0].plus(whole, -1)).positive
    rest = whole.plus(unit, -units).positive
    head = _head(few[1], few[0], stack)
    head = Part(*map(min, head, rest))
    tail = rest.plus(head, -1).positive
    batch = max(1, few[1].samples)
    shares, rows = _shares(few[0], (fqn for fqn in few[0].trained if _is_in(fqn, stack.unit(2)[:1])))
    layer, layers, crossing = Part().plus(unit, 1 / stack.period), stack.layers - stack.head, _crossing(few[0], stack)
    return LayerCosts(head, layer, tail, layers, batch, working, crossing, shares, rows, stack.period)


def with_others(costs: LayerCosts, few: Analysed, more: Analysed, stack: Stack, times: int) -> LayerCosts:
    """The ``costs`` of a model with ``stack``, read off the program ``few``, if it has so many units more of another
    stack, of which the program ``more`` has one more."""
    (whole, working), (longer, more_working) = _costs_of(*few), _costs_of(*more)
    before, longer_before = (_head(analysis, program, stack) for program, analysis in (few, more))
    added = longer.plus(whole, -1).positive
    head = Part(*map(min, longer_before.plus(before, -1).positive, added))
    return replace(
        costs,
        head=costs.head.plus(head, times),
        tail=costs.tail.plus(added.plus(head, -1), times),
        working=max(0.0, costs.working + times * (more_working - working)),
    )


def takes_another(analysis: Analysis, stack: Stack) -> bool:
    """Whether one program does not tell what a layer costs: something runs beside the computation, or forward does
    nothing in the layers, but reads their parameters elsewhere."""
    beside = any(row.stream for row in analysis.rows)
    return beside or not all(_rows_in(analysis, stack, "forward", unit) for unit in (1, 2))


def _unit(program: Program, analysis: Analysis, stack: Stack) -> Part:
    """What one of the equal units costs: the third in forward, and in backward, which comes to the third before it,
    the second."""
    rows = analysis.rows
    begin, end = (_rows_in(analysis, stack, "forward", unit)[-1] for unit in (1, 2))
    saved = _of_microbatch(rows[end]) - _of_microbatch(rows[begin])
    third, second = (_rows_in(analysis, stack, "backward", unit) for unit in (2, 1))
    back = range(third[-1] + 1, second[-1] + 1) if third and second else range(0)  # if they are trained
    state = _state(program, (fqn for fqn in sorted(program.trained) if _is_in(fqn, stack.unit(2))))
    return state._replace(saved=saved, **_halves(program, analysis, range(begin + 1, end + 1), back))


def _halves(program: Program, analysis: Analysis, forward: Iterable[int], backward: Iterable[int]) -> dict[str, float]:
    """The seconds of rows of the two halves, and those that their operations take to be started and called."""
    first, second = ([analysis.rows[place] for place in places] for places in (forward, backward))
    fixed = _fixed(program, first, second, analysis)
    seconds = {"forward": sum(row.seconds for row in first), "backward": sum(row.seconds for row in second)}
    return seconds | fixed | {"forward": seconds["forward"] - fixed["cast"]}


def _fixed(program: Program, forward: Sequence[Row], backward: Sequence[Row], analysis: Analysis) -> dict[str, float]:
    """The seconds that operations take whatever the size of a microbatch is."""
    call = analysis.cluster.device.call
    parameters, gradients = _casts(program)
    casts = [row for row in forward if row.node in parameters]
    cast = sum(row.seconds for row in casts) - _started(casts, analysis)
    return {
        "started": _started(forward, analysis),
        "started_back": _started(backward, analysis, gradients),
        "called": call * len(forward),
        "called_back": call * len(backward),
        "cast": cast,
    }


def _casts(program: Program) -> tuple[set[str], set[str]]:
    """The nodes that cast parameters in forward, and gradients of parameters in backward."""

    def is_parameter(node: fx.Node) -> bool:
        return isinstance(ROLE.get(node), Parameter)

    casts = program.forward.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    parameters = {node.name for node in casts if is_parameter(node.all_input_nodes[0])}
    backward = () if program.backward is None else program.backward.graph.nodes
    return parameters, {node.name for node in backward if node in CAST_OF}


def _started(rows: Sequence[Row], analysis: Analysis, fixed: Set[str] = frozenset()) -> float:
    """Seconds that operations take before they have done any work; all seconds of ``fixed`` ones."""
    device = analysis.cluster.device
    whole = sum(row.seconds for row in rows if row.node in fixed)
    others = (row for row in rows if not row.stream and row.kind != "free" and row.node not in fixed)
    kinds = Counter((row.kind, row.dtype) for row in others)
    return whole + sum(count * compute.seconds(device, *kind, 0, 0) for kind, count in kinds.items())


def _rows_in(analysis: Analysis, stack: Stack, half: str, unit: int) -> list[int]:
    """Where the operations of a unit are among the rows of a program."""
    paths = stack.unit(unit)
    return [i for i, row in enumerate(analysis.rows) if row.half == half and _is_in(row.module, paths)]


def _is_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter is one of these modules or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _of_microbatch(row: Row) -> int:
    """The live bytes of a row that a microbatch adds."""
    return sum(nbytes for kind, nbytes in row.memory.items() if kind not in _LASTING)


def _costs_of(program: Program, analysis: Analysis) -> tuple[Part, float]:
    """The costs of all of a program, and its working bytes."""
    rows = [row for row in analysis.rows if row.half != "optimizer"]
    live = list(map(_of_microbatch, rows))
    forward = [row.half for row in rows].count("forward")
    saved = live[forward - 1] if 0 < forward < len(rows) else 0
    spans = analysis.timeline.spans[: len(rows)]
    ends = [span.end for span in spans if span.task.stream == COMPUTE]
    middle = max((span.end for span in spans[:forward] if span.task.stream == COMPUTE), default=0.0)
    backward = max(ends, default=0.0) - middle
    collectives = [row for row in rows if row.stream and row.stream not in COPIES]
    state = _state(program, sorted(program.trained))
    fixed = _fixed(program, rows[:forward], rows[forward:], analysis)
    exposed, exposed_back = _exposed(rows[:forward], middle), _exposed(rows[forward:], backward)
    computed = sum(row.seconds for row in rows if not row.stream)
    whole = state._replace(
        forward=middle - fixed["cast"],
        backward=backward,
        sent=sum(row.seconds for row in collectives),
        latency=_latency(program, analysis, collectives),
        exposed=exposed,
        exposed_back=exposed_back,
        copied=max(0.0, middle + backward - exposed - exposed_back - computed),
        saved=saved,
        **fixed,
    )
    return whole, max(live, default=0) - saved


def _exposed(rows: Iterable[Row], seconds: float) -> float:
    """Of the seconds of a half those in which only collectives run."""
    sent = sum(row.seconds for row in rows if row.stream and row.stream not in COPIES)
    return min(sent, max(0.0, seconds - sum(row.seconds for row in rows if not row.stream)))


def _latency(program: Program, analysis: Analysis, collectives: Iterable[Row]) -> float:
    """Seconds that collectives take whatever they send; without messages of rings, which attention hides."""
    mesh, cluster = program.plan.whole_mesh, analysis.cluster
    kinds = Counter((row.operation.partition(".")[0], row.stream) for row in collectives)
    return sum(
        count * collective_seconds(operation, 0, 0, cluster.group_of(mesh, axis), cluster.efficiency)
        for (operation, axis), count in kinds.items()
        if operation != "send"
    )


def _state(program: Program, names: Iterable[str]) -> Part:
    """The bytes of parameters, and what is sent of them."""
    whole = Part()
    for part in _states(program, names):
        whole = whole.plus(part)
    return whole


def _states(program: Program, names: Iterable[str]) -> Iterator[Part]:
    """Likewise of each of them."""
    context, reduce = program.context, program.plan.precision.reduce
    computed = {role.fqn: node.meta["val"].itemsize for role, node in placeholders(program.joint.module).items()
                if isinstance(role, Parameter)}  # fmt: skip
    for fqn in names:
        stored = context.stored[fqn].itemsize
        elements = shard_bytes(context, fqn, 0) // stored
        item = computed.get(fqn, stored)
        reduced = getattr(torch, reduce).itemsize if reduce else item
        sizes = (elements * stored, elements * item, elements * reduced)
        yield Part(parameters=sizes[0], gathered=sizes[1], reduced=sizes[2], tensors=1)


def _shares(program: Program, names: Iterable[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The part of the bytes of parameters that each of them has, and its rows; without empty ones."""
    names = sorted(names)
    sizes = [part.gathered for part in _states(program, names)]
    rows = [(*shard_shape(program.context, fqn, 0), 1)[0] for fqn in names]
    whole, some = sum(sizes), [place for place, size in enumerate(sizes) if size]
    return tuple(sizes[place] / whole for place in some), tuple(float(rows[place]) for place in some)


def _head(analysis: Analysis, program: Program, stack: Stack) -> Part:
    """What comes before the layers: operations before the first one of a layer in forward, and after the last one in
    backward, and the parameters that they use."""
    rows = analysis.rows
    inside = [(place := layer_of(row.module, [stack])) is not None and place[1] >= stack.head for row in rows]
    outside: dict[str, list[int]] = {"forward": [], "backward": []}
    for half in outside:
        own = [i for i, row in enumerate(rows) if row.half == half]
        places = [i for i in own if inside[i]]
        if places:
            around = [i for i in own if (i < places[0] if half == "forward" else i > places[-1])]
            outside[half] = [i for i in around if not rows[i].stream]
    first = next((i for i, within in enumerate(inside) if within), 0)
    modules = {row.module for row in rows[:first]}
    state = _state(program, (fqn for fqn in sorted(program.trained) if fqn.rpartition(".")[0] in modules))
    return state._replace(**_halves(program, analysis, **outside))


def _crossing(program: Program, stack: Stack) -> float:
    """Bytes that the second unit gives to the third in forward."""
    one, two = stack.unit(1), stack.unit(2)
    given = [
        node.meta["val"].nbytes
        for node in program.forward.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        and _is_in(module_of(node), one)
        and any(_is_in(module_of(user), two) for user in node.users)
    ]
    return float(sum(given))
