"""Which models compute each row of a batch apart, so that a pipeline may cut the batch into microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardgraph
from shardgraph.capture.capture import capture
from shardgraph.errors import CaptureError, ShardGraphError
from shardgraph.proof.microbatches import Rows, rows_of
from tests.test_proof import captured


class Head(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.of = nn.Linear(8, 8), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.body(x))


def rows(of: Callable[[Tensor], Tensor], batch: int = 4) -> Rows:
    return rows_of(capture(Head(of), (torch.randn(batch, 8),), {}, device=torch.device("cpu")))


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "a softmax of each row": lambda h: h.softmax(1),
    "a mean over rows and elements": lambda h: h.square().mean(),
    "a mean of each row": lambda h: h.mean(1),
    "dropout": lambda h: F.dropout(h, 0.5),
    "rows in another shape": lambda h: h.view(-1, 2, 4).transpose(1, 2).flatten(1).square().sum(1),
    "rows that are merged with elements": lambda h: h.reshape(-1, 4).relu().view(-1, 8),
    "products within a row": lambda h: torch.einsum("bi,bj->bij", h, h).sum((1, 2)),
    "an element of each row": lambda h: h[:, 3],
    "a random choice for each row": lambda h: torch.where(torch.rand(len(h), 1) > 0.5, h, 0 * h),
    "sums up to each element": lambda h: h.cumsum(1) + h.flip(1).roll(1, 1),
    "elements in their order": lambda h: h.sort(1)[0] + h.topk(8, 1)[0],
    "a median and a maximum": lambda h: h.median(1)[0] + h.max(1)[0],
    "a logarithm of a sum of exponentials": lambda h: h.logsumexp(1),
    "spread and norm": lambda h: h.std(1) + h.var(1) + h.norm(dim=1) + h.prod(1),
    "rows of norm 1": lambda h: F.normalize(h, dim=1),
    "groups of channels": lambda h: F.group_norm(h, 2),
    "a choice of one element": lambda h: F.one_hot(h.argmax(1), 8) * h,
}


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("of", APART.values(), ids=APART)
def test_what_a_row_gives_alone_is_apart(of, batch):
    found = rows(of, batch)
    assert not found.mixed and not found.unknown


def test_a_batch_norm_has_its_documented_meaning_for_microbatches():
    found = rows(lambda h: F.batch_norm(h, None, None, training=True))
    assert not found.mixed and not found.unknown


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "similarities of rows": lambda h: h @ h.T,
    "rows less their mean": lambda h: h - h.mean(0),
    "a softmax over rows": lambda h: h.softmax(0),
    "a row less the first": lambda h: h - h[0],
    "rows in order": lambda h: h.sort(0)[0],
    "sums of the rows up to each": lambda h: h.cumsum(0),
    "rows turned around": lambda h: h.flip(0),
    "rows over their spread": lambda h: h / h.std(0),
    "rows in another order": lambda h: h[torch.tensor([1, 0, 3, 2])],
    "a square of a mean over rows": lambda h: h.mean(0).square().sum(),
    "rows scaled by the norm of all": lambda h: h / h.norm(),
    "a sum of products of all rows": lambda h: torch.einsum("bi,bj->ij", h, h),
    "the mean of such a sum": lambda h: torch.einsum("bi,bj->ij", h, h).mean(),
    "rows merged with elements, then normalized": lambda h: h.flatten().softmax(0),
}


@pytest.mark.parametrize("of", MIXED.values(), ids=MIXED)
def test_what_a_row_gives_with_others_is_refused_by_its_line(of):
    with pytest.raises(ShardGraphError, match=r"not computed apart: at .*test_proof_rows\.py:\d+ "):
        rows(of).raise_if_mixed()


class Scaled(nn.Module):
    """Rows times numbers of the model's own, as similarities have a learned temperature."""

    def __init__(self, of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(6, 3), of
        self.scale, self.weights = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.layer(x), self.scale, self.weights)


@pytest.mark.parametrize(
    "of",
    [
        lambda h, scale, weights: scale.exp() * h @ h.T,
        lambda h, scale, weights: (h / weights.norm()).softmax(0),
        lambda h, scale, weights: h * torch.cat([h.mean().view(1), weights]),
    ],
    ids=["similarities", "a softmax over rows", "a mean over rows beside weights"],
)
def test_numbers_of_the_model_do_not_hide_rows_that_are_combined(of):
    joint = capture(Scaled(of), (torch.randn(4, 6),), {}, device=torch.device("cpu"))
    with pytest.raises(ShardGraphError, match=r"not computed apart: at .*test_proof_rows\.py:\d+ "):
        rows_of(joint).raise_if_mixed()


def test_rows_are_known_to_be_apart_where_numbers_of_the_model_scale_them():
    model = Scaled(lambda h, scale, weights: h * scale.exp() / (weights.norm() + weights[0] + 1e-6))
    found = rows_of(capture(model, (torch.randn(4, 6),), {}, device=torch.device("cpu")))
    assert found.apart


def test_bags_that_begin_at_offsets_are_refused_and_those_in_rows_are_not():
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(9, 8, mode="sum")

        def forward(self, offsets: Tensor | None, indices: Tensor) -> Tensor:
            return self.bags(indices, offsets)

    def found(*call: Tensor | None) -> Rows:
        return rows_of(capture(Bags(), call, {}, device=torch.device("cpu")))

    offsets = found(torch.arange(0, 8, 2), torch.arange(8))
    with pytest.raises(ShardGraphError, match=r"where bags begin among the indices.*a row for each bag"):
        offsets.raise_if_mixed()
    found(None, torch.arange(8).view(4, 2)).raise_if_mixed()


class Tables(nn.Module):
    """Bags of several tables, with offsets ``[tables, rows]``, beside numbers that a layer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.layer = nn.ModuleList(nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2)), nn.Linear(5, 4)

    def forward(self, x: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        bags = [table(indices[k], offsets[k]) for k, table in enumerate(self.tables)]
        return torch.cat([self.layer(x), *bags], 1)


@pytest.mark.parametrize("rows", [8, 12])  # microbatches of as many rows as there are tables, and of others
def test_an_input_whose_rows_are_not_first_is_named_where_forward_does_not_take_the_whole_of_it(rows):
    call = torch.randn(rows, 5), torch.arange(0, 2 * rows, 2).repeat(2, 1), torch.randint(9, (2, 2 * rows))
    with pytest.raises(CaptureError, match=rf"a microbatch, of {rows // 4} rows(?s:.)*shape \[2, {rows}\] may be"):
        shardgraph.verify(Tables(), call, "pp", mesh={"pp": 2})


def test_an_operation_of_which_it_is_not_known_is_named_with_its_line():
    (line,) = rows(lambda h: torch.cdist(h, h)).warnings()
    assert "aten._cdist_forward.default at" in line and "test_proof_rows.py:" in line


@pytest.mark.quick("llama", "unet")
@pytest.mark.parametrize("name", ["odd-mlp", "conv-batch-norm", "tied-transformer", "unet", "llama", "mixtral", "t5"])
def test_models_are_known_to_compute_rows_apart(name):
    joint, _ = captured(name)
    found = rows_of(joint)
    assert not found.mixed and not found.unknown
