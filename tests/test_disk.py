"""Parameters and optimizer state in memory-mapped files: in no memory, with the same training."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Offload, OffloadError, PlanError
from shardgraph.report.step import program_memory
from shardgraph.runtime.host import is_in_file
from tests import disk
from tests.standing import on_ranks
from tests.test_offload import Wide, trained


@pytest.mark.slow
def test_parameters_on_disk_take_no_memory_and_train_the_same(tmp_path):
    losses, meter, program = trained(Offload(parameters=True, disk=tmp_path))
    assert losses == trained(None, fused=True)[0]
    assert meter.host_peak_bytes < trained("parameters")[1].host_peak_bytes
    host = max(map(sum, zip(*program_memory(program, "adamw").host.values(), strict=True)))
    assert host == pytest.approx(meter.host_peak_bytes, rel=0.02)


def test_optimizer_state_on_disk_takes_no_memory_and_trains_the_same(tmp_path):
    losses, meter, program = trained(Offload(parameters=True, disk=tmp_path, optimizer_state=True))
    assert losses == trained(None, fused=True)[0]
    state = 8 * sum(parameter.numel() for parameter in Wide().parameters())
    assert meter.host_peak_bytes < trained(Offload(parameters=True, disk=tmp_path))[1].host_peak_bytes - 0.9 * state
    host = max(map(sum, zip(*program_memory(program, "adamw").host.values(), strict=True)))
    assert host == pytest.approx(meter.host_peak_bytes, rel=0.02)


@pytest.mark.quick("Adafactor", "AdamW", "RMSprop")
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters),
        lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
        lambda parameters: torch.optim.Adafactor(parameters),
    ],
    ids=["AdamW", "fused Adam", "SGD", "Adagrad", "RMSprop", "Adafactor"],
)
def test_any_optimizer_has_its_state_in_files_and_checkpoints_it_as_without(make, tmp_path):
    def steps(optimizer: torch.optim.Optimizer, sharded: nn.Module) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            sharded(torch.ones(2, 32)).square().mean().backward()
            optimizer.step()

    given = Offload(parameters=True, disk=tmp_path, optimizer_state=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    models = [shardgraph.compile(copy.deepcopy(model), "single", offload=offload) for offload in (given, "parameters")]
    optimizers = [make(each.parameters()) for each in models]
    for optimizer, each in zip(optimizers, models, strict=True):
        steps(optimizer, each)
        optimizer.load_state_dict(torch.load(saved(optimizer.state_dict())))
        steps(optimizer, each)
    held = [value for state in optimizers[0].state.values() for value in state.values() if torch.is_tensor(value)]
    assert held and all(is_in_file(value) for value in held if value.numel() > 1)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert all(type(state) is dict for state in states[0].values())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_state_of_shards_and_of_whole_tensors_is_in_files_and_trains_the_same(tmp_path):
    assert on_ranks(disk.training, 2, args=(tmp_path,)) == [[(True, True, True)] * 2] * 2


def test_a_folder_without_room_for_the_state_is_an_error_of_the_step(tmp_path, monkeypatch):
    given = Offload(parameters=True, disk=tmp_path, optimizer_state=True)
    sharded = shardgraph.compile(nn.Linear(64, 64), "single", offload=given)
    optimizer = torch.optim.Adam(sharded.parameters())
    sharded(torch.ones(1, 64)).sum().backward()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(OffloadError, match=r"tensors of the optimizer's state of this rank take 16\.0 KiB, and .* 0"):
        optimizer.step()


def test_optimizer_state_on_disk_needs_a_folder():
    with pytest.raises(PlanError, match=r"optimizer_state is True, and offload\.disk names no folder"):
        Offload(parameters=True, optimizer_state=True)


@pytest.mark.slow
def test_the_files_of_parameters_have_no_name_and_go_with_them(tmp_path):
    free = os.statvfs(tmp_path).f_bfree
    sharded = shardgraph.compile(Wide(64), "single", offload=Offload(parameters=True, disk=tmp_path))
    assert all(map(is_in_file, sharded.parameters())) and list(tmp_path.iterdir()) == []
    assert mapped(tmp_path) == len(list(sharded.parameters())) and os.statvfs(tmp_path).f_bfree < free
    del sharded
    gc.collect()
    assert mapped(tmp_path) == 0


def mapped(folder: Path) -> int:
    """The files in a folder that are mapped into this process's memory."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    model, asked = Wide(), Offload(parameters=True, disk=tmp_path)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    monkeypatch.setattr("shardgraph.module.mapped_files.os.posix_fallocate", no_space)
    with pytest.raises(OffloadError, match=r"take 4\.0 MiB.*No space left on device.*nothing was left there"):
        shardgraph.compile(model, "single", offload=asked)
    monkeypatch.setattr("shardgraph.module.mapped_files.shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(OffloadError, match=r"has 1\.0 MiB left: nothing was written"):
        shardgraph.compile(model, "single", offload=asked)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("folder", ["missing", "a file"])
def test_a_folder_that_is_none_is_an_error(tmp_path, folder):
    (tmp_path / "a file").write_text("")
    with pytest.raises(OffloadError, match=r"cannot be had in .*(No such file|Not a directory)"):
        shardgraph.compile(Wide(1), "single", offload=Offload(parameters=True, disk=tmp_path / folder))


def test_a_host_without_room_is_an_error(monkeypatch):
    monkeypatch.setattr("shardgraph.module.parameter_memory.host_memory", lambda: 1 << 20)
    with pytest.raises(OffloadError, match=r"take 4\.0 MiB, and this machine has 1\.0 MiB of free.*disk="):
        shardgraph.compile(Wide(), "single", offload="parameters")
