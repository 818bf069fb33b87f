"""A rank that dies, stops, raises, ends or makes other calls is told of within seconds; a slow one is waited for."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from tests import standing
from tests.faulted import LIMIT, Case, draw, run
from tests.soak import soak
from tests.unheard_saves import save_unheard

pytestmark = pytest.mark.timeout(120)

STOPPED = Case(0, "stop", "forward", 1, victim=1, ranks=2, plan="fsdp", way="plain")
HOLDS_THE_LOCK = Case(0, "lock", "backward", 1, victim=0, ranks=2, plan="ddp", way="plain", seconds=6.0)
COMES_LATE = Case(0, "lock", "save", 0, victim=2, ranks=3, plan="zero2", way="plain", seconds=9.0)
SKIPS_CLIPPING = Case(0, "skip", "clip", 1, victim=1, ranks=2, plan="zero2", way="launch")
SKIPS_CLIPPING_OF_A_PIPELINE = replace(SKIPS_CLIPPING, plan="pp", way="plain")
CUT = Case(0, "cut", "clip", 1, victim=1, ranks=3, plan="fsdp", way="plain", link="ranks")
WITHOUT_STORE = Case(0, "stall", "save", 0, victim=1, ranks=2, plan="fsdp", way="plain", link="store", seconds=1.0)
HELD_IN_THE_STORE = replace(WITHOUT_STORE, phase="clip", step=2, plan="pp", way="launch")
KILLED_AT_FIRST = Case(0, "kill", "compile", 0, victim=1, ranks=2, plan="ddp", way="script", delay=0.02)
RETURNS_AT_FIRST = Case(0, "return", "compile", 0, victim=0, ranks=2, plan="ddp", way="launch")
SERVES_THE_STORE = Case(0, "kill", "compile", 0, victim=0, ranks=4, plan="zero2", way="plain")
SKIPS_SAVING = Case(0, "skip", "save", 1, victim=0, ranks=2, plan="ddp", way="plain")
FULL = Case(1, "full", "save", 1, victim=1, ranks=2, plan="fsdp", way="plain", room=3000)
RAISES = Case(0, "raise", "save", 0, victim=1, ranks=3, plan="fsdp", way="plain")


@pytest.fixture(scope="module", autouse=True)
def no_other_ranks() -> None:
    standing.end_all()


@pytest.mark.slow
def test_a_stopped_rank_is_told_to_the_others_by_name_and_by_what_it_was_doing() -> None:
    outcome = run(STOPPED)
    assert not outcome.problem and outcome.took < LIMIT
    assert "RankFailedError: rank 1 was stopped (SIGSTOP) and no longer answers" in outcome.output
    assert "Rank 0 was in all_gather_into_tensor of" in outcome.output
    assert len(outcome.output.splitlines()) <= 10


@pytest.mark.slow
def test_a_rank_that_holds_pythons_lock_is_waited_for() -> None:
    outcome = run(HOLDS_THE_LOCK)
    assert outcome.finished == 2, outcome.output


@pytest.mark.slow
def test_ranks_that_wait_for_a_late_one_at_a_save_do_not_wait_for_each_other() -> None:
    outcome = run(COMES_LATE)
    assert outcome.finished == 3, outcome.output


@pytest.mark.quick("return")
@pytest.mark.parametrize("case", [KILLED_AT_FIRST, SERVES_THE_STORE, RETURNS_AT_FIRST], ids=lambda case: case.kind)
def test_a_rank_that_ends_in_the_first_moments_of_compile_is_told(case: Case) -> None:
    outcome = run(case)
    assert not outcome.problem and outcome.took < LIMIT


@pytest.mark.quick("zero2")
@pytest.mark.parametrize("case", [SKIPS_CLIPPING, SKIPS_CLIPPING_OF_A_PIPELINE], ids=lambda case: case.plan)
def test_a_rank_that_leaves_out_a_collective_is_told_with_the_places_of_both(case: Case) -> None:
    outcome = run(case)
    assert not outcome.problem and outcome.took < LIMIT
    assert "none can go on: rank 0 is in all_reduce, called at job.py:" in outcome.output
    assert "rank 1 is in waiting for all ranks at step 2 of the checkpoint" in outcome.output


@pytest.mark.slow
def test_a_connection_cut_between_two_ranks_is_told_with_the_ranks_that_communicated() -> None:
    outcome = run(CUT)
    assert not outcome.problem and outcome.took < LIMIT
    # Each of the three may be the first that sees it.
    told = r"rank \d failed in clip_grad_norm_ with ranks \d, \d: another rank has closed its connection"
    assert re.search(told, outcome.output)


def test_an_error_of_a_rank_is_told_with_its_last_line_and_others_have_their_finally() -> None:
    outcome = run(RAISES)
    assert not outcome.problem and outcome.finals == 3
    assert "rank 1 raised _Injected: injected at save (job.py:" in outcome.output


@pytest.mark.quick("case3-*")
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (WITHOUT_STORE, "rank 1 cannot reach the store of the process group"),
        (HELD_IN_THE_STORE, "cannot reach the store of the process group"),
        (SKIPS_SAVING, "the ranks are not at the same point: rank 0 at loading a checkpoint; rank 1 at step 2"),
        (FULL, "step 2 could not be saved in"),
    ],
)
def test_lost_connections_skipped_saves_and_full_disks_are_told_and_lose_no_checkpoint(case, told) -> None:
    outcome = run(case)
    assert not outcome.problem and outcome.took < LIMIT
    assert told in outcome.output


def _on_a_full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    raise ValueError("a bad batch")


def test_an_error_of_a_rank_whose_disk_is_full_is_told_by_launch() -> None:
    with pytest.raises(shardgraph.LaunchError, match="a bad batch"):
        shardgraph.launch(_on_a_full_disk, 2, timeout=1e8)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_are_those_of_an_undisturbed_job_with_a_fault_every_twenty_seconds() -> None:
    found = soak(minutes=2, pause=20)
    assert not found["differ"] and not found["missing"] and sum(found["faults"].values()) >= 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_faults_drawn_at_random(tmp_path: Path) -> None:
    """As many as FAULTS says (20), of which those in the file FAULTS_FILE have been."""
    from tests.faulted import inject

    file = Path(os.environ.get("FAULTS_FILE", tmp_path / "faults.jsonl"))
    done = inject(range(int(os.environ.get("FAULTS", "20"))), file)
    assert not [record for record in done if record["problem"]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_minutes_of_computation_that_hold_pythons_lock_are_no_death() -> None:
    outcome = run(replace(HOLDS_THE_LOCK, seconds=120.0))
    assert outcome.finished == 2, outcome.output


def test_a_case_is_drawn_by_its_number() -> None:
    assert draw(7) == draw(7) != draw(8)


# -- other ways in which ranks part


def _other_mesh() -> None:
    shardgraph.compile(nn.Linear(4, 4), "fsdp", mesh={"a" if dist.get_rank() else "b": 2}, timeout=600)


def _other_version() -> None:
    if dist.get_rank() == 1:
        shardgraph.__version__ = "0.0.9"
    shardgraph.compile(nn.Linear(4, 4), "fsdp", timeout=600)


def _live_on(folder: str) -> None:
    """Rank 0 catches the failure of rank 1, and calls again."""
    sharded = shardgraph.compile(nn.Linear(4, 4), "fsdp", timeout=600)
    sharded(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        raise ValueError("no data")
    for number in range(2):
        try:
            sharded(torch.ones(2, 4)).sum().backward()
        except shardgraph.RankFailedError as error:
            Path(folder, str(number)).write_text(str(error))


def _compute_beside_a_save(folder: str) -> bool:
    """Rank 1 writes for 9 seconds on a thread, for which one of rank 0 waits, and waits for rank 0, which computes."""
    from shardgraph.saves import writing

    write = writing._write_file

    def slowly(*args: object) -> object:
        time.sleep(9.0 * dist.get_rank())
        return write(*args)

    writing._write_file = slowly
    save = shardgraph.save_checkpoint(folder, 1, nn.Linear(4, 4), background=True)
    if dist.get_rank() == 0:
        time.sleep(9.0)
    dist.barrier()
    return save.result().exists()


def _killed_while_it_saves(folder: str, background: bool) -> None:
    from shardgraph.saves import writing

    if dist.get_rank() == 1:
        writing._write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    save = shardgraph.save_checkpoint(folder, 1, nn.Linear(4, 4), background=background)
    try:
        save.result()
    except shardgraph.RankFailedError as error:
        raise ValueError("no checkpoint") from error


def _record(folder: str) -> list[dict[str, object]]:
    sharded = shardgraph.compile(nn.Linear(4, 4), "fsdp")
    for _ in range(70):
        sharded(torch.ones(2, 4)).sum().backward()
    return shardgraph.flight_record(Path(folder, "record.json"))


def _record_outside(backend: str) -> list[dict[str, object]]:
    torch.manual_seed(0)
    sharded = shardgraph.compile(nn.Linear(4, 4), "fsdp", backend=backend)
    before = len(shardgraph.flight_record())
    sharded(torch.ones(2, 4)).sum().backward()
    sharded.clip_grad_norm_(1.0)
    dist.barrier()
    # gloo's thread counts a collective as done just after those who wait for it go on
    deadline = time.monotonic() + 30
    while not shardgraph.flight_record()[-1]["done"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return shardgraph.flight_record()[before:]


def _wait_of_groups() -> list[float]:
    from shardgraph.torch_api import wait_of

    example = {"example_inputs": (torch.ones(2, 4),)}
    sharded = shardgraph.compile(nn.Linear(4, 4), "fsdp+tp", mesh={"dp": 1, "tp": 2}, timeout=77, **example)
    assert sharded.mesh is not None
    return [wait_of(group).total_seconds() for group in sharded.mesh.get_all_groups()]


@pytest.mark.quick("_other_mesh*")
@pytest.mark.parametrize(("fn", "line"), [(_other_mesh, "-mesh: {b: 2}"), (_other_version, "shardgraph 0.0.9")])
def test_ranks_agree_on_mesh_and_versions_before_they_make_groups(fn, line) -> None:
    started = time.monotonic()
    with pytest.raises(shardgraph.LaunchError, match="the ranks differ in the model and the plan") as failure:
        shardgraph.launch(fn, 2, timeout=600)
    assert line in str(failure.value)
    assert time.monotonic() - started < 60


def test_a_rank_that_catches_the_failure_of_another_and_calls_again_is_told_again(tmp_path: Path) -> None:
    with pytest.raises(shardgraph.LaunchError, match=r"ValueError: no data$"):
        shardgraph.launch(_live_on, 2, args=(str(tmp_path),), timeout=600)
    assert all("rank 1 raised ValueError: no data" in (tmp_path / name).read_text() for name in "01")


@pytest.mark.slow
def test_a_rank_that_computes_while_its_checkpoint_is_written_is_waited_for(tmp_path: Path) -> None:
    assert shardgraph.launch(_compute_beside_a_save, 2, args=(str(tmp_path),), timeout=600) == [True, True]


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_is_killed_while_it_saves_is_the_only_one_that_has_failed(tmp_path: Path, background: bool) -> None:
    with pytest.raises(shardgraph.LaunchError, match="rank 1 of 3 was killed by SIGKILL") as failure:
        shardgraph.launch(_killed_while_it_saves, 3, args=(str(tmp_path), background), timeout=600)
    assert failure.value.failed == (1,)  # so a job of elastic goes on with the two others


def test_a_last_save_that_fails_is_told_by_launch_also_if_nothing_of_it_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(shardgraph.LaunchError, match=r"CheckpointError: rank \d: step 1 could not be saved in"):
        shardgraph.launch(save_unheard, 2, args=(str(tmp_path),), timeout=600)


def test_the_timeout_of_compile_is_that_of_every_group() -> None:
    assert all(set(waits) == {77.0} for waits in standing.on_ranks(_wait_of_groups))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_record_has_what_is_communicated_in_graphs_and_outside_of_them(backend: str) -> None:
    for own in standing.on_ranks(_record_outside, args=(backend,)):
        kinds = ["all_gather", "all_to_all", "all_reduce", "barrier"]
        assert all(str(each["kind"]).startswith(kind) for each, kind in zip(own, kinds, strict=True))
        clip, barrier = own[-2:]
        assert (clip["axis"], clip["bytes"], clip["done"]) == ("dp", 16, True)  # two sums in float64
        assert re.fullmatch(r"test_faults.py:\d+ in _record_outside", str(clip["line"])) and barrier["done"]
        assert all(each["call"] for each in own[:-2])


def test_the_record_has_the_last_hundred_collectives_of_all_ranks_in_one_file(tmp_path: Path) -> None:
    own, _ = standing.on_ranks(_record, args=(str(tmp_path),))
    merged = json.loads((tmp_path / "record.json").read_text())["ranks"]
    assert merged.keys() == {"0", "1"} and merged["0"] == own and len(own) == 100
    last = own[-2]
    assert last["kind"].startswith("all_gather") and last["axis"] == "dp" and "weight" in last["value"]
    assert last["started"] < last["finished"] and {each["call"] for each in merged["1"]} == {e["call"] for e in own}
