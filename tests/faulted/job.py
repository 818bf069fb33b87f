"""What each rank of a case does: train, save and load, with the fault."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faulted.cases import DISK, NETWORK, STEPS, TIMEOUT, Case

SAMPLES = 4  # of each rank, the same on all: so that losses are those of one device on any number of ranks
At = Callable[[str, int], bool]


class _Injected(Exception):
    """An error of the user's."""


class _Left(Exception):
    """The rank returns."""


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def batch_of(step: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 8, generator=generator), torch.zeros(SAMPLES, 4)


def loss_of(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def job(case: Case, folder: str) -> None:
    """In ``folder`` ranks note the time of the fault, losses, what they have saved, and that they finished."""
    import torch
    import torch.distributed as dist

    import shardgraph
    import shardgraph.api.compile  # else imported by the first call, in seconds

    rank = dist.get_rank()
    is_victim = rank == case.victim

    def at(phase: str, step: int) -> bool:
        """Whether the rank skips this phase; the fault happens here."""
        here = phase == case.phase and (step == case.step or phase in ("before", "compile", "end"))
        if not (is_victim and here):
            return False
        Path(folder, "fault").write_text(str(time.time()))
        _happen(case, folder)
        return case.kind == "skip"

    Path(folder, f"{rank}.began").write_text(str(time.time()))
    try:
        at("before", 0)
        x, target = batch_of(0)
        options: dict[str, Any] = {"timeout": TIMEOUT, "loss_fn": loss_of}
        if case.plan == "pp":
            options |= {"example_inputs": (x,), "example_kwargs": {"target": target}}
            options |= {"pipeline": shardgraph.Pipeline(2)}
        if case.kind == "mesh":
            options["mesh"] = {"a": 4} if is_victim else {"b": 4}
        at("compile", 0)
        sharded = shardgraph.compile(model(), case.plan, **options)
        optimizer = torch.optim.AdamW(sharded.parameters())
        for step in range(STEPS):
            try:
                _step(case, sharded, optimizer, step, at, folder)
            except Exception:
                if case.kind != "catch" or is_victim:
                    raise
        if case.phase == "end":
            time.sleep(0.5 * (rank != case.victim))
        at("end", 0)
        shardgraph.wait_for_saves()
        dist.barrier()
        Path(folder, f"{rank}.finished").touch()
    except _Left:
        return
    finally:
        Path(folder, f"{rank}.finally").touch()


def _step(case: Case, sharded: Any, optimizer: Any, step: int, at: At, folder: str) -> None:
    import torch.distributed as dist

    import shardgraph

    x, target = batch_of(step)
    if not at("forward", step):
        if case.plan == "pp":
            at("backward", step)
            loss = sharded.train_step(x, target=target)
        else:
            loss = loss_of(sharded(x), target)
            at("backward", step)
            loss.backward()
        with Path(folder, f"{dist.get_rank()}.losses").open("a") as file:
            file.write(json.dumps([step, loss.item()]) + "\n")
    if not at("clip", step):
        sharded.clip_grad_norm_(1.0)
    at("step", step)
    optimizer.step()
    optimizer.zero_grad()
    if not at("save", step):
        tolerated = shardgraph.CheckpointError if case.kind == DISK[1] else ()
        with contextlib.suppress(tolerated):
            save = shardgraph.save_checkpoint(
                Path(folder, "saved"), step + 1, sharded, optimizer, background=case.background, timeout=TIMEOUT
            )
            if case.phase in ("save", "load"):
                save.result()
                Path(folder, f"{dist.get_rank()}.saved{step + 1}").touch()
        if dist.get_rank() == case.victim:
            _make_room(folder)
    at("load", step)
    if case.phase in ("load", "save") and shardgraph.checkpoints(Path(folder, "saved")) and case.kind not in DISK:
        shardgraph.load_checkpoint(Path(folder, "saved"), sharded, optimizer, timeout=TIMEOUT)


def _happen(case: Case, folder: str) -> None:
    if case.kind in ("kill", "stop"):
        number = signal.SIGKILL if case.kind == "kill" else signal.SIGSTOP
        if not case.delay:
            os.kill(os.getpid(), number)
        threading.Timer(case.delay, lambda: os.kill(os.getpid(), number)).start()
    elif case.kind in ("raise", "catch"):
        raise _Injected(f"injected at {case.phase}")
    elif case.kind == "exit":
        sys.exit(3)
    elif case.kind == "os._exit":
        os._exit(4)
    elif case.kind == "return":
        raise _Left
    elif case.kind == "slow":
        time.sleep(case.seconds)
    elif case.kind == "lock":
        ctypes.PyDLL(None).sleep(int(case.seconds))  # as a function in C that does not let go of it
    elif case.kind in NETWORK:
        with socket.create_connection(("127.0.0.1", int(Path(folder, "relay").read_text()))) as told:
            told.recv(1)  # it is done
    elif case.kind in DISK:
        _fill(case, folder)


def _fill(case: Case, folder: str) -> None:
    """Leave ``room`` on the disk of the checkpoints; if that is that of other files too, in a file of this rank."""
    saved = os.path.realpath(Path(folder, "saved"))
    if os.path.ismount(os.path.dirname(saved)):
        free = os.statvfs(saved)
        with open(Path(saved).parent / "ballast", "wb") as file:
            file.write(bytes(max(0, free.f_bavail * free.f_frsize - case.room)))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _make_room(folder: str) -> None:
    saved = Path(os.path.realpath(Path(folder, "saved")))
    if os.path.ismount(saved.parent):
        (saved.parent / "ballast").unlink(missing_ok=True)
    else:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def resumed(folder: Path, expected: list[float]) -> str:
    """What is wrong with a job that goes on from the last checkpoint, on one device, or ``""``."""
    import torch

    import shardgraph

    path, one = folder / "saved", model()
    optimizer = torch.optim.AdamW(one.parameters())
    done = shardgraph.load_checkpoint(path, one, optimizer).step if shardgraph.checkpoints(path) else 0
    said = max((int(file.suffix.removeprefix(".saved")) for file in folder.glob("*.saved*")), default=0)
    if done is None or done < said:
        return f"step {said} was saved, and step {done} is found"
    losses = on_one(one, optimizer, done)
    return "" if _alike(losses, expected[done:]) else f"losses after step {done} was loaded: {losses}"


def computed(folder: Path, expected: list[float]) -> str:
    """Which loss that ranks computed is another than that of one device, or ``""``."""
    for file in folder.glob("*.losses"):
        for step, loss in map(json.loads, file.read_text().splitlines()):
            if not _alike([loss], [expected[step]]):
                return f"{file.name}: the loss of step {step} is {loss}, not {expected[step]}"
    return ""


def on_one(one: Any, optimizer: Any, done: int) -> list[float]:
    """The losses of the steps that are left, on one device."""
    import torch

    losses = []
    for step in range(done, STEPS):
        x, target = batch_of(step)
        loss = loss_of(one(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _alike(losses: list[float], expected: list[float]) -> bool:
    return all(abs(loss / other - 1) < 1e-4 for loss, other in zip(losses, expected, strict=True))
