"""Training for a long time with a fault a minute: the losses are those of a job that nothing happened to.

    python -m tests.soak --minutes 30 --file soak.json

A job of four ranks trains under ``shardgraph.elastic`` and saves every ten steps in the background. Once a minute a
rank is killed, stopped, raises, ends, or finds the disk full; the job goes on with those that are left, and begins
again with four when fewer than two are. Every loss that was computed, also of steps that were done twice, is compared
to that of the same step on one device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from tests.plain_loop import losses_of

RANKS, SAMPLES, EVERY = 4, 10, 10  # samples of a step; steps between two checkpoints
PAUSE = 0.05  # seconds in a step, so that a machine has room for other things
ENDLESS = 10**8
KINDS = ("kill", "stop", "raise", "exit", "os._exit", "disk")
PLANS = ("fsdp", "zero2", "ddp")


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, the ``victim`` modulo the number of ranks, at ``time`` (seconds since 1970)."""

    number: int
    time: float
    kind: str
    victim: int
    delay: float


def drawn(count: int, start: float, pause: float) -> list[Fault]:
    """The faults of a soak."""
    choose = random.Random(count)
    return [
        Fault(number, start + pause * (number + 1), choose.choice(KINDS), choose.randrange(RANKS), choose.random())
        for number in range(count)
    ]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].tanh()


def model() -> nn.Module:
    """In 64 bits: what ranks round differently does not grow to be seen in thousands of steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimizer_of(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-3)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(folder: str, faults: list[Fault], until: float) -> None:
    """Train until a time, from the last checkpoint, with the faults that have not happened yet."""
    rank, ranks, place = dist.get_rank(), dist.get_world_size(), Path(folder)
    happen = _scheduled(faults, place, rank, ranks)
    sharded = shardgraph.compile(model(), PLANS[ranks % len(PLANS)], loss_fn=loss_of, loss_weight="tokens", timeout=600)
    optimizer, saved = optimizer_of(sharded), place / "saved"
    done = shardgraph.load_checkpoint(saved, sharded, optimizer).step if shardgraph.checkpoints(saved) else 0
    for step in range(done + 1, ENDLESS):
        happen()
        inputs, targets = batch_of(step)
        mine = sharded.rows_of(SAMPLES)
        loss = sharded.train_step(inputs[mine], target=targets[mine]).double() * len(targets[mine]) / SAMPLES
        optimizer.step()
        optimizer.zero_grad()
        told = torch.stack([loss.detach(), torch.tensor(float(time.time() > until), dtype=torch.float64)])
        dist.all_reduce(told)
        if rank == 0:
            with (place / "losses.jsonl").open("a") as file:
                file.write(json.dumps([step, ranks, told[0].item(), time.time()]) + "\n")
        if step % EVERY == 0:
            shardgraph.save_checkpoint(saved, step, sharded, optimizer, background=True)
        if told[1] > 0:  # of any rank, so that all end at one step
            return
        time.sleep(PAUSE)


def _scheduled(faults: list[Fault], folder: Path, rank: int, ranks: int) -> Callable[[], None]:
    """Begin to wait for the next fault of this rank; what is returned raises it, if it is one to be raised."""
    left = [each for each in faults if not (folder / f"fault-{each.number}").exists()]
    if not left or left[0].victim % ranks != rank:
        return lambda: None
    fault, due = left[0], threading.Event()

    def wait() -> None:
        time.sleep(max(0.0, fault.time - time.time()) + fault.delay)  # one that is late happens in the next job
        (folder / f"fault-{fault.number}").write_text(json.dumps({**asdict(fault), "at": time.time(), "ranks": ranks}))
        if fault.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        elif fault.kind == "os._exit":
            os._exit(4)
        elif fault.kind == "disk":
            room = 2000  # bytes of a file, which a rank's part of a checkpoint is more than
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        else:
            due.set()

    def happen() -> None:
        if due.is_set():
            if fault.kind == "exit":
                sys.exit(3)
            raise ValueError("an error of the user's")

    threading.Thread(target=wait, daemon=True).start()
    return happen


def undisturbed(steps: int) -> dict[int, float]:
    """The loss of each step on one device."""
    one = model()

    def loss(step: int) -> torch.Tensor:
        inputs, targets = batch_of(step)
        return loss_of(one(inputs), targets)

    return losses_of(optimizer_of(one), loss, range(1, steps + 1))


def soak(minutes: float, pause: float = 60.0) -> dict[str, Any]:
    """Train for ``minutes`` with a fault every ``pause`` seconds; what has happened, and what differs."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["shardgraph.api.compile", "torch.testing", "tests.soak"])
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        until = start + minutes * 60
        faults = drawn(int(minutes * 60 / pause - 0.5), start, pause)
        starts, told = 0, []
        while True:
            starts += 1
            try:
                arguments = (folder, faults, until)
                shardgraph.elastic(train, RANKS, args=arguments, least=2, restarts=ENDLESS, timeout=ENDLESS)
                break
            except shardgraph.LaunchError as error:  # fewer than two are left
                told.append(str(error))
                if starts > len(faults) + 1:
                    raise
        return _compared(Path(folder), minutes, starts, told)


def _compared(folder: Path, minutes: float, starts: int, told: list[str]) -> dict[str, Any]:
    done = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    happened = [json.loads(file.read_text()) for file in sorted(folder.glob("fault-*"))]
    last = max(step for step, *_ in done)
    expected = undisturbed(last)
    differ = [(step, loss, expected[step]) for step, _, loss, _ in done if abs(loss / expected[step] - 1) > 1e-9]
    times = [when for *_, when in done]
    gaps = [min((when for when in times if when > fault["at"] + 1), default=0.0) - fault["at"] for fault in happened]
    return {
        "minutes": minutes,
        "faults": {kind: sum(each["kind"] == kind for each in happened) for kind in KINDS},
        "by_ranks": {n: sum(each["ranks"] == n for each in happened) for n in range(2, RANKS + 1)},
        "jobs": starts,
        "steps": last,
        "losses": len(done),
        "again": len(done) - len({step for step, *_ in done}),
        "missing": last - len({step for step, *_ in done}),
        "differ": differ[:10],
        "largest": max(abs(loss / expected[step] - 1) for step, _, loss, _ in done),
        "longest_pause": max(b - a for a, b in itertools.pairwise(times)),
        "gaps": gaps,
        "told": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--file", type=Path, default=Path("soak.json"))
    options = parser.parse_args()
    found = soak(options.minutes, options.pause)
    options.file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key not in ("gaps", "told")}, indent=1))


if __name__ == "__main__":
    from tests import soak as module  # ranks import it by its name

    module.main()
