"""Every error that shardgraph raises deliberately, one tree under :class:`ShardGraphError`.

A message states three things: what was requested, why it is impossible, and what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShardGraphError(Exception):
    """The root of the tree: ``except ShardGraphError`` catches everything raised here."""


class CaptureError(ShardGraphError):
    """The model cannot be traced into one graph; the message names the user's line."""


class PlanError(ShardGraphError):
    """A plan is malformed, or does not fit this model or this mesh."""


class PassOrderError(ShardGraphError):
    """A pass ran where what it requires is missing or what it excludes is present."""


class GraphInvariantError(ShardGraphError):
    """A graph is not valid between two passes: a bug in the pass that the message names."""


class RandomStateError(ShardGraphError):
    """A program would recompute random numbers; detected before launch."""


class DeadlockError(ShardGraphError):
    """The collectives of a program could block for ever; detected before launch."""


class RankMismatchError(ShardGraphError):
    """The ranks were not given the same model, plan or input shapes."""


class CollectiveError(ShardGraphError):
    """A collective failed or timed out; the message names its parameter and source line."""


class RankFailedError(CollectiveError):
    """Another rank has failed, ended or stopped, or makes other calls, so this one cannot go on; the message says."""


class ClusterError(ShardGraphError):
    """A device or cluster is unknown, malformed or too small."""


class CheckpointError(ShardGraphError):
    """A checkpoint does not fit the model."""


class ReplicaError(ShardGraphError):
    """Ranks that should have the same values have different ones: a fault of hardware, or of what computes there."""


class InitializationError(ShardGraphError):
    """A model on ``meta`` has parameters that nothing initialises."""


class OffloadError(ShardGraphError):
    """There is not enough space for offloaded parameters; nothing has been written."""


class BackwardError(ShardGraphError, RuntimeError):
    """A backward that PyTorch would refuse too: its parameters have changed, or it was to be differentiated again."""


class ModelCheckError(ShardGraphError, AssertionError, ValueError):
    """An ``assert``, or a branch that raises, of the model's forward; the message names its line."""


class LaunchError(ShardGraphError):
    """A launched rank failed; the message has its cause, and ``traceback`` the whole traceback of one that raised.

    ``failed`` are the ranks that failed by themselves, not for another; empty where none did.
    """

    traceback = ""
    failed: tuple[int, ...] = ()


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """``"; did you mean 'a', 'b'?"`` for the known names most similar to ``name``, or ``""``."""
    close = difflib.get_close_matches(name, list(known), n=limit, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def expect(allowed: bool, field: str, value: object, expected: str) -> None:
    """Raise PlanError, which names what is ``expected``, unless the value of ``field`` is ``allowed``."""
    if not allowed:
        raise PlanError(f"{field} is {value!r}; it may be {expected}")
