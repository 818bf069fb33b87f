"""Checkpoints of ``shardgraph.save_checkpoint``: whole or not there, refused if damaged, loaded under any plan."""

from __future__ import annotations

import errno
import multiprocessing
import pickle
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardgraph
from shardgraph.errors import ArgumentError, CheckpointError
from shardgraph.saves import writing
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


@pytest.mark.quick("replicas", "the plan of one rank")
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


@pytest.mark.quick("replicas")
@pytest.mark.parametrize("saver", ["pipeline", "tensor parallel", "replicas", "the plan of one rank"])
def test_a_job_under_any_plan_goes_on_on_one_rank(saver, tmp_path):
    plan, mesh, count = KINDS[saver]
    losses = run(saves.saved, count, str(tmp_path), plan, mesh)
    assert saves.continued(str(tmp_path), "single", None) == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize("flips", [25, pytest.param(250, marks=pytest.mark.slow)])
def test_a_bit_flipped_anywhere_is_refused_by_name_and_nothing_is_changed(flips, tmp_path):
    first, second = on_ranks(saves.flipped_everywhere, 2, args=(str(tmp_path), flips))
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
    assert "rank 0 at step 0 of the checkpoint; rank 1 at step 1" in first["step"] and first["step"] == second["step"]
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


@pytest.mark.slow
@pytest.mark.parametrize("points", [10, pytest.param(None, marks=pytest.mark.slow, id="all")])
@pytest.mark.parametrize("case", ["a new step", "the same step again"])
def test_a_save_that_is_killed_at_any_point_leaves_the_last_good_checkpoint(case, points, tmp_path):
    step = 2 if case == "a new step" else 1
    count = killed_at(tmp_path / "counted", step, 2, -1)
    assert count > 20
    for last in sorted(random.Random(step).sample(range(1, count + 1), points or count)):
        path = tmp_path / str(last)
        killed_saves.save_checkpoint(path, 0, *killed_saves.trained_to(0), keep=2)
        killed_saves.save_checkpoint(path, 1, *killed_saves.trained_to(1), keep=2)
        killed_at(path, step, 2, last)
        loaded, values = killed_saves.step_of_values(str(path))
        assert (loaded, values) in [(1, [1.0]), (step, [2.0])], last
        killed_saves.save_checkpoint(path, 3, *killed_saves.trained_to(3), keep=2)
        assert killed_saves.step_of_values(str(path)) == (3, [3.0])
        assert len(list(path.iterdir())) == 2, "what the killed one left is removed"


@pytest.mark.slow
def test_a_rank_that_stops_while_it_saves_is_named_and_the_last_checkpoint_is_whole(tmp_path):
    with pytest.raises(shardgraph.LaunchError):
        shardgraph.launch(saves.one_rank_stops, 2, args=(str(tmp_path / "run"), str(tmp_path / "told")), timeout=300)
    seconds, _, told = (tmp_path / "told-0").read_text().partition(" ")
    assert "rank 1 was stopped (SIGSTOP)" in told and float(seconds) < 15, told
    assert saves.Job("single").load(str(tmp_path / "run")).step == 1


@pytest.mark.slow
def test_a_save_that_is_under_way_when_a_job_returns_is_finished(tmp_path):
    shardgraph.launch(saves.saved_at_the_end, 2, args=(str(tmp_path),), timeout=120)
    assert saves.Job("single").load(str(tmp_path)).step == 1


# -- optimizers and other objects ----------------------------------------------------------------------


@pytest.mark.quick("momentum")
@pytest.mark.parametrize("name", saves.OPTIMIZERS)
def test_the_state_of_any_optimizer_goes_on(name, tmp_path):
    options = {"optimizer": saves.OPTIMIZERS[name]}
    losses, _ = on_ranks(saves.saved, 2, args=(str(tmp_path), *FSDP2, options))
    assert on_ranks(saves.continued, 2, args=(str(tmp_path), *FSDP2, options)) == [losses, losses]
    if name != "ShardedOptimizer":
        assert saves.continued(str(tmp_path), "single", None, options) == pytest.approx(losses, rel=1e-9)


@pytest.mark.slow
def test_the_history_of_lbfgs_goes_on(tmp_path):
    expected = on_ranks(saves.with_lbfgs, 2, args=(str(tmp_path), False))
    assert on_ranks(saves.with_lbfgs, 2, args=(str(tmp_path), True)) == expected


def test_averages_of_weights_and_a_scaler_go_on(tmp_path):
    expected = on_ranks(saves.with_average, 2, args=(str(tmp_path), False))
    assert on_ranks(saves.with_average, 2, args=(str(tmp_path), True)) == expected


def test_adascale_goes_on_with_its_averages(tmp_path):
    expected = on_ranks(saves.with_gains, 2, args=(str(tmp_path), False))
    assert on_ranks(saves.with_gains, 2, args=(str(tmp_path), True)) == expected


def test_a_job_goes_on_with_its_parameters_and_state_in_files(of_two_ranks, tmp_path):
    path, losses = of_two_ranks
    shutil.copytree(path, tmp_path / "run")
    (tmp_path / "disk").mkdir()
    found = on_ranks(saves.on_disk, 2, args=(str(tmp_path / "run"), str(tmp_path / "disk")))
    assert found[0] == pytest.approx(losses, rel=1e-12)


# -- one process ---------------------------------------------------------------------------------------


def model_of(**changes: torch.dtype | int) -> nn.Module:
    model = nn.Linear(3, changes.get("out", 2))
    for name, dtype in {"counts": torch.int64, "phases": torch.complex64, **changes}.items():
        if isinstance(dtype, torch.dtype):
            model.register_buffer(name, torch.arange(4).to(dtype))
    return model


def test_a_checkpoint_of_another_model_is_refused_by_its_differences(tmp_path):
    shardgraph.save_checkpoint(tmp_path, 1, model_of())
    with pytest.raises(CheckpointError, match=r"'weight' is \[2, 3\], here \[4, 3\]"):
        shardgraph.load_checkpoint(tmp_path, model_of(out=4))
    with pytest.raises(CheckpointError, match="missing in it: 'more'"):
        shardgraph.load_checkpoint(tmp_path, model_of(more=torch.float32))
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        shardgraph.load_checkpoint(tmp_path, model := model_of(), torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("changes", [{"counts": torch.int32}, {"counts": torch.float32}, {"phases": torch.float32}])
def test_integers_and_complex_numbers_are_not_cast(changes, tmp_path):
    shardgraph.save_checkpoint(tmp_path, 1, model_of())
    with pytest.raises(CheckpointError, match="of another dtype"):
        shardgraph.load_checkpoint(tmp_path, model_of(**changes))
    compiled = shardgraph.compile(model_of(**changes), "single")
    with pytest.raises(CheckpointError, match="of another dtype"):
        compiled.load_state_dict(model_of().state_dict())


def test_floating_numbers_are_rounded_with_a_warning(tmp_path):
    shardgraph.save_checkpoint(tmp_path, 1, saved := model_of())
    with pytest.warns(UserWarning, match=r"'weight' in .* is torch.float32 and is rounded to torch.bfloat16"):
        shardgraph.load_checkpoint(tmp_path, loaded := nn.Module.bfloat16(model_of()))
    assert torch.equal(loaded.weight, saved.weight.bfloat16())


def test_an_optimizer_of_another_class_or_other_groups_is_refused(tmp_path):
    model, parts = nn.Linear(3, 2), lambda model: [{"params": [model.weight]}, {"params": [model.bias]}]
    shardgraph.save_checkpoint(tmp_path, 1, model, torch.optim.SGD(parts(model), lr=0.1))
    with pytest.raises(CheckpointError, match=r"state of torch\.optim\.sgd\.SGD"):
        shardgraph.load_checkpoint(tmp_path, model, torch.optim.AdamW(parts(model)))
    with pytest.raises(CheckpointError, match="2 parameter groups, and the optimizer has 1"):
        shardgraph.load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="group 0 of the optimizer has other parameters"):
        shardgraph.load_checkpoint(tmp_path, model, torch.optim.SGD(parts(model)[::-1]))


def test_a_damaged_checkpoint_is_left_out_with_a_warning_if_an_older_one_is_whole(tmp_path):
    for step in (1, 2):
        shardgraph.save_checkpoint(tmp_path, step, model := nn.Linear(2, 2))
    file = tmp_path / "step-00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9] + b"corrupted")
    with pytest.warns(UserWarning, match=r"left out: 'random' in .*step-00000002|left out: .*step-00000002"):
        assert shardgraph.load_checkpoint(tmp_path, model).step == 1
    with pytest.raises(CheckpointError, match="is not as it was written"):
        shardgraph.load_checkpoint(tmp_path, model, step=2)


def test_old_checkpoints_are_removed_and_the_last_written_is_the_newest(tmp_path):
    for step in (10, 20, 30, 40, 25):
        shardgraph.save_checkpoint(tmp_path, step, model := nn.Linear(2, 2), keep=3)
    assert [step for step, _ in shardgraph.checkpoints(tmp_path)] == [30, 40, 25]
    assert shardgraph.load_checkpoint(tmp_path, model).step == 25
    assert shardgraph.load_checkpoint(tmp_path, model, step=30).step == 30
    with pytest.raises(CheckpointError, match="has steps 25, 40, 30"):
        shardgraph.load_checkpoint(tmp_path, model, step=10)


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    assert shardgraph.checkpoints(tmp_path / "nothing") == []
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        shardgraph.load_checkpoint(tmp_path / "nothing", nn.Linear(2, 2))


@pytest.mark.parametrize("extra", [lambda: 0, Path("x"), {"inside": [object()]}])
def test_what_could_only_be_read_by_running_code_is_not_saved(extra, tmp_path):
    with pytest.raises(CheckpointError, match="'extra' cannot be saved so that it is read again without running code"):
        shardgraph.save_checkpoint(tmp_path, 1, nn.Linear(2, 2), extra=extra)
    assert not list(tmp_path.iterdir())


class Malicious:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Malicious, "ran", True)


def test_nothing_of_a_checkpoint_is_run(tmp_path):
    weights = {"model": nn.Linear(2, 2).state_dict(), "extra": Malicious()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights, checkpoint_id=tmp_path / "value")
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        shardgraph.load_checkpoint(tmp_path / "value", nn.Linear(2, 2))
    (tmp_path / "description").mkdir()
    (tmp_path / "description" / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.setattr"):
        shardgraph.load_checkpoint(tmp_path / "description", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.setattr"):
        shardgraph.consolidate(tmp_path / "description", tmp_path / "model.safetensors")
    assert not Malicious.ran


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_with_bytes_needed_and_free_and_the_old_one_is_untouched(small_disk):
    small, large = nn.Linear(4, 4), nn.Linear(300, 300)
    shardgraph.save_checkpoint(small_disk, 1, small)
    with pytest.raises(CheckpointError, match=r"No space|free\): it takes 36\d\.\d KiB, and .* KiB are free there"):
        shardgraph.save_checkpoint(small_disk, 2, large)
    assert [each.name for each in small_disk.iterdir()] == ["step-00000001"]
    assert shardgraph.load_checkpoint(small_disk, small).step == 1


def test_a_disk_that_may_not_be_written_to_is_told_and_the_old_one_loads(small_disk):
    shardgraph.save_checkpoint(small_disk, 1, model := nn.Linear(4, 4))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved .*Read-only file system"):
        shardgraph.save_checkpoint(small_disk, 2, model)
    assert shardgraph.load_checkpoint(small_disk, model).step == 1


def test_an_error_of_the_background_is_raised_at_the_next_call_once(tmp_path, monkeypatch):
    shardgraph.save_checkpoint(tmp_path, 1, model := nn.Linear(4, 4))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(writing, "_write_file", lambda *_: (_ for _ in ()).throw(full))
    shardgraph.save_checkpoint(tmp_path, 2, model, background=True)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="step 2 could not be saved"):
        shardgraph.save_checkpoint(tmp_path, 3, model, background=True)
    shardgraph.save_checkpoint(tmp_path, 3, model, background=True)
    shardgraph.wait_for_saves()
    assert [step for step, _ in shardgraph.checkpoints(tmp_path)] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [("nobody waits", 120), ("a process of multiprocessing", 1), ("an error of its own", 1), ("heard", 0)],
)
def test_a_last_save_that_fails_unheard_is_told_and_its_process_does_not_end_well(tmp_path, how, code):
    command = [sys.executable, "-m", "tests.unheard_saves", tmp_path / "run", how]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ended.returncode == code, ended.stderr
    last = "shardgraph.CheckpointError: step 1 could not be saved in "
    assert (ended.stderr.splitlines() or [""])[-1].startswith(last) == (how != "heard")
    assert ("ValueError: a bad batch" in ended.stderr) == (how == "an error of its own")
    assert ended.stdout == "what else is done at the end\n"  # as well as at every other end


@pytest.mark.parametrize(
    "options", [{"step": -1}, {"step": 1.0}, {"step": True}, {"keep": 0}, {"timeout": 0}, {"timeout": float("nan")}]
)
def test_arguments_that_cannot_be_are_refused(options, tmp_path):
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} is "):
        shardgraph.save_checkpoint(tmp_path, **{"step": 1, **options}, model=nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())
