"""Faults that are injected into a small training run, drawn by number: what one rank does wrong, where, and when.

    python -m tests.faulted --faults 100 --file faults.jsonl    # goes on where the file ends

Every case is a run of its own, with ``launch`` or with processes that make their group themselves. Its outcome is how
long the other ranks took to end after the fault, how they ended, and what they wrote.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMIT = 15.0  # seconds within which every other rank has ended
TIMEOUT = 600.0  # of collectives, so that it is not what ends a rank
STEPS = 3
SLOW = 9.0  # seconds that a slow rank takes, or holds Python's lock
PHASES = ("before", "compile", "forward", "backward", "clip", "step", "save", "load", "end")
ENDINGS = ("kill", "stop", "raise", "exit", "os._exit", "return")
HARMLESS = ("slow", "lock")
OTHERS = {"skip": ("clip", "save", "forward"), "mesh": ("compile",), "shape": ("forward",), "catch": PHASES[1:-1]}
PLANS = ("fsdp", "ddp", "zero2", "pp")
WAYS = ("launch", "plain")


@dataclass(frozen=True)
class Case:
    """What ``victim`` does, in which phase of which step, and ``delay`` seconds after that begins."""

    seed: int
    kind: str
    phase: str
    step: int
    victim: int
    ranks: int
    plan: str
    way: str
    delay: float = 0.0

    @property
    def is_harmless(self) -> bool:
        return self.kind in HARMLESS

    @property
    def is_seen(self) -> bool:
        """Whether the watch of a plain process group has begun: with the first ``compile``."""
        return self.way == "launch" or self.phase != "before"


def draw(seed: int) -> Case:
    """The case of this number."""
    choose = random.Random(seed)
    kind = choose.choice([*ENDINGS, *ENDINGS, *HARMLESS, *OTHERS])
    phases = OTHERS.get(kind, PHASES)
    ranks = choose.choice([2, 2, 3, 4])
    plan = choose.choice(PLANS if kind not in ("mesh", "shape") else PLANS[:1])
    phase, way = choose.choice(phases), choose.choice(WAYS)
    if (way == "plain" and phase == "before") or (kind == "stop" and phase == "compile" and way == "plain"):
        phase = "forward" if kind == "stop" else "compile"
    ranks = 2 if plan == "pp" else 4 if kind == "mesh" else ranks
    delay = choose.choice([0.0, choose.uniform(0.0, 0.03)]) if kind in ("kill", "stop") else 0.0
    return Case(seed, kind, phase, choose.randrange(STEPS), choose.randrange(ranks), ranks, plan, way, delay)


# -- what each rank does


class _Injected(Exception):
    """An error of the user's."""


class _Left(Exception):
    """The rank returns."""


def job(case: Case, folder: str) -> None:
    """Train, save and load, with the fault; in ``folder`` ranks note the time of the fault and that they finished."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import shardgraph

    rank = dist.get_rank()
    torch.manual_seed(0)
    is_victim = rank == case.victim

    def at(phase: str, step: int) -> bool:
        """Whether the rank skips this phase; the fault happens here."""
        here = phase == case.phase and (step == case.step or phase in ("before", "compile", "end"))
        if not (is_victim and here):
            return False
        Path(folder, "fault").write_text(str(time.time()))
        _happen(case)
        return case.kind == "skip"

    def model() -> Any:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    try:
        at("before", 0)
        x = torch.ones(4, 8)
        options: dict[str, Any] = {
            "timeout": TIMEOUT,
            "loss_fn": lambda output, target: (output - target).square().mean(),
        }
        if case.plan == "pp":
            options |= {"example_inputs": (x,), "example_kwargs": {"target": torch.zeros(4, 4)}}
            options |= {"pipeline": shardgraph.Pipeline(2)}
        if case.kind == "mesh":
            options["mesh"] = {"a": 4} if is_victim else {"b": 4}
        at("compile", 0)
        sharded = shardgraph.compile(model(), case.plan, **options)
        optimizer = torch.optim.AdamW(sharded.parameters())
        for step in range(STEPS):
            try:
                _step(case, sharded, optimizer, x, step, at, is_victim)
            except Exception:
                if case.kind != "catch" or is_victim:
                    raise
        if case.phase == "end":
            time.sleep(0.5 * (rank != case.victim))
        at("end", 0)
        dist.barrier()
        Path(folder, f"{rank}.finished").touch()
    except _Left:
        return
    finally:
        Path(folder, f"{rank}.finally").touch()


def _step(case: Case, sharded: Any, optimizer: Any, x: Any, step: int, at: Any, is_victim: bool) -> None:
    import torch

    target = torch.zeros(4, 4)
    if not at("forward", step):
        if case.kind == "shape" and is_victim and step == case.step:
            x, target = x[:3], target[:3]
        if case.plan == "pp":
            at("backward", step)
            sharded.train_step(x, target=target)
        else:
            loss = sharded(x).square().mean()
            at("backward", step)
            loss.backward()
    if not at("clip", step):
        sharded.clip_grad_norm_(1.0)
    at("step", step)
    optimizer.step()
    optimizer.zero_grad()
    if not at("save", step):
        saved = sharded.full_state_dict()
        assert saved or os.environ["RANK"] != "0"
    at("load", step)
    sharded.load_state_dict({name: value.clone() for name, value in sharded.state_dict().items()})


def _happen(case: Case) -> None:
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
        time.sleep(SLOW)
    elif case.kind == "lock":
        ctypes.PyDLL(None).sleep(int(SLOW))  # as a function in C that does not let go of it


# -- one run


@dataclass
class Outcome:
    """How a case ended; ``took`` is the seconds from the fault to the end of the last other rank."""

    case: Case
    took: float
    codes: list[int | None]
    finished: int
    finals: int
    output: str

    @property
    def problem(self) -> str:
        """What is not as it should be, or ``""``."""
        case = self.case
        if case.is_harmless:
            return "" if self.finished == case.ranks else f"a {case.kind} rank ended the run: {self.output[-300:]}"
        if case.phase == "end" and not any(self.codes):
            return ""  # all had ended by then
        if self.took > LIMIT:
            return f"the others ended after {self.took:.1f} s"
        others = [code for rank, code in enumerate(self.codes) if case.way == "launch" or rank != case.victim]
        if not all(others):
            return f"a rank ended well: {self.codes}"
        wanted = "rank" if case.kind in ("skip", "shape", "mesh") else f"rank {case.victim}"
        named = wanted in self.output
        return "" if named else f"the rank is not named: {self.output[-300:]}"


def run(case: Case) -> Outcome:
    """Run a case, and end what it has left after a minute."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        count = 1 if case.way == "launch" else case.ranks
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        running = []
        for rank in range(count):
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
            if case.way == "plain":
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1"}
                environment |= {"MASTER_PORT": str(port)}
            command = [sys.executable, "-m", "tests.faulted", "--case", json.dumps(asdict(case)), "--folder", folder]
            with open(f"{folder}/{rank}.output", "w") as file:
                running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        ended = _wait(running, case, Path(folder))
        fault = Path(folder, "fault")
        since = float(fault.read_text()) if fault.exists() and fault.read_text() else ended
        if case.way == "plain" and case.kind == "stop":
            running[case.victim].kill()
        for process in running:
            process.kill()
            process.wait()
        outputs = [Path(folder, f"{rank}.output").read_text() for rank in range(count)]
        output = "\n".join(text for rank, text in enumerate(outputs) if case.way == "launch" or rank != case.victim)
        files = [path.name for path in Path(folder).iterdir()]
        finished, finals = (sum(name.endswith(end) for name in files) for end in (".finished", ".finally"))
        codes = [process.returncode for process in running]
        return Outcome(case, ended - since, codes, finished, finals, output)


def _wait(running: list[Any], case: Case, folder: Path) -> float:
    """Wait for the other ranks, or for the launch; returns when the last ended."""
    waited = [p for rank, p in enumerate(running) if case.way == "launch" or rank != case.victim or case.is_harmless]
    deadline = time.monotonic() + 100
    while any(process.poll() is None for process in waited) and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--file", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--case")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.case is None:
        inject(options.faults, options.file)
        return
    case = Case(**json.loads(options.case))
    if case.way == "launch":
        import shardgraph

        shardgraph.launch(job, case.ranks, args=(case, options.folder), timeout=TIMEOUT)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    job(case, options.folder)


def inject(count: int, file: Path) -> list[dict[str, Any]]:
    """Run the cases up to this number that the file does not have, and add them to it; returns all of them."""
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for seed in range(len(done), count):
        outcome = run(draw(seed))
        record = {**asdict(outcome), "problem": outcome.problem}
        done.append(record)
        with file.open("a") as appended:
            appended.write(json.dumps(record) + "\n")
        print(seed, *asdict(outcome.case).values(), f"{outcome.took:.1f} s", outcome.problem or "ok", flush=True)
    return done


if __name__ == "__main__":
    if __spec__ is not None and __name__ == "__main__":  # ranks of launch import this module by its name
        from tests import faulted

        faulted.main()
