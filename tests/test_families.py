"""Families of transformers that nobody chose are captured and planned as they are, with their defaults."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardgraph
from tests import families

pytestmark = pytest.mark.usefixtures("shared_captures")  # what a family is traced to does not depend on the plan

PLANS = {"fsdp": {"dp": 2}, "ddp": {"dp": 2}, "tp": {"tp": 2}, "fsdp+tp": {"dp": 2, "tp": 2}, "pp": {"pp": 2}}

UNBUILT = {
    "dinat": "it needs another package, natten",
    "granite_speech5_ctc": "its sizes follow from a checkpoint's",
    "omniasr_ctc": "its layers do not take the attention mask that its loss needs",
    "tipsv2_dpt": "its sizes follow from a checkpoint's",
    "upernet": "its sizes follow from a checkpoint's",
}
"""Families that do not train small and by themselves."""


def planned(model: nn.Module, plan: str, call: dict[str, torch.Tensor]) -> shardgraph.Analysis:
    return shardgraph.analyze(model, plan=plan, example_kwargs=call, cluster="H100", mesh=PLANS[plan])


@pytest.mark.quick("yoso-fsdp")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", families.sample())
def test_a_family_is_captured_and_planned(family, plan):
    if family in UNBUILT:
        pytest.skip(f"{family}: {UNBUILT[family]}")
    model, call = families.build(family)
    assert planned(model, plan, call).peak_memory > 0


@pytest.mark.slow
@pytest.mark.timeout(900)  # efficientnet has 64 million parameters
@pytest.mark.parametrize("plan", ["fsdp", "tp"])
@pytest.mark.parametrize("family", sorted({*families.sample()} - {*UNBUILT}))
def test_a_family_trains_like_the_unsharded_model(family, plan):
    model, call = families.build(family)
    report = shardgraph.verify(model, (), plan, mesh=PLANS[plan], example_kwargs=call, steps=1)
    assert report.ok, str(report)


class Split(nn.Module):
    """Its Python needs numbers that it has computed, as loops over the experts that were chosen do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        sizes = (y > 0).sum(0).tolist()
        return sum(part.sum() for part in y.split(sizes[0] + 1))


def test_where_the_tracer_itself_fails_the_line_of_the_model_is_named():
    with pytest.raises(shardgraph.CaptureError, match=r"test_families\.py:\d+, in forward:  sizes = .*\.tolist\(\)"):
        shardgraph.compile(Split(), "single", example_inputs=(torch.ones(2, 4),), progress=False)
