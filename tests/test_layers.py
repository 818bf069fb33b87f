"""Layers of torch that do more than compute with their parameters: recurrent ones, weights that are computed anew at
every call, embeddings with options. They are as in the original model, or refused with the line and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import shardgraph
from tests import layers, recurrent
from tests.standing import on_ranks

EXACT = 1e-11  # double precision; what is left is the order of sums

# -- recurrent layers --------------------------------------------------------------------------------------


@pytest.mark.quick("rnn with relu-fsdp+tp")
@pytest.mark.parametrize("plan", ["ddp", "zero2", "fsdp", "tp", "fsdp+tp", "pp"])
@pytest.mark.parametrize("name", [*recurrent.KINDS, "positions first"])
def test_recurrent_layers_train_as_the_original(name, plan):
    model, call = recurrent.make(name, 8)
    mesh = {"mesh": {"dp": 2, "tp": 2}} if plan == "fsdp+tp" else {}
    report = shardgraph.verify(model, call, plan, steps=3, **mesh)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
@pytest.mark.parametrize("name", ["lstm with given states", "lstm in two directions", "gru"])
def test_a_recurrent_layer_has_its_shards_however_it_is_called(name, plan):
    for facts in on_ranks(layers.recurrently, args=(plan, name)):
        assert facts.pop("listed")
        assert max(facts.values()) < EXACT


@pytest.mark.slow
def test_dropout_between_recurrent_layers_drops_what_the_original_drops():
    original = recurrent.Tagger(nn.LSTM, num_layers=3, dropout=0.5, bidirectional=True)
    sharded = shardgraph.compile(copy.deepcopy(original), "single", progress=False)
    ids, tags = torch.randint(11, (4, 5)), torch.randint(5, (4, 5))
    losses = []
    for model in (original, sharded):
        torch.manual_seed(1)
        losses.append(model(ids, tags)["loss"])
    torch.testing.assert_close(*losses)


@pytest.mark.slow
def test_the_best_plan_of_a_recurrent_model_is_found_and_priced():
    model, call = recurrent.make("rnn with relu")
    plan = shardgraph.plan(model, example_inputs=call, cluster="H100", devices=2)
    assert shardgraph.analyze(model, plan=plan, example_inputs=call, cluster="H100").time.total > 0


class Packed(nn.Module):
    """Leaves out padding, by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out, _ = self.layers(pack_padded_sequence(x, lengths, batch_first=True))
        return out.data.sum()


def test_packed_sequences_are_refused_with_their_line_and_what_to_do():
    call = torch.randn(2, 3, 4), torch.tensor([3, 2])
    with pytest.raises(
        shardgraph.CaptureError, match=r"(?s)test_layers\.py:\d+.*pack_padded_sequence\(.*torch\.gather"
    ):
        shardgraph.compile(Packed(), "single", example_inputs=call, progress=False)


@pytest.mark.quick("parametrization")
@pytest.mark.parametrize("how", [nn.utils.weight_norm, parametrizations.weight_norm], ids=["hooks", "parametrization"])
def test_a_recurrent_layer_that_computes_a_weight_is_refused_and_its_cell_is_not(how):
    layers = how(nn.GRU(4, 5), "weight_hh_l0")
    with pytest.raises(shardgraph.CaptureError, match=r"'weight_hh_l0' is computed at every call.*GRUCell"):
        shardgraph.compile(layers, "single", example_inputs=(torch.ones(3, 2, 4),), progress=False)
    report = shardgraph.verify(how(nn.GRUCell(4, 5), "weight_hh"), (torch.randn(4, 4),), "fsdp", steps=2)
    assert report.ok, str(report)


def test_a_long_sequence_is_told_to_be_written_out(monkeypatch):
    monkeypatch.setattr("shardgraph.capture.recurrent._MANY_STEPS", 5)
    model = nn.RNN(1, 1)
    with pytest.warns(UserWarning, match=r"written out in 6 steps \(of 6 positions, 1 layers, 1 directions\)"):
        shardgraph.analyze(model, plan="ddp", example_inputs=(torch.ones(6, 1, 1),), cluster="H100", mesh={"dp": 1})


# -- weights that are computed -----------------------------------------------------------------------------


@pytest.mark.quick("spectral_norm-fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
@pytest.mark.parametrize("name", layers.REPARAMETRIZED)
def test_a_weight_that_is_computed_at_every_call_is_that_of_the_original(name, plan):
    for error, buffers, evaluated, programs in on_ranks(layers.trained, args=(plan, name)):
        assert max(error, buffers, evaluated) < EXACT
        assert programs == 1


@pytest.mark.parametrize("kind", ["hooks", "parametrization"])
def test_what_computes_a_weight_is_removed_on_whole_parameters(kind):
    assert max(on_ranks(layers.without_weight_norm, args=(kind,))) < EXACT


# -- matrices that are checked -----------------------------------------------------------------------------


class OfMatrix(nn.Module):
    """A layer of what an operation that checks a matrix makes of one that is trained, or one for each row."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], batched: bool = False) -> None:
        super().__init__()
        self.matrix, self.layer, self.operation = nn.Parameter(torch.eye(4) * 2), nn.Linear(4, 4), operation
        self.batched = batched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        given = y.unsqueeze(1) * y.unsqueeze(2) + self.matrix if self.batched else self.matrix @ self.matrix.T
        return (self.operation(given) @ y.unsqueeze(2)).square().mean()


CHECKED = {
    "solve": lambda a: torch.linalg.solve(a, torch.ones_like(a)),
    "inv": torch.linalg.inv,
    "inverse": torch.Tensor.inverse,
    "power": lambda a: torch.linalg.matrix_power(a, -2),
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda a: torch.linalg.lu_factor(a).LU,
}


@pytest.mark.quick("solve-*")
@pytest.mark.parametrize(("plan", "batched"), [("fsdp", True), ("tp", False)], ids=["fsdp rows", "tp weight"])
@pytest.mark.parametrize("name", CHECKED)
def test_operations_that_check_a_matrix_train_as_the_original(name, plan, batched):
    report = shardgraph.verify(OfMatrix(CHECKED[name], batched), (torch.randn(4, 4),), plan, steps=2, fp64=True)
    assert report.ok, str(report)


@pytest.mark.quick("solve")
@pytest.mark.parametrize("name", CHECKED)
def test_a_matrix_of_which_they_are_not_defined_is_told_with_the_line_in_every_call(name):
    model, x = OfMatrix(CHECKED[name]), torch.randn(3, 4)
    sharded = shardgraph.compile(model, "single", example_inputs=(x,), progress=False)
    assert torch.allclose(sharded(x), model(x))
    with torch.no_grad(), sharded.unsharded():
        sharded.matrix.zero_()
        model.matrix.zero_()
    with pytest.raises(RuntimeError, match="linalg"):
        model(x)
    for _ in range(2):
        with pytest.raises(shardgraph.ModelCheckError, match=r"test_layers\.py:\d+: .*linalg.* is singular"):
            sharded(x)


def test_a_parametrization_that_solves_trains_as_the_original():
    model = parametrizations.orthogonal(nn.Linear(3, 4), orthogonal_map="cayley")
    report = shardgraph.verify(model, (torch.randn(2, 3),), "fsdp", steps=2)
    assert report.ok, str(report)


# -- embeddings --------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """A layer on embeddings of words, one by one or in bags, with weights or without."""

    def __init__(self, kind: type[nn.Module], **options: object) -> None:
        super().__init__()
        self.embed, self.head = kind(12, 6, **options), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        more = () if weights is None else (None, weights)
        return self.head(self.embed(words, *more)).square().mean()


WORDS = torch.tensor([[1, 1, 2, 0], [3, 1, 5, 0], [7, 7, 7, 0], [0, 1, 2, 11]])
EMBEDDINGS = {
    "padding": (nn.Embedding, {"padding_idx": 0}),
    "sparse": (nn.Embedding, {"sparse": True}),
    "by frequency": (nn.Embedding, {"scale_grad_by_freq": True}),
    "mean": (nn.EmbeddingBag, {"mode": "mean", "padding_idx": 0}),
    "sum": (nn.EmbeddingBag, {"mode": "sum", "sparse": True}),
    "max": (nn.EmbeddingBag, {"mode": "max"}),
}


@pytest.mark.quick("*-fsdp", "padding-tp", "mean-tp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_with_options_train_as_the_original(name, plan):
    kind, options = EMBEDDINGS[name]
    report = shardgraph.verify(Bag(kind, **options), (WORDS,), plan, steps=3)
    assert report.ok, str(report)


def test_a_bag_with_weights_trains_as_the_original():
    report = shardgraph.verify(Bag(nn.EmbeddingBag, mode="sum"), (WORDS, torch.rand(4, 4)), "fsdp", steps=3)
    assert report.ok, str(report)
