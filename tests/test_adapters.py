"""Fine-tuning: adapters of peft, layers that are frozen and trained again."""

from __future__ import annotations

import pytest

from tests import adapters
from tests.standing import on_ranks

PLANS = {"fsdp": None, "ddp": None, "tp": None, "fsdp+tp": {"dp": 2, "tp": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", adapters.TARGETS)
def test_a_model_with_adapters_trains_generates_and_is_saved_as_the_original(name, plan, tmp_path):
    mesh = PLANS[plan]
    nproc = 2 if mesh is None else 4
    for facts in on_ranks(adapters.fine_tuned, nproc, args=(plan, mesh, name, str(tmp_path))):
        # Llama's norms are in single precision, and AdamW's first steps make the rounding of gradients larger.
        assert facts.pop("errors") < (5e-6 if name == "llama" else 1e-12)
        assert all(facts.values()), facts


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", adapters.TARGETS)
def test_adapters_are_merged_on_whole_parameters(name, plan):
    for error, left_over in on_ranks(adapters.merged, args=(plan, name)):
        assert error < 1e-12 and not left_over


@pytest.mark.quick("tp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp", "zero1"])
def test_layers_that_are_frozen_and_trained_again_are_those_of_the_original(plan):
    assert max(on_ranks(adapters.frozen_and_trained, args=(plan,))) < 1e-12
