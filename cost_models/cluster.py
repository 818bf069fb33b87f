"""What a program runs on, as data: devices, the links between them, and how fast each kind of work goes.

A time is priced by a :class:`Rate`, ``overhead + work / per_second``. Small operations then run below the rate and
large ones approach it, which is what an efficiency that depends on size amounts to. The rates of known devices
are datasheet peaks times fitted efficiencies (``devices.yaml`` says where each number is from); those of the machine at
hand are measured (``shardgraph calibrate``).
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
"""Work that moves nothing: only the overhead of its rate counts. It costs the host, and a GPU does not wait for it."""

MEMORY = "memory"
"""All of ``BYTE_KINDS``, in :attr:`Device.sustained`."""


@dataclass(frozen=True)
class Rate:
    """The price of one kind of work: ``overhead`` seconds per operation, then ``per_second`` FLOPs or bytes.

    What is counted in FLOPs may also cost by the bytes that it reads and writes, ``moved_per_second`` of them: kernels
    of a CPU that first bring their operands into another order.
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
    """What one device can send: ``bandwidth`` bytes/s in one direction, ``latency`` seconds per message.

    ``latencies`` are the seconds of operations whose messages take another time (such as ``all_reduce``).
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
    """The machine beside a device: the ``link`` to its memory, and the ``optimizer``'s rate there in bytes read and
    written."""

    link: Link
    optimizer: Rate


@dataclass(frozen=True)
class Device:
    """One accelerator, or one rank's share of a CPU.

    ``memory``
        Bytes that a program may use.
    ``peak``
        Dense FLOP/s by dtype name as the maker states them, the denominator of MFU.
    ``rates``
        What a kernel attains: by ``kind/dtype`` for kinds counted in FLOPs, by kind for those counted in bytes.
    ``sustained``
        The part of those rates that a whole training step attains, by kind counted in FLOPs and ``"memory"`` for all
        counted in bytes: a kernel timed alone runs at a higher clock, and in frameworks' favourite shapes. 1 where
        nothing is said, as after ``shardgraph calibrate``, which times operations among others.
    ``allocation``
        The granule of the memory allocator, bytes: every tensor's size is rounded up to it.
    ``source``
        Where the numbers are from.
    ``host``
        What is beside it; None where nothing is known of it, and a plan that offloads cannot be priced.
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
        """What is beside the device.

        Raises:
            ClusterError: nothing is known of it.
        """
        if self.host is None:
            raise ClusterError(
                f"device {self.name!r} says nothing of its host, so offloading cannot be priced: add to it "
                "host: {link: {bandwidth: 2.5e+10, latency: 6.0e-6}, optimizer: {per_second: 2.0e+10}} with your "
                "figures, or measure this machine with `shardgraph calibrate`"
            )
        return self.host

    def rate(self, kind: str, dtype: str = "") -> Rate | None:
        """The rate of a kind of work; None for a FLOP kind in a dtype that the device has no figure for.

        Kinds that a device does not tell apart cost what the plainer kind costs: attention and convolution as
        matmul, every kind counted in bytes as pointwise. Views cost nothing where nothing is said.
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
    ``overlap`` is the part of a collective's time during which computation goes on unhindered: 1 where
    communication has engines of its own, less where it takes cores from the computation.
    ``efficiency`` is the part of a link's bandwidth that a collective attains, by operation (such as
    ``all_gather_into_tensor``); 1 where nothing is said.
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
        from shardgraph.cost_models.cluster_files import known_cluster  # which makes clusters

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
        """How many devices there are."""
        return self.devices_per_node * self.nodes

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ClusterError when ``mesh`` needs more devices than there are."""
        needed = math.prod(size for _, size in mesh)
        if needed > self.world_size:
            raise ClusterError(
                f"the mesh {dict(mesh)} needs {needed} devices, and cluster {self.name!r} has {self.nodes} nodes of "
                f"{self.devices_per_node}, {self.world_size} in all: make the mesh smaller or give more nodes"
            )

    def link_of(self, mesh: Mesh, axis: str) -> Link:
        """What a rank can send to its neighbour in a ring over ``axis`` of ``mesh`` (or several, as ``"dp+ep"``).

        Ranks fill node by node.

        A group inside a node uses ``intra``. One that spans nodes runs through the network: as many rings as the
        group has members in a node share their network interfaces, so the bandwidth is that many shares, at most
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
    """The error for a device that nobody has described."""
    return ClusterError(
        f"there is no device {name!r}; known are {', '.join(known)}{nearest(name, known)}. "
        "Describe your own in a cluster file, or measure this machine with `shardgraph calibrate`"
    )
