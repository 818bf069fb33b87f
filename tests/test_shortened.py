"""Embeddings with ``max_norm``, whose forward shortens rows of their weight in place: stored parameters are those that
torch has after the whole batch, whichever rank or microbatch looks a row up."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardgraph
from tests import shortened
from tests.standing import on_ranks

EXACT = 1e-10  # double precision; what is left is the order of sums


@pytest.mark.quick("bags-ddp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "zero2", "tp", "pp"])
@pytest.mark.parametrize("name", shortened.MODELS)
def test_stored_rows_losses_and_gradients_are_those_of_the_whole_batch(name, plan):
    for worst in on_ranks(shortened.trained, args=(plan, name)):
        assert max(worst.values()) < EXACT, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", shortened.MODELS)
def test_rows_of_a_table_that_data_and_operators_divide_are_those_of_the_whole_batch(name):
    for worst in on_ranks(shortened.trained, 4, args=("fsdp+tp", name)):
        assert max(worst.values()) < EXACT, worst


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_gradients_of_several_calls_add_up(plan):
    assert max(on_ranks(shortened.accumulated, args=(plan,))) < EXACT


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_a_step_in_one_call_shortens_rows_too(plan):
    assert max(on_ranks(shortened.in_steps, args=(plan,))) < EXACT


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_ranks_without_data_shorten_the_rows_of_those_with_data(plan):
    assert max(on_ranks(shortened.beside_ranks_without_data, args=(plan,))) < EXACT


def test_stored_rows_are_shortened_in_the_precision_that_they_are_stored_in():
    assert max(on_ranks(shortened.in_half_precision)) < 1e-6


# -- in one process ----------------------------------------------------------------------------------------


@pytest.mark.quick("one by one-fsdp", "tied-pp")
@pytest.mark.parametrize("plan", ["fsdp", "tp", "fsdp+tp", "pp"])
@pytest.mark.parametrize("name", ["one by one", "bags", "tied"])
def test_verify_compares_with_torch_which_shortens_rows_in_every_forward(name, plan):
    mesh = {"mesh": {"dp": 2, "tp": 2}} if plan == "fsdp+tp" else {}
    report = shardgraph.verify(shortened.make(name), (shortened.words(0),), plan, steps=3, **mesh)
    assert report.ok, str(report)
    assert any("rows are shortened" in error for error in report.errors)


def test_verify_tells_rows_that_are_shortened_otherwise(monkeypatch):
    factors = shardgraph.ir.ShortenedRows.factors
    monkeypatch.setattr(shardgraph.ir.ShortenedRows, "factors", lambda self, powers: 0.9 * factors(self, powers))
    report = shardgraph.verify(shortened.make("one by one"), (shortened.words(0),), "fsdp")
    assert not report.ok
    assert "weight embed.weight when rows are shortened" in str(report)


class Function(nn.Module):
    """Looks words up in a table of its own by ``F.embedding``, the second time with another bound."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(shortened.ROWS, 4), requires_grad=not frozen)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        one = F.embedding(words, self.table, max_norm=2.0)
        other = F.embedding((words + 3) % shortened.ROWS, self.table, max_norm=1.0)
        return (self.scale * one * other).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_functional_lookups_shorten_rows_one_after_the_other(frozen):
    torch.manual_seed(0)
    report = shardgraph.verify(Function(frozen), (torch.randint(9, (4, 3)) * 2,), "fsdp", steps=2)
    assert report.ok, str(report)


def test_a_checkpoint_has_the_rows_as_they_were_shortened():
    model = shortened.make("one by one")
    sharded = shardgraph.compile(shortened.make("one by one"), "single", progress=False)
    model(shortened.words(0))
    sharded(shortened.words(0))
    torch.testing.assert_close(sharded.state_dict()["embed.weight"], model.state_dict()["embed.weight"])


class Reads(nn.Module):
    """Reads its table before it looks words up, or looks up what layers choose."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed, self.scores, self.what = nn.Embedding(9, 4, max_norm=1.0), nn.Parameter(torch.randn(9)), what

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if self.what == "before":
            return (self.embed.weight.sum() + self.embed(words)).mean()
        if self.what == "chosen":
            return self.embed(words + self.scores.argmax()).mean()
        return self.embed(words + torch.randint(2, words.shape)).mean()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("before", r"(?s)reads 'embed\.weight' at .*test_shortened\.py:\d+, and shortens rows of it after that"),
        ("chosen", r"(?s)'embed\.weight' has max_norm and looks up rows that .* from parameters, at .*:\d+"),
        ("drawn", r"(?s)'embed\.weight' has max_norm and looks up rows that .* from random numbers, at .*:\d+"),
    ],
)
def test_what_cannot_be_shortened_before_a_call_is_refused_with_its_line(what, said):
    with pytest.raises(shardgraph.CaptureError, match=said):
        shardgraph.compile(Reads(what), "single", example_inputs=(torch.tensor([1, 2]),), progress=False)


class Clamps(nn.Module):
    """Writes a parameter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return self.layer(x).mean()


def test_any_other_write_of_a_parameter_is_refused_with_its_line():
    with pytest.raises(shardgraph.CaptureError, match=r"(?s)writes the parameter 'layer\.weight'.*test_shortened\.py:"):
        shardgraph.compile(Clamps(), "single", example_inputs=(torch.ones(2, 3),), progress=False)


def test_an_emitted_program_is_refused(tmp_path):
    with pytest.raises(shardgraph.ShardGraphError, match=r"'embed\.weight' has max_norm"):
        shardgraph.emit(
            shortened.make("one by one"), tmp_path, "ddp", example_inputs=(shortened.words(0),), mesh={"dp": 2}
        )
