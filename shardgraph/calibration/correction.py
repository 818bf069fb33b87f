"""What measured steps teach about a machine's prices: factors of computation and of communication, remembered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from scipy.optimize import lsq_linear

from shardgraph.calibration.files import named, write
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Link, Rate

_NOISE, _PRIOR = 0.05, 0.5
"""How far a measured step is off by chance, and how far a factor is from 1 before anything is measured."""

_FACTORS = (0.1, 10.0)
_SCHEMA = 2
_JOBS = 16  # that are remembered, the latest ones


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was measured, beside its predicted seconds of computation and of exposed communication."""

    computation: float
    communication: float
    measured: float


@dataclass(frozen=True)
class Correction:
    """How many times the seconds that a machine's prices say computation and communication take on it."""

    computation: float = 1.0
    communication: float = 1.0

    def undone(self, step: MeasuredStep) -> MeasuredStep:
        """A step whose prediction was made with corrected prices, as the original prices predict it."""
        computation, communication = step.computation / self.computation, step.communication / self.communication
        return MeasuredStep(computation, communication, step.measured)

    def of(self, cluster: Cluster) -> Cluster:
        """The cluster with its prices corrected."""
        device = cluster.device
        rates = {kind: _slower_rate(rate, self.computation) for kind, rate in device.rates.items()}
        inter = cluster.inter and _slower_link(cluster.inter, self.communication)
        intra = _slower_link(cluster.intra, self.communication)
        sync = cluster.sync * self.communication
        return replace(cluster, device=replace(device, rates=rates), intra=intra, inter=inter, sync=sync)


def shared_by(ranks: int, machine: Cluster) -> Cluster:
    """A machine with at least so many devices; more ranks of a CPU than it has cores share these and the memory, so
    that all takes longer."""
    if ranks <= machine.devices_per_node:
        return machine
    if machine.device.is_cpu:
        turns = ranks / machine.devices_per_node
        machine = Correction(turns, turns).of(machine)
        machine = replace(machine, device=replace(machine.device, memory=int(machine.device.memory / turns)))
    return replace(machine, devices_per_node=ranks)


def fitted(steps: Sequence[MeasuredStep]) -> Correction:
    """The factors with which predictions are nearest to measured steps, by least squares of relative errors.

    What steps do not tell apart, since all of them communicate alike, stays near 1: the factors have a prior there.
    """
    measured = np.array([step.measured for step in steps])
    parts = np.array([[step.computation, step.communication] for step in steps]) / measured[:, None]
    rows = np.vstack([parts / _NOISE, np.eye(2) / _PRIOR])
    wanted = np.concatenate([np.ones(len(steps)) / _NOISE, np.ones(2) / _PRIOR])
    computation, communication = lsq_linear(rows, wanted, bounds=_FACTORS).x
    return Correction(float(computation), float(communication))


def correction_of(cluster: Cluster) -> Correction | None:
    """The correction of these prices by the jobs that are remembered; None if there is no file that can be read."""
    steps = [step for job in _jobs(cluster) for step in job]
    return fitted(steps) if steps else None


def remember(steps: Sequence[MeasuredStep], cluster: Cluster) -> None:
    """Add the steps of a job, predicted with these prices, to those that are remembered.

    All jobs there correct the prices together. Were each to correct what the one before it had left, the factors would
    drift by what is peculiar to models, since a job tells computation and communication apart but roughly.
    """
    jobs = [*_jobs(cluster), steps][-_JOBS:]
    written = [[[float(f"{value:.4g}") for value in vars(step).values()] for step in job] for job in jobs]
    data = {"schema": _SCHEMA, "of": f"{cluster.name}, {cluster.device.name}", "jobs": written}
    write(_file(cluster), yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _jobs(cluster: Cluster) -> list[list[MeasuredStep]]:
    try:
        data = yaml.safe_load(_file(cluster).read_text(encoding="utf-8"))
        jobs = [[MeasuredStep(*map(float, step)) for step in job] for job in data["jobs"]]
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, ValueError):
        return []
    usable = data.get("schema") == _SCHEMA and all(_is_possible(step) for job in jobs for step in job)
    return jobs if usable else []


def _is_possible(step: MeasuredStep) -> bool:
    values = vars(step).values()
    return all(math.isfinite(value) and value >= 0 for value in values) and step.measured > 0


def _file(cluster: Cluster) -> Path:
    """A file for these prices alone: those of another measurement, or release of PyTorch, have not been corrected."""
    prices: Mapping[str, object] = {
        **({"nodes": (cluster.nodes, cluster.devices_per_node)} if cluster.nodes > 1 else {}),
        "rates": cluster.device.rates,
        "links": (cluster.intra, cluster.inter),
        "efficiency": cluster.efficiency,
        "overlap": cluster.overlap,
        "sync": cluster.sync,
        "torch": torch.__version__,
    }
    return named("correction", repr(prices))


def _slower_rate(rate: Rate, factor: float) -> Rate:
    rates = (each / factor for each in (rate.moved_per_second, rate.bandwidth))
    return Rate(rate.per_second / factor, rate.overhead * factor, *rates)


def _slower_link(link: Link, factor: float) -> Link:
    latencies = {operation: seconds * factor for operation, seconds in link.latencies.items()}
    return replace(link, bandwidth=link.bandwidth / factor, latency=link.latency * factor, latencies=latencies)
