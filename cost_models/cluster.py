"""The hardware that a program runs on, as data: devices, links between them, and a rate for each kind of work.

Work takes ``overhead + work / per_second`` seconds by its :class:`Rate`, so small operations run below the rate and
large ones approach it, like an efficiency that depends on size. The rates of known devices are datasheet peaks times
fitted efficiencies (``devices.yaml`` cites the source of each number); those of this machine are measured
(``shardgraph calibrate``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardgraph.errors import ClusterError, nearest
from shardgraph.mesh import Mesh, axes_of, position_of

FLOP_KINDS = ("matmul", "convolution", "attention")
"""Kinds of work counted in FLOPs; their rates are by dtype, as ``"matmul/bfloat16"``."""

BYTE_KINDS = ("pointwise", "transcendental", "random", "reduction", "gather", "optimizer")
"""Kinds of work counted in bytes read and written."""

VIEW = "view"
"""Work that moves no bytes: only the overhead of its rate counts. It costs host time, which a GPU does not wait for."""

MEMORY = "memory"
"""All of ``BYTE_KINDS``, in :attr:`Device.sustained`."""


@dataclass(frozen=True)
class Rate:
    """The price of one kind of work: ``overhead`` seconds per operation, then ``per_second`` FLOPs or bytes.

    Work counted in FLOPs may have an additional cost per byte read and written, at ``moved_per_second``: CPU kernels
    that first repack their operands.
    """

    per_second: float
    overhead: float = 0.0
    moved_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_second > 0 or not self.overhead >= 0 or not self.moved_per_second > 0:
            raise ClusterError(
                "a rate has a positive per_second and moved_per_second and an overhead of at least 0 seconds, and this "
                f"has {self.per_second}, {self.moved_per_second} and {self.overhead}"
            )

    def seconds(self, work: float, moved: float = 0.0) -> float:
        """Seconds for ``work`` FLOPs or bytes in one operation, which reads and writes ``moved`` bytes."""
        return self.overhead + work / self.per_second + moved / self.moved_per_second


@dataclass(frozen=True)
class Link:
    """A device's link: ``bandwidth`` in bytes/s in one direction, ``latency`` in seconds per message.

    ``latencies`` overrides the latency, in seconds, for individual operations (such as ``all_reduce``).
    """

    bandwidth: float
    latency: float
    latencies: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not all(seconds >= 0 for seconds in (self.latency, *self.latencies.values())):
            raise ClusterError(
                "a link has a positive bandwidth and latencies of at least 0, and this has "
                f"{self.bandwidth} bytes/s, {self.latency} s and {dict(self.latencies)}"
            )


@dataclass(frozen=True)
class Host:
    """The host of a device: the ``link`` to its memory, and the rate of ``optimizer`` updates on it in bytes read and
    written."""

    link: Link
    optimizer: Rate


@dataclass(frozen=True)
class Device:
    """One accelerator, or one rank's share of a CPU.

    ``memory``
        Bytes that a program may use.
    ``peak``
        Dense FLOP/s by dtype name as the manufacturer states them, the denominator of MFU.
    ``rates``
        What a kernel attains: by ``kind/dtype`` for kinds counted in FLOPs, by kind for those counted in bytes.
    ``sustained``
        The fraction of those rates that a whole training step attains, by kind for kinds counted in FLOPs and as
        ``"memory"`` for all counted in bytes: a kernel timed alone runs at a higher clock, and in favourable shapes.
        The default is 1, also after ``shardgraph calibrate``, which times operations in place in a program.
    ``allocation``
        The granularity of the memory allocator in bytes: every tensor's size is rounded up to a multiple of it.
    ``source``
        Where the numbers come from.
    ``host``
        The host; if None, plans that offload cannot be priced.
    """

    name: str
    memory: int
    peak: Mapping[str, float]
    rates: Mapping[str, Rate]
    sustained: Mapping[str, float] = field(default_factory=dict)
    allocation: int = 512
    source: str = ""
    host: Host | None = None

    def __post_init__(self) -> None:
        for what, value in (("memory", self.memory), ("allocation", self.allocation)):
            if not value > 0:
                raise ClusterError(f"device {self.name!r} has {what} {value}: a positive number of bytes is needed")
        if "pointwise" not in self.rates:
            raise ClusterError(f"device {self.name!r} has no rate 'pointwise', the price of what has no other")
        for kind, part in self.sustained.items():
            if kind not in (*FLOP_KINDS, MEMORY) or not 0 < part <= 1:
                raise ClusterError(
                    f"device {self.name!r} sustains {part} of {kind!r}: it may be a part above 0, at most 1, of "
                    f"{', '.join(FLOP_KINDS)} or {MEMORY}"
                )

    @property
    def linked_host(self) -> Host:
        """The host of the device.

        Raises:
            ClusterError: the device does not describe one.
        """
        if self.host is None:
            raise ClusterError(
                f"device {self.name!r} says nothing of its host, so offloading cannot be priced: add to it "
                "host: {link: {bandwidth: 2.5e+10, latency: 6.0e-6}, optimizer: {per_second: 2.0e+10}} with your "
                "figures, or measure this machine with `shardgraph calibrate`"
            )
        return self.host

    def rate(self, kind: str, dtype: str = "") -> Rate | None:
        """The rate of a kind of work; None for a kind counted in FLOPs in a dtype that the device has no rate for.

        A kind without a rate of its own falls back to a simpler one: attention and convolution to matmul, every kind
        counted in bytes to pointwise. Views without a rate cost nothing.
        """
        if kind == VIEW:
            return self.rates.get(VIEW, Rate(1.0))
        if kind not in FLOP_KINDS:
            return self._sustained(self.rates.get(kind, self.rates["pointwise"]), MEMORY)
        own = self.rates.get(f"{kind}/{dtype}")
        plain = self.rates.get(f"matmul/{dtype}")
        if own is None:
            return None if plain is None else self._sustained(plain, "matmul")
        return self._sustained(own, kind)

    def _sustained(self, rate: Rate, kind: str) -> Rate:
        return replace(rate, per_second=rate.per_second * self.sustained.get(kind, 1.0))


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    ``intra`` joins the devices of a node, ``inter`` is a device's share of the node's network (None: one node).
    ``overlap`` is the fraction of a collective's time during which computation is not slowed: 1 if communication has
    engines of its own, less if it takes cores from the computation.
    ``efficiency`` is the fraction of a link's bandwidth that a collective attains, by operation (such as
    ``all_gather_into_tensor``); by default 1.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    intra: Link
    inter: Link | None = None
    overlap: float = 1.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for what, value in (("devices_per_node", self.devices_per_node), ("nodes", self.nodes)):
            if not (isinstance(value, int) and value > 0):
                raise ClusterError(f"cluster {self.name!r} has {what}={value!r}: a positive whole number is needed")
        if self.nodes > 1 and self.inter is None:
            raise ClusterError(f"cluster {self.name!r} has {self.nodes} nodes and no link 'inter' between them")
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"cluster {self.name!r} has overlap {self.overlap}: a number from 0 to 1 is needed")

    @staticmethod
    def of(name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
        """Nodes of a known device; see :func:`shardgraph.cost_models.cluster_files.known_cluster`."""
        from shardgraph.cost_models.cluster_files import known_cluster  # which imports this module

        return known_cluster(name, nodes, devices_per_node)

    @staticmethod
    def detect() -> Cluster:
        """This machine; see :func:`shardgraph.cost_models.detection.detect_cluster`."""
        from shardgraph.cost_models.detection import detect_cluster

        return detect_cluster()

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster file; see :func:`shardgraph.cost_models.cluster_files.load_cluster`."""
        from shardgraph.cost_models.cluster_files import load_cluster

        return load_cluster(path)

    def save(self, path: str | Path) -> None:
        """Write a cluster file that :meth:`load` reads back exactly."""
        from shardgraph.cost_models.cluster_files import save_cluster

        save_cluster(self, path)

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.devices_per_node * self.nodes

    def check_mesh(self, mesh: Mesh) -> None:
        """Check that there are enough devices.

        Raises:
            ClusterError: ``mesh`` needs more devices than there are.
        """
        needed = math.prod(size for _, size in mesh)
        if needed > self.world_size:
            raise ClusterError(
                f"the mesh {dict(mesh)} needs {needed} devices, and cluster {self.name!r} has {self.nodes} nodes of "
                f"{self.devices_per_node}, {self.world_size} in all: make the mesh smaller or give more nodes"
            )

    def link_of(self, mesh: Mesh, axis: str) -> Link:
        """The link of a rank to its neighbour in a ring over ``axis`` of ``mesh`` (or several axes, as ``"dp+ep"``).

        Ranks fill node by node. A group within a node uses ``intra``. A group that spans nodes uses the network, with
        as many rings as it has members in a node, so its bandwidth is that many members' shares of the network, at most
        ``intra``'s (how NCCL builds its rings: https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/).
        """
        spans = [
            (math.prod(size for _, size in mesh[position + 1 :]), mesh[position][1])
            for position in (position_of(mesh, each) for each in axes_of(axis))
        ]
        if self.inter is None or all(stride * size <= self.devices_per_node for stride, size in spans):
            return self.intra
        inside = math.prod(max(1, min(size, self.devices_per_node // stride)) for stride, size in spans)
        return replace(self.inter, bandwidth=min(self.intra.bandwidth, self.inter.bandwidth * inside))


def nearest_device(name: str, known: Mapping[str, Device]) -> ClusterError:
    """The error for a device that is not described."""
    return ClusterError(
        f"there is no device {name!r}; known are {', '.join(known)}{nearest(name, known)}. "
        "Describe your own in a cluster file, or measure this machine with `shardgraph calibrate`"
    )
