"""torchrun on two "machines": network namespaces that reach each other by one link, and share a disk.

A folder is the memory of one, which is removed when it is lost. They need root on Linux, and iproute2; elsewhere these
tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_elastic import undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = ("10.78.0.1", "10.78.0.2")


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """The names of two namespaces, with the ends of a link called ``eth0`` in each."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root on Linux, and the command ip")
    names = [f"shardgraph-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def agent(machines: list[str], number: int, folder: Path, steps: int, nnodes: str, seconds: float, *more: str) -> Any:
    """An agent of torchrun on a machine, with one rank; the first holds the meeting."""
    command = ["ip", "netns", "exec", machines[number], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", ADDRESSES[number]]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    command += ["--rdzv-conf", f"last_call_timeout=10,is_host={int(number == 0)}"]
    command += ["-m", "tests.elastic_jobs", str(folder / "saved"), str(steps), *more]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "SECONDS_OF_A_STEP": str(seconds)}
    if more:  # in memory alone
        environment |= {"MACHINE": str(number), "STEPS_BETWEEN_SAVES": "1000"}
        # Otherwise an agent that stays the first does not tell its address to one that joins.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = (folder / f"agent{number}.log").open("a")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=_ROOT)


@contextlib.contextmanager
def agents(
    machines: list[str], folder: Path, steps: int, nnodes: str, seconds: float, *more: str
) -> Iterator[list[Any]]:
    """An agent on each machine. None is left afterwards."""
    started = []
    try:
        for number in range(len(machines)):
            started.append(agent(machines, number, folder, steps, nnodes, seconds, *more))
        yield started
    finally:
        for name in machines:
            _lose(name)
        for each in started:
            each.wait()


_ROOT = Path(__file__).parents[1]


def _lose(machine: str) -> None:
    """Kill all that runs on a machine."""
    listed = subprocess.run(["ip", "netns", "pids", machine], check=True, capture_output=True, text=True).stdout
    for process in listed.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _done(folder: Path) -> list[tuple[int, int, float]]:
    file = folder / "losses.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _until(ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _equal(done: list[tuple[int, int, float]], steps: int) -> bool:
    expected = undisturbed(steps)
    return all(loss == pytest.approx(expected[step], rel=1e-4) for step, _, loss in done)


def test_a_job_on_two_machines_trains_and_is_resumed(machines, tmp_path):
    for steps in (4, 8):  # the second job goes on from the checkpoint of step 4
        with agents(machines, tmp_path, steps, "2", 0) as started:
            assert [each.wait(240) for each in started] == [0, 0], (tmp_path / "agent0.log").read_text()
    done = _done(tmp_path)
    assert [(step, ranks) for step, ranks, _ in done] == [(step, 2) for step in range(1, 9)]
    assert _equal(done, 8)


def test_a_job_goes_on_without_a_machine_that_is_lost(machines, tmp_path):
    with agents(machines, tmp_path, 24, "1:2", 0.5) as started:
        _until(lambda: any(step >= 5 for step, _, _ in _done(tmp_path)), 200)
        _lose(machines[1])
        assert started[0].wait(300) == 0, (tmp_path / "agent0.log").read_text()
    done = _done(tmp_path)
    assert {ranks for _, ranks, _ in done} == {1, 2} and done[-1][:2] == (24, 1)
    assert _equal(done, 24)


def _again(done: list[tuple[int, int, float]]) -> int:
    return len(done) - len({step for step, *_ in done})


def test_a_lost_machine_costs_one_step_at_most_where_each_is_in_the_memory_of_both(machines, tmp_path):
    memory = str(tmp_path / "memory{machine}")
    with agents(machines, tmp_path, 24, "1:2", 0.5, memory) as started:
        _until(lambda: any(step >= 5 for step, _, _ in _done(tmp_path)), 200)
        _lose(machines[1])
        shutil.rmtree(tmp_path / "memory1")
        assert started[0].wait(300) == 0, (tmp_path / "agent0.log").read_text()
    done = _done(tmp_path)
    assert not (tmp_path / "saved").exists()  # nothing was on the disk
    assert {ranks for _, ranks, _ in done} == {1, 2} and done[-1][:2] == (24, 1)
    assert {step for step, *_ in done} == {*range(1, 25)} and _again(done) <= 1
    assert _equal(done, 24)


@pytest.mark.parametrize("memory_is", ["lost", "as it was"])
def test_a_lost_machine_that_comes_back_goes_on_with_the_other(machines, tmp_path, memory_is):
    memory = str(tmp_path / "memory{machine}")
    job = tmp_path, 60, "1:2", 0.5, memory
    with agents(machines, *job) as started:
        _until(lambda: any(step >= 5 for step, _, _ in _done(tmp_path)), 200)
        _lose(machines[1])
        if memory_is == "lost":
            shutil.rmtree(tmp_path / "memory1")
        _until(lambda: any(ranks == 1 for _, ranks, _ in _done(tmp_path)), 200)
        started[1].wait()
        started[1] = agent(machines, 1, *job)
        assert [each.wait(300) for each in started] == [0, 0], (tmp_path / "agent0.log").read_text()
    done = _done(tmp_path)
    counts = [ranks for _, ranks, _ in done]
    assert counts == sorted(counts[: counts.index(1)], reverse=True) + sorted(counts[counts.index(1) :])
    assert {step for step, *_ in done} == {*range(1, 61)} and done[-1][:2] == (60, 2)
    assert _again(done) <= 2  # one for each time that ranks ended
    assert _equal(done, 60)
