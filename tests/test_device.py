"""Which device the ranks of a process group compute on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.runtime import mesh as mesh_module
from shardgraph.runtime.device import accelerator, current_device, device_type_of
from shardgraph.runtime.mesh import run_mesh


@pytest.fixture
def bare_group(monkeypatch, tmp_path):
    """One rank in a group that was initialised without naming a backend."""
    dist.init_process_group(store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine with CUDA devices, of which this process uses number 3."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)


@pytest.mark.parametrize(
    ("backends", "there", "chosen"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", "cuda"),
        ({"cuda": "nccl"}, "cuda", "cuda"),
        ({"cpu": "gloo", "xpu": "xccl"}, "xpu", "xpu"),
        ({"cpu": "gloo", "cuda": "nccl"}, "xpu", "cpu"),
        ({"cpu": "gloo", "cuda": "nccl"}, None, "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cpu"),
        ({"cpu": "gloo"}, "cuda", "cpu"),
    ],
)
def test_the_device_is_the_accelerator_that_the_group_communicates_from(backends, there, chosen):
    assert device_type_of(backends, there) == chosen


def test_a_bare_group_on_a_machine_with_gpus_has_a_mesh_of_gpus(bare_group, a_gpu, monkeypatch):
    made = []
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(mesh_module, "init_device_mesh", lambda kind, *args, **kwargs: made.append(kind))
    run_mesh(None, (("dp", 1),))
    assert made == ["cuda"]


def test_a_group_of_gloo_on_a_machine_with_gpus_has_a_mesh_of_cpus(bare_group, a_gpu, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:gloo")
    assert run_mesh(None, (("dp", 1),)).device_type == "cpu"


def test_the_device_of_a_mesh_is_the_one_that_this_process_uses(a_gpu):
    assert current_device("cuda") == accelerator() == torch.device("cuda", 3)
    assert current_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="trains on the CPU")
def test_a_bare_group_on_a_machine_without_gpus_trains(bare_group):
    sharded = shardgraph.compile(nn.Linear(3, 2), "fsdp")
    sharded(torch.randn(4, 3)).sum().backward()
    assert sharded.mesh.device_type == "cpu" and all(p.grad is not None for p in sharded.parameters())
