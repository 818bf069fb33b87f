"""From timings to rates: least squares of relative errors."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch
from scipy.optimize import nnls

from shardgraph.calibration.timings import Measurements, Sample, Transfer
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.device import BYTE_KINDS, FLOP_KINDS, VIEW, Device, Host, Link, Rate
from shardgraph.sizes import format_seconds

NOMINAL_LINK = Link(bandwidth=10e9, latency=20e-6)
"""The link of a machine with one rank, which sends nothing, so its values do not matter."""


def fit(measured: Measurements) -> Cluster:
    """The cluster whose rates and link fit the timings best, by least squares of relative errors."""
    by_kind = _by_kind(measured.samples)
    transfers, overlap = behind_computation(measured.transfers)
    link, efficiency = fit_link(transfers, measured.ranks)
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
        host=fit_host(measured.host),
    )
    return Cluster(
        name="measured",
        device=device,
        devices_per_node=measured.ranks,
        nodes=1,
        intra=link,
        overlap=overlap,
        efficiency=efficiency,
        source=source,
    )


def fit_rate(samples: Sequence[Sample]) -> Rate:
    """The rate that fits timings of one kind of work, in seconds and FLOPs or bytes per second."""
    seconds = [sample.seconds for sample in samples]
    if not any(sample.work for sample in samples):
        return Rate(1.0, statistics.median(seconds))
    overhead, per_unit, per_byte = _solve([[1.0, sample.work, sample.moved] for sample in samples], seconds)
    if not per_unit:  # noise
        overhead, per_byte, (per_unit,) = 0.0, 0.0, _solve([[sample.work] for sample in samples], seconds)
    return Rate(1 / per_unit, overhead, 1 / per_byte if per_byte else inf)


def fit_host(samples: Sequence[Sample]) -> Host | None:
    """The host that fits timings of copies from its memory and of updates on it; None without timings."""
    by_kind = _by_kind(samples)
    if not by_kind:
        return None
    copies = fit_rate(by_kind["copy"])
    return Host(Link(copies.per_second, copies.overhead), fit_rate(by_kind["optimizer"]))


def behind_computation(transfers: Sequence[Transfer]) -> tuple[list[Transfer], float]:
    """The collectives with their times when overlapped with a computation, and the fraction of them that is hidden.

    If both share the cores, both take longer: a collective then costs the time that it adds, and nothing is hidden.
    One ratio is used for all of them, since single timings are noisy and a maximum per timing would be too large for
    most.
    """
    ratio = max(statistics.median(t.added / t.seconds for t in transfers), 0.0) if transfers else 0.0
    return [replace(t, seconds=t.seconds * max(ratio, 1.0)) for t in transfers], max(1 - ratio, 0.0)


def fit_link(transfers: Sequence[Transfer], ranks: int) -> tuple[Link, dict[str, float]]:
    """The link between ``ranks`` that fits timings of collectives, and the efficiency of each operation on it.

    The link has the bandwidth of the fastest operation and the latency of the one with the least latency.
    """
    if not transfers:
        return NOMINAL_LINK, {}
    latencies: dict[str, float] = {}
    per_byte: dict[str, float] = {}
    for operation in dict.fromkeys(transfer.operation for transfer in transfers):
        chosen = [transfer for transfer in transfers if transfer.operation == operation]
        seconds = [transfer.seconds for transfer in chosen]
        steps = [_predict(transfer, ranks, Link(inf, 1.0), {}) for transfer in chosen]
        sent = [_predict(transfer, ranks, Link(1.0, 0.0), {}) for transfer in chosen]
        latency, slope = _solve(list(zip(steps, sent, strict=True)), seconds)
        if not slope:  # noise
            latency, (slope,) = 0.0, _solve([[nbytes] for nbytes in sent], seconds)
        latencies[operation], per_byte[operation] = latency, slope
    best = min(per_byte.values())
    efficiency = {operation: best / slope for operation, slope in per_byte.items()}
    return Link(1 / best, min(latencies.values()), latencies), efficiency


def fit_table(measured: Measurements, cluster: Cluster) -> str:
    """The fitted rates and their errors: a line for each kind of work and each collective.

    ``error`` is the median of ``|fitted - measured| / measured``, over all sizes and over the larger half.
    """
    rows: list[tuple[str, ...]] = [("kind", "rate", "overhead", "error", "large", "sizes")]
    for kind, samples in _by_kind(measured.samples).items():
        rate = cluster.device.rates[kind]
        unit = "FLOP/s" if "/" in kind else "B/s"
        pairs = [(sample.seconds, rate.seconds(sample.work, sample.moved)) for sample in samples]
        rows.append(_row(kind, rate.per_second, unit, rate.overhead, pairs))
    if (host := cluster.device.host) is not None:
        rates = {"copy": Rate(host.link.bandwidth, host.link.latency), "optimizer": host.optimizer}
        for kind, samples in _by_kind(measured.host).items():
            rate = rates[kind]
            pairs = [(sample.seconds, rate.seconds(sample.work)) for sample in samples]
            rows.append(_row(f"host/{kind}", rate.per_second, "B/s", rate.overhead, pairs))
    transfers, _ = behind_computation(measured.transfers)
    for operation in cluster.efficiency:
        chosen = [transfer for transfer in transfers if transfer.operation == operation]
        pairs = [
            (transfer.seconds, _predict(transfer, measured.ranks, cluster.intra, cluster.efficiency))
            for transfer in chosen
        ]
        bandwidth = cluster.intra.bandwidth * cluster.efficiency[operation]
        rows.append(_row(operation, bandwidth, "B/s", cluster.intra.latencies[operation], pairs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    ]
    return "\n".join([*lines, f"overlap of communication with computation: {cluster.overlap:.0%}"])


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


def _predict(transfer: Transfer, ranks: int, link: Link, efficiency: Mapping[str, float]) -> float:
    return collective_seconds(transfer.operation, transfer.given, transfer.gotten, ranks, link, efficiency)


def _by_kind(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    kinds: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work):
        kinds.setdefault(sample.kind, []).append(sample)
    flop_kinds, byte_kinds = [kind for kind in kinds if "/" in kind], [kind for kind in kinds if "/" not in kind]
    order = sorted(flop_kinds, key=lambda kind: FLOP_KINDS.index(kind.split("/")[0]))
    return {kind: kinds[kind] for kind in order + sorted(byte_kinds, key=(*BYTE_KINDS, VIEW, "copy").index)}


def _row(kind: str, rate: float, unit: str, overhead: float, pairs: list[tuple[float, float]]) -> tuple[str, ...]:
    errors = [abs(fitted - measured) / measured for measured, fitted in pairs]
    return (
        kind,
        f"{rate / 1e9:.3g} G{unit}",
        format_seconds(overhead) if overhead else "0 s",
        f"{statistics.median(errors):.0%}",
        f"{statistics.median(errors[len(errors) // 2 :]):.0%}",
        str(len(errors)),
    )
