"""Roles: the meaning of a value that is an input or a result of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """The parameter ``fqn`` (its local shard, once a pass has sharded it)."""

    fqn: str


@dataclass(frozen=True)
class Buffer:
    """The buffer ``fqn``, replicated on every rank."""

    fqn: str


@dataclass(frozen=True)
class Input:
    """The ``index``-th leaf of the flattened ``(args, kwargs)`` of a call."""

    index: int


@dataclass(frozen=True)
class Tangent:
    """The incoming gradient of the :class:`Output` of the same index."""

    index: int


@dataclass(frozen=True)
class Saved:
    """The ``index``-th value saved for backward."""

    index: int


@dataclass(frozen=True)
class Output:
    """The ``index``-th leaf of the model's output."""

    index: int


@dataclass(frozen=True)
class IntermediateBase:
    """A hidden output, of which user outputs are views (``index`` counts the hidden ones)."""

    index: int


@dataclass(frozen=True)
class Mutation:
    """The new value of an input that the model writes in place."""

    of: Buffer | Input | Parameter


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter or of an input."""

    of: Parameter | Buffer | Input


@dataclass(frozen=True)
class Accumulated:
    """The unreduced gradient of a parameter, summed over earlier microbatches under ``no_sync``."""

    of: Parameter


@dataclass(frozen=True)
class Gathered:
    """The full parameter ``fqn``, all-gathered once for all microbatches of a step."""

    fqn: str


@dataclass(frozen=True)
class Forwarded:
    """The ``index``-th value that a pipeline stage sends to the next in forward: its result, the next one's input."""

    index: int


@dataclass(frozen=True)
class Returned:
    """The ``index``-th value that a pipeline stage sends to the previous one in backward, as a tangent there."""

    index: int


Role = (
    Parameter
    | Buffer
    | Input
    | Tangent
    | Saved
    | Output
    | IntermediateBase
    | Mutation
    | Gradient
    | Accumulated
    | Gathered
    | Forwarded
    | Returned
)


def of_backward(role: Role | None) -> bool:
    """Whether this role is of an input or a result of backward, not of forward."""
    return isinstance(role, (Tangent, Gradient, Returned))
