"""Every error that shardgraph raises deliberately, one tree under :class:`ShardGraphError`.

A message states three things: what was requested, why it is impossible, and what would work.
"""

from __future__ import annotations

import difflib
import reprlib
import types
from collections.abc import Iterable


class ShardGraphError(Exception):
    """The root of the tree: ``except ShardGraphError`` catches everything raised here."""


class CaptureError(ShardGraphError):
    """The model cannot be traced into one graph; the message names the user's line."""


class NoLossError(ShardGraphError):
    """A loss is needed where the model gives none, and no ``loss_fn``."""


class PlanError(ShardGraphError):
    """A plan is malformed, or does not fit this model or this mesh."""


class ArgumentError(ShardGraphError, TypeError, ValueError):
    """An argument of a public function is of no type, or has no value, that is allowed; the message says what is."""


class FieldError(ArgumentError, PlanError):
    """The same of a plan's field, or of an argument that says what a plan is."""


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


class ShardOperationError(ShardGraphError, NotImplementedError):
    """An operation that PyTorch does not have for parameters' shards, or not for shards beside other tensors."""


NOT_PICKLED = (
    "a compiled module and its parameters cannot be pickled, with their process groups and programs: save the state, "
    "with torch.save(sharded.full_state_dict(), ...) or save_safetensors for the original model, or with "
    "torch.distributed.checkpoint for any number of ranks"
)
"""What is raised where that is tried."""

MIXED = "mixed torch.Tensor and DTensor"
"""What torch's error has where an operation takes shards and other tensors; it is not always one of ours."""

ON_SHARDS = (
    "a parameter is a shard outside of the compiled module's calls and methods, and torch does not have this there. "
    "What computes with parameters finds them whole inside of `with sharded.as_written():`, with gradients that reach "
    "the shards; what writes to them, inside of `with sharded.unsharded():`; the step of an optimizer, in "
    "shardgraph.ShardedOptimizer"
)
"""What works instead of an operation on shards that torch refuses."""


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
        raise FieldError(f"{field} is {shown(value)}; it may be {expected}")


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 120, 160


def one_line(text: object, most: int) -> str:
    """A text of somebody else's, such as an error's, for a sentence: on one line of at most so many characters."""
    return " ".join(str(text).split())[:most]


def shown(value: object) -> str:
    """``value`` in one line of an error: as Python writes it if that is short, otherwise what it is."""
    kind = type(value)
    what = f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"the function {value.__name__}"
    if not isinstance(value, (str, bytes, list, tuple, dict, set)):
        try:
            shape, dtype = list(value.shape), str(value.dtype)  # type: ignore[attr-defined]
            return f"a {kind.__module__.split('.')[0]}.{kind.__name__} of shape {shape} and {dtype}"
        except Exception:  # it has none, or computes them in its own way
            pass
    try:
        text = _SHORT.repr(value)
    except Exception:  # of any kind: an error must not fail to say what is wrong
        return what
    return what if "\n" in text or " object at 0x" in text else text
