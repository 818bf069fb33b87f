"""Lint: each rule finds what it is for, with its place and a remedy, and is silent on a plain model."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel

import shardgraph
from shardgraph import ShardGraphError
from tests.standing import on_ranks

IDS = torch.zeros(4, 8, dtype=torch.long)
ROWS = torch.zeros(4, 8)


class Plain(nn.Module):
    """A layer and the mean of its result; with ``changes``, more."""

    def __init__(self, **changes: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, module in changes.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for name in ("norm", "dropout", "uneven"):
            x = getattr(self, name)(x) if hasattr(self, name) else x
        return x.square().mean()


def rules(model: nn.Module, inputs: tuple[torch.Tensor, ...] = (ROWS,), **options: object) -> dict[str, object]:
    """The findings by rule."""
    given = {"plan": "fsdp", "mesh": {"dp": 2}} | options
    return {each.rule: each for each in shardgraph.lint(model, inputs, **given)}


def test_a_plain_model_has_nothing_to_be_found():
    model = Plain()
    assert rules(model, optimizer=torch.optim.AdamW(model.parameters())) == {}
    assert str(shardgraph.lint(model, (ROWS,), mesh={"dp": 2})) == "nothing found"


@pytest.mark.parametrize(
    "change, rule, severity, place",
    [
        ({"norm": nn.BatchNorm1d(8)}, "local-batch-norm", "warning", "norm"),
        ({"other": nn.Linear(2, 2)}, "unused", "warning", "other.weight, other.bias"),
        ({"dropout": nn.Dropout(0.5)}, "random", "note", "test_lint.py"),
        ({"uneven": nn.Linear(8, 5)}, "uneven-shards", "note", "uneven.weight of shape (5, 8)"),
        ({"uneven": nn.Linear(8, 8).requires_grad_(False)}, "frozen-gathered", "note", "uneven.weight"),
    ],
)
def test_a_change_of_the_model_is_found_and_placed(change, rule, severity, place):
    found = rules(Plain(**change), mesh={"dp": 4} if rule == "uneven-shards" else {"dp": 2})
    assert list(found) == [rule] and found[rule].severity == severity and place in found[rule].where
    assert found[rule].remedy in str(found[rule])


def test_on_one_rank_there_is_nothing_that_differs():
    assert rules(Plain(norm=nn.BatchNorm1d(8), dropout=nn.Dropout()), plan="single", mesh={"dp": 1}) == {}


class Loss(nn.Module):
    def __init__(self, reduction: str = "mean", logits: bool = False, words: int = 16, width: int = 8) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.reduction, self.logits = reduction, logits

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> object:
        logits = self.head(self.words(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return (loss, logits) if self.logits else loss


@pytest.mark.parametrize("reduction, rule", [("mean", "unequal-counts"), ("sum", "summed-loss")])
def test_losses_whose_mean_over_ranks_is_not_that_of_the_batch_are_found_with_their_line(reduction, rule):
    found = rules(Loss(reduction), (IDS, IDS))
    assert list(found) == [rule] and "test_lint.py" in found[rule].where


def test_an_output_that_is_gathered_beside_the_loss_is_found():
    ids = torch.zeros(8, 512, dtype=torch.long, device="meta")
    options = {"plan": "tp", "mesh": {"tp": 4}, "cluster": "H100"}
    with torch.device("meta"):  # large enough for the head to be divided
        both, alone = (Loss(logits=logits, words=32_000, width=1024) for logits in (True, False))
    assert "500.0 MiB" in rules(both, (ids, ids), **options)["gathered-output"].message
    assert "gathered-output" not in rules(alone, (ids, ids), **options)


@pytest.mark.parametrize("words, precision, found", [(61, "bf16", True), (64, "bf16", False), (61, None, False)])
def test_products_in_16_bits_of_a_vocabulary_of_odd_size_are_found(words, precision, found):
    rule = rules(Loss(words=words), (IDS, IDS), precision=precision).get("unaligned-products")
    assert (rule is not None) is found
    assert rule is None or ("multiples of 2 bytes" in rule.message and "test_lint.py" in rule.where)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(16, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return F.linear(x, self.words.weight).square().mean()


def test_a_weight_that_is_tied_across_stages_is_found():
    found = rules(Tied(), (IDS,), plan="pp", mesh={"pp": 2})
    assert found["tied-across-stages"].where == "words.weight" and "0 and 1" in found["tied-across-stages"].message


def test_float16_wants_a_scaler():
    assert "GradScaler" in rules(Plain(), precision="fp16")["float16"].remedy
    assert "float16" not in rules(Plain(), precision="bf16")


def test_an_optimizer_of_other_parameters_is_found():
    model = Plain()
    assert "after compile" in rules(model, optimizer=torch.optim.SGD(Plain().parameters()))["stale-optimizer"].remedy
    found = rules(model, optimizer=torch.optim.SGD([model.layer.bias]))["not-optimized"]
    assert "layer.weight" in found.message


def test_what_is_sharded_already_is_refused():
    with pytest.raises(ShardGraphError, match=r"double-sharding at the model: DataParallel"):
        shardgraph.lint(DataParallel(Plain()), (ROWS,), mesh={"dp": 2})


def found_on_a_rank() -> list[str]:
    sharded = shardgraph.compile(Plain(norm=nn.BatchNorm1d(8)), "fsdp")
    sharded(torch.zeros(4, 8)).backward()
    return [each.rule for each in shardgraph.lint(sharded, optimizer=torch.optim.AdamW(sharded.parameters()))]


def test_shards_of_the_plan_itself_are_no_double_sharding():
    assert on_ranks(found_on_a_rank) == [["local-batch-norm"]] * 2


def test_auto_is_refused():
    with pytest.raises(ShardGraphError, match="lint looks at one plan"):
        shardgraph.lint(Plain(), (ROWS,), "auto", mesh={"dp": 2})


def test_a_compiled_module_says_at_its_first_call_that_there_is_something_and_lint_says_what(caplog):
    sharded = shardgraph.compile(Plain(other=nn.Linear(2, 2)), "single")
    with caplog.at_level(logging.WARNING, logger="shardgraph"):
        for _ in range(2):
            sharded(ROWS).backward()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["this may train otherwise than expected (unused): print(shardgraph.lint(sharded))"]
    assert [each.rule for each in shardgraph.lint(sharded)] == ["unused"]
