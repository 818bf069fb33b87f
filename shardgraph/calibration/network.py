"""The network between the nodes of this run, measured once by its ranks, and remembered."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardgraph.calibration.collectives import time_collectives
from shardgraph.calibration.correction import shared_by
from shardgraph.calibration.files import named, write
from shardgraph.calibration.fitting import fit_network
from shardgraph.calibration.measuring import mean_of_ranks
from shardgraph.calibration.timing import of_all_ranks
from shardgraph.cost_models import detection
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Link
from shardgraph.errors import ClusterError
from shardgraph.progress import Progress
from shardgraph.runtime.device import current_device, group_device_type
from shardgraph.runtime.mesh import OVER_NODES, node_mesh
from shardgraph.runtime.nodes import nodes_of_run, ranks_per_node

_SECONDS = 3.0
_MEASURES = 2  # of measurements: another number if they are made otherwise
_ETHERNET = Link(bandwidth=1.1e9, latency=5e-5)
"""A guess for nodes whose network has not been measured and whose devices have no usual one: 10 Gbit/s Ethernet."""

_known: dict[Path, Link] = {}  # in this process


def on_nodes_of_run(machine: Cluster) -> Cluster:
    """This machine as each of the nodes of this run, and the network between them: as measured, else the usual one of
    its devices."""
    nodes, ranks = nodes_of_run(), ranks_per_node()
    if nodes == 1:
        return machine
    inter = _here(network_file()) or machine.inter or _ETHERNET
    return replace(shared_by(ranks, machine), devices_per_node=ranks, nodes=nodes, inter=inter)


def measure_network(progress: bool | None = None) -> None:
    """Measure the network between the nodes of this run, for some seconds, unless one of the ranks knows it already.

    All ranks must call it; those of one node have nothing to measure. A node's first rank keeps what was measured in
    :func:`network_file`: delete that file to measure again, or pass that of a longer ``shardgraph calibrate``, started
    on all nodes, as ``cluster``.
    """
    if nodes_of_run() == 1 or dist.get_backend() == "fake":
        return
    path = network_file()
    # Always, since some of the ranks may have joined the run later.
    link = next((link for link in of_all_ranks(_here(path)) if link is not None), None)
    if link is None:
        link = _measured(progress)
    _known[path] = link
    if dist.get_rank() % ranks_per_node() == 0 and _remembered(path) is None:
        _remember(link, path)


def network_file() -> Path:
    """Where it is kept: one file for each kind of node, number of nodes and ranks, backend and release of PyTorch."""
    nodes = nodes_of_run(), ranks_per_node(), detection.cpu_name(), _interfaces()
    return named("network", *nodes, _backend(), torch.__version__, platform.python_version(), _MEASURES)


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_initialized() else ""


def _interfaces() -> list[str]:
    """The speeds of this machine's network interfaces, as Linux tells them: another network has others."""
    found = []
    for pattern in ("class/net/*/speed", "class/infiniband/*/ports/*/rate"):
        for path in sorted(Path("/sys").glob(pattern)):
            with suppress(OSError):  # an interface that is down
                found.append(f"{path.parts[4]} {path.read_text(encoding='utf-8').strip()}")
    return found


def _measured(progress: bool | None) -> Link:
    nodes, first = nodes_of_run(), dist.get_rank() == 0
    with Progress("measure the network between nodes, once", 1, progress if first else False) as show:
        show("")
        group, device = node_mesh().get_group(OVER_NODES).group_name, current_device(group_device_type())
        transfers = time_collectives(group, nodes, _SECONDS, device)
    by_rank = of_all_ranks(tuple(transfers))
    return fit_network(mean_of_ranks(by_rank, "seconds", "added", "awaited"), nodes)


def _here(path: Path) -> Link | None:
    """The link as this rank knows it, if it does."""
    return _known.get(path) or _remembered(path)


def _remembered(path: Path) -> Link | None:
    with suppress(ClusterError):  # none yet
        return Cluster.load(path).inter
    return None


def _remember(link: Link, path: Path) -> None:
    """In a cluster file, of whose other prices none is used."""
    here = replace(Cluster.detect(), devices_per_node=ranks_per_node(), nodes=nodes_of_run(), inter=link)
    write(path, here.to_yaml())
