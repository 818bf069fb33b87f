"""Devices as data: the rate of each kind of work, the link to other devices, and the host.

Work takes ``overhead + work / per_second`` seconds by its :class:`Rate`, so small operations run below the rate and
large ones approach it, like an efficiency that depends on size. The rates of known devices are datasheet peaks times
fitted efficiencies (``devices.yaml`` cites the source of each number); those of this machine are measured
(``shardgraph calibrate``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardgraph.arguments import NONE, NOT_NEGATIVE, POSITIVE, TEXT, check_fields, instance, mapping_of, number
from shardgraph.cost_models.arithmetic import NUMBERS, Arithmetic
from shardgraph.errors import ClusterError

FLOP_KINDS = ("matmul", "convolution", "attention")
"""Kinds of work counted in FLOPs; their rates are by dtype, as ``"matmul/bfloat16"``."""

BYTE_KINDS = ("pointwise", "transcendental", "random", "reduction", "gather", "optimizer")
"""Kinds of work counted in bytes read and written."""

IN_16_BITS = ("bfloat16", "float16")
"""Dtypes that tensor cores read row by row, in loads as wide as rows are aligned."""

VIEW = "view"
"""Work that moves no bytes: only the overhead of its rate counts. It costs host time, which a GPU does not wait for."""

_CPU_RATES = {"float64": 1 / 2, "bfloat16": 1 / 4, "float16": 1 / 4, "float8_e4m3fn": 2 / 5}
"""Parts of a CPU's rate in float32: half as many numbers are in a vector, and those of 16 and 8 bits are converted."""

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The dtype of a complex number's two parts. A product of two numbers, and its sum, is one of parts four times over."""

_ALIKE = {"float8_e5m2": "float8_e4m3fn"}
"""Dtypes that are multiplied as fast as others, with which they are."""

MEMORY = "memory"
"""All of ``BYTE_KINDS``, in :attr:`Device.sustained`."""

NUMBER = number("a number", lambda value: not math.isnan(value))


@dataclass(frozen=True)
class Rate:
    """The price of one kind of work: ``overhead`` seconds per operation, then ``per_second`` FLOPs or bytes.

    Work counted in FLOPs may have an additional cost per byte read and written, at ``moved_per_second``: CPU kernels
    that first repack their operands. It moves at most ``bandwidth`` bytes per second: less than elementwise operations
    do, where few rows meet a large matrix that is in no cache.
    """

    per_second: float
    overhead: float = 0.0
    moved_per_second: float = math.inf
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_fields(
            self, "a rate's ", per_second=POSITIVE, overhead=NOT_NEGATIVE, moved_per_second=NUMBER, bandwidth=NUMBER
        )  # fmt: skip
        speeds = self.per_second, self.moved_per_second, self.bandwidth
        if not self.overhead >= 0 or not all(speed > 0 for speed in speeds):
            raise ClusterError(
                "a rate has a positive per_second, moved_per_second and bandwidth and an overhead of at least 0 "
                f"seconds, but this has {', '.join(map(str, speeds))} and {self.overhead}"
            )

    def seconds(self, work: float, moved: float = 0.0, on: Arithmetic = NUMBERS) -> float:
        """Seconds for ``work`` FLOPs or bytes in one operation, which reads and writes ``moved`` bytes; ``on`` is the
        arithmetic of their type, numbers or expressions."""
        taken = self.overhead + work / self.per_second + moved / self.moved_per_second
        if self.bandwidth == math.inf:
            return taken
        return on.maximum(taken, self.overhead + moved / self.bandwidth)


@dataclass(frozen=True)
class Link:
    """A device's link: ``bandwidth`` in bytes/s in one direction, ``latency`` in seconds per message.

    ``latencies`` overrides the latency, in seconds, for individual operations (such as ``all_reduce``). ``efficiency``
    and ``overlap`` are those of the cluster on this link, if others than on the cluster's other link.
    """

    bandwidth: float
    latency: float
    latencies: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    overlap: float | None = None

    def __post_init__(self) -> None:
        by_name = mapping_of("seconds by operation", NUMBER)
        parts = mapping_of("parts of the bandwidth by operation", POSITIVE)
        check_fields(
            self, "a link's ", bandwidth=NUMBER, latency=NUMBER, latencies=by_name, efficiency=parts,
            overlap=NUMBER | NONE,
        )  # fmt: skip
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            raise ClusterError(f"a link has overlap {self.overlap}: a number from 0 to 1 is needed")
        if not self.bandwidth > 0 or not all(seconds >= 0 for seconds in (self.latency, *self.latencies.values())):
            raise ClusterError(
                "a link has a positive bandwidth, and a latency and latencies of at least 0, but this has "
                f"{self.bandwidth} bytes/s, {self.latency} s and {dict(self.latencies)}"
            )

    def latency_of(self, operation: str) -> float:
        """Seconds per message of an operation."""
        return self.latencies.get(operation, self.latency)


_RATE = instance("a Rate", Rate)


@dataclass(frozen=True)
class Host:
    """The host of a device: the ``link`` to its memory, the rate of ``optimizer`` updates on it in bytes read and
    written, the seconds in which Python calls one ``call`` of an operation, which the device may have to wait for, and
    the bytes of its ``memory`` that the device may use.
    """

    link: Link
    optimizer: Rate
    call: float = 0.0
    memory: float = math.inf

    def __post_init__(self) -> None:
        link, memory = instance("a Link", Link), number("a positive number of bytes", lambda value: value >= 1)
        check_fields(self, "a host's ", link=link, optimizer=_RATE, call=NOT_NEGATIVE, memory=memory)


_NBYTES = number("a positive number of bytes", lambda value: 1 <= value < math.inf)
_FIELDS = {
    "name": TEXT,
    "memory": _NBYTES,
    "allocation": _NBYTES,
    "alignment": POSITIVE,
    "peak": mapping_of("FLOP/s by dtype", POSITIVE),
    "rates": mapping_of("rates by kind", instance("a Rate", Rate)),
    "sustained": mapping_of("parts by kind", NUMBER),
    "source": TEXT,
    "host": instance("a Host", Host) | NONE,
}


@dataclass(frozen=True)
class Device:
    """One accelerator, or one rank's share of a CPU.

    ``memory`` is in bytes; the allocator rounds every tensor's size up to a multiple of ``allocation`` bytes. ``peak``
    is dense FLOP/s by dtype name as the manufacturer states them, the denominator of MFU. ``rates`` are what a kernel
    attains: by ``kind/dtype`` for kinds counted in FLOPs, by kind for those counted in bytes. ``sustained`` is the
    fraction of those rates that a whole training step attains, by kind for kinds counted in FLOPs and as ``"memory"``
    for all counted in bytes: a kernel timed alone runs at a higher clock, and in favourable shapes. The default is 1,
    also after ``shardgraph calibrate``, which times operations in place in a program. ``source`` says where the numbers
    come from. Without a ``host``, plans that offload cannot be priced. Products in 16 bits whose matrices have rows at
    multiples of fewer than ``alignment`` bytes attain only that part of their rate: loads of tensor cores are narrower.
    """

    name: str
    memory: int
    peak: Mapping[str, float]
    rates: Mapping[str, Rate]
    sustained: Mapping[str, float] = field(default_factory=dict)
    allocation: int = 512
    source: str = ""
    host: Host | None = None
    alignment: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "a device's ", **_FIELDS)
        if "pointwise" not in self.rates:
            raise ClusterError(f"device {self.name!r} has no rate 'pointwise', the price of what has no other")
        for kind, part in self.sustained.items():
            if kind not in (*FLOP_KINDS, MEMORY) or not 0 < part <= 1:
                raise ClusterError(
                    f"device {self.name!r} sustains {part} of {kind!r}: it may be a part above 0, at most 1, of "
                    f"{', '.join(FLOP_KINDS)} or {MEMORY}"
                )

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU of this machine: named as detection and calibration name it."""
        return self.name.startswith("cpu")

    @property
    def linked_host(self) -> Host:
        """The host of the device.

        Raises:
            ClusterError: the device does not describe one.
        """
        if self.host is None:
            raise ClusterError(
                f"device {self.name!r} does not describe its host, so offloading cannot be priced: add to it "
                "host: {link: {bandwidth: 2.5e+10, latency: 6.0e-6}, optimizer: {per_second: 4.0e+10}} with your "
                "figures, or measure this machine with `shardgraph calibrate`"
            )
        return self.host

    @property
    def call(self) -> float:
        """Seconds in which Python calls an operation; 0 where the host is not described."""
        return self.host.call if self.host else 0.0

    def aligned(self, kind: str, dtype: str, alignment: int) -> float:
        """The part of its rate that work attains whose matrices have rows at multiples of ``alignment`` bytes."""
        return min(1.0, alignment / self.alignment) if kind == "matmul" and dtype in IN_16_BITS else 1.0

    def rate(self, kind: str, dtype: str = "") -> Rate | None:
        """The rate of a kind of work; None for a kind counted in FLOPs in a dtype that the device has no rate for.

        A kind without a rate of its own falls back to a simpler one: attention and convolution to matmul, every kind
        counted in bytes to pointwise, complex numbers to their parts, and on a CPU other dtypes to float32. Views
        without a rate cost nothing.
        """
        asked = kind, dtype
        if asked not in self._attained:
            self._attained[asked] = self._rate(kind, dtype)
        return self._attained[asked]

    @cached_property
    def _attained(self) -> dict[tuple[str, str], Rate | None]:
        """The rates that were asked for: every operation of every program asks."""
        return {}

    def _rate(self, kind: str, dtype: str) -> Rate | None:
        if kind == VIEW:
            return self.rates.get(VIEW, Rate(1.0))
        if kind in FLOP_KINDS:
            dtype = _ALIKE.get(dtype, dtype)
            part = kind if f"{kind}/{dtype}" in self.rates else "matmul"
            rate = self.rates.get(f"{part}/{dtype}")
            if rate is None and self.is_cpu and dtype in _CPU_RATES and (measured := self.rate(kind, "float32")):
                return replace(measured, per_second=measured.per_second * _CPU_RATES[dtype])
            if rate is None and dtype in _PARTS and (measured := self.rate(kind, _PARTS[dtype])):
                return replace(measured, per_second=measured.per_second / 4)
        else:
            rate, part = self.rates.get(kind, self.rates["pointwise"]), MEMORY
        return rate and replace(rate, per_second=rate.per_second * self.sustained.get(part, 1.0))
