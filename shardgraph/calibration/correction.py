"""What measured steps teach about a machine's prices: factors of computation and of communication, remembered."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from scipy.optimize import lsq_linear

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Link, Rate

_NOISE, _PRIOR = 0.05, 0.5
"""How far a measured step is off by chance, and how far a factor is from 1 before anything is measured."""

_FACTORS = (0.1, 10.0)
_SCHEMA = 1


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

    def after(self, earlier: Correction) -> Correction:
        """The correction of prices that ``earlier`` had corrected, as one of the original prices."""
        return Correction(self.computation * earlier.computation, self.communication * earlier.communication)

    def of(self, cluster: Cluster) -> Cluster:
        """The cluster with its prices corrected."""
        device = cluster.device
        rates = {kind: _slower_rate(rate, self.computation) for kind, rate in device.rates.items()}
        inter = cluster.inter and _slower_link(cluster.inter, self.communication)
        intra = _slower_link(cluster.intra, self.communication)
        return replace(cluster, device=replace(device, rates=rates), intra=intra, inter=inter)


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


def correction_of(cluster: Cluster, folder: Path) -> Correction:
    """The correction of these prices that is kept in ``folder``; none if there is no such file that can be read."""
    try:
        data = yaml.safe_load(_file(cluster, folder).read_text(encoding="utf-8"))
        factors = {name: float(data[name]) for name in ("computation", "communication")}
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, ValueError):
        return Correction()
    usable = data.get("schema") == _SCHEMA and all(factor > 0 for factor in factors.values())
    return Correction(**factors) if usable else Correction()


def keep(correction: Correction, cluster: Cluster, folder: Path) -> None:
    """Write the correction of these prices to ``folder``, in place of an earlier one."""
    data = {"schema": _SCHEMA, "of": f"{cluster.name}, {cluster.device.name}", **asdict(correction)}
    write(_file(cluster, folder), yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def write(path: Path, content: str) -> None:
    """Write a file whole, whoever else does so at the same time; where none can be written, a warning says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(content, encoding="utf-8")
        written.replace(path)
    except OSError as error:
        warnings.warn(f"the rates of this machine cannot be kept in {path}: {error.strerror}", stacklevel=3)


def _file(cluster: Cluster, folder: Path) -> Path:
    """A file for these prices alone: those of another measurement, or release of PyTorch, have not been corrected."""
    prices: Mapping[str, object] = {
        "rates": cluster.device.rates,
        "links": (cluster.intra, cluster.inter),
        "efficiency": cluster.efficiency,
        "overlap": cluster.overlap,
        "torch": torch.__version__,
    }
    return folder / f"correction-{hashlib.sha256(repr(prices).encode()).hexdigest()[:16]}.yaml"


def _slower_rate(rate: Rate, factor: float) -> Rate:
    return Rate(rate.per_second / factor, rate.overhead * factor, rate.moved_per_second / factor)


def _slower_link(link: Link, factor: float) -> Link:
    latencies = {operation: seconds * factor for operation, seconds in link.latencies.items()}
    return Link(link.bandwidth / factor, link.latency * factor, latencies)
