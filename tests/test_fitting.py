"""If no plan fits: what takes the room, and what would bring the smallest plan within the memory, each priced."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import PlanError
from shardgraph.api.plan import searched
from shardgraph.plans.batch import Batch
from shardgraph.search.exact import price
from shardgraph.search.fitting import advice
from tests.machines import GIB, toy_cluster
from tests.test_analysis import llama, text
from tests.test_what_if import INPUTS, Net
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")


class Words(nn.Module):
    """A layer and the cross-entropy over a large vocabulary, whose scores take more than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), nn.Linear(64, 40_000)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(x)), labels)


def source_of(model: nn.Module, inputs: tuple[torch.Tensor, ...] = (), kwargs=None, total: int | None = None):
    found = searched(model, inputs, kwargs, toy_cluster(2, 2), 2, total, "adamw", None, "eager", None)
    return found


def test_twice_the_devices_and_half_the_batch_are_priced_for_the_calls_of_a_global_batch():
    source = source_of(Net(), INPUTS, total=12)
    plan = replace(shardgraph.preset("fsdp", {"dp": 2}), batch=Batch(12, calls=3))
    smallest = price(source.resized(2, 6), plan, GIB)
    halved, doubled = advice(source, smallest, GIB).splitlines()[-2:]
    if "devices" in halved:
        halved, doubled = doubled, halved
    assert halved.startswith("  batches of 1, 6 of them accumulated: ") and doubled.startswith("  4 devices: ")


def test_a_loss_in_chunks_is_a_way_to_fit():
    with torch.device("meta"):
        source = source_of(Words(), (torch.zeros(2048, 64), torch.zeros(2048, dtype=torch.long)))
    smallest = price(source, shardgraph.preset("ddp", {"dp": 2}), GIB)
    assert "  loss_chunk='64MiB': " in advice(source, smallest, smallest.memory // 2)


@pytest.mark.slow
def test_a_full_recomputation_is_a_way_to_fit():
    source = source_of(llama(4), kwargs=text(16))
    smallest = price(source, shardgraph.preset("ddp", {"dp": 2}), GIB)
    (line,) = (line for line in advice(source, smallest, 1).splitlines() if "recompute='full': " in line)
    assert line.endswith(" per sample, which is still too much")


def test_what_takes_no_less_memory_is_no_way_to_fit():
    source = source_of(Net(), INPUTS)
    smallest = price(source, shardgraph.preset("ddp", {"dp": 2}), GIB)
    assert "devices" not in advice(source, smallest, GIB)  # on which parameters are replicated too


def test_what_is_live_at_the_peak_is_told_by_name():
    with torch.device("meta"):
        source = source_of(Words(), (torch.zeros(64, 64), torch.zeros(64, dtype=torch.long)))
    smallest = price(source, shardgraph.preset("ddp", {"dp": 2}), GIB)
    where, *kinds = (line.strip() for line in advice(source, smallest, GIB).splitlines()[1:5])
    assert where == "at its peak, in the optimizer, adamw:"
    weights = 64 * 40_000 * 4 / 2**20
    assert kinds[0].endswith(f" optimizer state, of which head.weight {2 * weights:.1f} MiB")
    assert kinds[2].endswith(f" parameters, of which head.weight {weights:.1f} MiB")


@pytest.mark.slow
def test_what_equal_layers_save_is_told_together():
    source = source_of(llama(4), kwargs=text(64))
    plan = shardgraph.preset("ddp", {"dp": 2})
    smallest = price(source, plan, GIB)
    where, saved = advice(source, smallest, GIB).splitlines()[1:3]
    assert re.search(r"in backward, _log_softmax_backward_data.default \(.*loss_utils.py:\d+\):$", where)
    assert re.search(r" saved, of which model.layers.\*.self_attn [\d.]+ MiB, model.layers.\*.", saved)


def test_what_a_pipeline_holds_at_its_peak_is_told():
    source = source_of(llama(2), kwargs=text(4))
    plan = shardgraph.preset("pp", {"pp": 2}, shardgraph.Pipeline(2))
    smallest = price(source, plan, GIB)
    assert sum(smallest.live.values()) == smallest.memory
    assert " optimizer state, " in advice(source, smallest, GIB).splitlines()[1]


@pytest.mark.slow
def test_the_fewest_devices_are_found_with_which_a_plan_fits():
    model, (args, kwargs) = make("tied-transformer", 2)
    with pytest.raises(PlanError, match=r"\n  8 devices, as 'tp\+sp' on \{'tp': 8\}: "):
        shardgraph.plan(model, args, example_kwargs=kwargs, cluster=toy_cluster(1, 4, memory=20_000))


@pytest.mark.slow
def test_the_fewest_devices_may_be_stages_of_a_pipeline():
    options = {"cluster": toy_cluster(1, 2, memory=1500 << 10), "global_batch": 8, "recompute": "none"}
    with pytest.raises(PlanError, match=r"the smallest is 'pp' on (?s:.)*\n  4 devices, as 'pp\+tp\+sp' on "):
        shardgraph.plan(llama(8), example_kwargs=text(), **options)
