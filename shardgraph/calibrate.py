"""Measures the machine at hand: what a cluster file says of it, from timings of its own operations.

:func:`measure` times operations on every rank at once, since the ranks of one machine share its cores and its memory;
:func:`fit` turns the timings into the rates of a :class:`~shardgraph.cost_models.cluster.Cluster`; :func:`calibrate`
is both.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shardgraph.compiler import resolve_mesh
from shardgraph.cost_models.cluster import BYTE_KINDS, FLOP_KINDS, Cluster, Device, Link, Rate
from shardgraph.cost_models.cluster_files import host_memory
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.errors import ClusterError
from shardgraph.launch import launch
from shardgraph.progress import Progress
from shardgraph.sizes import format_seconds

aten = torch.ops.aten

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")

NOMINAL_LINK = Link(bandwidth=10e9, latency=20e-6)
"""The link of a machine with one rank, where nothing is sent and any link prices it the same."""

_TIMING = 1e-3  # seconds that one timing on a GPU lasts at least: many calls, to hide the cost of synchronizing
_QUANTILE = 0.25  # below the median: what else runs on the machine comes and goes, and only ever makes a time longer
_ROUNDS = (3, 200)  # the fewest and the most timings of an operation


@dataclass(frozen=True)
class Sample:
    """One operation: FLOPs or bytes of its ``work``, and the ``seconds`` that it took."""

    kind: str
    work: float
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """One collective: the bytes of a rank's input and output, and the ``seconds`` from start to wait."""

    operation: str
    given: int
    gotten: int
    seconds: float


@dataclass(frozen=True)
class Measurements:
    """What the ranks of a machine measured; ``memory`` is one rank's bytes, ``overlaps`` are parts from 0 to 1."""

    device: str
    ranks: int
    threads: int
    memory: int
    samples: tuple[Sample, ...]
    transfers: tuple[Transfer, ...]
    overlaps: tuple[float, ...]


def calibrate(
    nproc: int | None = None,
    dtypes: Sequence[str] = ("float32",),
    seconds: float = 40.0,
    progress: bool | None = None,
) -> Cluster:
    """The cluster that this machine is, measured on ``nproc`` ranks that all work at once.

    Args:
        nproc: number of ranks; by default one for each GPU, or 2 without.
        dtypes: dtypes to measure arithmetic in; memory traffic is measured in the first.
        seconds: about how long to measure, besides the start of the ranks. Each operation is timed a few times
            however short this is.
        progress: whether to show a progress line; None shows it on a terminal.

    Raises:
        ClusterError: a dtype is not a floating-point one, or this process is a rank of a run already.
    """
    return fit(measure(nproc, dtypes, seconds, progress))


def measure(
    nproc: int | None = None,
    dtypes: Sequence[str] = ("float32",),
    seconds: float = 40.0,
    progress: bool | None = None,
) -> Measurements:
    """The timings that :func:`calibrate` fits; arguments and errors are the same."""
    if dist.is_initialized() or "RANK" in os.environ:
        raise ClusterError("calibrate starts the ranks that it measures: call it from one process, without torchrun")
    for dtype in dtypes:
        found = getattr(torch, dtype, None)
        if not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise ClusterError(f"calibrate cannot measure dtype {dtype!r}: give floating-point ones, such as float32")
    memory = host_memory()  # before the ranks take any
    ranks = nproc or torch.cuda.device_count() or 2
    measured = launch(_measure_rank, ranks, args=(tuple(dtypes), seconds, memory // ranks, progress))
    return _merge(measured)


def fit(measured: Measurements) -> Cluster:
    """The cluster whose rates and link fit the timings best, by least squares of relative errors."""
    by_kind = _by_kind(measured.samples)
    link, efficiency = fit_link(measured.transfers, measured.ranks)
    on_cpu = measured.device.startswith("cpu")
    source = (
        f"measured by shardgraph calibrate on {measured.ranks} ranks at once, {measured.threads} CPU threads each, "
        f"torch {torch.__version__}, {platform.platform()}; peak is the best matmul measured"
    )
    device = Device(
        name=f"{measured.device} (measured)",
        memory=measured.memory,
        peak={
            kind.removeprefix("matmul/"): max(sample.work / sample.seconds for sample in samples)
            for kind, samples in by_kind.items()
            if kind.startswith("matmul/")
        },
        rates={kind: fit_rate(samples) for kind, samples in by_kind.items()},
        allocation=64 if on_cpu else 512,
        source=source,
    )
    return Cluster(
        name="measured",
        device=device,
        devices_per_node=measured.ranks,
        nodes=1,
        intra=link,
        overlap=statistics.median(measured.overlaps) if measured.overlaps else 1.0,
        efficiency=efficiency,
        source=source,
    )


def fit_rate(samples: Sequence[Sample]) -> Rate:
    """The rate that fits timings of one kind of work."""
    overhead, (per_unit,) = _solve(
        [1.0 for _ in samples], [[sample.work] for sample in samples], [sample.seconds for sample in samples]
    )
    return Rate(per_second=1 / per_unit, overhead=overhead)


def fit_link(transfers: Sequence[Transfer], ranks: int) -> tuple[Link, dict[str, float]]:
    """The link between ``ranks`` that fits timings of collectives, and the part of it that each operation attains.

    The link has the bandwidth of the operation that attains most.
    """
    if not transfers:
        return NOMINAL_LINK, {}
    operations = list(dict.fromkeys(transfer.operation for transfer in transfers))
    steps = [_predict(transfer, ranks, Link(inf, 1.0), {}) for transfer in transfers]
    sent = [_predict(transfer, ranks, Link(1.0, 0.0), {}) for transfer in transfers]
    latency, per_byte = _solve(
        steps,
        [[b if t.operation == op else 0.0 for op in operations] for t, b in zip(transfers, sent, strict=True)],
        [transfer.seconds for transfer in transfers],
    )
    best = min(per_byte)
    efficiency = {op: best / slope for op, slope in zip(operations, per_byte, strict=True)}
    return Link(bandwidth=1 / best, latency=latency), efficiency


def fit_table(measured: Measurements, cluster: Cluster) -> str:
    """What was fitted and how well: a line for each kind of work and each collective.

    ``error`` is the median of ``|fitted - measured| / measured``, over all sizes and over the larger half.
    """
    rows: list[tuple[str, ...]] = [("kind", "rate", "overhead", "error", "large", "sizes")]
    for kind, samples in _by_kind(measured.samples).items():
        rate = cluster.device.rates[kind]
        unit = "FLOP/s" if "/" in kind else "B/s"
        pairs = [(sample.seconds, rate.seconds(sample.work)) for sample in samples]
        rows.append(_row(kind, rate.per_second, unit, rate.overhead, pairs))
    for operation in cluster.efficiency:
        chosen = [transfer for transfer in measured.transfers if transfer.operation == operation]
        pairs = [
            (transfer.seconds, _predict(transfer, measured.ranks, cluster.intra, cluster.efficiency))
            for transfer in chosen
        ]
        bandwidth = cluster.intra.bandwidth * cluster.efficiency[operation]
        rows.append(_row(operation, bandwidth, "B/s", cluster.intra.latency, pairs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    ]
    return "\n".join([*lines, f"overlap of communication with computation: {cluster.overlap:.0%}"])


# -- fitting --------------------------------------------------------------------------------------------


def _solve(
    fixed: Sequence[float], work: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[float, list[float]]:
    """Coefficients of ``fixed`` (at least 0) and of the columns of ``work`` (above 0), by least squares.

    Errors are relative to the larger of the fit and what was seen. Relative to what was seen alone, being too low can
    cost at most 1 and being too high any number, so that a fit would be too low for most; relative to the fit alone,
    one operation that is slow for reasons of its own would outweigh all others.
    """
    columns, seen = np.column_stack([fixed, np.asarray(work)]), np.asarray(seconds)
    fitted = seen
    for _ in range(30):  # each time with the fit before
        larger = np.maximum(fitted, seen)
        solution = _nonnegative(columns / larger[:, None], seen / larger)
        fitted = columns @ solution
    return float(solution[0]), [float(value) for value in solution[1:]]


def _nonnegative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    # Columns differ by ten orders of magnitude: brought to one length, or the solver takes small ones for zero.
    lengths = np.linalg.norm(columns, axis=0)
    solution = np.linalg.lstsq(columns / lengths, values, rcond=None)[0] / lengths
    if solution[0] >= 0 and (solution[1:] > 0).all():
        return solution
    # A negative overhead or rate is noise. Without an overhead each rate is a mean of what was seen, so positive.
    return np.array([0.0, *(column @ values / (column @ column) for column in columns.T[1:])])


def _predict(transfer: Transfer, ranks: int, link: Link, efficiency: Mapping[str, float]) -> float:
    return collective_seconds(transfer.operation, transfer.given, transfer.gotten, ranks, link, efficiency)


def _by_kind(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    kinds: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work):
        kinds.setdefault(sample.kind, []).append(sample)
    flop_kinds, byte_kinds = [kind for kind in kinds if "/" in kind], [kind for kind in kinds if "/" not in kind]
    order = sorted(flop_kinds, key=lambda kind: FLOP_KINDS.index(kind.split("/")[0]))
    return {kind: kinds[kind] for kind in order + sorted(byte_kinds, key=BYTE_KINDS.index)}


def _row(kind: str, rate: float, unit: str, overhead: float, pairs: list[tuple[float, float]]) -> tuple[str, ...]:
    errors = [abs(fitted - seen) / seen for seen, fitted in pairs]
    return (
        kind,
        f"{rate / 1e9:.3g} G{unit}",
        format_seconds(overhead) if overhead else "0 s",
        f"{statistics.median(errors):.0%}",
        f"{statistics.median(errors[len(errors) // 2 :]):.0%}",
        str(len(errors)),
    )


def _merge(measured: Sequence[Measurements]) -> Measurements:
    """The mean of what the ranks measured; they timed the same operations in the same order."""
    first = measured[0]

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    return Measurements(
        first.device,
        first.ranks,
        first.threads,
        min(each.memory for each in measured),
        tuple(
            Sample(same[0].kind, same[0].work, mean(sample.seconds for sample in same))
            for same in zip(*(each.samples for each in measured), strict=True)
        ),
        tuple(
            Transfer(same[0].operation, same[0].given, same[0].gotten, mean(transfer.seconds for transfer in same))
            for same in zip(*(each.transfers for each in measured), strict=True)
        ),
        tuple(mean(same) for same in zip(*(each.overlaps for each in measured), strict=True)),
    )


# -- on a rank: timing ----------------------------------------------------------------------------------


def _measure_rank(dtypes: tuple[str, ...], seconds: float, memory: int, progress: bool | None) -> Measurements:
    ranks = dist.get_world_size()
    on_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    work = {f"{kind}/{dtype}": (_WORK[kind], dtype) for dtype in dtypes for kind in FLOP_KINDS}
    work |= {kind: (_WORK[kind], dtypes[0]) for kind in BYTE_KINDS}
    stages = len(work) + 2 * (ranks > 1)
    share = seconds / stages
    samples: list[Sample] = []
    transfers: list[Transfer] = []
    overlaps: list[float] = []
    with Progress("calibrate", stages, progress if dist.get_rank() == 0 else False) as show:
        for kind, (make, dtype) in work.items():
            show(kind)
            chosen = list(make(_Maker(device, getattr(torch, dtype))))
            times = _time_all([one.run for one in chosen], share, device)
            samples += [Sample(kind, one.work, taken / one.count) for one, taken in zip(chosen, times, strict=True)]
        if ranks > 1:
            group = resolve_mesh({"dp": ranks}, "fsdp").get_group().group_name  # type: ignore[union-attr]
            show("collectives")
            transfers = _time_collectives(group, ranks, share, device)
            show("overlap")
            overlaps = _time_overlap(group, ranks, share, device)
    if on_cuda:
        memory = torch.cuda.get_device_properties(device).total_memory
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    return Measurements(name, ranks, torch.get_num_threads(), memory, tuple(samples), tuple(transfers), tuple(overlaps))


def _time_all(runs: Sequence[Callable[[], object]], budget: float, device: torch.device) -> list[float]:
    """Typical seconds of each of ``runs``, timed in turn, round after round, for about ``budget`` seconds.

    Every rank does the same number of everything, as collectives need.
    """
    for run in runs:
        run()
    first = _slowest([_seconds(run, 1, device) for run in runs], device)
    # On a CPU each runs once, after others of its size, as in training: repeated, its inputs would be in the cache.
    counts = [min(100, ceil(_TIMING / taken)) if device.type == "cuda" else 1 for taken in first]
    one_round = sum(count * taken for count, taken in zip(counts, first, strict=True))
    rounds = min(max(int(budget / one_round) - 2, _ROUNDS[0]), _ROUNDS[1])  # two are done
    times = [[_seconds(run, count, device) for run, count in zip(runs, counts, strict=True)] for _ in range(rounds)]
    return [float(np.quantile(taken, _QUANTILE)) for taken in zip(*times, strict=True)]


def _seconds(run: Callable[[], object], count: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(times: list[float], device: torch.device) -> list[float]:
    """The largest of all ranks' times, one by one; also a meeting of the ranks before the timings that count."""
    shared = torch.tensor(times, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def _time_collectives(group: str, ranks: int, budget: float, device: torch.device) -> list[Transfer]:
    plain, runs = [], []
    for exponent in range(12, 25, 2):  # 4 KiB to 16 MiB in the larger of input and output
        for operation in COLLECTIVES:
            whole = 2**exponent // 4 // ranks * ranks
            given = whole // ranks if operation == "all_gather_into_tensor" else whole
            gotten = whole // ranks if operation == "reduce_scatter_tensor" else whole
            plain.append((operation, 4 * given, 4 * gotten))
            start = _starter(operation, torch.ones(given, device=device), group, ranks)
            runs.append(partial(_finish, start))
    times = _time_all(runs, budget, device)
    return [Transfer(*which, taken) for which, taken in zip(plain, times, strict=True)]


def _starter(operation: str, given: torch.Tensor, group: str, ranks: int) -> Callable[[], torch.Tensor]:
    collective = getattr(torch.ops._c10d_functional, operation)
    if operation == "all_gather_into_tensor":
        return lambda: collective(given, ranks, group)
    if operation == "reduce_scatter_tensor":
        return lambda: collective(given, "sum", ranks, group)
    return lambda: collective(given, "sum", group)


def _finish(start: Callable[[], torch.Tensor]) -> None:
    torch.ops._c10d_functional.wait_tensor(start())


def _time_overlap(group: str, ranks: int, budget: float, device: torch.device) -> list[float]:
    """What part of the shorter of a computation and a collective is hidden when both run at once."""
    x, weight = torch.ones(_rows(device, 256), 512, device=device), torch.ones(512, 512, device=device)

    def compute(count: int) -> None:
        for _ in range(count):
            x @ weight

    def both(start: Callable[[], torch.Tensor], count: int) -> None:
        pending = start()
        compute(count)
        torch.ops._c10d_functional.wait_tensor(pending)

    runs: list[Callable[[], object]] = []
    for exponent in range(18, 23):  # 1 to 16 MiB given by each rank
        start = _starter("all_gather_into_tensor", torch.ones(2**exponent, device=device), group, ranks)
        both(start, 1)  # what runs for the first time is slow
        sending, computing = _slowest(
            [_seconds(partial(_finish, start), 3, device), _seconds(partial(compute, 3), 1, device) / 3], device
        )
        count = max(1, round(sending / computing))  # about as long as the collective
        runs += [partial(compute, count), partial(_finish, start), partial(both, start, count)]
    times = iter(_time_all(runs, budget, device))
    return [
        min(max((computing + sending - together) / min(computing, sending), 0.0), 1.0)
        for computing, sending, together in zip(times, times, times, strict=True)
    ]


# -- on a rank: what is timed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """``count`` operations, each of ``work`` FLOPs or bytes."""

    work: float
    run: Callable[[], object]
    count: int = 1


@dataclass(frozen=True)
class _Maker:
    """Makes the inputs of operations on one device in one dtype."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def indices(self, count: int, below: int) -> torch.Tensor:
        return torch.randint(below, (count,), device=self.device)


def _rows(device: torch.device, rows: int) -> int:
    return rows if device.type == "cpu" else 8 * rows  # a GPU is not full before


def _counted(run: Callable[[], object]) -> _Work:
    with FlopCounterMode(display=False) as counter:
        run()
    return _Work(counter.get_total_flops(), run)


def _matmul(new: _Maker) -> Iterator[_Work]:
    """A linear layer's forward and the two products of its backward."""
    for rows, inner, outer in (
        (8, 64, 64),
        (128, 64, 64),
        (128, 256, 256),
        (512, 128, 512),
        (512, 512, 512),
        (512, 512, 2048),
        (2048, 512, 512),
        (1024, 1024, 2048),
    ):
        x, weight, bias = new(_rows(new.device, rows), inner), new(outer, inner), new(outer)
        grad = new(_rows(new.device, rows), outer)
        yield _counted(partial(torch.addmm, bias, x, weight.t()))
        yield _counted(partial(torch.mm, grad, weight))
        yield _counted(partial(torch.mm, grad.t(), x))


def _attention(new: _Maker) -> Iterator[_Work]:
    for batch, heads, length, width in (
        (1, 2, 32, 32),
        (4, 4, 64, 32),
        (4, 4, 128, 64),
        (2, 8, 256, 64),
        (1, 8, 512, 64),
    ):
        shape = (_rows(new.device, batch), heads, length, width)
        for causal in (False, True):
            query, key, value = (new(*shape).requires_grad_() for _ in range(3))
            attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
            out, inputs, grad = attend(), (query, key, value), new(*shape)
            # The formulas, not the counter: it has none for the CPU's kernel.
            yield _Work(sdpa_flop_count(shape, shape, shape), attend)
            yield _Work(
                sdpa_backward_flop_count(shape, shape, shape, shape),
                partial(torch.autograd.grad, out, inputs, grad, retain_graph=True),
            )


def _convolution(new: _Maker) -> Iterator[_Work]:
    for batch, inside, outside, size, kernel in (
        (1, 3, 8, 8, 3),
        (4, 3, 16, 32, 3),
        (8, 16, 32, 32, 3),
        (8, 64, 64, 16, 1),
        (8, 64, 64, 16, 3),
        (8, 128, 128, 14, 3),
    ):
        x, weight = new(_rows(new.device, batch), inside, size, size), new(outside, inside, kernel, kernel)
        settings: tuple[Any, ...] = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        grad = torch.ones_like(aten.convolution(x, weight, None, *settings))
        yield _counted(partial(aten.convolution, x, weight, None, *settings))
        yield _counted(partial(aten.convolution_backward, grad, x, weight, [0], *settings, [True, True, False]))


_SHAPES = ((4, 64), (64, 128), (128, 512), (512, 512), (512, 2048), (2048, 2048))  # 1 KiB to 16 MiB of float32


def _moving(operation: Callable[..., Any], *args: Any) -> _Work:
    """One operation by the bytes of its inputs and outputs, once each; its result is allocated each time."""
    return _Work(_bytes(args) + _bytes(operation(*args)), lambda: operation(*args))


def _bytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _pointwise(new: _Maker) -> Iterator[_Work]:
    for rows, width in _SHAPES:
        x, y = new(_rows(new.device, rows), width), new(_rows(new.device, rows), width)
        yield _moving(torch.add, x, y)
        yield _moving(torch.mul, x, y)
        yield _moving(torch.clone, x)
        heads = x.view(-1, 4, width // 4).transpose(0, 1)  # as attention brings its heads to the front
        yield _moving(partial(torch.clone, memory_format=torch.contiguous_format), heads)


def _transcendental(new: _Maker) -> Iterator[_Work]:
    for rows, width in _SHAPES[:-1]:
        x, grad = new(_rows(new.device, rows), width), new(_rows(new.device, rows), width)
        yield _moving(torch.exp, x)
        for forward, backward in ((aten.gelu, aten.gelu_backward), (aten.silu, aten.silu_backward)):
            yield _moving(forward, x)
            yield _moving(backward, grad, x)
        for forward, backward in (
            (aten._softmax, aten._softmax_backward_data),
            (aten._log_softmax, aten._log_softmax_backward_data),
        ):
            yield _moving(forward, x, -1, False)
            yield _moving(backward, grad, forward(x, -1, False), -1, new.dtype)


def _reduction(new: _Maker) -> Iterator[_Work]:
    # Without var: its CPU kernel is 20 times slower than all others, and models have layer norm instead.
    for rows, width in _SHAPES:
        x, grad = new(_rows(new.device, rows), width), new(_rows(new.device, rows), width)
        weight, bias = new(width), new(width)
        yield _moving(torch.sum, x)
        yield _moving(torch.sum, x, 0)  # the gradient of a bias
        yield _moving(torch.mean, x, -1)
        yield _moving(aten.native_layer_norm, x, [width], weight, bias, 1e-5)
        _, mean, rstd = aten.native_layer_norm(x, [width], weight, bias, 1e-5)
        yield _moving(aten.native_layer_norm_backward, grad, x, [width], mean, rstd, weight, bias, [True] * 3)


def _gather(new: _Maker) -> Iterator[_Work]:
    for rows, width, entries in ((8, 32, 64), (64, 128, 256), (256, 256, 1024), (512, 512, 2048), (1024, 1024, 4096)):
        rows = _rows(new.device, rows)
        table, chosen = new(entries, width), new.indices(rows, entries)
        yield _selecting(aten.embedding, table, chosen)
        yield _selecting(torch.index_select, table, 0, chosen)
        yield _moving(aten.embedding_dense_backward, new(rows, width), chosen, entries, -1, False)
        logits, target = new(rows, entries), new.indices(rows, entries)
        loss = (logits, target, None, 1, -100)
        yield _selecting(aten.nll_loss_forward, *loss)
        mean, total = aten.nll_loss_forward(*loss)
        yield _moving(aten.nll_loss_backward, mean, *loss, total)


def _selecting(operation: Callable[..., Any], *args: Any) -> _Work:
    """As :func:`_moving`, for what reads no more of its table than it writes: as programs are priced."""
    written = _bytes(operation(*args))
    return _Work(min(_bytes(args), 2 * written) + written, lambda: operation(*args))


def _optimizer(new: _Maker) -> Iterator[_Work]:
    """A step of AdamW: reads parameter, gradient and two moments, writes all but the gradient."""
    count = 8  # parameters, so that what a step costs besides them is shared as in a model
    for size in (64, 4096, 32768, 262144, 1048576):
        parameters = [new(_rows(new.device, size)).requires_grad_() for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        yield _Work(7 * parameters[0].nbytes, torch.optim.AdamW(parameters).step, count)


_WORK: dict[str, Callable[[_Maker], Iterator[_Work]]] = {
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
    "pointwise": _pointwise,
    "transcendental": _transcendental,
    "reduction": _reduction,
    "gather": _gather,
    "optimizer": _optimizer,
}
