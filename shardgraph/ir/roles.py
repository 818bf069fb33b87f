"""Roles: what a value that enters or leaves a graph means."""

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
    """The ``index``-th value that forward keeps for backward."""

    index: int


@dataclass(frozen=True)
class Output:
    """The ``index``-th leaf of what the model returns."""

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
    """The whole parameter ``fqn``, gathered once for all microbatches of a step."""

    fqn: str


@dataclass(frozen=True)
class Forwarded:
    """The ``index``-th value that a pipeline stage gives the next in forward: a result of the one, an input of the
    other."""

    index: int


@dataclass(frozen=True)
class Returned:
    """The ``index``-th value that a pipeline stage gives the one before in backward, where it is as a tangent."""

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
    """Whether an input or a result with this role is backward's and not forward's."""
    return isinstance(role, (Tangent, Gradient, Returned))
