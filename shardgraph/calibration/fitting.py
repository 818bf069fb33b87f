"""From timings to rates: least squares of relative errors."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np
import torch

from shardgraph.calibration.timings import Measurements, Sample, Transfer
from shardgraph.cost_models.cluster import BYTE_KINDS, FLOP_KINDS, Cluster, Device, Link, Rate
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.sizes import format_seconds

NOMINAL_LINK = Link(bandwidth=10e9, latency=20e-6)
"""The link of a machine with one rank, where nothing is sent and any link prices it the same."""


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
