"""Networks for images, noise and graphs, written in plain torch, train under every plan as they do unsharded."""

from __future__ import annotations

import pytest

import shardgraph
from tests import architectures

PLANS = {"fsdp": {"dp": 2}, "ddp": {"dp": 2}, "tp": {"tp": 2}, "fsdp+tp": {"dp": 2, "tp": 2}, "pp": {"pp": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_a_network_trains_as_the_original(name, plan):
    model, call = architectures.make(name, 8)
    mesh = PLANS[plan] if len(PLANS[plan]) > 1 else None
    report = shardgraph.verify(model, (), plan, mesh=mesh, example_kwargs=call, steps=3)
    assert report.ok, str(report)


@pytest.mark.quick("graph-tp")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_a_network_is_planned_and_priced(name, plan):
    model, call = architectures.make(name, 8)
    analysis = shardgraph.analyze(model, plan=plan, example_kwargs=call, cluster="H100", mesh=PLANS[plan])
    assert analysis.peak_memory > 0
