"""Checkpoints in folders that each machine has for itself, with copies on another: a machine that is lost takes no step
with it. Machines are folders here; tests/test_two_machines.py has network namespaces."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

import shardgraph
from shardgraph.errors import ArgumentError, CheckpointError
from shardgraph.saves.listing import listed
from shardgraph.saves.machines import keepers
from tests import copied_saves
from tests.standing import on_ranks

FOUR = [0, 1, 2, 3]


def files(base: Path, machine: int, step: int) -> list[str]:
    folder = base / f"machine{machine}" / f"step-{step:08}"
    return sorted(each.name for each in folder.iterdir() if each.suffix == ".distcp")


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a job on four machines with a rank each."""
    base = tmp_path_factory.mktemp("machines")
    on_ranks(copied_saves.saved, 4, args=(str(base), FOUR, [1, 2]))
    return base


def test_each_machine_has_its_own_part_and_that_of_the_machine_before(on_four):
    assert [files(on_four, machine, 2) for machine in FOUR] == [
        ["__0_0.distcp", "__3_0.distcp"],
        ["__0_0.distcp", "__1_0.distcp"],
        ["__1_0.distcp", "__2_0.distcp"],
        ["__2_0.distcp", "__3_0.distcp"],
    ]


def test_what_a_machine_has_is_listed_and_verified_as_a_part(on_four, tmp_path):
    shutil.copytree(on_four / "machine1", tmp_path / "machine1")
    first, second = listed(tmp_path / "machine1", verify=True)
    assert str(first).endswith("verified, 2 files are on other machines") and not second.damage
    file = tmp_path / "machine1" / "step-00000002" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-9] + b"corrupted")
    assert "__1_0.distcp" in str(listed(tmp_path / "machine1", verify=True)[1])


def test_the_last_step_is_there_whichever_machine_is_lost(on_four):
    for found in on_ranks(copied_saves.loaded_after_each, 4, args=(str(on_four), FOUR, FOUR)):
        for step, same, extras, warned in found:  # the rank of the lost machine has come back, to an empty folder
            assert (step, same, warned) == (2, True, [])
            assert extras == [{"rank": rank, "step": 2} for rank in FOUR]


def test_fewer_machines_go_on_from_what_they_have_together(on_four, tmp_path):
    base = tmp_path / "copy"
    shutil.copytree(on_four, base)
    shutil.rmtree(base / "machine1")
    for step, same, _, _ in on_ranks(copied_saves.loaded, 3, args=(str(base), [3, 0, 2])):
        assert (step, same) == (2, True)
    on_ranks(copied_saves.saved, 3, args=(str(base), [3, 0, 2], [3]))
    assert [step for step, *_ in on_ranks(copied_saves.loaded, 4, args=(str(base), FOUR))] == [3] * 4


def test_a_machine_that_was_away_gets_the_steps_of_the_others(on_four, tmp_path):
    base = tmp_path / "copy"
    shutil.copytree(on_four, base)
    on_ranks(copied_saves.saved, 2, args=(str(base), [0, 0], [3, 4], {"keep": 1}))  # the others have step 2
    assert [each.name for each in base.glob("machine0/step-*")] == ["step-00000004"]
    found = on_ranks(copied_saves.loaded, 4, args=(str(base), [2, 3, 0, 1]))
    assert [(step, same) for step, same, *_ in found] == [(4, True)] * 4
    on_ranks(copied_saves.saved, 4, args=(str(base), [2, 3, 0, 1], [5], {"keep": 1}))
    for machine in FOUR:
        assert [each.name for each in sorted(base.glob(f"machine{machine}/step-*"))] == ["step-00000005"]


def test_what_two_machines_have_lost_is_told_and_an_older_one_on_the_disk_is_taken(on_four, tmp_path):
    base, disk = tmp_path / "copy", tmp_path / "disk"
    shutil.copytree(on_four, base)
    for machine in (1, 2):
        shutil.rmtree(base / f"machine{machine}")
    for told, same, _, _ in on_ranks(copied_saves.loaded, 2, args=(str(base), [0, 3])):
        assert same and "lacks '__1_0.distcp', and no other machine" in told
    shutil.copytree(on_four, disk / "of_each")
    on_ranks(copied_saves.saved, 2, args=(str(disk), [0, 0], [1], {"copies": 1}))
    found = on_ranks(copied_saves.loaded, 2, args=(str(base), [0, 3], [str(disk / "machine0")]))
    for step, same, _, warned in found:
        assert (step, same) == (1, True)
        assert any("left out: " in each and "'__1_0.distcp'" in each for each in warned)


def test_a_bit_flipped_in_the_memory_of_another_machine_is_refused_by_name(on_four, tmp_path):
    base = tmp_path / "copy"
    shutil.copytree(on_four, base)
    shutil.rmtree(base / "machine1")
    file = base / "machine2" / "step-00000002" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for told, same, _, _ in on_ranks(copied_saves.loaded, 4, args=(str(base), FOUR), timeout=120):
        assert told == 1 and same  # step 1 is whole
    for told, same, _, _ in on_ranks(at_step_two, 4, args=(str(base), FOUR)):
        assert same and "__1_0.distcp" in told and "is not as it was written" in told


def at_step_two(base: str, of_ranks: list[int]) -> tuple[object, ...]:
    return copied_saves.loaded(base, of_ranks, step=2)


def test_ranks_that_share_a_folder_are_one_machine_and_two_machines_have_all_each(tmp_path):
    on_ranks(copied_saves.saved, 4, args=(str(tmp_path), [0, 0, 1, 1], [1], {"background": True}))
    for machine in (0, 1):
        assert files(tmp_path, machine, 1) == [f"__{rank}_0.distcp" for rank in FOUR]
        assert [step for step, _ in shardgraph.checkpoints(tmp_path / f"machine{machine}")] == [1]
    on_ranks(copied_saves.saved, 4, args=(str(tmp_path / "one"), [0] * 4, [1]))
    assert files(tmp_path / "one", 0, 1) == [f"__{rank}_0.distcp" for rank in FOUR]


def test_a_machine_without_room_for_a_copy_is_told_on_all_and_the_last_checkpoint_stays(tmp_path):
    for told, left, step in on_ranks(copied_saves.one_machine_is_full, 3, args=(str(tmp_path),)):
        assert "rank 1: step 2" in told and "No space left" in told
        assert left == [".machine", "step-00000001"] and step == 1


def test_arguments_that_do_not_fit_are_told(tmp_path):
    for differ, alone in on_ranks(copied_saves.different_arguments, 2, args=(str(tmp_path),)):
        assert "rank 1 saves with copies=2, and rank 0 with copies=1" in differ
        assert "give all ranks the same" in alone
    with pytest.raises(ArgumentError, match="copies is 0"):
        shardgraph.save_checkpoint(tmp_path, 1, nn.Linear(2, 2), copies=0)


def test_nothing_is_loaded_at_the_first_start_of_a_job_if_nothing_is_required(tmp_path):
    for step, same, _, _ in on_ranks(not_required, 2, args=(str(tmp_path),)):
        assert (step, same) == (0, True)
    with pytest.raises(CheckpointError, match=r"has no checkpoint.*required=False"):
        shardgraph.load_checkpoint(tmp_path, nn.Linear(2, 2))


def not_required(base: str) -> tuple[object, ...]:
    return copied_saves.loaded(base, [0, 1], required=False)


def test_each_file_is_kept_by_as_many_machines_as_there_are_copies():
    of_machines = [[0, 1, 2], [3], [4, 5]]
    assert keepers(of_machines, 1) == []
    assert keepers(of_machines, 2) == [(0, 3), (1, 3), (2, 3), (3, 4), (4, 0), (5, 1)]
    place = {rank: number for number, ranks in enumerate(of_machines) for rank in ranks}
    for copies, machines_with in ((2, 2), (3, 3), (9, 3)):
        for rank in range(6):
            having = {place[keeper] for each, keeper in keepers(of_machines, copies) if each == rank} | {place[rank]}
            assert len(having) == machines_with


@pytest.mark.slow
def test_a_save_that_is_under_way_when_a_job_returns_is_finished(tmp_path):
    shardgraph.launch(copied_saves.saved, 3, args=(str(tmp_path), FOUR, [1], {"background": True}, False), timeout=200)
    assert on_ranks(copied_saves.loaded, 3, args=(str(tmp_path), FOUR))[0][:2] == (1, True)


def killed_at(base: Path, step: int, last: int, all_of_them: bool) -> int:
    """Save on three machines, and kill rank 1 or all at a point; how many points there were if they were not."""
    with suppress(shardgraph.LaunchError):
        return shardgraph.launch(copied_saves.killed, 3, args=(str(base), step, last, all_of_them), timeout=200)[1]
    return 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("case", "points"),
    [
        pytest.param("a new step", 2, id="a new step"),
        *(pytest.param(case, 30, marks=pytest.mark.slow) for case in ("a new step", "the same step again")),
    ],
)
@pytest.mark.parametrize("who", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_machines_that_are_killed_have_a_whole_checkpoint_together(who, case, points, tmp_path):
    step = 2 if case == "a new step" else 1
    count = killed_at(tmp_path / "counted", step, -1, True)
    assert count > 20
    for last in sorted(random.Random(step).sample(range(1, count + 1), points)):
        base = tmp_path / str(last)
        on_ranks(copied_saves.saved, 3, args=(str(base), [0, 1, 2], [1], {"keep": 1}))
        killed_at(base, step, last, who == "all")
        found = on_ranks(copied_saves.loaded, 3, args=(str(base), [0, 1, 2]))
        assert [(got in (1, step), same) for got, same, *_ in found] == [(True, True)] * 3, (last, found)
        on_ranks(copied_saves.saved, 3, args=(str(base), [0, 1, 2], [3], {"keep": 1}))
        for machine in range(3):
            names = sorted(each.name for each in (base / f"machine{machine}").iterdir())
            assert names == [".machine", "step-00000003"], (last, names)
