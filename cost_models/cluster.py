"""The machine that a program runs on: equal nodes of devices, by the name of a device, from a file, or this machine.

A cluster file includes its device, and round-trips exactly::

    schema: 1
    name: lab
    nodes: 2
    devices_per_node: 8
    intra: {bandwidth: 3.2e11, latency: 5e-6}    # bytes/s, seconds
    inter: {bandwidth: 4.7e10, latency: 1.1e-5}
    device:
      name: H100
      memory: 79.1GiB
      peak: {bfloat16: 9.89e14}                  # FLOP/s
      rates:                                     # per_second: FLOPs or bytes; overhead: seconds
        matmul/bfloat16: {per_second: 7.7e14, overhead: 6e-6}
        pointwise: {per_second: 2.9e12, overhead: 5e-6}
      host:                                      # for offloading; call: seconds in which Python calls an operation
        {link: {bandwidth: 5.5e10, latency: 1e-5}, optimizer: {per_second: 4e10}, call: 1e-5, memory: 200GiB}

Known devices are in ``devices.yaml``, which cites the source of each number.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path

import torch
import yaml

from shardgraph import arguments
from shardgraph.arguments import NONE, PATH, TEXT, check_fields, checked, instance
from shardgraph.cost_models import detection
from shardgraph.cost_models.collectives import WIRE_RULES
from shardgraph.cost_models.device import BYTE_KINDS, FLOP_KINDS, MEMORY, NUMBER, VIEW, Device, Host, Link, Rate
from shardgraph.cost_models.fields import PART, POSITIVE, SECONDS, SIZE, WHOLE, mapping, number, record, refuse, text
from shardgraph.cost_models.group import BETWEEN_NODES, Group
from shardgraph.errors import ClusterError, nearest, shown
from shardgraph.mesh import Mesh, axes_of, position_of
from shardgraph.sizes import is_whole
from shardgraph.yaml_text import parsed

SCHEMA = 1

# Two gloo ranks of one machine, which share its cores, so nothing of a collective is hidden: 48.8 MB take 34 ms to
# all-reduce, 28 ms to all-gather and 45 ms to reduce-scatter, and a collective of 2 KiB takes 0.37 ms.
_GLOO = Link(bandwidth=1.44e9, latency=3.7e-4, latencies={"all_reduce": 1.85e-4})
_ON_GLOO = {"all_reduce": 1.0, "all_gather_into_tensor": 0.61, "reduce_scatter_tensor": 0.38}

_LINK_GIVEN = instance("a Link", Link)
_FIELDS = {
    "name": TEXT,
    "device": instance("a Device", Device),
    "intra": _LINK_GIVEN,
    "inter": _LINK_GIVEN | NONE,
    "overlap": NUMBER,
    "doubt": NUMBER,
    "efficiency": arguments.mapping_of("parts of a link's bandwidth by operation", arguments.POSITIVE),
    "source": TEXT,
    "sync": NUMBER,
}


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    ``intra`` joins the devices of a node, ``inter`` is a device's share of the node's network (None: one node).
    ``overlap`` is the fraction of a collective's time during which computation is not slowed: 1 if communication has
    engines of its own, less if it takes cores from the computation. A link may have its own.
    ``efficiency`` is the fraction of a link's bandwidth that a collective attains, by operation (such as
    ``all_gather_into_tensor``); by default 1. Above 1, a switch reduces inside a node, and only groups inside one gain.
    A link may have its own, of some operations or all.
    ``sync`` is how many seconds longer a rank waits for a collective than it takes after another one: until the slowest
    rank has come to it and the thread that waits is awake again. It is 0 where the device waits, and not a thread.
    ``doubt`` is how far predicted seconds may be off: of the steps that were compared with measured ones, 8 of 10 took
    from ``1 / (1 + doubt)`` to ``1 + doubt`` times the prediction.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    intra: Link
    inter: Link | None = None
    overlap: float = 1.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    doubt: float = 0.0
    source: str = field(default="", compare=False)
    sync: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "a cluster's ", **_FIELDS)
        for name in ("devices_per_node", "nodes"):
            if not is_whole(count := getattr(self, name), 1):
                raise ClusterError(
                    f"cluster {self.name!r} has {name}={shown(count)}: a positive whole number is needed"
                )
        if self.nodes > 1 and self.inter is None:
            raise ClusterError(f"cluster {self.name!r} has {self.nodes} nodes and no link 'inter' between them")
        if not 0 <= self.doubt < math.inf:
            raise ClusterError(f"cluster {self.name!r} has doubt {self.doubt}: a finite number of at least 0 is needed")
        if not 0 <= self.sync < math.inf:
            raise ClusterError(f"cluster {self.name!r} has sync {self.sync}: a number of seconds from 0 is needed")
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"cluster {self.name!r} has overlap {self.overlap}: a number from 0 to 1 is needed")

    @staticmethod
    @checked(name=TEXT, network=arguments.POSITIVE)
    def of(name: str, nodes: int = 1, devices_per_node: int | None = None, network: float | None = None) -> Cluster:
        """``nodes`` nodes of a known device, with the usual links of such nodes.

        Args:
            name: name of a known device, in any case.
            nodes: number of nodes.
            devices_per_node: devices in a node; by default the usual number.
            network: bytes/s in one direction of a device's share of the network between nodes; by default the usual
                network of such nodes.

        Raises:
            ClusterError: the device is not described, or a number is not positive.
        """
        known, names = _known_nodes()
        if (key := _normalized(name)) not in names:
            raise ClusterError(
                f"there is no device {name!r}; known are {', '.join(known)}. Describe your own in "
                f"a cluster file, or measure this machine with `shardgraph calibrate`{nearest(name, known)}"
            )
        node = known[names[key]]
        here = node.devices_per_node if devices_per_node is None else devices_per_node
        inter = node.inter if network is None or node.inter is None else replace(node.inter, bandwidth=network)
        return replace(node, nodes=nodes, devices_per_node=here, inter=inter)

    @staticmethod
    def detect() -> Cluster:
        """This machine: its GPUs if it has any, otherwise its CPU with one rank per core.

        The CPU's rates are guesses, as its ``source`` says; where prices are asked for without a cluster, they are
        measured instead (:func:`shardgraph.calibration.this_machine`).

        Raises:
            ClusterError: it has a GPU that is not described.
        """
        if not torch.cuda.is_available():
            core = detection.cpu_core()
            return Cluster(
                "cpu", core, detection.cpu_cores(), 1, intra=_GLOO, overlap=0.0, efficiency=_ON_GLOO, doubt=1.0,
                source=core.source,
            )  # fmt: skip
        cluster = Cluster.of(torch.cuda.get_device_name(0), devices_per_node=torch.cuda.device_count())
        device = replace(cluster.device, memory=torch.cuda.get_device_properties(0).total_memory)
        if device.host is not None:
            room = detection.machine_memory() * detection.FOR_DEVICES / cluster.devices_per_node
            device = replace(device, host=replace(device.host, memory=int(room)))
        return replace(cluster, device=device)

    @staticmethod
    @checked(path=PATH)
    def load(path: str | Path) -> Cluster:
        """Read a cluster file.

        Raises:
            ClusterError: there is no such file, or a field has a value that is not allowed.
        """
        try:
            data = parsed(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(f"cannot read the cluster file {str(path)!r}: {error.strerror}") from error
        except ValueError as error:
            raise ClusterError(f"{path} is not YAML: {error}") from error
        if isinstance(data, dict) and (schema := data.pop("schema", None)) != SCHEMA:
            refuse((str(path), "schema"), schema, f"{SCHEMA}, the one that this version of shardgraph reads")
        return _CLUSTER(data, (str(path),))

    @checked(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write a cluster file that :meth:`load` reads back exactly."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def to_yaml(self) -> str:
        """The content of a cluster file."""

        def defined(fields: list[tuple[str, object]]) -> dict[str, object]:
            return {name: value for name, value in fields if value not in (None, math.inf)}

        data = {"schema": SCHEMA, **asdict(self, dict_factory=defined)}
        return str(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True))

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.devices_per_node * self.nodes

    @property
    def closest(self) -> int:
        """The devices that its fastest link joins: those of a node, or all where each node has one."""
        return self.devices_per_node if self.devices_per_node > 1 else self.world_size

    def overlap_on(self, where: str) -> float:
        """``overlap`` of collectives whose :attr:`Group.where` this is."""
        link = self.inter if where == BETWEEN_NODES and self.inter is not None else self.intra
        return self.overlap if link.overlap is None else link.overlap

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ClusterError if ``mesh`` needs more devices than there are."""
        needed = math.prod(size for _, size in mesh)
        if needed > self.world_size:
            raise ClusterError(
                f"the mesh {dict(mesh)} needs {needed} devices, and cluster {self.name!r} has {self.nodes} nodes of "
                f"{self.devices_per_node}, {self.world_size} in all: make the mesh smaller or give more nodes"
            )

    def group_of(self, mesh: Mesh, axis: str) -> Group:
        """The ranks of a group over ``axis`` of ``mesh`` (or several axes, as ``"dp+ep"``); ranks fill node by node."""
        spans = [
            (math.prod(size for _, size in mesh[position + 1 :]), mesh[position][1])
            for position in (position_of(mesh, each) for each in axes_of(axis))
        ]
        ranks = math.prod(size for _, size in spans)
        if self.inter is None or all(stride * size <= self.devices_per_node for stride, size in spans):
            return Group.of_node(ranks, self.intra)
        inside = math.prod(max(1, min(size, self.devices_per_node // stride)) for stride, size in spans)
        return Group(ranks, inside, -(-ranks // inside), self.intra, self.inter)


def known_devices() -> dict[str, Device]:
    """The devices that ``devices.yaml`` describes, by name."""
    return {name: node.device for name, node in _known_nodes()[0].items()}


@functools.cache
def _known_nodes() -> tuple[dict[str, Cluster], dict[str, str]]:
    """One node of each known device by name, and the device's name by each of its normalized names and aliases."""
    content = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, where PyYAML is built with it
    nodes: dict[str, Cluster] = {}
    names: dict[str, str] = {}
    for name, entry in yaml.load(content, loader).items():
        data = {"name": name, "nodes": 1, "device": {"name": name, **entry["device"]}, **entry["node"]}
        nodes[name] = _CLUSTER(data, ("devices.yaml", name))
        names |= {_normalized(each): name for each in (name, *entry["aliases"])}
    return nodes, names


def _normalized(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower()).removeprefix("nvidia-")


def _is_rate(name: str) -> bool:
    kind, _, dtype = name.partition("/")
    return (kind in FLOP_KINDS and isinstance(getattr(torch, dtype, None), torch.dtype)) or name in (*BYTE_KINDS, VIEW)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype) or name == "tfloat32"


_LATENCIES = mapping(f"{', '.join(WIRE_RULES)} to seconds", SECONDS, WIRE_RULES.__contains__)
_EFFICIENCY = mapping(f"{', '.join(WIRE_RULES)} to numbers", POSITIVE, WIRE_RULES.__contains__)
_LINK = record(
    Link, bandwidth=POSITIVE, latency=SECONDS, latencies=_LATENCIES, efficiency=_EFFICIENCY, overlap=PART
)  # fmt: skip
_RATE = record(Rate, per_second=POSITIVE, overhead=SECONDS, moved_per_second=POSITIVE, bandwidth=POSITIVE)
_RATE_NAMES = f"{', '.join(f'{kind}/<dtype>' for kind in FLOP_KINDS)}, {', '.join((*BYTE_KINDS, VIEW))} to rates"
_DEVICE = record(
    Device,
    name=text,
    memory=SIZE,
    peak=mapping("dtypes, such as bfloat16, to FLOP/s", POSITIVE, _is_dtype),
    rates=mapping(_RATE_NAMES, _RATE, _is_rate),
    sustained=mapping(f"{', '.join((*FLOP_KINDS, MEMORY))} to parts", PART, (*FLOP_KINDS, MEMORY).__contains__),
    allocation=SIZE,
    alignment=POSITIVE,
    host=record(Host, link=_LINK, optimizer=_RATE, call=SECONDS, memory=SIZE),
    source=text,
)
_CLUSTER = record(
    Cluster,
    name=text,
    device=_DEVICE,
    devices_per_node=WHOLE,
    nodes=WHOLE,
    intra=_LINK,
    inter=_LINK,
    overlap=PART,
    doubt=number("a number from 0", float, lambda value: 0 <= value < math.inf),
    efficiency=_EFFICIENCY,
    source=text,
    sync=SECONDS,
)
