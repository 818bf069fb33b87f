"""The watch of ranks over each other: the failure of one is told to all within seconds, whatever their timeout is.

It begins with the first agreement of a process group, or with :func:`shardgraph.launch`, and costs nothing while ranks
work: a thread looks at this rank's frames once a second, and a small process beside it sees whether it lives.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from shardgraph import torch_api
from shardgraph.errors import MIXED, ON_SHARDS, RankFailedError, ShardGraphError
from shardgraph.runtime.watch import flight, place
from shardgraph.runtime.watch.place import agreeing
from shardgraph.runtime.watch.sentinel import state
from shardgraph.runtime.watch.watcher import Watcher
from shardgraph.runtime.watch.wording import named, unreachable

__all__ = [
    "abandon",
    "agreeing",
    "begin",
    "begin_graph",
    "fail",
    "failed",
    "introduced",
    "is_of_others",
    "leave",
    "look_after",
    "place",
    "plain",
    "raise_failure",
    "seen",
    "state",
    "stepping",
    "translated",
]

_SENTINEL = 1.0  # seconds for a sentinel to tell what it knows
_INTRODUCED = 10.0  # seconds for the sentinel of rank 0, which the others are told of by the store
_ASKED = 8  # ranks of many that are asked at once whether they are there

_PLAIN = (
    (
        r"connection (was )?(closed|reset)|closed by peer|broken pipe|remote process exited",
        "another rank has closed its connection",
    ),
    (r"connection refused|connectFullMesh failed", "another rank could not be reached"),
    (r"timed? ?out", "no answer came within its timeout"),
    (r"communicator was aborted", "the communicator was aborted"),
)

P = ParamSpec("P")
T = TypeVar("T")

# Errors of gloo, NCCL and the store for a missing or an unexpected message.
_OF_OTHERS = re.compile(
    r"gloo/transport|connection (was )?(closed|reset|refused)|closed by peer|broken pipe|timed? ?out|socket|"
    r"remote process|communicator was aborted|NCCL error",
    re.IGNORECASE,
)
_OF_THE_CALL = re.compile(r"invalid (usage|argument)", re.IGNORECASE)

_watcher: Watcher | None = None
_hooked: int | None = None  # the process that has the hooks
_lock = threading.Lock()


def begin() -> None:
    """Watch over the ranks of the default process group, if there are several; all ranks must call it, at any time."""
    global _watcher
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or dist.get_world_size() == 1 or dist.get_backend() in ("fake", "threaded"):
        return
    with _lock:
        if _watcher is None or _watcher.group is not group:
            try:
                _watcher = Watcher(group)
            except dist.DistNetworkError as error:
                raise RankFailedError(unreachable(dist.get_rank(), "its beginning", plain(error))) from error
            _hook()


def _current() -> Watcher | None:
    return _watcher if _watcher is not None and _watcher.is_on else None


def raise_failure() -> None:
    """Raise RankFailedError if another rank has failed."""
    if (watcher := _current()) is not None:
        watcher.raise_failure()


def begin_graph() -> None:
    """Say that a graph with collectives begins; raises RankFailedError if another rank has failed."""
    if _watcher is not None and _watcher.failure is not None:
        raise_failure()
    place.calls += 1
    flight.begin(place.calls)


def look_after(ranks: Sequence[int], doing: str, ask: bool) -> None:
    """Raise RankFailedError if another rank has failed, or one of ``ranks``, for which this one waits, has ended.

    With ``ask`` they are asked whether they are there: the watch does not know a rank that has ended before it began to
    watch, of a group that the user has made.
    """
    watcher = _current()
    if watcher is None:
        return
    watcher.raise_failure()
    if any(rank in watcher.left for rank in ranks) and watcher.cause():
        raise watcher.error(doing)
    gone = next((rank for rank in ranks[:_ASKED] if torch_api.has_hung_up(rank)), None) if ask else None
    if gone is not None and not watcher.failed.wait(_SENTINEL):
        watcher.fail(text := f"rank {gone} has ended before {doing}")
        if not watcher.failed.wait(_SENTINEL):  # the sentinels that would tell it have ended with rank 0
            raise RankFailedError(text)
    watcher.raise_failure()


def introduced(doing: str) -> None:
    """Wait, for some seconds, until others would hear of the end of this rank, which then may let them wait for it."""
    watcher, looks = _current(), int(_INTRODUCED / _SENTINEL)
    while watcher is not None and looks and not watcher.introduced.wait(_SENTINEL):
        look_after([0] if watcher.rank else [], doing, ask=True)
        looks -= 1


def is_of_others(error: BaseException) -> bool:
    """Whether a failed communication was failed by others, or their loss, rather than by this rank's own call."""
    network = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    found = isinstance(error, RuntimeError) and _OF_OTHERS.search(str(error))
    return bool(network or found) and not _OF_THE_CALL.search(str(error))


def failed(error: BaseException, doing: str) -> RankFailedError | None:
    """What is raised in place of an error of communication: the failure of another rank that is behind it.

    If none is known within seconds the others are told that this rank has failed, and with whom it communicated; where
    that is not known either, it raises its own error.
    """
    watcher = _current()
    if watcher is None or not is_of_others(error):
        return None
    if watcher.cause():
        return watcher.error(doing)
    peers = [rank for rank in torch_api.members(place.of_error(error).group) if rank != watcher.rank]
    text = f"rank {watcher.rank} failed in {doing}{f' with {named(peers)}' if peers else ''}: {plain(error)}"
    watcher.fail(text)
    return RankFailedError(f"{text}, and no rank is known to have ended") if peers else None


def plain(error: BaseException) -> str:
    """What an error of gloo, NCCL or the store says, without the lines of their sources."""
    text = " ".join(str(error).split())
    for pattern, words in _PLAIN:
        if re.search(pattern, text, re.IGNORECASE):
            return words
    return text[:300]


def translated(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, which communicates, with RankFailedError for an error of communication that another rank has caused."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except RuntimeError as error:
            if (cause := failed(error, fn.__name__)) is not None:
                raise cause from error
            raise

    return call


def seen(error: BaseException) -> BaseException:
    """What an error that ends this rank is: the failure of another rank, if that is its cause, or if it is an error of
    communication and there is one.

    Torch's own of shards beside other tensors gets a note with what works.
    """
    for cause in _with_causes(error):
        if isinstance(cause, RankFailedError):
            return cause
    if isinstance(error, RuntimeError) and MIXED in str(error):
        error.add_note(f"shardgraph: {ON_SHARDS}")
    return failed(error, place.of_error(error).text) or error


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from, each once: Python lets an error be raised from itself."""
    cause: BaseException | None = error
    known: set[int] = set()
    while cause is not None and id(cause) not in known:
        yield cause
        known.add(id(cause))
        cause = cause.__cause__


def abandon(error: BaseException) -> None:
    """Say that this rank has left the graph that it was in, with an error of its own."""
    if (watcher := _current()) is not None:
        watcher.abandon(error)


def fail(error: BaseException) -> None:
    """Say that this rank ends with an error."""
    watcher = _current()
    if watcher is not None and not isinstance(error, RankFailedError):
        watcher.fail(f"rank {watcher.rank} raised {place.described(error)}")


@contextmanager
def stepping() -> Iterator[None]:
    """Run a step of a pipeline; if it fails, others that are in the same one wait in vain."""
    raise_failure()
    with place.counted_step():
        try:
            yield
        except Exception as error:
            if not is_of_others(error):
                abandon(error)
            raise


def leave(how: str = "has ended: its program returned, or called sys.exit") -> None:
    """Say that this rank ends in order, before it does."""
    if (watcher := _current()) is not None:
        watcher.leave(f"rank {watcher.rank} {how}")


def _hook() -> None:
    """Hear how this process ends."""
    global _hooked
    if _hooked == os.getpid():
        return
    _hooked = os.getpid()
    sys.excepthook = functools.partial(_uncaught, sys.excepthook)
    atexit.register(leave)
    Finalize(None, leave, exitpriority=0)  # a process of multiprocessing has no atexit


def _uncaught(
    before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an uncaught error: of another rank's failure the cause alone, and that below one of communication."""
    watcher = _current()
    if watcher is None or watcher.process != os.getpid():
        before(kind, error, trace)
        return
    error = seen(error)
    if isinstance(error, RankFailedError):
        print(f"shardgraph.RankFailedError: {error}", file=sys.stderr, flush=True)
        return
    fail(error)
    if isinstance(error, ShardGraphError):
        print(f"{place.shown(error)}", file=sys.stderr, flush=True)
    else:
        before(kind, error, trace)
