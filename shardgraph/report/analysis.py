"""Predicted costs of a program: those of every node, peak memory and step time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardgraph.arguments import BYTES, NONE, NOT_NEGATIVE, PATH, WHOLE, checked, mapping_of
from shardgraph.capture.captures import Call
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.timeline import COPIES, StepTime, Timeline
from shardgraph.errors import ShardGraphError
from shardgraph.passes.analysis.rows import Prices, Row, rows_of
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.report.accumulation import holding_gradients, seconds_of_calls
from shardgraph.report.step import batch_of, program_halves, program_memory, timeline_of
from shardgraph.report.tables import ModuleCosts, operation_table
from shardgraph.report.transfers import Transfer, table_of, transfers_of
from shardgraph.report.update import trained_shards, update_rows
from shardgraph.sizes import format_bytes, format_seconds, parse_bytes

_WORTH_TELLING = 0.01  # of a step
_TIMES = mapping_of("the times of a WaitTracker", NOT_NEGATIVE, lambda name: isinstance(name, tuple))


class OtherSizes(Protocol):
    """Predictions for other sizes of an analysed call, from its model and plan."""

    @property
    def symbolic(self) -> Any:
        """See :meth:`Analysis.symbolic`."""

    def largest(self, size: str, budget: int) -> int:
        """The largest ``"batch"`` or ``"sequence"`` whose peak is within ``budget`` bytes."""


@dataclass(frozen=True, repr=False)
class StepCosts:
    """The predicted costs of a step on one rank, with or without a pipeline.

    ``samples`` and ``tokens`` count one step over all ranks; ``tokens`` is 0 for inputs that are not sequences of
    integers.
    """

    plan: Plan
    cluster: Cluster
    optimizer: str
    samples: int
    tokens: int

    if TYPE_CHECKING:  # defined by each kind of analysis

        @property
        def peak_memory(self) -> int: ...
        @property
        def time(self) -> StepTime: ...
        @property
        def flops(self) -> int: ...
        @property
        def rows(self) -> tuple[Row, ...]: ...
        @property
        def call(self) -> Call | None: ...

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak_memory <= self.cluster.device.memory

    @property
    def interval(self) -> tuple[float, float]:
        """The seconds between which a step is expected to be in 8 of 10 cases, by the cluster's
        :attr:`~shardgraph.cost_models.cluster.Cluster.doubt`."""
        return self.time.total / (1 + self.cluster.doubt), self.time.total * (1 + self.cluster.doubt)

    @property
    def _between(self) -> str:
        """The interval, for people."""
        low, high = self.interval
        return f" ({format_seconds(low)} to {format_seconds(high)})" if self.cluster.doubt else ""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks; 0 for inputs that are not sequences."""
        return self.tokens / self.time.total if self.time.total else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, from 0 to 1: the fraction of the device's peak FLOP/s that the step attains.

        What backward computes again does not count. Attention counts in full, also where a causal kernel skips half of
        it. The peak is that of the dtype with the most FLOPs; None if the device has none for it. Definition:
        A. Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
        """
        executed = sum(row.flops for row in self.rows)
        again = sum(row.flops for row in self.rows if row.again)
        return self.hfu * (1 - again / executed) if self.hfu is not None and executed else self.hfu

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, from 0 to 1: :attr:`mfu` with what backward computes again."""
        flops: Counter[str] = Counter()
        for row in self.rows:
            flops[row.dtype] += row.flops
        peak = self.cluster.device.peak.get(max(flops, key=flops.__getitem__, default=""))
        return self.flops / self.time.total / peak if peak and self.time.total else None

    def _totals(self) -> dict[str, Any]:
        kinds = ("compute", "optimizer", "communication", "exposed", "hidden", "bubble")
        return {
            "fits": self.fits,
            "step": self.time.total,
            "interval": self.interval,
            **{kind: getattr(self.time, kind) for kind in kinds},
            **{name: getattr(self, name) for name in ("flops", "mfu", "hfu", "tokens_per_second", "samples")},
        }

    def __repr__(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.plan.whole_mesh) or "one process"
        costs = f"{format_bytes(self.peak_memory)} a rank, {format_seconds(self.time.total)} a step"
        return f"<{type(self).__name__} of plan {self.plan.name} on {mesh}, {self.cluster.name}: {costs}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def _excess(self) -> str:
        """The end of a line about the peak."""
        return "" if self.fits else f", MORE THAN THE DEVICE HAS: {format_bytes(self.cluster.device.memory)}"


@dataclass(frozen=True, repr=False)
class Analysis(StepCosts):
    """The predicted costs of a program on one rank of a cluster; see :func:`shardgraph.analyze`.

    ``rows`` are its operations in execution order, the optimizer's update last; of a plan with several calls in a step
    those of the last one, which hold what the gradients of the others take. ``earlier`` is the analysis of each call
    before it, if these do not reduce gradients; None if they are as the last. ``call`` is the analysed call; None if
    the program was compiled before.
    """

    rows: tuple[Row, ...]
    other_sizes: OtherSizes | None = field(default=None, repr=False, compare=False)
    call: Call | None = field(default=None, repr=False, compare=False)
    earlier: Analysis | None = field(default=None, repr=False, compare=False)

    @property
    def flops(self) -> int:
        """FLOPs of one step on one rank."""
        return int(self._of_all_calls(lambda call: sum(row.flops for row in call.rows)))

    def _of_all_calls(self, of: Callable[[Analysis], float]) -> float:
        """What a step has ``of`` each of its calls."""
        return of(self) + (self.plan.calls - 1) * of(self.earlier or self)

    @cached_property
    def peak(self) -> Row:
        """The first operation at which live memory on the device is at its peak."""
        before = self.earlier.rows if self.earlier is not None else ()
        return max((*self.rows, *before), key=lambda row: row.live)

    @property
    def peak_memory(self) -> int:
        """Peak bytes of one rank."""
        return self.peak.live

    @cached_property
    def host_peak(self) -> Row:
        """The first operation at which live host memory is at its peak."""
        return max(self.rows, key=lambda row: sum(row.host.values()))

    @property
    def host_memory(self) -> int:
        """Peak bytes of one rank in host memory; 0 if nothing is offloaded."""
        return sum(self.host_peak.host.values())

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline: the operations on the compute stream and the streams of mesh axes and copies."""
        return timeline_of(self.rows, self.cluster)

    @cached_property
    def calls(self) -> float:
        """Seconds of a step in which the device waits for Python to call its next operation."""
        return self._of_all_calls(lambda call: call._waits_for_python)

    @cached_property
    def _waits_for_python(self) -> float:
        """The same of a call."""
        if not (call := self.cluster.device.call):
            return 0.0
        return timeline_of(self.rows, self.cluster, call).seconds - self.timeline.seconds

    @cached_property
    def time(self) -> StepTime:
        """The seconds of the step, by kind of work; what the device waits for Python is computation."""

        def of_all(of: Callable[[Row], bool]) -> float:
            return self._of_all_calls(lambda call: sum(row.seconds for row in call.rows if of(row)))

        optimizer = sum(row.seconds for row in self.rows if row.kind == "optimizer")
        compute = of_all(lambda row: not row.stream and row.kind != "optimizer") + self.calls + self.additions
        exposed = self._of_all_calls(lambda call: max(0.0, call.timeline.exposed))
        return StepTime(compute, optimizer, of_all(lambda row: bool(row.stream)), exposed)

    @property
    def additions(self) -> float:
        """Seconds of a step in which reduced gradients are added to those of the calls before, outside of ``rows``."""
        calls, last = self.plan.calls, self.rows[-1]
        if calls == 1 or self.earlier is not None:
            return 0.0
        on_device, on_host = (memory.get("gradients", 0) for memory in (last.memory, last.host))
        return seconds_of_calls(self.cluster.device, calls, on_device, on_host)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The collectives, and the copies between host and device, in the order in which they are awaited; of the last
        call of a step."""
        return tuple(transfers_of(self.rows, self.timeline))

    @checked(measured=_TIMES, limit=WHOLE)
    def transfer_table(self, measured: Mapping[tuple[str, str], float] | None = None, limit: int = 20) -> str:
        """The ``limit`` transfers of which most is exposed, as text: what each takes, slows and is waited for.

        Args:
            measured: the seconds that were waited for each, ``times`` of a :class:`shardgraph.WaitTracker`.
            limit: how many.

        Raises:
            ShardGraphError: another program was measured.
        """
        return table_of(self.transfers, measured, limit)

    @property
    def unpriced(self) -> dict[str, int]:
        """Operations without a formula, which are priced by their bytes, and how often each occurs."""
        return dict(Counter(row.operation for row in self.rows if not row.known))

    def symbolic(self) -> Any:
        """The costs as sympy expressions in batch size, sequence length and mesh sizes, of one call; see
        :class:`shardgraph.search.symbolic.Symbolic`.

        Raises:
            NotSizedError: the model runs different operations at other sizes.
            ShardGraphError: this is the analysis of a compiled program, whose sizes are fixed.
        """
        return self._other_sizes.symbolic

    @checked(memory=BYTES)
    def max_batch(self, memory: int | str | None = None) -> int:
        """The largest batch of one rank, in rows, whose peak is within ``memory``, such as ``"80GiB"``.

        The default is the device's memory. What forward itself raises at, or has no embeddings of, does not fit.

        Raises:
            NotSizedError, ShardGraphError: as :meth:`symbolic`; or not even one row fits.
        """
        return self._largest("batch", memory)

    @checked(memory=BYTES)
    def max_sequence(self, memory: int | str | None = None) -> int:
        """The longest sequence whose peak is within ``memory``, with the present batch; raises as :meth:`max_batch`."""
        return self._largest("sequence", memory)

    def _largest(self, size: str, memory: int | str | None) -> int:
        budget = self.cluster.device.memory if memory is None else parse_bytes(memory)
        return self._other_sizes.largest(size, budget)

    @property
    def _other_sizes(self) -> OtherSizes:
        if self.other_sizes is None:
            raise ShardGraphError(
                "this is the analysis of a compiled program, whose sizes are fixed: shardgraph.analyze(model, ...) "
                "returns one that can predict other sizes"
            )
        return self.other_sizes

    def by_module(self) -> ModuleCosts:
        """FLOPs, bytes moved, seconds of computation and bytes sent of every module, by its name.

        The model itself is ``""``. A node counts for its module and for each module that contains it. It prints as a
        table.
        """
        return ModuleCosts.of(self.rows)

    @checked(limit=WHOLE | NONE)
    def table(self, limit: int | None = 20) -> str:
        """The ``limit`` slowest operations, all if None, and the totals, as text."""
        return operation_table(self.rows, limit)

    def to_records(self) -> list[dict[str, Any]]:
        """Every node as a dictionary."""
        return [asdict(row) | {"live": row.live} for row in self.rows]

    def to_json(self) -> str:
        """Totals and every node, as JSON."""
        return json.dumps({"summary": self.summary(), "nodes": self.to_records()}, indent=1)

    def to_dataframe(self) -> Any:
        """Every node as a row of a ``pandas.DataFrame``.

        Raises:
            ShardGraphError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ShardGraphError("to_dataframe needs pandas: pip install pandas, or use to_records()") from error
        return pandas.DataFrame(self.to_records())

    @checked(path=PATH)
    def save_trace(self, path: str | Path) -> Path:
        """Write the timeline as a file that ui.perfetto.dev and chrome://tracing open; returns its path."""
        Path(path).write_text(json.dumps(self.timeline.to_chrome_trace()), encoding="utf-8")
        return Path(path)

    def summary(self) -> dict[str, Any]:
        """The totals by name: bytes, seconds and FLOPs of one rank."""
        return {
            "plan": self.plan.name,
            "mesh": dict(self.plan.mesh),
            "cluster": self.cluster.name,
            "peak_memory": self.peak_memory,
            "peak_at": f"{self.peak.half} {self.peak.node}",
            "composition": dict(self.peak.memory),
            "host_memory": self.host_memory,
            "host_composition": dict(self.host_peak.host),
            "copies": {stream: self.timeline.busy(stream) for stream in COPIES},
            **self._totals(),
            "calls": self.calls,
            "unpriced": self.unpriced,
        }

    def __str__(self) -> str:
        time = self.time
        lines = [
            f"plan {self.plan.name} on {self.cluster.name}, one rank of {self.plan.world_size}",
            *([f"  {self.plan.division}"] if self.plan.batch else ()),
            f"  memory {format_bytes(self.peak_memory)} at {self.peak.node} ({self.peak.half}){self._excess}",
            "    " + _by_size(self.peak.memory),
            f"  step {format_seconds(time.total)}{self._between}: compute {format_seconds(time.compute)}, optimizer "
            f"{format_seconds(time.optimizer)}, communication {format_seconds(time.communication)} of which "
            f"{format_seconds(time.exposed)} exposed",
            f"  {self.flops / 1e9:,.1f} GFLOP" + (f", MFU {self.mfu:.1%}" if self.mfu is not None else "")
            + (f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens else ""),
        ]  # fmt: skip
        if self.host_memory:
            copies = ", ".join(f"{format_seconds(self.timeline.busy(each))} {each}" for each in COPIES)
            held = _by_size(self.host_peak.host)
            lines.append(f"  host memory {format_bytes(self.host_memory)}: {held}; copies {copies}")
        if self.calls >= _WORTH_TELLING * time.total:
            lines.append(
                f"  {format_seconds(self.calls)} of compute are waits for Python, which calls {len(self.rows):,} "
                "operations: more work in each, or backend='inductor', would hide them"
            )
        if self.unpriced:
            named = ", ".join(f"{name} x{count}" for name, count in self.unpriced.items())
            lines.append(f"  priced by bytes for want of a formula: {named}")
        return "\n".join(lines)


def _by_size(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {format_bytes(memory[kind])}" for kind in sorted(memory, key=lambda kind: -memory[kind]))


def analyze_program(
    program: Program,
    cluster: Cluster,
    *,
    optimizer: str = "adamw",
    fused: bool = False,
    other_sizes: OtherSizes | None = None,
) -> Analysis:
    """Analyse a training step of a lowered program; if it has no backward, its forward alone.

    ``optimizer`` is one of :mod:`shardgraph.cost_models.optimizers`. ``fused`` prices chains of pointwise operations as
    fused. ``other_sizes`` predicts other sizes of the model that the program was built from, if possible.

    Raises:
        ClusterError: the mesh does not fit the cluster, or the device has no rate for a dtype.
    """
    plan, device = program.plan, cluster.device
    cluster.check_mesh(plan.mesh)
    samples, tokens = (plan.data_size * plan.calls * count for count in batch_of(program))

    def analysed(backward: str, last: bool = True) -> Analysis:
        halves, on_cpu = program_halves(program, backward), device.is_cpu
        options: Any = {"granule": device.allocation, "workspaces": on_cpu, "gloo": on_cpu, "halves": halves}
        memory = program_memory(program, optimizer, **options)
        rows = [*rows_of(halves, memory, Prices(cluster, plan.mesh), fused)]
        if last:
            rows += update_rows(trained_shards(program.context, program.trained), optimizer, device, memory, plan)
        return Analysis(plan, cluster, optimizer, samples, tokens, tuple(rows), other_sizes)

    if program.backward is None or not plan.reduces_once:
        analysis = analysed("backward")
        return analysis if plan.calls == 1 else replace(analysis, rows=holding_gradients(analysis.rows))
    before = analysed("adding" if plan.calls > 2 else "local", last=False)
    of_call = replace(plan, batch=None)
    return replace(analysed("accumulate"), earlier=replace(before, plan=of_call))
