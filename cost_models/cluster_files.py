"""Clusters as files, and by the name of a device.

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
      host: {link: {bandwidth: 5.5e10, latency: 1e-5}, optimizer: {per_second: 2e10}}  # for offloading

Known devices are in ``devices.yaml``, which cites the source of each number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch
import yaml

from shardgraph.cost_models.cluster import (
    BYTE_KINDS,
    FLOP_KINDS,
    MEMORY,
    VIEW,
    Cluster,
    Device,
    Host,
    Link,
    Rate,
    nearest_device,
)
from shardgraph.cost_models.collectives import WIRE_RULES
from shardgraph.cost_models.fields import PART, POSITIVE, SECONDS, At, mapping, record, size, text, whole
from shardgraph.errors import ClusterError

SCHEMA = 1


# -- known devices -----------------------------------------------------------------------------------------


def device(name: str) -> Device:
    """A known device by its name or an alias, in any case.

    Raises:
        ClusterError: the device is not described; the message names the nearest one.
    """
    return _known_node(name).device


def known_devices() -> dict[str, Device]:
    """The devices that ``devices.yaml`` describes, by name."""
    return {name: node.device for name, node in _registry()[0].items()}


def known_cluster(name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
    """``nodes`` nodes of a known device, with the usual links of such nodes.

    Args:
        name: name of a known device, in any case.
        nodes: number of nodes.
        devices_per_node: devices in a node; by default the usual number.

    Raises:
        ClusterError: the device is not described, or a number is not positive.
    """
    node = _known_node(name)
    attained = node.efficiency
    if nodes != 1:
        # An efficiency above 1 comes from a switch that reduces within a node; across nodes the link is the limit.
        attained = {operation: min(part, 1.0) for operation, part in attained.items()}
    here = node.devices_per_node if devices_per_node is None else devices_per_node
    return replace(node, nodes=nodes, devices_per_node=here, efficiency=attained)


def _known_node(name: str) -> Cluster:
    nodes, names = _registry()
    if (key := _plain(name)) not in names:
        raise nearest_device(name, known_devices())
    return nodes[names[key]]


@functools.cache
def _registry() -> tuple[dict[str, Cluster], dict[str, str]]:
    """One node of each known device by name, and the device's name by each of its normalised names and aliases."""
    content = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    nodes: dict[str, Cluster] = {}
    names: dict[str, str] = {}
    for name, entry in yaml.safe_load(content).items():
        data = {"name": name, "nodes": 1, "device": {"name": name, **entry["device"]}, **entry["node"]}
        nodes[name] = _CLUSTER(data, At("devices.yaml", name))
        names |= {_plain(each): name for each in (name, *entry["aliases"])}
    return nodes, names


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower()).removeprefix("nvidia-")


# -- files -------------------------------------------------------------------------------------------------


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ClusterError: there is no such file, or a field has a value that is not allowed.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} is not YAML: {error}") from error
    top = At(str(path))
    if isinstance(data, dict):
        data = dict(data)
        if (schema := data.pop("schema", None)) != SCHEMA:
            top.child("schema").refuse(schema, f"{SCHEMA}, the one that this version of shardgraph reads")
    return _CLUSTER(data, top)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write ``cluster``, its device included, as a file that :func:`load_cluster` reads back exactly."""
    data = {"schema": SCHEMA, **dataclasses.asdict(cluster)}
    host = data["device"]["host"]
    for rate in (*data["device"]["rates"].values(), *([host["optimizer"]] if host else [])):
        if rate["moved_per_second"] == math.inf:
            del rate["moved_per_second"]
    if cluster.inter is None:
        del data["inter"]
    if host is None:
        del data["device"]["host"]
    content = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    Path(path).write_text(content, encoding="utf-8")


# -- the fields of a file ----------------------------------------------------------------------------------


def _is_rate(name: str) -> bool:
    kind, _, dtype = name.partition("/")
    return (kind in FLOP_KINDS and isinstance(getattr(torch, dtype, None), torch.dtype)) or name in (*BYTE_KINDS, VIEW)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype) or name == "tfloat32"


_LATENCIES = mapping(f"{', '.join(WIRE_RULES)} to seconds", SECONDS, WIRE_RULES.__contains__)
_LINK = record(Link, {"bandwidth": POSITIVE, "latency": SECONDS, "latencies": _LATENCIES})
_RATE = record(Rate, {"per_second": POSITIVE, "overhead": SECONDS, "moved_per_second": POSITIVE})
_HOST = record(Host, {"link": _LINK, "optimizer": _RATE})
_RATE_NAMES = f"{', '.join(f'{kind}/<dtype>' for kind in FLOP_KINDS)}, {', '.join((*BYTE_KINDS, VIEW))} to rates"
_DEVICE = record(
    Device,
    {
        "name": text,
        "memory": size,
        "peak": mapping("dtypes, such as bfloat16, to FLOP/s", POSITIVE, _is_dtype),
        "rates": mapping(_RATE_NAMES, _RATE, _is_rate),
        "sustained": mapping(f"{', '.join((*FLOP_KINDS, MEMORY))} to parts", PART, (*FLOP_KINDS, MEMORY).__contains__),
        "allocation": size,
        "host": _HOST,
        "source": text,
    },
)
_CLUSTER = record(
    Cluster,
    {
        "name": text,
        "device": _DEVICE,
        "devices_per_node": whole,
        "nodes": whole,
        "intra": _LINK,
        "inter": _LINK,
        "overlap": PART,
        "efficiency": mapping(f"{', '.join(WIRE_RULES)} to numbers", POSITIVE, WIRE_RULES.__contains__),
        "source": text,
    },
)
