"""Runs a function on several local ranks, and reports which rank failed first and why.

For tests, notebooks and single machines; ``torchrun`` is for clusters, and the same script works under both.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessContext, start_processes
from tqdm import tqdm

from shardgraph.arguments import CALLABLE, LIST, SECONDS, WHOLE, checked
from shardgraph.cost_models.detection import cpu_cores
from shardgraph.errors import LaunchError, RankFailedError
from shardgraph.runtime import watch
from shardgraph.runtime.before_end import wait_before_end
from shardgraph.runtime.start_again import StartAgain, tell
from shardgraph.runtime.watch.place import shown
from shardgraph.torch_api import innermost_store, own_connection, recorded_connections

_GRACE = 5.0  # seconds for the other ranks to end after one has failed
_NOTICE = 1.0  # maximum seconds between a rank's death and our notice of it, on a busy machine
_STOPPED = 8.0  # seconds for which a rank is stopped until it is given up; its sentinel takes 3, if it has one
_KEY = "shardgraph/launch/error/{}"  # in the store, of a rank

_inside_rank = False
_hooked = False  # sys.excepthook, by _hook


@checked(fn=CALLABLE, nproc=WHOLE, args=LIST, timeout=SECONDS)
def launch(fn: Callable[..., Any], nproc: int = 2, *, args: Sequence[Any] = (), timeout: float = 600.0) -> list[Any]:
    """Call ``fn(*args)`` in ``nproc`` new local processes with a process group; return their results in rank order.

    In each rank the default process group is initialised (NCCL if every rank has a GPU, otherwise gloo), its GPU is
    selected, and ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``
    are set. Ranks share the CPU cores evenly. Every rank has its own copy of ``args``. Tensors in ``args`` and in the
    results are transferred through host memory and arrive on the CPU.

    Ranks are new interpreters. A program that launches often saves their imports, seconds each, with
    ``multiprocessing.set_start_method("forkserver")`` and ``set_forkserver_preload([...])``: ranks are then forked
    from a process that has imported these modules.

    Under ``torchrun`` (``RANK`` and ``WORLD_SIZE`` are set) this process already is a rank: nothing is started,
    ``nproc`` is ignored, ``fn`` is called here, and the list has **only this rank's result**. The process group is
    initialised if there is none, and stays for the next launch.

    Args:
        fn: a function defined at the top of a module that the ranks can import.
        nproc: number of ranks.
        args: positional arguments for ``fn``; anything that ``torch.save`` can save.
        timeout: seconds for the whole run, and for each collective; under ``torchrun`` for each collective.

    Raises:
        LaunchError: a rank raised (with the user's lines of its traceback; all of it is ``traceback`` of the error),
            died (with the signal or exit code) or was still running after ``timeout`` seconds; if several failed, the
            one that the others failed for, or the first in time. No rank is left running: the others are told, and
            have some seconds for their ``finally``.
            Also: ``fn`` or ``args`` cannot be sent to another process, or ``launch``
            was called by a rank.
        ArgumentError: an argument is not allowed. Nothing has been started.
    """
    global _inside_rank
    if _inside_rank:
        raise LaunchError(
            "launch was called by a rank of another launch, and ranks do not start ranks: "
            "call the inner function directly, or launch it on its own with the total number of ranks"
        )
    if is_rank():
        if not dist.is_initialized():
            _join_group(
                timeout
            )  # not destroyed before the end: a second group on the same store would read the first's addresses
        _inside_rank = True
        atexit.unregister(_leave_group)
        try:
            results = [fn(*args)]
        finally:
            _inside_rank = False
        atexit.register(_leave_group)  # not after a failure: threads of a broken group can be waited for for ever
        return results
    try:
        return on_new_ranks(fn, nproc, args, timeout)
    except LaunchError as error:
        raise error.with_traceback(None)  # noqa: B904 - the same; where this process has waited says nothing


def is_rank() -> bool:
    """Whether this process is a rank that something else has started, such as ``torchrun``."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def on_new_ranks(
    fn: Callable[..., Any],
    nproc: int,
    args: Sequence[Any],
    timeout: float,
    wanted: Callable[[], int] | None = None,
) -> list[Any]:
    """As :func:`launch` in a process that is no rank. ``wanted`` is asked once a second on how many ranks ``fn`` should
    run; once that is another number, they end after the next checkpoint, with :class:`StartAgain` as their results."""
    with tempfile.TemporaryDirectory(prefix="shardgraph-launch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _send_task(fn, tuple(args), folder)
        deadline = time.monotonic() + timeout
        store = serve_store(timeout)  # served from here, so that it outlives every rank
        each_second = (lambda: None) if wanted is None else partial(tell, store, nproc, wanted)
        each_second()  # before there are ranks, so that all see that somebody tells
        rank_args = (nproc, store.port, folder, timeout, dict(os.environ))  # a fork server may have another environment
        method = "forkserver" if multiprocessing.get_start_method(allow_none=True) == "forkserver" else "spawn"
        context = start_processes(_run_rank, rank_args, nproc, join=False, start_method=method)
        try:
            _wait(context, folder, store, deadline, timeout, each_second)
        except LaunchError:
            _hook()
            raise
        finally:
            _end(context)
        results = [folder / f"{rank}.result" for rank in range(nproc)]
        # Any object, as the function's results may be: written by our own ranks, in a folder that is this user's alone.
        return [torch.load(file, map_location="cpu", weights_only=False) for file in results]


def _hook() -> None:
    """Have an uncaught LaunchError shown by the user's lines alone: our own say nothing of a rank's failure."""
    global _hooked
    if not _hooked:
        _hooked, sys.excepthook = True, partial(_uncaught, sys.excepthook)


def _uncaught(
    before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, LaunchError):
        print(shown(error, raised=False), file=sys.stderr, flush=True)
    else:
        before(kind, error, trace)


def _send_task(fn: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> None:
    name = getattr(fn, "__qualname__", repr(fn))
    if _is_interactive(fn):
        raise LaunchError(
            f"launch cannot send {name} to its ranks: it was typed into a notebook, a prompt or a pipe, where "
            "other processes cannot import it. Write it to a file (in a notebook: %%writefile work.py) and import it"
        )
    try:
        torch.save((fn, args), folder / "task")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"launch cannot send {name} and its arguments to other processes: {error}. Define the function "
            "at module level (no lambda, no function inside a function) and give it what it needs through args"
        ) from error


def _is_interactive(fn: Callable[..., Any]) -> bool:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file is not None and Path(file).is_file()):
        return False
    # Ranks run the main program's file first, so a program without one ("<stdin>") stops them, whatever fn is.
    return file is not None or getattr(fn, "__module__", None) == "__main__"


def rank_environment(rank: int, nproc: int, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of one of ``nproc`` local ranks, whose store is served at ``port``, as torchrun has it."""
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the launcher serves the store, not rank 0
    }
    # A hostname that resolves elsewhere does no harm then, and no other machine can connect.
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return loopback | dict(environment) | own


def serve_store(timeout: float) -> dist.TCPStore:
    """The store where local ranks meet, on a free port; it is there while the result is."""
    listener = socket.create_server(("127.0.0.1", 0))  # bound before the port is published, so it cannot be taken
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _wait(
    context: ProcessContext,
    folder: Path,
    store: dist.Store,
    deadline: float,
    timeout: float,
    each_second: Callable[[], None],
) -> None:
    """Return when all ranks have returned; raise as soon as one fails or the deadline passes."""
    running = dict(enumerate(context.processes))
    stopped: dict[int, float] = {}  # and since when
    while running:
        each_second()
        look = min(_NOTICE, max(0.0, deadline - time.monotonic()))
        connection.wait([process.sentinel for process in running.values()], look)
        noticed = time.time()
        codes = {rank: process.exitcode for rank, process in running.items() if process.exitcode is not None}
        died = {rank: code for rank, code in codes.items() if code != 0 or not (folder / f"{rank}.result").exists()}
        if died:
            _end(context, _GRACE)
            raise _first_failure(died, noticed, len(context.processes), folder, store)
        for rank in codes:
            del running[rank]
        stopped = {
            rank: stopped.get(rank, time.monotonic())
            for rank, process in running.items()
            if process.pid is not None and watch.state(process.pid) == "T"
        }
        if given_up := [rank for rank, since in stopped.items() if time.monotonic() - since > _STOPPED]:
            error = LaunchError(f"rank {given_up[0]} of {len(context.processes)} was stopped (SIGSTOP)")
            error.failed = tuple(given_up)
            raise error
        if running and time.monotonic() >= deadline:
            ranks = f"rank{'s' if len(running) > 1 else ''} {', '.join(map(str, running))} of {len(context.processes)}"
            raise LaunchError(
                f"{ranks} still ran after {timeout:g} s, so the run was ended. Either the work needs longer, "
                "launch(..., timeout=seconds), or these ranks wait for a collective that another rank never calls"
            )


def _end(context: ProcessContext, grace: float = 0.0) -> None:
    deadline = time.monotonic() + grace
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in context.processes:
        process.kill()  # a rank inside a collective does not react to anything weaker
    for process in context.processes:
        process.join()


def _first_failure(died: dict[int, int], noticed: float, nproc: int, folder: Path, store: dist.Store) -> LaunchError:
    """The failure that others failed for, if they were told, or else the first, with its cause at the end."""
    failures = []
    for rank in range(nproc):
        if (record := _told(folder, rank, store)) is not None:
            report = record["short"] if record["told"] else f"rank {rank} of {nproc} raised:\n\n{record['short']}"
            failures.append((record["told"], record["time"], report, record["traceback"], rank))
        elif rank in died:  # it may have died so long before
            report = f"rank {rank} of {nproc} {_cause_of_death(died[rank])}"
            failures.append((False, noticed - _NOTICE, report, "", rank))
    _, _, report, full, _ = min(failures)
    error = LaunchError(report)
    error.traceback = full
    error.failed = tuple(rank for told, _, _, _, rank in failures if not told)
    return error


def _cause_of_death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL: by somebody, or by the system because memory ran out (see its log)"
    if code < 0:
        return f"died of signal {signal.Signals(-code).name}; what it last wrote is on standard error"
    return (
        f"ended with exit code {code} before its function returned; what it last wrote is on standard error. "
        'If the function never began: a script must call launch under `if __name__ == "__main__":`'
    )


def _run_rank(rank: int, nproc: int, port: int, folder: Path, timeout: float, environment: Mapping[str, str]) -> None:
    global _inside_rank
    _inside_rank = True
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # torch uses it; its own lock is a semaphore, which a killed rank leaves behind
    try:
        os.environ.clear()
        os.environ.update(rank_environment(rank, nproc, port, environment))
        # In a container this process may use fewer cores than the machine has.
        torch.set_num_threads(max(1, cpu_cores() // nproc))
        _join_group(timeout)
        fn, args = torch.load(folder / "task", map_location="cpu", weights_only=False)
        try:
            result = fn(*args)
        except StartAgain as ended:
            result = ended
        wait_before_end()  # a save that is under way communicates in the groups
        torch.save(result, folder / f"{rank}.result")
        watch.leave("has ended: its function returned")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as raised:
        error = watch.seen(raised)
        watch.fail(error)
        record = {
            "time": time.time(),
            "told": isinstance(error, RankFailedError),
            "short": str(error) if isinstance(error, RankFailedError) else watch.place.shown(error),
            "traceback": traceback.format_exc(),
        }
        _tell(folder, rank, json.dumps(record))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit can wait for ever for threads of a broken process group


def _tell(folder: Path, rank: int, record: str) -> None:
    """Give the launcher the record of an error: in a file, or by the store if the disk is full."""
    draft = folder / f"{rank}.draft"
    try:
        draft.write_text(record)
        draft.rename(folder / f"{rank}.error")  # atomic: this process may be killed at any moment
    except OSError:
        with contextlib.suppress(RuntimeError, ValueError):  # no group was made, or the store cannot be reached
            # The group's own connections are shut down if another rank has failed at the same time.
            store, key = innermost_store(own_connection()), _KEY.format(rank)
            store.set(key, record)
            store.check([key])  # set() does not wait until the store has it, and this process ends now


def _told(folder: Path, rank: int, store: dist.Store) -> dict[str, Any] | None:
    """The record of a rank's error, if there is one."""
    file, key = folder / f"{rank}.error", _KEY.format(rank)
    if not file.exists() and not store.check([key]):
        return None
    record: dict[str, Any] = json.loads(file.read_text() if file.exists() else store.get(key))
    return record


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_group() -> None:
    """A process that ends with threads of a group that it is in aborts now and then."""
    watch.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(timeout: float) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if gpu_each:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    backend = "nccl" if gpu_each else "gloo"
    with recorded_connections(backend):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    watch.begin()
