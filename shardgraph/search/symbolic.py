"""Predicted costs as expressions in batch size, sequence length and mesh sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
from sympy.polys.rings import PolyElement

from shardgraph.cost_models.optimizers import optimizer_cost
from shardgraph.errors import ShardGraphError
from shardgraph.ir import Gradient, Parameter, outputs, placeholders
from shardgraph.passes.analysis.liveness import UpdateMemory, profile_step
from shardgraph.passes.analysis.rows import Row, rows_of
from shardgraph.passes.analysis.sized import NotSizedError, Point, Sizes, size_program
from shardgraph.passes.analysis.sized_prices import SizedPrices
from shardgraph.passes.program import Program
from shardgraph.report.analysis import program_halves, update_row
from shardgraph.report.folding import SHALLOW, NotPeriodicError, Stack, extend, shortened
from shardgraph.search.source import Source
from shardgraph.sizes import format_bytes


@dataclass(frozen=True)
class Symbolic:
    """The costs of one rank's step as sympy expressions in :attr:`batch`, :attr:`sequence` and :attr:`mesh`.

    Exact for every batch size and sequence length at which the model runs the same operations (a batch of 1 often
    runs others), except for the allocator's rounding of each tensor; and for mesh sizes that divide the rows of the
    same parameters as the present ones (other sizes add or remove a padding copy, of one parameter at a time).

    ``peak_memory``
        Bytes.
    ``flops``, ``sent``
        FLOPs, and bytes on the wire.
    ``compute``, ``optimizer``, ``communication``
        Seconds. Overlap has no expression: the step time is between :attr:`fastest` and :attr:`slowest`, and
        ``analyze`` simulates it for given sizes.
    """

    batch: sympy.Symbol
    sequence: sympy.Symbol | None
    mesh: dict[str, sympy.Symbol]
    present: dict[sympy.Symbol, int]
    peak_memory: sympy.Expr
    flops: sympy.Expr
    sent: sympy.Expr
    compute: sympy.Expr
    optimizer: sympy.Expr
    communication: sympy.Expr

    @property
    def slowest(self) -> sympy.Expr:
        """Seconds of a step without any overlap of communication and computation."""
        return self.compute + self.optimizer + self.communication

    @property
    def fastest(self) -> sympy.Expr:
        """Seconds of a step with full overlap of communication and computation."""
        return sympy.Max(self.compute + self.optimizer, self.communication, evaluate=False)

    def at(self, **sizes: int) -> dict[str, float]:
        """Every quantity by name for the given sizes, such as ``batch=8, sequence=4096, dp=64``; others as at present.

        Raises:
            ShardGraphError: there is no such size, or it is not positive.
        """
        values = self._values(sizes)
        names = ("peak_memory", "flops", "sent", "compute", "optimizer", "communication", "fastest", "slowest")
        return {name: float(_function(getattr(self, name), tuple(values))(*values.values())) for name in names}

    def largest(self, size: str, memory: int, **sizes: int) -> int:
        """The largest batch, sequence or axis whose peak is within ``memory`` bytes, with the other sizes as given.

        Raises:
            ShardGraphError: not even 1 fits (the message has its peak), the peak does not depend on ``size``, or there
                is no such size.
        """
        values = self._values({**sizes, size: 1})
        symbol = self._symbols[size]
        if not self.peak_memory.has(symbol):
            raise ShardGraphError(f"the peak does not depend on {size}")
        function = _function(self.peak_memory, tuple(values))

        def peak(value: int) -> int:
            return int(function(*(values | {symbol: value}).values()))

        if peak(1) > memory:
            raise ShardGraphError(f"not even {size}=1 fits {format_bytes(memory)}: it takes {format_bytes(peak(1))}")
        low, high = 1, 2
        while peak(high) <= memory:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak(middle) <= memory else (low, middle)
        return low

    @property
    def _symbols(self) -> dict[str, sympy.Symbol]:
        symbols = {"batch": self.batch} | ({"sequence": self.sequence} if self.sequence is not None else {})
        return symbols | self.mesh

    def _values(self, sizes: dict[str, int]) -> dict[sympy.Symbol, int]:
        for name, value in sizes.items():
            if name not in self._symbols:
                raise ShardGraphError(f"there is no size {name!r} here; there are {', '.join(self._symbols)}")
            if value < 1:
                raise ShardGraphError(f"{name}={value}: a positive whole number is needed")
        return self.present | {self._symbols[name]: value for name, value in sizes.items()}


@cache
def _function(expression: sympy.Expr, symbols: tuple[sympy.Symbol, ...]) -> Callable[..., float]:
    """The expression as a function of numbers, because substitution into a large maximum takes minutes."""
    return sympy.lambdify(symbols, expression, modules="math")


def symbolic(source: Source) -> Symbolic:
    """The costs of one rank's step as expressions.

    Raises:
        NotSizedError: the model runs different operations at other sizes, or the plan shards operators or experts.
        ShardGraphError: no input has a batch dimension.
    """
    if source.plan.operators or source.plan.experts:
        raise NotSizedError(
            f"plan {source.plan.name!r} divides operators or experts, and how follows from their sizes: analyse "
            "each size, or take a plan of data alone"
        )
    points = _points(source)
    shapes, mesh = source.question.shapes, source.plan.mesh
    entries = source.plan.resolve(shapes)
    sharded_rows = [
        (shapes[fqn][0], mesh[entry.shard_axis][0]) for fqn, entry in entries.items() if entry.shard_axis is not None
    ]
    sizes = Sizes(mesh, sharded_rows)

    def rows(of: Source = source) -> list[Row]:
        programs = [of.resized(batch, sequence).program() for batch, sequence in points]
        return list(_rows(programs, points, sizes, source))

    try:
        table = rows() if (stack := source.stack) is None else _folded(source, stack, rows)
    except NotPeriodicError:
        table = rows()
    totals: Counter[sympy.Expr] = Counter()
    stream = {True: totals, False: Counter(), None: Counter()}
    for row in table:
        stream[None if row.kind == "optimizer" else bool(row.stream)][row.seconds] += 1
    seconds = {key: sympy.Add(*(count * each for each, count in counted.items())) for key, counted in stream.items()}
    sent = Counter(row.sent for row in table if row.stream)
    return Symbolic(
        batch=sizes.batch,
        sequence=sizes.sequence if points[0][1] else None,
        mesh=sizes.axes,
        present={sizes.batch: source.call.batch, sizes.sequence: source.call.sequence}
        | {sizes.axes[axis]: size for axis, size in mesh},
        peak_memory=_peak([row.live for row in table], sizes),
        flops=sizes.expression(sum((row.flops for row in table), sizes.constant(0))),
        sent=sympy.Add(*(count * each for each, count in sent.items())),
        compute=seconds[False],
        optimizer=seconds[None],
        communication=seconds[True],
    )


def _points(source: Source) -> list[Point]:
    """The ``(batch, sequence)`` sizes at which to capture; the last one checks the interpolation of the others.

    No batch or sequence is 1, for which broadcasting and views change the program.
    """
    batch, sequence = max(source.call.batch, 2), source.call.sequence
    if not source.call.batch:
        raise ShardGraphError("none of the inputs is a tensor with a batch dimension: there is nothing to vary")
    more, last = batch + 1, batch + 2
    if not sequence:
        return [(batch, 0), (more, 0), (last, 0)]
    # Shorter sequences: a model may have no positions beyond the present length.
    less, least = (sequence - 1, sequence - 3) if sequence > 4 else (sequence + 1, sequence + 3)
    return [(batch, sequence), (more, sequence), (batch, less), (more, less), (last, least)]


def _folded(source: Source, stack: Stack, rows: Callable[..., list[Row]]) -> list[Row]:
    return extend(
        [rows(source.of(shortened(source.question.model, stack, layers))) for layers in SHALLOW], stack.layers
    )


def _rows(programs: Sequence[Program], points: Sequence[Point], sizes: Sizes, source: Source) -> Iterator[Row]:
    """The rows of a program, with polynomials for FLOPs and bytes and expressions for seconds."""
    halves = size_program([program_halves(program) for program in programs], points, sizes, programs[0].context)
    forward, backward = halves["forward"], halves.get("backward")
    trained = {
        role.of for role, value in (outputs(backward) if backward else []) if isinstance(role, Gradient) and value
    }
    values = {role: node.meta["val"] for role, node in placeholders(forward).items() if isinstance(role, Parameter)}
    entries, cost = programs[0].parameters, optimizer_cost(source.question.optimizer)
    updated = [
        [values[role].nbytes for role in values if role in trained and entries[role.fqn].offload is host]
        for host in (False, True)
    ]

    def update(shards: Sequence[Any]) -> UpdateMemory:
        largest = max(shards, key=lambda size: _at(size, sizes, source), default=0)
        state = cost.states * sum(shards) + cost.counters * 4 * len(shards)
        return UpdateMemory(state, cost.temporaries * largest)

    memory = profile_step(forward, backward, 1, *map(update, updated))
    prices = SizedPrices(source.question.machine, source.plan.mesh, sizes)
    yield from rows_of(halves, memory, prices, source.fused)
    for host, shards in zip((False, True), updated, strict=True):
        if shards:
            yield update_row(shards, source.question.optimizer, _update(shards, sizes, source, host), memory, host)


def _at(size: Any, sizes: Sizes, source: Source) -> int:
    """The value of a parameter's symbolic size on the present mesh."""
    return int(sizes.expression(size).subs({sizes.axes[axis]: n for axis, n in source.plan.mesh}))


def _peak(lives: Sequence[Any], sizes: Sizes) -> sympy.Expr:
    """The maximum of polynomials in non-negative variables, without those that another one dominates everywhere."""
    distinct = list(dict.fromkeys(sizes.ring(live) for live in lives))
    distinct.sort(key=lambda size: -sum(size.coeffs()))
    kept: list[PolyElement] = []
    for size in distinct:
        if not any(all(c >= 0 for c in (other - size).coeffs()) for other in kept):
            kept.append(size)
    return sympy.Max(*(sizes.expression(size) for size in kept), evaluate=False)


def _update(shards: Sequence[Any], sizes: Sizes, source: Source, host: bool) -> sympy.Expr:
    cost, device = optimizer_cost(source.question.optimizer), source.question.machine.device
    rate = device.linked_host.optimizer if host else device.rate("optimizer")
    assert rate is not None
    return sympy.Add(*(rate.seconds(cost.moved * sizes.expression(each)) for each in shards))
