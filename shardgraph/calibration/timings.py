"""What calibration measures, as data."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@dataclass(frozen=True)
class Sample:
    """One operation: FLOPs or bytes of its ``work``, and the ``seconds`` that it took.

    ``moved`` are the bytes that it reads and writes where ``work`` is FLOPs.
    """

    kind: str
    work: float
    seconds: float
    moved: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """One collective: the bytes of a rank's input and output, and its ``seconds`` from start to wait.

    ``added`` are the seconds by which a computation is longer behind which it runs.
    """

    operation: str
    given: int
    gotten: int
    seconds: float
    added: float


@dataclass(frozen=True)
class Measurements:
    """What the ranks of a machine measured; ``memory`` is one rank's bytes.

    ``host`` are copies from its memory to the device (kind ``"copy"``) and updates of parameters there.
    """

    device: str
    ranks: int
    threads: int
    memory: int
    samples: tuple[Sample, ...]
    transfers: tuple[Transfer, ...]
    host: tuple[Sample, ...] = ()
