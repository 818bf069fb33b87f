"""Local ranks: their results, their environment, and what is reported when one fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardgraph
from shardgraph.errors import ArgumentError, LaunchError
from shardgraph.runtime.launch import launch
from tests import standing

pytestmark = pytest.mark.timeout(150)


def look_around(scale: torch.Tensor) -> dict[str, Any]:
    """A collective, and what the rank finds around it."""
    scale *= dist.get_rank() + 1  # its own copy: other ranks must not see this
    total = scale.clone()
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    try:
        launch(os.getpid)
    except LaunchError as error:
        nested = str(error)
    return {
        "total": total,
        "env": [os.environ[name] for name in names],
        "threads": torch.get_num_threads(),
        "nested": nested,
    }


def raise_on_rank_1() -> None:
    """Rank 0 then fails too, because its partner is gone."""
    if dist.get_rank() == 1:
        raise ValueError("the batch of rank 1 is empty")
    dist.all_reduce(torch.ones(1))


def kill_rank_1() -> None:
    """As by the system when memory runs out."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def write_pid_and_wait(folder: str) -> None:
    """The last rank never returns."""
    Path(folder, "pid").write_text(str(os.getpid()))
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(120)


def group_size(pid: int) -> int:
    """The size of the process group, if this is the process ``pid``."""
    return dist.get_world_size() if os.getpid() == pid else 0


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module", autouse=True)
def no_other_ranks() -> None:
    """No processes of other tests' ranks: every child is of a launch here."""
    standing.end_all()


@pytest.fixture(scope="module")
def results(no_other_ranks: None) -> list[dict[str, Any]]:
    return launch(look_around, 2, args=(torch.ones(2),), timeout=100)


def test_results_come_in_rank_order_from_ranks_that_share_a_group_but_no_memory(results: list[dict[str, Any]]) -> None:
    assert [result["total"].tolist() for result in results] == [[3.0, 3.0]] * 2
    assert [result["env"] for result in results] == [[str(rank), str(rank), "2", "2"] for rank in range(2)]
    assert not multiprocessing.active_children()


def test_ranks_share_the_cores(results: list[dict[str, Any]]) -> None:
    assert {result["threads"] for result in results} == {max(1, len(os.sched_getaffinity(0)) // 2)}


def _leave_a_pool() -> int:
    return ThreadPoolExecutor(1).submit(dist.get_rank).result()


def test_a_pool_of_threads_that_a_rank_leaves_behind_holds_nobody_up() -> None:
    assert shardgraph.launch(_leave_a_pool, 2, timeout=60) == [0, 1]


def test_ranks_do_not_launch(results: list[dict[str, Any]]) -> None:
    assert all("ranks do not start ranks" in result["nested"] for result in results)


def test_the_rank_that_raised_is_reported_with_its_traceback_and_not_its_victims() -> None:
    with pytest.raises(LaunchError, match="rank 1 of 2 raised") as failure:
        launch(raise_on_rank_1, timeout=100)
    assert "ValueError: the batch of rank 1 is empty" in str(failure.value)
    assert "in raise_on_rank_1" in str(failure.value)


_SCRIPT = """
import os
import torch
import torch.distributed as dist
import shardgraph

def train():
    if dist.get_rank() == 1:
        {fault}
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    shardgraph.launch(train, 3)
"""


def ran(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "script.py"], env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("ValueError: the batch is empty", "raise ValueError('the batch is empty')"),
        ("rank 1 of 3 was killed by SIGKILL", "os.kill(os.getpid(), 9)"),
    ],
)
def test_what_a_failed_script_prints_is_short_and_ends_with_the_cause(cause: str, fault: str, tmp_path: Path) -> None:
    ended = ran(tmp_path, _SCRIPT.format(fault=fault))
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and cause in lines[-1]
    assert len(lines) <= 10 and "script.py" in lines[0], ended.stderr  # where launch was called, and what failed
    assert "leaked" not in ended.stderr and not ended.stdout


_DIES_IN_INIT = """
import os
import time
import torch.distributed as dist
import shardgraph

init = dist.init_process_group

def die_on_rank_1(*args, **options):
    if os.environ["RANK"] == "1":
        with open("died", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), 9)
    init(*args, **options)

dist.init_process_group = die_on_rank_1

if __name__ == "__main__":
    try:
        shardgraph.launch(dist.get_rank, 3)
    except shardgraph.LaunchError as error:
        died = float(open("died").read())
        print(error.failed, time.time() - died < 15, error)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_process_group_is_made_is_named_within_seconds(tmp_path: Path) -> None:
    ended = ran(tmp_path, _DIES_IN_INIT)
    assert ended.stdout.startswith("(1,) True rank 1 of 3 was killed by SIGKILL"), ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_reported_with_its_signal() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(kill_rank_1, timeout=100)
    assert time.monotonic() - started < 25  # far below the timeout of the collective
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_run_over_its_time_is_ended_and_names_the_rank_that_still_ran(tmp_path: Path) -> None:
    # A busy machine may not have started rank 0 by then.
    with pytest.raises(LaunchError, match=r"^ranks? (0, )?1 of 2 still ran after 5 s"):
        launch(write_pid_and_wait, args=(str(tmp_path),), timeout=5)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_ranks_end_when_the_launching_process_is_killed(tmp_path: Path) -> None:
    code = f"import test_launch as t; t.launch(t.write_pid_and_wait, 1, args=({str(tmp_path)!r},))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    file = tmp_path / "pid"
    while not file.exists() or not file.read_text():
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while exists(int(file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_under_torchrun_the_function_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    try:
        assert launch(group_size, nproc=7, args=(os.getpid(),), timeout=10) == [1]
        assert launch(group_size, args=(os.getpid(),), timeout=10) == [1]
    finally:
        dist.destroy_process_group()


def test_a_function_that_other_processes_cannot_import_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"<lambda>.*Define the function at module level"):
        launch(lambda: 0)


def test_what_cannot_be_pickled_among_the_arguments_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"look_around and its arguments.*generator"):
        launch(look_around, args=((i for i in range(3)),))


def test_fewer_than_one_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"launch\(\): nproc is 0"):
        launch(raise_on_rank_1, nproc=0)


def _listening(process: int) -> set[str]:
    """The addresses at which a process takes connections, as the kernel writes them."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


def _listening_ranks() -> set[str]:
    """Those of this rank, of its sentinel and of the launcher, after a step that communicates."""
    sharded = shardgraph.compile(torch.nn.Linear(4, 4), "fsdp")
    sharded(torch.ones(2, 4)).sum().backward()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return set().union(*map(_listening, [os.getpid(), os.getppid(), *map(int, children)]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_local_ranks_listen_at_the_loopback_interface_only():
    for addresses in launch(_listening_ranks, nproc=2, timeout=120):
        assert addresses and addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1
