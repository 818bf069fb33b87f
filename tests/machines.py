"""Clusters for tests, with round numbers that can be checked by hand."""

from __future__ import annotations

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Device, Link, Rate

GIB = 2**30


def toy_device(memory: int = GIB) -> Device:
    """1 TFLOP/s of matmul, 100 GB/s of memory."""
    rates = {f"matmul/{dtype}": Rate(1e12) for dtype in ("float32", "float64", "bfloat16")}
    return Device("toy", memory, {"float32": 2e12}, rates | {"pointwise": Rate(1e11)}, allocation=1)


def toy_cluster(nodes: int = 1, devices_per_node: int = 8, memory: int = GIB, overlap: float = 1.0) -> Cluster:
    """Devices of :func:`toy_device`, 10 GB/s within a node and 1 GB/s between nodes, without latency."""
    return Cluster("toy", toy_device(memory), devices_per_node, nodes, Link(1e10, 0.0), Link(1e9, 0.0), overlap)
