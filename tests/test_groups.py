"""Process groups as torch makes its own."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardgraph.runtime.mesh import run_mesh
from shardgraph.torch_api import groups


def make_group():
    return groups._one_worker_gloo(dist.HashStore(), 0, 1, timedelta(seconds=10))


def test_groups_use_the_network_interface_that_gloo_is_told_to_use(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with pytest.raises(RuntimeError, match="no-such-one"):
        make_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert make_group().size() == 1


def test_a_mesh_of_groups_that_communicate_nothing_is_made_without_a_warning():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("idle",))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run_mesh(mesh, (("idle", 4),), timeout=5.0) is mesh
    finally:
        dist.destroy_process_group()
