"""What ranks of one machine do that take themselves for those of two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.calibration import learn, network, this_machine
from shardgraph.calibration.files import write
from shardgraph.calibration.remembered import measured_file
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Link
from shardgraph.errors import ClusterError
from shardgraph.search.machine import machine_for
from tests.standing import environment
from tests.test_this_machine import steps


@contextmanager
def two_nodes(cache: str) -> Iterator[None]:
    """The launcher of this run says that half of its ranks are on this node; prices are remembered in ``cache``, those
    of the CPU already."""
    with environment():
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // 2)
        os.environ["XDG_CACHE_HOME"] = cache
        write(measured_file(), Cluster.detect().to_yaml())  # nothing but the network is measured
        network._known.clear()
        yield
        network._known.clear()


@contextmanager
def one_node(cache: str) -> Iterator[None]:
    """All ranks of this run are on this node."""
    with environment():
        os.environ["XDG_CACHE_HOME"] = cache
        yield


def calibrated(cache: str) -> Cluster:
    with two_nodes(cache):
        return shardgraph.calibration.calibrate(seconds=1.0)


def refused(cache: str) -> str:
    with two_nodes(cache), pytest.raises(ClusterError) as error:
        shardgraph.calibration.calibrate(2)
    return str(error.value)


def planned(cache: str) -> tuple[str, Cluster, Cluster | None, list[str]]:
    """The automatic plan's name, the cluster before and after it was found, and the files that are remembered."""
    patch = pytest.MonkeyPatch()
    with two_nodes(cache), patch.context() as patched:
        patched.setattr(network, "_SECONDS", 0.1)
        before = this_machine()
        torch.manual_seed(0)
        model, x = nn.Linear(64, 64), torch.ones(4, 64)
        sharded = shardgraph.compile(model, "auto", example_inputs=(x,))
        after = machine_for(None, dist.get_world_size())
        files = sorted(path.name.partition("-")[0] for path in (Path(cache) / "shardgraph").iterdir())
        return sharded.plan.name, before, after, files


def learned(cache: str) -> list[Cluster]:
    """This machine in a run over two nodes: before anything is learned, after a job in one node, and after one over
    both nodes; then in a run in one node after the former, and after both."""
    own = str(Path(cache) / f"rank {dist.get_rank()}")
    with two_nodes(own):
        network._remember(Link(1e9, 1e-4), network.network_file())
        before = this_machine()
    with one_node(own):
        learn(steps(2.0, 1.0))
        alone = this_machine()
    with two_nodes(own):
        inside = this_machine()
        learn(steps(1.0, 3.0))
        after = this_machine()
    with one_node(own):
        return [before, inside, after, alone, this_machine()]


def measured_once(cache: str) -> tuple[int, Link | None, Link | None]:
    """How often the network was measured where the first rank alone remembers it, and what two ranks then know."""
    own = Path(cache) / f"rank {dist.get_rank()}"
    measured: list[Any] = []
    fast, slow = Link(1e9, 1e-4, overlap=0.5), Link(1e6, 1e-4)
    patch = pytest.MonkeyPatch()
    with two_nodes(str(own)), patch.context() as patched:
        patched.setattr(network, "_measured", lambda progress: measured.append(1) or slow)
        if dist.get_rank() == 0:
            network._remember(fast, network.network_file())
        dist.barrier()
        for _ in range(2):
            network.measure_network()
        network._known.clear()  # as a new process
        return len(measured), this_machine().inter, network._remembered(network.network_file())
