"""Checkpoints of ``shardgraph.save_checkpoint``: whole or not there, refused if damaged, loaded under any plan."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import killed_saves, saves
from tests.standing import on_ranks

FSDP2 = ("fsdp", {"dp": 2})
KINDS = {
    "the plan of one rank": ("single", None, 1),
    "other rows": ("fsdp", {"dp": 4}, 4),
    "tensor parallel": ("tp", {"tp": 2}, 2),
    "pipeline": ("pp", {"pp": 2}, 2),
    "replicas": ("ddp", {"dp": 2}, 2),
}


def run(fn: Any, count: int, *args: Any) -> list[Any]:
    return [fn(*args)] if count == 1 else on_ranks(fn, count, args=args)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """A checkpoint of rows on two ranks, and the losses of the job that went on."""
    path = str(tmp_path_factory.mktemp("checkpoints") / "run")
    losses, _ = on_ranks(saves.saved, 2, args=(path, *FSDP2))
    return path, losses


def test_a_job_that_goes_on_has_the_losses_of_one_that_never_stopped_to_all_digits(of_two_ranks):
    path, losses = of_two_ranks
    assert on_ranks(saves.continued, 2, args=(path, *FSDP2)) == [losses, losses]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_goes_on_under_another_plan(of_two_ranks, kind):
    path, losses = of_two_ranks
    plan, mesh, count = KINDS[kind]
    for found in run(saves.continued, count, path, plan, mesh):
        assert found == pytest.approx(losses, rel=1e-12)


def test_random_numbers_go_on_too(tmp_path):
    options = {"dropout": 0.5}
    losses, _ = on_ranks(saves.saved, 2, args=(str(tmp_path), *FSDP2, options))
    assert on_ranks(saves.continued, 2, args=(str(tmp_path), *FSDP2, options)) == [losses, losses]


@pytest.mark.parametrize("saver", ["pipeline", "tensor parallel", "replicas", "the plan of one rank"])
def test_a_job_under_any_plan_goes_on_on_one_rank(saver, tmp_path):
    plan, mesh, count = KINDS[saver]
    losses = run(saves.saved, count, str(tmp_path), plan, mesh)
    assert saves.continued(str(tmp_path), "single", None) == pytest.approx(losses[0], rel=1e-12)


def test_a_bit_flipped_anywhere_is_refused_by_name_and_nothing_is_changed(tmp_path):
    first, second = on_ranks(saves.flipped_everywhere, 2, args=(str(tmp_path), 65))
    for (file, told, unchanged), (_, told_there, unchanged_there) in zip(first, second, strict=True):
        assert unchanged and unchanged_there, told
        assert file in told and told == told_there


def test_files_that_are_not_those_that_were_written_are_refused_and_nothing_is_changed(tmp_path):
    first, second = on_ranks(saves.damaged_in_other_ways, 2, args=(str(tmp_path),))
    named = {
        "truncated": "__1_0.distcp",
        "missing": "__1_0.distcp",
        "swapped": ".distcp",
        "of_another_step": "step 1, not of 2",
        "all_of_another_step": "step 1, not of 2",
        "longer": "__0_0.distcp",
        "file_of_another_step": "__0_0.distcp",
        "without_manifest": "manifest.json",
    }
    assert first.keys() == named.keys()
    for kind, name in named.items():
        assert name in first[kind][0] and first[kind][0] == second[kind][0], (kind, first[kind])
        assert first[kind][1] and second[kind][1]


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_with_bytes_needed_and_free(tmp_path):
    for told in on_ranks(saves.one_rank_cannot_write, 2, args=(str(tmp_path / "run"),)):
        for each in told:
            assert "rank 1: step" in each and "No space left" in each and "it takes" in each and "are free" in each


def test_ranks_that_do_not_save_the_same_are_told_apart_and_none_waits_for_ever(tmp_path):
    first, second = on_ranks(saves.ranks_that_differ, 2, args=(str(tmp_path / "run"),))
    assert "rank 1 saves step 1" in first["step"] and first["step"] == second["step"]
    assert "rank 1 saves" in first["path"]
    assert "'extra'" in first["extra"] and "rank 1" in first["extra"]
    assert "rank 1: AttributeError" in first["object"]
    assert "rank 1 did not come to step 1" in first["late"] and first["late"] == second["late"]
    assert "rank 1" in first["model"] and "another model" in second["model"]


def test_each_rank_gets_its_own_extra_back_and_fewer_ranks_get_all(tmp_path):
    assert on_ranks(saves.extras_of_ranks, 2, args=(str(tmp_path),)) == [[{"position": 0}, 2], [{"position": 1}, 2]]
    extras, told = saves.extras_loaded(str(tmp_path))
    assert extras == [{"position": 0}, {"position": 1}] and "each of 2 ranks" in told


def test_torch_reads_our_folders_and_we_read_those_of_torch(tmp_path):
    assert on_ranks(saves.by_torch, 2, args=(str(tmp_path),)) == [0.0, 0.0]


def test_what_is_written_in_the_background_is_of_the_step_that_was_saved(tmp_path):
    assert on_ranks(saves.in_the_background, 2, args=(str(tmp_path),)) == [(True, [6, 7])] * 2


def killed_at(path: Path, step: int, value: int, last: int) -> int:
    """Save in a process of its own that is killed at a point; how many points there were if it was not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.killed_saves"])
    passed = context.Value("i", 0)
    process = context.Process(target=killed_saves.save_and_be_killed, args=(str(path), step, value, last, passed))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return passed.value


@pytest.mark.parametrize("case", ["a new step", "the same step again"])
def test_a_save_that_is_killed_at_any_point_leaves_the_last_good_checkpoint(case, tmp_path):
    step = 2 if case == "a new step" else 1
    count = killed_at(tmp_path / "counted", step, 2, -1)
    assert count > 20
    chosen = sorted(random.Random(0).sample(range(1, count + 1), 20))
    for last in chosen:
        path = tmp_path / str(last)
        killed_saves.save_checkpoint(path, 0, *killed_saves.trained_to(0), keep=2)
        killed_saves.save_checkpoint(path, 1, *killed_saves.trained_to(1), keep=2)
        killed_at(path, step, 2, last)
        loaded, values = killed_saves.step_of_values(str(path))
        assert (loaded, values) in [(1, [1.0]), (step, [2.0])], last
        killed_saves.save_checkpoint(path, 3, *killed_saves.trained_to(3), keep=2)
        assert killed_saves.step_of_values(str(path)) == (3, [3.0])
        assert len(list(path.iterdir())) == 2, "what the killed one left is removed"
