"""From timings to rates: least squares of relative errors."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch
from scipy.optimize import nnls

from shardgraph.calibration.timings import Measurements, Sample, Transfer
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.device import BYTE_KINDS, FLOP_KINDS, VIEW, Device, Host, Link, Rate
from shardgraph.cost_models.group import BETWEEN_NODES, Group
from shardgraph.sizes import aligned, format_seconds

NOMINAL_LINK = Link(bandwidth=10e9, latency=20e-6)
"""The link of a machine with one rank, which sends nothing, so its values do not matter."""

_LARGE, _FEW = 2**20, 4
"""Bytes, and FLOPs per byte."""


def fit(measured: Measurements) -> Cluster:
    """The cluster whose rates and link fit the timings best, by least squares of relative errors."""
    by_kind = _by_kind(measured.samples)
    transfers, overlap = behind_computation(measured.transfers)
    link, efficiency = fit_link(transfers, measured.ranks)
    inter = fit_network(measured.between, measured.nodes) if measured.nodes > 1 else None
    ranks = f"{measured.ranks} ranks" if inter is None else f"{measured.nodes} nodes of {measured.ranks} ranks"
    source = (
        f"measured by shardgraph calibrate on {ranks} at once, {measured.threads} CPU threads each, "
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
        allocation=64 if measured.device.startswith("cpu") else 512,
        source=source,
        host=fit_host(measured.host),
    )
    doubt = _doubt(measured.samples, device)
    # A GPU waits, and not the thread that calls it.
    sync = fit_sync(measured.transfers or measured.between) if device.is_cpu else 0.0
    nodes = measured.nodes, link, inter
    return Cluster("measured", device, measured.ranks, *nodes, overlap, efficiency, doubt, source, sync)


def fit_network(between: Sequence[Transfer], nodes: int) -> Link:
    """The link between ``nodes`` nodes, a device's share of it, that fits timings of collectives between them.

    What is hidden is told by the sums of all timings, of which large collectives are most: small ones wait for threads
    that a computation keeps from waking, more or less by chance.
    """
    added, alone = sum(each.added for each in between), sum(each.seconds for each in between)
    link, efficiency = fit_link(between, nodes)
    return replace(link, efficiency=efficiency, overlap=min(max(1 - added / alone, 0.0), 1.0))


def _doubt(samples: Sequence[Sample], device: Device) -> float:
    """How far off the sum of all operations would be if every one of them erred to the same side."""
    errors = [abs(_fitted(sample, device) - sample.seconds) for sample in samples]
    return sum(errors) / sum(sample.seconds for sample in samples) if samples else 0.0


def _fitted(sample: Sample, device: Device) -> float:
    return device.rates[sample.kind].seconds(sample.work, sample.moved)


def fit_rate(samples: Sequence[Sample]) -> Rate:
    """The rate that fits timings of one kind of work, in seconds and FLOPs or bytes per second."""
    seconds = [sample.seconds for sample in samples]
    if not any(sample.work for sample in samples):
        return Rate(1.0, statistics.median(seconds))
    bound = [sample for sample in samples if _is_bound_by_memory(sample)]
    if bound and len(bound) < len(samples):
        rate = fit_rate([sample for sample in samples if not _is_bound_by_memory(sample)])
        moved = statistics.median((sample.seconds - rate.overhead) / sample.moved for sample in bound)
        return replace(rate, bandwidth=1 / moved if moved > 0 else inf)
    overhead, per_unit, per_byte = _solve([[1.0, sample.work, sample.moved] for sample in samples], seconds)
    if not per_unit:  # noise
        overhead, per_byte, (per_unit,) = 0.0, 0.0, _solve([[sample.work] for sample in samples], seconds)
    return Rate(1 / per_unit, overhead, 1 / per_byte if per_byte else inf)


def _is_bound_by_memory(sample: Sample) -> bool:
    """Whether it moves more than inner caches hold, and computes so little with it that no device takes longer to."""
    return sample.moved >= _LARGE and sample.work <= _FEW * sample.moved


def fit_host(samples: Sequence[Sample]) -> Host | None:
    """The host that fits timings of copies from its memory and of updates on it; None without timings."""
    if not samples:
        return None
    by_kind = _by_kind(samples)
    copies = fit_rate(by_kind["copy"])
    return Host(Link(copies.per_second, copies.overhead), fit_rate(by_kind["optimizer"]))


def behind_computation(transfers: Sequence[Transfer]) -> tuple[list[Transfer], float]:
    """The collectives with their times when overlapped with a computation, and the fraction of them that is hidden.

    If both share the cores, both take longer: a collective then costs the time that it adds, and nothing is hidden.
    One fraction is used for all of them, since single timings are noisy and a maximum per timing would be too large for
    most. Of operations that add more of their time than others do, as gloo's gather does, the time is longer by as
    much, the more so the less is hidden: what they add is what a step sees of them.
    """
    ratio = max(statistics.median(t.added / t.seconds for t in transfers), 0.0) if transfers else 0.0
    overlap = max(1 - ratio, 0.0)
    added = {
        operation: max(sum(t.added for t in same) / sum(t.seconds for t in same), 0.0)
        for operation, same in _by_operation(transfers).items()
    }
    usual = statistics.median(added.values()) if added else 0.0

    def longer(operation: str) -> float:
        return 1 + (1 - overlap) * (added[operation] / usual - 1) if usual else 1.0

    return [replace(t, seconds=t.seconds * max(ratio, 1.0) * longer(t.operation)) for t in transfers], overlap


def fit_link(transfers: Sequence[Transfer], ranks: int) -> tuple[Link, dict[str, float]]:
    """The link between ``ranks`` that fits timings of collectives, and the efficiency of each operation on it.

    The link has the bandwidth of the fastest operation and the latency of the one with the least latency.
    """
    if not transfers:
        return NOMINAL_LINK, {}
    latencies: dict[str, float] = {}
    per_byte: dict[str, float] = {}
    for operation, same in _by_operation(transfers).items():
        seconds = [transfer.seconds for transfer in same]
        steps = [_predict(transfer, ranks, Link(inf, 1.0)) for transfer in same]
        sent = [_predict(transfer, ranks, Link(1.0, 0.0)) for transfer in same]
        latency, slope = _solve(list(zip(steps, sent, strict=True)), seconds)
        if not slope:  # noise
            latency, (slope,) = 0.0, _solve([[nbytes] for nbytes in sent], seconds)
        latencies[operation], per_byte[operation] = latency, slope
    best = min(per_byte.values())
    efficiency = {operation: best / slope for operation, slope in per_byte.items()}
    return Link(1 / best, min(latencies.values()), latencies), efficiency


def fit_sync(transfers: Sequence[Transfer]) -> float:
    """Seconds longer that a rank waits for a collective after a computation than after another collective."""
    return max(statistics.median(t.awaited - t.seconds for t in transfers), 0.0) if transfers else 0.0


def fit_table(measured: Measurements, cluster: Cluster) -> str:
    """The fitted rates and their errors: a line for each kind of work and each collective.

    ``error`` is the median of ``|fitted - measured| / measured``, over all sizes and over the larger half.
    """
    rows = [("kind", "rate", "overhead", "error", "large", "sizes")]

    def add(kind: str, rate: Rate, unit: str, pairs: Sequence[tuple[float, float]]) -> None:
        errors = [abs(fitted - measured) / measured for measured, fitted in pairs]
        error, large = statistics.median(errors), statistics.median(errors[len(errors) // 2 :])
        overhead = format_seconds(rate.overhead) if rate.overhead else "0 s"
        per_second = f"{rate.per_second / 1e9:.3g} G{unit}" if unit else ""
        rows.append((kind, per_second, overhead, f"{error:.0%}", f"{large:.0%}", str(len(errors))))

    fitted = dict(cluster.device.rates)
    samples_of = _by_kind(measured.samples)
    if (host := cluster.device.host) is not None:
        fitted |= {"host/copy": Rate(host.link.bandwidth, host.link.latency), "host/optimizer": host.optimizer}
        samples_of |= {f"host/{kind}": samples for kind, samples in _by_kind(measured.host).items()}
    for kind, samples in samples_of.items():
        rate = fitted[kind]
        unit = "" if kind == VIEW else "FLOP/s" if kind.split("/")[0] in FLOP_KINDS else "B/s"  # a view moves nothing
        add(kind, rate, unit, [(sample.seconds, rate.seconds(sample.work, sample.moved)) for sample in samples])
    overlaps = []
    for timings, ranks, link, where in _links(measured, cluster):
        for operation, transfers in _by_operation(timings).items():
            rate = Rate(link.bandwidth * link.efficiency[operation], link.latencies[operation])
            add(f"{operation}{where}", rate, "B/s", [(t.seconds, _predict(t, ranks, link)) for t in transfers])
        overlaps.append(f"overlap of communication{where} with computation: {link.overlap:.0%}")
    sync = f"longer where computation waits for communication: {format_seconds(cluster.sync)}"
    return "\n".join([*aligned(rows), *overlaps, sync])


def _links(measured: Measurements, cluster: Cluster) -> Iterator[tuple[Sequence[Transfer], int, Link, str]]:
    """What the timings on each link were taken for, by how many ranks, and the link that was fitted to them."""
    if measured.transfers or measured.nodes == 1:
        intra = replace(cluster.intra, efficiency=cluster.efficiency, overlap=cluster.overlap)
        yield behind_computation(measured.transfers)[0], measured.ranks, intra, ""
    if cluster.inter is not None:
        yield measured.between, measured.nodes, cluster.inter, f" {BETWEEN_NODES}"


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative coefficients of the columns of ``rows`` that fit ``seconds`` by iterated least squares.

    Errors are relative to the larger of the fitted and the measured value. Relative to the measured value alone, a fit
    that is too low costs at most 1 and one that is too high any number, so fits would be too low for most samples;
    relative to the fitted value alone, one unusually slow operation would outweigh all others.
    """
    columns, measured = np.asarray(rows), np.asarray(seconds)
    # Columns differ by ten orders of magnitude: unscaled, the solver would treat small ones as zero.
    sizes = np.maximum(columns.max(axis=0), np.finfo(float).tiny)
    fitted, solution = measured, np.zeros(len(sizes))
    for _ in range(30):  # each iteration uses the previous fit
        larger = np.maximum(fitted, measured)
        scale = np.linalg.norm(columns / sizes / larger[:, None], axis=0)
        scale[scale == 0] = 1.0
        solution = nnls(columns / sizes / larger[:, None] / scale, measured / larger)[0] / scale / sizes
        fitted = columns @ solution
    return [float(value) for value in solution]


def _predict(transfer: Transfer, ranks: int, link: Link) -> float:
    return collective_seconds(transfer.operation, transfer.operand, transfer.result, Group.of_node(ranks, link), {})


def _by_kind(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    kinds: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work):
        kinds.setdefault(sample.kind, []).append(sample)
    order = (*FLOP_KINDS, *BYTE_KINDS, VIEW, "copy")
    return dict(sorted(kinds.items(), key=lambda item: order.index(item[0].split("/")[0])))


def _by_operation(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    operations: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        operations.setdefault(transfer.operation, []).append(transfer)
    return operations
