"""Roles: the meaning of a value that is an input or a result of a graph."""

from __future__ import annotations

from dataclasses import dataclass


class Role:
    """The meaning of a value; two roles are equal if they are of one class and have the same fields."""


@dataclass(frozen=True)
class _Named(Role):
    fqn: str


@dataclass(frozen=True)
class _Indexed(Role):
    index: int


class Parameter(_Named):
    """The parameter ``fqn`` (its local shard, once a pass has sharded it)."""


class Buffer(_Named):
    """The buffer ``fqn``, replicated on every rank."""


class Gathered(_Named):
    """The full parameter ``fqn``, all-gathered once for all microbatches of a step."""


class Input(_Indexed):
    """The ``index``-th leaf of the flattened ``(args, kwargs)`` of a call."""


class Tangent(_Indexed):
    """The incoming gradient of the :class:`Output` of the same index."""


class Saved(_Indexed):
    """The ``index``-th value saved for backward."""


class Output(_Indexed):
    """The ``index``-th leaf of the model's output."""


class IntermediateBase(_Indexed):
    """A hidden output, of which user outputs are views (``index`` counts the hidden ones)."""


class Forwarded(_Indexed):
    """The ``index``-th value that a pipeline stage sends to the next in forward: its result, the next one's input."""


class Returned(_Indexed):
    """The ``index``-th value that a pipeline stage sends to the previous one in backward, as a tangent there."""


@dataclass(frozen=True)
class Updater(Role):
    """What backward hands gradients of parameters to, as soon as nothing reads them (:mod:`shardgraph.ir.update`)."""


@dataclass(frozen=True)
class Mutation(Role):
    """The new value of an input that the model writes in place."""

    of: Buffer | Input | Parameter


@dataclass(frozen=True)
class Checked(_Indexed):
    """The ``index``-th condition, one number that is 0 if it fails, without which forward raises at ``line``."""

    line: str


@dataclass(frozen=True)
class Gradient(Role):
    """The gradient of a parameter or of an input."""

    of: Parameter | Buffer | Input


@dataclass(frozen=True)
class Accumulated(Role):
    """The unreduced gradient of a parameter, summed over earlier microbatches of a pipeline or under ``no_sync``, in
    memory of its own, which is given away."""

    of: Parameter


@dataclass(frozen=True)
class SquaredNorm(Role):
    """The squared norm of what a rank has of the gradient of a parameter: of its own, or of the ``reduced`` one."""

    of: Parameter
    reduced: bool


def of_backward(role: Role | None) -> bool:
    """Whether this role is of an input or a result of backward, not of forward."""
    return isinstance(role, (Tangent, Gradient, Returned, SquaredNorm))
