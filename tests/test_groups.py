"""Process groups as torch makes its own."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from shardgraph.torch_api import groups


def make_group():
    return groups._one_worker_gloo(dist.HashStore(), 0, 1, timedelta(seconds=10))


def test_groups_use_the_network_interface_that_gloo_is_told_to_use(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with pytest.raises(RuntimeError, match="no-such-one"):
        make_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert make_group().size() == 1
