"""Clusters as files, by the name of a device, and as found on this machine.

A cluster file is complete: it holds the device, and reads back as exactly what was saved::

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

Known devices are in ``devices.yaml``, which says where each of its numbers is from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from shardgraph.cost_models.cluster import BYTE_KINDS, FLOP_KINDS, MEMORY, Cluster, Device, Link, Rate, nearest_device
from shardgraph.cost_models.collectives import WIRE_RULES
from shardgraph.errors import ClusterError, nearest

SCHEMA = 1


# -- known devices -----------------------------------------------------------------------------------------


def device(name: str) -> Device:
    """A known device by its name or another name for it, in any case.

    Raises:
        ClusterError: nobody has described the device; the message names the nearest.
    """
    return _known_node(name).device


def known_devices() -> dict[str, Device]:
    """The devices that ``devices.yaml`` describes, by name."""
    return {name: node.device for name, node in _registry()[0].items()}


def cluster(name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
    """``nodes`` nodes of a known device, linked as such nodes usually are.

    Args:
        name: name of a known device, in any case.
        nodes: number of nodes.
        devices_per_node: devices in a node; by default as many as usual.

    Raises:
        ClusterError: nobody has described the device, or a number is not positive.
    """
    node = _known_node(name)
    attained = node.efficiency
    if nodes != 1:
        # More than the link comes from a switch that reduces, within a node: across nodes no more than the link does.
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
    """One node of each known device, and the name of the device by each of its names in plain form."""
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    nodes: dict[str, Cluster] = {}
    names: dict[str, str] = {}
    for name, entry in yaml.safe_load(text).items():
        data = {"name": name, "nodes": 1, "device": {"name": name, **entry["device"]}, **entry["node"]}
        nodes[name] = _CLUSTER(data, _At("devices.yaml", name))
        names |= {_plain(each): name for each in (name, *entry["aliases"])}
    return nodes, names


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower()).removeprefix("nvidia-")


# -- this machine ------------------------------------------------------------------------------------------


def detect_cluster() -> Cluster:
    """This machine: its GPUs if they are known ones, else its CPU with one rank for each core.

    The CPU's rates are guesses, as its ``source`` says, until ``shardgraph calibrate`` measures them.

    Raises:
        ClusterError: it has a GPU that nobody has described.
    """
    if not torch.cuda.is_available():
        return _cpu_cluster()
    found = cluster(torch.cuda.get_device_name(0), devices_per_node=torch.cuda.device_count())
    memory = torch.cuda.get_device_properties(0).total_memory
    return replace(found, device=replace(found.device, memory=memory))


def host_memory() -> int:
    """Bytes of this machine's memory that are available; where the system does not say, all there are."""
    if found := re.search(r"^MemAvailable:\s*(\d+) kB", _system_text("/proc/meminfo"), re.MULTILINE):
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_cluster() -> Cluster:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = _system_text("/proc/cpuinfo")
    hertz = _cpu_hertz(info)
    source = (
        f"guesses, until `shardgraph calibrate` measures them: {_flops_per_cycle(info)} FLOPs a cycle at "
        f"{hertz / 1e9:.2f} GHz, half of them attained, 5 GB/s of memory for each core, 1 GB/s between ranks"
    )
    peak = hertz * _flops_per_cycle(info)
    per_second = {"float32": peak / 2, "float64": peak / 4}
    per_second |= dict.fromkeys(("bfloat16", "float16"), peak / 8)  # without instructions of their own: converted
    rates = {f"matmul/{dtype}": Rate(rate, overhead=5e-6) for dtype, rate in per_second.items()}
    core = Device(
        name="cpu",
        memory=host_memory() // cores,
        peak={"float32": peak, "float64": peak / 2},
        rates=rates | {"pointwise": Rate(5e9, overhead=5e-6)},
        allocation=64,
        source=source,
    )
    return Cluster("cpu", core, cores, 1, intra=Link(bandwidth=1e9, latency=5e-5), source=source)


def _cpu_hertz(info: str) -> float:
    """The clock of the CPU that ``/proc/cpuinfo`` tells of; 2 GHz where it does not say."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", info, re.MULTILINE)
    return float(found[1]) * 1e6 if found else 2e9


def _flops_per_cycle(info: str) -> int:
    """float32 FLOPs of one core in a cycle: two units, each a fused multiply-add of a vector."""
    flags = set(re.findall(r"\w+", info))
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    return 2 * 2 * lanes


def _system_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


# -- files -------------------------------------------------------------------------------------------------


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ClusterError: there is no such file, or a field of it is not what it may be.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} is not YAML: {error}") from error
    top = _At(str(path))
    if isinstance(data, dict):
        data = dict(data)
        if (schema := data.pop("schema", None)) != SCHEMA:
            top.child("schema").refuse(schema, f"{SCHEMA}, the one that this version of shardgraph reads")
    return _CLUSTER(data, top)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write ``cluster``, its device included, as a file that :func:`load_cluster` reads back exactly."""
    data = {"schema": SCHEMA, **dataclasses.asdict(cluster)}
    if cluster.inter is None:
        del data["inter"]
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    Path(path).write_text(text, encoding="utf-8")


_UNITS = {"": 1, "b": 1} | {
    prefix + end: base**power
    for end, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def parse_bytes(size: int | float | str) -> int:
    """``80 * 2**30`` for ``"80GiB"``, ``80 * 10**9`` for ``"80 GB"``; a number is bytes already.

    Raises:
        ClusterError: it is no size, or not above 0.
    """
    written = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?i?b)?", str(size).strip().lower())
    try:
        if written is None or isinstance(size, bool):
            raise ValueError
        number, unit = written[1], written[2] or ""
        nbytes = (int(number) if number.isdigit() else float(number)) * _UNITS[unit]
        if not 1 <= nbytes < math.inf:
            raise ValueError
    except (KeyError, ValueError):
        raise ClusterError(f"{size!r} is no size: it may be {_SIZE}") from None
    return int(nbytes)


_SIZE = "a positive number of bytes, or a text such as '80GiB' or '80 GB'"


# -- reading fields ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _At:
    """A place in a file, as errors name it."""

    file: str
    path: str = ""

    def child(self, name: object) -> _At:
        return _At(self.file, f"{self.path}.{name}" if self.path else str(name))

    def refuse(self, value: object, allowed: str) -> NoReturn:
        raise ClusterError(f"{self.file}: {self.path or 'the file'} is {value!r}; it may be {allowed}")


_Reader = Callable[[Any, _At], Any]
"""From what a file holds at a place to the value that it means."""


def _text(value: Any, at: _At) -> str:
    return value if isinstance(value, str) else at.refuse(value, "a text")


def _size(value: Any, at: _At) -> int:
    try:
        return parse_bytes(value)
    except ClusterError:
        at.refuse(value, _SIZE)


def _whole(value: Any, at: _At) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        at.refuse(value, "a whole number from 1")
    return value


def _number(allowed: str, fits: Callable[[float], bool]) -> _Reader:
    def read(value: Any, at: _At) -> float:
        try:
            # PyYAML takes 3e9 for a text, as YAML 1.1 does: only 3.0e+9 is a number there.
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            at.refuse(value, allowed)
        return number

    return read


_POSITIVE = _number("a number above 0", lambda number: number > 0)
_SECONDS = _number("a number of seconds from 0", lambda number: number >= 0)
_PART = _number("a number from 0 to 1", lambda number: 0 <= number <= 1)


def _mapping(what: str, read: _Reader, known: Callable[[str], bool] = lambda key: True) -> _Reader:
    """A mapping of names to what ``read`` gives; ``what`` says which names are ``known``."""

    def read_all(value: Any, at: _At) -> dict[str, Any]:
        if not isinstance(value, dict):
            at.refuse(value, f"a mapping of {what}")
        for key in value:
            if not (isinstance(key, str) and known(key)):
                raise ClusterError(f"{at.file}: unknown field {at.child(key).path}; {at.path} is a mapping of {what}")
        return {key: read(each, at.child(key)) for key, each in value.items()}

    return read_all


def _record(kind: type, readers: dict[str, _Reader]) -> _Reader:
    """A dataclass ``kind`` from a mapping of its fields; those without a default are required."""
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any, at: _At) -> Any:
        if not isinstance(value, dict):
            at.refuse(value, f"a mapping of {', '.join(readers)}")
        for key in value:
            if key not in readers:
                hint = nearest(str(key), readers) or f"; the fields are {', '.join(readers)}"
                raise ClusterError(f"{at.file}: unknown field {at.child(key).path}{hint}")
        for key in readers:
            if key in required and key not in value:
                raise ClusterError(f"{at.file}: the field {at.child(key).path} is missing")
        return kind(**{key: readers[key](each, at.child(key)) for key, each in value.items()})

    return read


def _is_rate(name: str) -> bool:
    kind, _, dtype = name.partition("/")
    return (kind in FLOP_KINDS and isinstance(getattr(torch, dtype, None), torch.dtype)) or name in BYTE_KINDS


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype) or name == "tfloat32"


_LINK = _record(Link, {"bandwidth": _POSITIVE, "latency": _SECONDS})
_RATE = _record(Rate, {"per_second": _POSITIVE, "overhead": _SECONDS})
_RATE_NAMES = f"{', '.join(f'{kind}/<dtype>' for kind in FLOP_KINDS)}, {', '.join(BYTE_KINDS)} to rates"
_DEVICE = _record(
    Device,
    {
        "name": _text,
        "memory": _size,
        "peak": _mapping("dtypes, such as bfloat16, to FLOP/s", _POSITIVE, _is_dtype),
        "rates": _mapping(_RATE_NAMES, _RATE, _is_rate),
        "sustained": _mapping(
            f"{', '.join((*FLOP_KINDS, MEMORY))} to parts", _PART, (*FLOP_KINDS, MEMORY).__contains__
        ),
        "allocation": _size,
        "source": _text,
    },
)
_CLUSTER = _record(
    Cluster,
    {
        "name": _text,
        "device": _DEVICE,
        "devices_per_node": _whole,
        "nodes": _whole,
        "intra": _LINK,
        "inter": _LINK,
        "overlap": _PART,
        "efficiency": _mapping(f"{', '.join(WIRE_RULES)} to numbers", _POSITIVE, WIRE_RULES.__contains__),
        "source": _text,
    },
)
