"""One case is run: its ranks, the relay of their connections, the disk of their checkpoints, and its outcome."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faulted.cases import DISK, LIMIT, NETWORK, TIMEOUT, Case
from tests.faulted.job import computed, job, model, on_one, resumed
from tests.faulted.relay import Relay

_START = 120.0  # seconds for a run until its fault
_DISK = "1m"  # of the checkpoints


@dataclass
class Outcome:
    """How a case ended; ``took`` is the seconds from the fault to the end of the last other rank.

    A fault is not counted before all ranks have begun: their imports take seconds. ``wrong`` is what a job that goes on
    found.
    """

    case: Case
    took: float
    codes: list[int | None]
    finished: int
    finals: int
    output: str
    wrong: str = ""
    load: float = 0.0

    @property
    def problem(self) -> str:
        """What is not as it should be, or ``""``."""
        return self.wrong or self._problem()

    def _problem(self) -> str:
        case = self.case
        if case.is_harmless:
            return "" if self.finished == case.ranks else f"a {case.kind} rank ended the run: {self.output[-300:]}"
        if self.took > LIMIT:
            return f"the others ended after {self.took:.1f} s: {self.output[-300:]}"
        if case.phase == "end" and not any(self.codes):
            return ""  # all had ended by then
        spared = case.kind in ("skip", *NETWORK, *DISK) or case.delay
        if self.finished == case.ranks and spared:
            return ""  # what was skipped or cut was not needed under this plan; or all was over when it happened
        survivors = case.way == "launch" or case.kind in (*NETWORK, *DISK)
        others = [code for rank, code in enumerate(self.codes) if survivors or rank != case.victim]
        if not all(others):
            return f"a rank ended well: {self.codes}"
        wanted = "could not be saved" if case.kind in DISK else rf"rank {case.victim}\b"
        named = re.search(r"ranks? \d" if case.kind in ("skip", "mesh", *NETWORK) else wanted, self.output)
        return "" if named else f"the rank is not named: {self.output[-300:]}"


def run(case: Case) -> Outcome:
    """Run a case, end what it has left after a while, and go on from its last checkpoint."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, _disk(case, name):
        codes, ended, output = {"launch": _launched, "plain": _forked, "script": _scripts}[case.way](case, name)
        folder = Path(name)
        fault, began = folder / "fault", list(folder.glob("*.began"))
        moments = [fault, *began]  # a rank that starts late hears of it when it has
        since = max([float(file.read_text()) for file in moments] if fault.exists() else [ended])
        files = [path.name for path in folder.iterdir()]
        finished, finals = (sum(name.endswith(end) for name in files) for end in (".finished", ".finally"))
        outcome = Outcome(case, ended - since, codes, finished, finals, output, load=os.getloadavg()[0])
        if not fault.exists():
            outcome.wrong = f"it did not come to its fault: {output[-300:]}"
        elif case.kind != "skip":  # what others then compute is another thing
            outcome.wrong = computed(folder, expected()) or resumed(folder, expected())
        return outcome


@functools.cache
def expected() -> list[float]:
    import torch

    one = model()
    return on_one(one, torch.optim.AdamW(one.parameters()), 0)


@contextlib.contextmanager
def _disk(case: Case, folder: str) -> Iterator[None]:
    """Put the checkpoints of a case whose disk gets full on one of their own, if this process may make one."""
    if case.kind not in DISK:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as mounted:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", mounted]
        made = case.seed % 4 and subprocess.run(command, capture_output=True, check=False).returncode == 0
        saved = Path(mounted, "saved")
        saved.mkdir()
        Path(folder, "saved").symlink_to(saved)
        try:
            yield
        finally:
            if made:
                subprocess.run(["umount", "-l", mounted], check=False)
            else:
                shutil.rmtree(saved, ignore_errors=True)


@contextlib.contextmanager
def _relayed(case: Case, folder: str, port: int) -> Iterator[int]:
    """The port that ranks whose connections fail reach the store at, and do what is to be done when they say so."""
    if case.kind not in NETWORK:
        yield port
        return
    with Relay(port) as relay, socket.create_server(("127.0.0.1", 0)) as control:
        Path(folder, "relay").write_text(str(control.getsockname()[1]))

        def act() -> None:
            with contextlib.suppress(OSError):
                told, _ = control.accept()
                with told:
                    time.sleep(case.delay)
                    if case.kind == "cut":
                        relay.cut(case.links)
                    elif case.kind == "delay":
                        relay.delay(case.seconds)
                    else:
                        relay.stall(case.links, case.seconds if case.kind == "pause" else 1e6)
                    told.sendall(b"x")

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        yield relay.port
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)


def _launched(case: Case, folder: str) -> tuple[list[int | None], float, str]:
    import shardgraph

    with launched_through(lambda port: _relayed(case, folder, port)):
        try:
            shardgraph.launch(job, case.ranks, args=(case, folder), timeout=TIMEOUT)
        except shardgraph.LaunchError as error:
            return [1], time.time(), str(error)
        return [0], time.time(), ""


@contextlib.contextmanager
def launched_through(relayed: Callable[[int], contextlib.AbstractContextManager[int]]) -> Iterator[None]:
    """Let ranks that are launched reach the store at the port that ``relayed`` has for its own."""
    from shardgraph.runtime import launch

    serve = launch.serve_store
    with contextlib.ExitStack() as stack:

        def served(timeout: float) -> Any:
            store = serve(timeout)
            return _At(store, stack.enter_context(relayed(store.port)))

        launch.serve_store = served
        stack.callback(setattr, launch, "serve_store", serve)
        yield


class _At:
    """A store that is told to be at another port."""

    def __init__(self, store: Any, port: int) -> None:
        self._store, self.port = store, port

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _forked(case: Case, folder: str) -> tuple[list[int | None], float, str]:
    context, port = multiprocessing.get_context("forkserver"), _free_port()
    with _relayed(case, folder, port) as relayed:
        ports = [relayed if rank == case.victim else port for rank in range(case.ranks)]
        ranks = [
            context.Process(target=_as_script, args=(case, folder, rank, ports[rank])) for rank in range(case.ranks)
        ]
        for process in ranks:
            process.start()
        ended = _wait([lambda each=each: each.exitcode is None for each in ranks], case, folder)
        for process in ranks:
            process.kill()
            process.join()
    return [process.exitcode for process in ranks], ended, _outputs(case, folder)


def _as_script(case: Case, folder: str, rank: int, port: int) -> None:
    """What a script is from its first line to its end, but for what the interpreter does after its handlers."""
    os.environ.update(_environment(case, rank, port))
    with open(f"{folder}/{rank}.output", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        plain(case, folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _scripts(case: Case, folder: str) -> tuple[list[int | None], float, str]:
    running, port = [], _free_port()
    with _relayed(case, folder, port) as relayed:
        for rank in range(case.ranks):
            own = _environment(case, rank, relayed if rank == case.victim else port)
            environment = {**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[2])}
            command = [sys.executable, "-m", "tests.faulted", "--case", json.dumps(asdict(case)), "--folder", folder]
            with open(f"{folder}/{rank}.output", "w") as file:
                running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        ended = _wait([lambda each=each: each.poll() is None for each in running], case, folder)
        for process in running:
            process.kill()
            process.wait()
    return [process.returncode for process in running], ended, _outputs(case, folder)


def plain(case: Case, folder: str) -> None:
    """What a script does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    job(case, folder)


def _environment(case: Case, rank: int, port: int) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return own | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _outputs(case: Case, folder: str) -> str:
    """What the ranks that live have written."""
    living = [rank for rank in range(case.ranks) if rank != case.victim or case.kind in (*NETWORK, *DISK)]
    return "\n".join(Path(folder, f"{rank}.output").read_text() for rank in living)


def _wait(running: list[Callable[[], bool]], case: Case, folder: str) -> float:
    """Wait until the ranks that should end have; returns when the last did."""
    spared = case.kind in (*NETWORK, *DISK) or case.is_harmless
    waited = [runs for rank, runs in enumerate(running) if rank != case.victim or spared]
    deadline, fault = time.monotonic() + _START, Path(folder, "fault")
    while any(runs() for runs in waited) and time.monotonic() < deadline:
        if fault is not None and fault.exists():
            deadline, fault = time.monotonic() + 60 + case.seconds, None
        time.sleep(0.05)
    return time.time()
