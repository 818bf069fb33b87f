"""Ranks that stay: what several tests run on processes runs on the same ones, with their imports and caches warm.

For functions that return on every rank and leave nothing behind; what ends a rank or leaves a collective behind is run
by :func:`shardgraph.launch`, on processes of its own.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import shardgraph
from tests.captures import sharing_captures

_RUNS = 20  # then new processes are started: every model leaves its process groups behind
_IDLE = timedelta(hours=2)  # that ranks wait for something to do

_standing: dict[int, _Ranks] = {}


def on_ranks(fn: Callable[..., Any], nproc: int = 2, *, args: Sequence[Any] = (), timeout: float = 280.0) -> list[Any]:
    """As :func:`shardgraph.launch`, on ranks that stay for the next call with as many.

    Their default process group stays too. After any failure they are ended, and the next call starts new ones.
    """
    ranks = _standing.get(nproc)
    if ranks is None:
        ranks = _standing[nproc] = _Ranks(nproc)
    try:
        results = ranks.run(fn, tuple(args), timeout)
    except BaseException:
        del _standing[nproc]
        ranks.kill()
        raise
    if ranks.runs == _RUNS:
        _standing.pop(nproc).end()
    return results


@contextmanager
def environment() -> Iterator[None]:
    """A rank's environment is as before afterwards: trainers delete what they have set, and more."""
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Ranks:
    """Processes that wait for functions in a store of the launching process."""

    def __init__(self, nproc: int) -> None:
        self.runs = 0
        self._nproc = nproc
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_IDLE)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._launch, daemon=True)
        self._thread.start()

    def _launch(self) -> None:
        try:
            shardgraph.launch(_serve, self._nproc, args=(self._store.port,), timeout=_IDLE.total_seconds())
        except BaseException as error:
            self._failure = error

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        number, self.runs = self.runs, self.runs + 1
        self._store.set(f"work {number}", _packed((fn, args)))
        keys = [f"result {number} of {rank}" for rank in range(self._nproc)]
        deadline = time.monotonic() + timeout
        while not self._store.check(keys):
            if not self._thread.is_alive():
                raise self._failure or RuntimeError("ranks ended before their work was done")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{fn.__name__} still ran on {self._nproc} ranks after {timeout:g} s")
            time.sleep(0.005)
        return [_unpacked(self._store.get(key)) for key in keys]

    def end(self) -> None:
        self._store.set(f"work {self.runs}", _packed(None))
        self._thread.join()

    def kill(self) -> None:
        """End ranks that may be inside a collective: when one dies, ``launch`` ends the others."""
        if self._thread.is_alive() and self._store.check(["process"]):
            os.kill(int(self._store.get("process")), signal.SIGKILL)
        self._thread.join(30)


def _serve(port: int) -> None:
    """What each rank does: one piece of work after the other. An error ends it, and so all ranks."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_IDLE)
    if dist.get_rank() == 0:
        store.set("process", str(os.getpid()))
    number = 0
    gc.freeze()  # imports are in no later collection
    with sharing_captures():
        while (work := _unpacked(store.get(f"work {number}"))) is not None:
            torch.manual_seed(0)
            fn, args = work
            store.set(f"result {number} of {dist.get_rank()}", _packed(fn(*args)))
            gc.collect()
            number += 1


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def end_all() -> None:
    """End the ranks that still stand."""
    while _standing:
        _standing.popitem()[1].end()
