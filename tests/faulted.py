"""Faults that are injected into a small training run, drawn by number: what one rank does wrong, where, and when.

    python -m tests.faulted --faults 100 --file faults.jsonl    # goes on where the file ends

Every case is a run of its own: with ``launch``; of processes that make their group themselves ("plain", forked from one
that has imported what they need, which saves seconds); or of scripts, each started anew. Its outcome is how long the
other ranks took to end after the fault, how they ended, and what they wrote.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import multiprocessing
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
PHASES = ("before", "compile", "forward", "backward", "clip", "step", "save", "load", "end")
ENDINGS = ("kill", "stop", "raise", "exit", "os._exit", "return")
HARMLESS = ("slow", "lock")
OTHERS = {"skip": ("clip", "save", "forward"), "mesh": ("compile",), "catch": PHASES[1:-1]}
PLANS = ("fsdp", "ddp", "zero2", "pp")
WAYS = ("launch", "launch", "plain", "plain", "plain", "script")


@dataclass(frozen=True)
class Case:
    """What ``victim`` does, in which phase of which step, and ``delay`` seconds after that begins.

    A slow rank takes ``seconds``, or holds Python's lock for as long.
    """

    seed: int
    kind: str
    phase: str
    step: int
    victim: int
    ranks: int
    plan: str
    way: str
    delay: float = 0.0
    seconds: float = 9.0

    @property
    def is_harmless(self) -> bool:
        return self.kind in HARMLESS


def draw(seed: int) -> Case:
    """The case of this number."""
    choose = random.Random(seed)
    kind = choose.choice([*ENDINGS, *ENDINGS, *HARMLESS, *OTHERS])
    phases = OTHERS.get(kind, PHASES)
    ranks = choose.choice([2, 2, 3, 4])
    plan = choose.choice(PLANS if kind != "mesh" else PLANS[:1])
    phase, way = choose.choice(phases), choose.choice(WAYS)
    if way != "launch" and phase == "before":
        phase = "compile"
    if way != "launch" and phase == "compile" and kind == "stop":  # nobody has begun to watch
        phase = "forward"
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
    import shardgraph.api.compile  # else imported by the first call, in seconds

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

    Path(folder, f"{rank}.began").write_text(str(time.time()))
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
                _step(case, sharded, optimizer, x, step, at)
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


def _step(case: Case, sharded: Any, optimizer: Any, x: Any, step: int, at: Any) -> None:
    import torch

    target = torch.zeros(4, 4)
    if not at("forward", step):
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
    state = {name: value.clone() for name, value in sharded.state_dict().items()}  # of a pipeline's stage a part
    sharded.load_state_dict(state, strict=case.plan != "pp")


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
        time.sleep(case.seconds)
    elif case.kind == "lock":
        ctypes.PyDLL(None).sleep(int(case.seconds))  # as a function in C that does not let go of it


# -- one run


@dataclass
class Outcome:
    """How a case ended; ``took`` is the seconds from the fault to the end of the last other rank.

    A fault is not counted before all ranks have begun: their imports take seconds.
    """

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
        if self.finished == case.ranks and (case.kind == "skip" or case.delay):
            return ""  # what was skipped does not communicate under this plan; or all was over when it happened
        if self.took > LIMIT:
            return f"the others ended after {self.took:.1f} s"
        others = [code for rank, code in enumerate(self.codes) if case.way == "launch" or rank != case.victim]
        if not all(others):
            return f"a rank ended well: {self.codes}"
        wanted = "rank" if case.kind in ("skip", "mesh") else f"rank {case.victim}"
        named = wanted in self.output
        return "" if named else f"the rank is not named: {self.output[-300:]}"


def run(case: Case) -> Outcome:
    """Run a case, and end what it has left after a while."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        codes, ended, output = {"launch": _launched, "plain": _forked, "script": _scripts}[case.way](case, folder)
        fault = Path(folder, "fault")
        moments = [fault, *Path(folder).glob("*.began")]  # a rank that starts late hears of it when it has
        since = max([float(file.read_text()) for file in moments] if fault.exists() else [ended])
        files = [path.name for path in Path(folder).iterdir()]
        finished, finals = (sum(name.endswith(end) for name in files) for end in (".finished", ".finally"))
        return Outcome(case, ended - since, codes, finished, finals, output)


def _launched(case: Case, folder: str) -> tuple[list[int | None], float, str]:
    import shardgraph

    try:
        shardgraph.launch(job, case.ranks, args=(case, folder), timeout=TIMEOUT)
    except shardgraph.LaunchError as error:
        return [1], time.time(), str(error)
    return [0], time.time(), ""


def _forked(case: Case, folder: str) -> tuple[list[int | None], float, str]:
    context, port = multiprocessing.get_context("forkserver"), _free_port()
    ranks = [context.Process(target=_as_script, args=(case, folder, rank, port)) for rank in range(case.ranks)]
    for process in ranks:
        process.start()
    ended = _wait([lambda each=each: each.exitcode is None for each in ranks], case)
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
    for rank in range(case.ranks):
        environment = {**os.environ, **_environment(case, rank, port), "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "tests.faulted", "--case", json.dumps(asdict(case)), "--folder", folder]
        with open(f"{folder}/{rank}.output", "w") as file:
            running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
    ended = _wait([lambda each=each: each.poll() is None for each in running], case)
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
    return own | {"OMP_NUM_THREADS": "1"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _outputs(case: Case, folder: str) -> str:
    """What the other ranks have written."""
    return "\n".join(Path(folder, f"{rank}.output").read_text() for rank in range(case.ranks) if rank != case.victim)


def _wait(running: list[Any], case: Case) -> float:
    """Wait until the ranks that should end have; returns when the last did."""
    waited = [runs for rank, runs in enumerate(running) if rank != case.victim or case.is_harmless]
    deadline = time.monotonic() + 100 + case.seconds
    while any(runs() for runs in waited) and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--file", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="show what the file has")
    parser.add_argument("--case")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.table:
        print(table(options.file))
        return
    if options.case is None:
        inject(options.faults, options.file)
        return
    plain(Case(**json.loads(options.case)), options.folder)


def inject(count: int, file: Path) -> list[dict[str, Any]]:
    """Run the cases up to this number that the file does not have, and add them to it; returns all of them."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["shardgraph.api.compile", "torch.testing", "tests.faulted"])
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for seed in range(len(done), count):
        outcome = run(draw(seed))
        record = {**asdict(outcome), "problem": outcome.problem}
        done.append(record)
        with file.open("a") as appended:
            appended.write(json.dumps(record) + "\n")
        print(seed, *asdict(outcome.case).values(), f"{outcome.took:.1f} s", outcome.problem or "ok", flush=True)
    return done


def table(file: Path) -> str:
    """What was injected where, as a table: the number of faults, and the longest time until all others had ended."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [*dict.fromkeys([*ENDINGS, *HARMLESS, *OTHERS])]
    lines = ["| | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for kind in kinds:
        cells = [kind]
        for phase in PHASES:
            here = [each for each in records if each["case"]["kind"] == kind and each["case"]["phase"] == phase]
            longest = max((each["took"] for each in here), default=0.0)
            bad = sum(bool(each["problem"]) for each in here)
            cells.append(f"{len(here)}: {longest:.1f} s" + f", {bad} bad" * bool(bad) if here else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    from tests import faulted  # ranks import it by its name

    faulted.main()
