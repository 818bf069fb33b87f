"""Families of transformers that nobody chose are captured and planned as they are, with their defaults."""

from __future__ import annotations

import pytest

import shardgraph
from tests import families

PLANS = {"fsdp": {"dp": 2}, "tp": {"tp": 2}, "fsdp+tp": {"dp": 2, "tp": 2}, "pp": {"pp": 2}}


@pytest.mark.quick("afmoe-fsdp")  # experts, whose kernels depend on who asks, and caches of two kinds
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", families.sample())
def test_a_family_is_captured_and_planned(family, plan):
    try:
        model, call = families.build(family)
    except Exception as error:  # of the family's own
        pytest.skip(f"{family} does not train small and by itself: {error}")
    analysis = shardgraph.analyze(model, plan=plan, example_kwargs=call, cluster="H100", mesh=PLANS[plan])
    assert analysis.peak_memory > 0
