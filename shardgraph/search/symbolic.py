"""Predicted costs as expressions in batch size, sequence length and mesh sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
from sympy.polys.rings import PolyElement

from shardgraph.errors import CaptureError, ShardGraphError
from shardgraph.ir import Parameter, placeholders
from shardgraph.passes.analysis.liveness import profile_step
from shardgraph.passes.analysis.rows import Row, rows_of
from shardgraph.passes.analysis.sized import NotSizedError, Point, Sizes, size_program
from shardgraph.passes.analysis.sized_prices import SizedPrices
from shardgraph.passes.program import Program
from shardgraph.report.folding import NotPeriodicError, extend, shallow
from shardgraph.report.step import program_halves
from shardgraph.report.update import Shards, update_memory, update_rows
from shardgraph.search.source import Source
from shardgraph.sizes import format_bytes


@dataclass(frozen=True)
class Symbolic:
    """The costs of one rank's step as sympy expressions in :attr:`batch`, :attr:`sequence` and :attr:`mesh`; of a plan
    with several calls in a step, those of one call that reduces its gradients and finds none to add to.

    Exact for every batch size and sequence length at which the model runs the same operations (a batch of 1 often
    runs others), in the order that the present sizes are scheduled in, except for the allocator's rounding of each
    tensor and for what CPU kernels take for themselves; and for mesh sizes that divide the rows of the same parameters
    as the present ones (other sizes add or remove a padding copy, of one parameter at a time).

    ``peak_memory`` is in bytes, ``sent`` in bytes on the wire, ``compute``, ``optimizer`` and ``communication`` in
    seconds. Overlap has no expression: the step time is between :attr:`fastest` and :attr:`slowest`, and ``analyze``
    simulates it for given sizes.
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
        limit = 2
        while peak(limit) <= memory:
            limit *= 2
        return bisect_right(range(1, limit), memory, key=peak)

    @property
    def _symbols(self) -> dict[str, sympy.Symbol]:
        symbols = (self.batch, self.sequence, *self.mesh.values())
        return {symbol.name: symbol for symbol in symbols if symbol is not None}

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


def symbolic(source: Source, by_sequence: bool = True) -> Symbolic:
    """The costs of one rank's step as expressions; without ``by_sequence`` of the present length.

    Raises:
        NotSizedError: the model runs different operations at other sizes, or the plan shards operators or experts.
        ShardGraphError: no input has a batch dimension.
    """
    if source.plan.operators or source.plan.experts:
        raise NotSizedError(
            f"plan {source.plan.name!r} divides operators or experts, and how follows from their sizes: analyse "
            "each size, or take a plan of data alone"
        )
    points = _points(source, by_sequence)
    shapes, mesh = source.question.shapes, source.plan.mesh
    entries = source.plan.resolve(shapes)
    sharded_rows = [
        (shapes[fqn][0], mesh[entry.shard_axis][0]) for fqn, entry in entries.items() if entry.shard_axis is not None
    ]
    sizes = Sizes(mesh, sharded_rows)

    def rows(source: Source) -> list[Row]:
        programs = [source.resized(batch, sequence).program() for batch, sequence in points]
        return list(_rows(programs, points, sizes, source))

    def table_of(source: Source) -> list[Row]:
        if (stack := source.stack) is not None:
            depths, numbers = source.depths_of(stack), shallow(stack)[0]
            with suppress(NotPeriodicError, CaptureError):  # as analyze_source
                return extend([table_of(each) for each in source.shallow(depths, numbers)], numbers[0], stack.units)
        return rows(source)

    table = table_of(source)
    steps = [row for row in table if row.kind != "optimizer"]
    return Symbolic(
        batch=sizes.batch,
        sequence=sizes.sequence if points[0][1] else None,
        mesh=sizes.axes,
        present={sizes.batch: source.call.batch, sizes.sequence: source.call.sequence}
        | {sizes.axes[axis]: size for axis, size in mesh},
        peak_memory=_peak([row.live for row in table], sizes),
        flops=sizes.expression(sum((row.flops for row in table), sizes.constant(0))),
        sent=_sum(row.sent for row in table if row.stream),
        compute=_sum(row.seconds for row in steps if not row.stream),
        optimizer=_sum(row.seconds for row in table if row.kind == "optimizer"),
        communication=_sum(row.seconds for row in steps if row.stream),
    )


def _sum(terms: Iterable[sympy.Expr]) -> sympy.Expr:
    """Their sum, in which equal ones are counted first: this is faster."""
    return sympy.Add(*(count * term for term, count in Counter(terms).items()))


def _points(source: Source, by_sequence: bool) -> list[Point]:
    """The ``(batch, sequence)`` sizes at which to capture; the last one checks the interpolation of the others.

    No batch or sequence is 1, for which broadcasting and views change the program.
    """
    batch, sequence = max(source.call.batch, 2), source.call.sequence if by_sequence else 0
    if not source.call.batch:
        raise ShardGraphError("none of the inputs is a tensor with a batch dimension: there is nothing to vary")
    more, last = batch + 1, batch + 2
    if not sequence:
        return [(batch, 0), (more, 0), (last, 0)]
    # Shorter sequences: a model may have no positions beyond the present length.
    less, least = (sequence - 1, sequence - 3) if sequence > 4 else (sequence + 1, sequence + 3)
    return [(batch, sequence), (more, sequence), (batch, less), (more, less), (last, least)]


def _rows(programs: Sequence[Program], points: Sequence[Point], sizes: Sizes, source: Source) -> Iterator[Row]:
    """The rows of a program, with polynomials for FLOPs and bytes and expressions for seconds."""
    first, question, mesh = programs[0], source.question, source.plan.mesh
    halves = size_program([program_halves(program) for program in programs], points, sizes, first.context)
    roles = placeholders(halves["forward"]).items()
    trained = [(role.fqn, n) for role, n in roles if isinstance(role, Parameter) and role.fqn in first.trained]
    shards = Shards.of(first.context, {fqn: node.meta["val"].nbytes for fqn, node in trained})

    def magnitude(size: Any) -> int:
        """The number of bytes on the present mesh; those of a parameter do not depend on the inputs."""
        return int(sizes.expression(size).subs({sizes.axes[axis]: ranks for axis, ranks in mesh}))

    device = question.machine.device
    graphs = list(halves.values())
    updates = update_memory(graphs, shards, question.optimizer, first.plan, magnitude, on_cpu=device.is_cpu)
    memory = profile_step(halves["forward"], halves.get("backward"), 1, *updates, gloo=device.is_cpu)
    yield from rows_of(halves, memory, SizedPrices(question.machine, mesh, sizes), source.fused)
    yield from update_rows(shards, question.optimizer, device, memory, first.plan, sizes.expression, magnitude)


def _peak(lives: Sequence[Any], sizes: Sizes) -> sympy.Expr:
    """The maximum of polynomials in non-negative variables, without those that another one dominates everywhere."""
    distinct = list(dict.fromkeys(sizes.ring(live) for live in lives))
    distinct.sort(key=lambda size: -sum(size.coeffs()))
    kept: list[PolyElement] = []
    for size in distinct:
        if not any(all(c >= 0 for c in (other - size).coeffs()) for other in kept):
            kept.append(size)
    return sympy.Max(*(sizes.expression(size) for size in kept), evaluate=False)
