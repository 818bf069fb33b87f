"""The timings of a calibration, as data."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@dataclass(frozen=True)
class Sample:
    """One operation: its ``work`` in FLOPs or bytes, and its ``seconds``.

    ``moved`` are the bytes that it reads and writes if ``work`` is in FLOPs.
    """

    kind: str
    work: float
    seconds: float
    moved: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """One collective: the bytes of a rank's input and output, and its ``seconds`` from start to wait.

    ``added`` are the seconds by which it extends a computation that it overlaps with, ``awaited`` those by which it
    extends one that it follows, and after which it is awaited at once. ``seconds`` are those after another collective.
    """

    operation: str
    operand: int
    result: int
    seconds: float
    added: float
    awaited: float


@dataclass(frozen=True)
class Measurements:
    """The timings of the ``ranks`` of a node, and of its collectives; ``memory`` is one rank's share in bytes.

    ``between`` are collectives of one rank of each of ``nodes`` nodes, of all such groups at once. ``host`` are copies
    from host memory to the device (kind ``"copy"``) and updates of parameters in host memory.
    """

    device: str
    ranks: int
    threads: int
    memory: int
    samples: tuple[Sample, ...]
    transfers: tuple[Transfer, ...]
    host: tuple[Sample, ...] = ()
    nodes: int = 1
    between: tuple[Transfer, ...] = ()
