"""The loss of a pipeline is that of the undivided batch, however it is reduced, or it is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardgraph
from shardgraph import Pipeline
from tests import pipelines, ranks
from tests.standing import on_ranks

TOKENS = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(2))
LABELS[0, :3] = LABELS[5] = -100  # with 6 microbatches, one has nothing to predict
SPREAD = torch.rand(7, generator=torch.Generator().manual_seed(3))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7))


def cross_entropy(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    kept = target != -100
    return (output.logsumexp(-1) * kept).sum() / kept.sum()


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "a mean over tokens that count": cross_entropy(),
    "with smoothed labels": cross_entropy(label_smoothing=0.1),
    "with weights of classes": cross_entropy(weight=SPREAD),
    "a sum": cross_entropy(reduction="sum"),
    "half a sum": lambda output, target: 0.5 * cross_entropy(reduction="sum")(output, target),
    "a sum divided by the rows": lambda output, target: output.square().sum() / len(output),
    "a sum divided by them as a float": lambda output, target: output.square().sum() / float(len(output)),
    "a sum divided by them as a tensor": lambda output, target: output.square().sum() / torch.tensor(len(output)),
    "a sum divided by what is filled": lambda output, target: output.square().sum() / output.new_full((), len(output)),
    "a sum times their inverse": lambda output, target: output.square().sum() * (1 / len(output)),
    "a sum divided by all elements": lambda output, target: output.square().sum() / output.numel(),
    "a sum divided by a constant": lambda output, target: output.square().sum() / 6,
    "a mean times the rows": lambda output, target: output.square().mean() * len(output),
    "a divergence per row": lambda output, target: F.kl_div(
        output.log_softmax(-1), output.detach().sigmoid(), reduction="batchmean"
    ),
    "a mean over all tokens": lambda output, target: cross_entropy(reduction="none")(output, target).mean(),
    "a mean of means": lambda output, target: output.square().mean(1).sum(-1).mean(),
    "with positions before classes": lambda output, target: F.cross_entropy(output.transpose(1, 2), target),
    "two means": lambda output, target: output.square().mean() + F.l1_loss(output, output.detach() * 2),
    "a stack of means": lambda output, target: torch.stack([output.mean(), output.square().mean()]).sum(),
    "a masked mean": masked_mean,
    "a mean added to zero": lambda output, target: output.new_zeros(()) + output.square().mean(),
    "a sum added to zero": lambda output, target: output.new_zeros(()) + 0.1 * output.square().sum(),
    "a mean and a constant": lambda output, target: cross_entropy()(output, target) + SPREAD.sum(),
}


def compiled(model: nn.Module, pipeline: Pipeline, loss_fn: Callable[..., torch.Tensor]) -> Any:
    example = {"example_inputs": (TOKENS,), "example_kwargs": {"target": LABELS}}
    return shardgraph.compile(model, "pp", pipeline=pipeline, loss_fn=loss_fn, progress=False, **example)


def step(pipeline: Pipeline, loss_fn: Callable[..., torch.Tensor], target: torch.Tensor = LABELS) -> None:
    """Compare three training steps with the original's on the undivided batch."""
    trained, original = model(), model()
    sharded = compiled(trained, pipeline, loss_fn)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (trained, original)]
    for _ in range(3):
        expected = loss_fn(original(TOKENS), target)
        expected.backward()
        torch.testing.assert_close(sharded.train_step(TOKENS, target=target), expected.detach())
        for (name, mine), theirs in zip(trained.named_parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.quick("[!ad]*-one without a token", "a [mdp]*-one without a token")
@pytest.mark.parametrize("microbatches", [2, 4, 6], ids=["equal", "of 2, 2, 1 and 1 rows", "one without a token"])
@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_a_step_is_that_of_the_undivided_batch(loss_fn, microbatches):
    step(Pipeline(schedule="looped-bfs", stages=("1", "3"), microbatches=microbatches), loss_fn)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_microbatches_that_recompute_count_as_the_others(checkpoint):
    step(Pipeline(schedule="looped-bfs", stages=("1", "3"), microbatches=6, checkpoint=checkpoint), masked_mean)


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "a function of a mean": (lambda o, t: cross_entropy()(o, t).exp(), "not a weighted sum"),
    "a product of means": (lambda o, t: o.mean() * o.square().mean(), "not a weighted sum"),
    "a division by as many ones": (lambda o, t: o.square().sum() / torch.ones(len(o)).sum(), "may count rows"),
    "a division by one less than the rows": (lambda o, t: o.sum() / (len(o) + 2), "scaled by .*, which comes from the"),
    "a mean times the square of the rows": (lambda o, t: o.mean() * len(o) ** 2, "which comes from the number of rows"),
    "a division of each row": (
        lambda o, t: (o / len(o)).square().sum(),
        "computes with .*, which comes from the",
    ),
    "a normalization over the batch": (lambda o, t: (o - o.mean()).square().mean(), "a value of the whole batch"),
    "similarities of rows": (
        lambda o, t: (o.mean(1) @ o.mean(1).T).logsumexp(1).mean(),
        "rows of a batch are not computed apart",
    ),
    "a mean over rows of each feature": (lambda o, t: (o - o.mean(0)).square().mean(), "summands of another"),
    "a softmax over rows": (lambda o, t: o.softmax(0)[:, 0].square().sum(), "needs whole is divided"),
    "another row": (lambda o, t: (o - o[:1]).square().mean(), "are taken of a dimension that"),
    "a sum over rows, then over elements": (
        lambda o, t: o.mean(0, keepdim=True).expand(6, -1, -1).sum(),
        "summed over",
    ),
    "a sum and a constant": (lambda o, t: o.square().sum() + SPREAD.sum(), "what is the same for all"),
    "a sum and a mean": (lambda o, t: o.square().sum() + o.mean(), "a sum and a mean over rows, which weigh"),
    "a mean over tokens and one over rows": (lambda o, t: cross_entropy()(o, t) + o.mean(), "counted elements and a"),
}


@pytest.mark.parametrize(("loss_fn", "message"), REFUSED.values(), ids=REFUSED)
def test_a_loss_that_does_not_follow_from_those_of_microbatches_is_refused_by_its_line(loss_fn, message):
    pipeline = Pipeline(schedule="looped-bfs", stages=("1",), microbatches=3)
    with pytest.raises(shardgraph.ShardGraphError, match=message) as raised:
        compiled(model(), pipeline, loss_fn).train_step(TOKENS, target=LABELS)
    assert "test_pipeline_loss.py:" in str(raised.value)


@pytest.mark.quick("similarities of rows", "a division of each row")
@pytest.mark.parametrize("loss_fn", [loss_fn for loss_fn, _ in REFUSED.values()], ids=REFUSED)
def test_it_is_refused_in_microbatches_of_one_row_too(loss_fn):
    pipeline = Pipeline(schedule="looped-bfs", stages=("1",), microbatches=len(TOKENS))
    with pytest.raises(shardgraph.ShardGraphError, match=r"test_pipeline_loss\.py:\d+ "):
        compiled(model(), pipeline, loss_fn).train_step(TOKENS, target=LABELS)


def test_a_microbatch_of_one_row_is_no_reason_to_refuse_or_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Pipeline(schedule="looped-bfs", stages=("1",), microbatches=len(TOKENS)), cross_entropy(), TOKENS)


def test_terms_that_weigh_microbatches_alike_may_be_reduced_differently():
    step(
        Pipeline(schedule="looped-bfs", stages=("1",), microbatches=3),
        lambda o, t: cross_entropy()(o, t) + o.mean(),
        TOKENS,
    )


def test_a_batch_without_a_token_that_counts_has_no_loss_as_in_the_original():
    sharded = compiled(model(), Pipeline(schedule="looped-bfs", stages=("1",), microbatches=3), cross_entropy())
    assert sharded.train_step(TOKENS, target=torch.full_like(LABELS, -100)).isnan()


def test_a_batch_of_fewer_rows_than_microbatches_is_refused_in_training():
    sharded = compiled(model(), Pipeline(schedule="looped-bfs", stages=("1",), microbatches=4), cross_entropy())
    with pytest.raises(shardgraph.PlanError, match="3 rows cannot be cut into 4 microbatches"):
        sharded.train_step(TOKENS[:3], target=LABELS[:3])


def test_no_microbatches_are_an_error():
    with pytest.raises(shardgraph.PlanError, match="whole number from 1"):
        Pipeline(microbatches=0)


class Evaluates(nn.Module):
    """Returns outputs of all kinds for a batch."""

    def __init__(self, outputs: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.outputs = model(), outputs

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.outputs(self.body(tokens), labels)


OUTPUTS: dict[str, Callable[..., Any]] = {
    "losses and rows": lambda o, t: (cross_entropy()(o, t), cross_entropy(reduction="sum")(o, t), o, o.flatten(0, 1)),
    "a count": lambda o, t: ((o.argmax(-1) == t).sum(), (t != -100).sum()),
    "a perplexity": lambda o, t: (cross_entropy()(o, t).exp(), o),
    "statistics of the batch": lambda o, t: (o.mean((0, 1)), o),
    "statistics as long as a microbatch": lambda o, t: (o.mean((0, 1))[:2], o.mean(0, keepdim=True), o),
}


@pytest.mark.quick("*-4")
@pytest.mark.parametrize("microbatches", [3, 4, 6])
@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_in_eval_mode_are_those_of_the_undivided_batch(outputs, microbatches):
    original = Evaluates(outputs).eval()
    pipeline = Pipeline(schedule="looped-bfs", stages=("body.3",), microbatches=microbatches)
    sharded = shardgraph.compile(
        copy.deepcopy(original), "pp", pipeline=pipeline, example_inputs=(TOKENS, LABELS), progress=False
    )
    with torch.no_grad():
        torch.testing.assert_close(sharded(TOKENS, LABELS), original(TOKENS, LABELS))


# -- data-parallel ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "mesh", "pipeline"),
    [
        ("fsdp", {"dp": 2}, None),
        ("ddp", {"dp": 2}, None),
        ("pp+fsdp", {"pp": 1, "dp": 2}, Pipeline(schedule="looped-bfs", stages=("1",), microbatches=4)),
    ],
    ids=["fsdp", "ddp", "pipeline"],
)
def test_losses_weighed_by_tokens_give_the_mean_over_the_tokens_of_all_ranks(plan, mesh, pipeline):
    assert max(on_ranks(ranks.mean_over_all_tokens, args=(plan, mesh, pipeline))) < 1e-6


def test_a_sum_cannot_be_weighed_by_tokens():
    options = {"loss_fn": cross_entropy(reduction="sum"), "loss_weight": "tokens", "progress": False}
    sharded = shardgraph.compile(model(), "single", **options)
    with pytest.raises(shardgraph.ShardGraphError, match="for a loss that is one mean"):
        sharded.train_step(TOKENS, target=LABELS)


def test_a_loss_weight_that_does_not_exist_is_refused():
    with pytest.raises(shardgraph.ShardGraphError, match="'rows'; it may be 'ranks' or 'tokens'"):
        shardgraph.compile(model(), "single", loss_weight="rows", progress=False)


# -- inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [2, 4])
def test_inputs_get_the_gradients_of_the_undivided_batch(microbatches):
    pipeline = Pipeline(schedule="looped-bfs", stages=("last",), microbatches=microbatches)
    assert pipelines.input_gradients(pipeline) < 1e-6


def test_inputs_get_their_gradients_on_every_rank():
    assert max(on_ranks(pipelines.input_gradients, args=(Pipeline(stages=("last",), microbatches=4),))) < 1e-6


# -- verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["pp", "pp+fsdp"])
def test_verify_compares_with_undivided_batches(plan):
    report = shardgraph.verify(
        Evaluates(lambda o, t: {"loss": cross_entropy()(o, t)}),
        (TOKENS, LABELS),
        plan,
        mesh={"pp": 1} if plan == "pp" else {"pp": 1, "dp": 2},
        pipeline=Pipeline(schedule="looped-bfs", stages=("body.3",), microbatches=3),
        steps=3,
    )
    assert report.ok, report
    assert "undivided batches" in report.batch


def test_verify_refuses_rows_that_are_combined_in_microbatches_of_one_row():
    pipeline = Pipeline(schedule="looped-bfs", stages=("body.3",), microbatches=len(TOKENS))
    model = Evaluates(lambda o, t: {"loss": (o.mean(1) @ o.mean(1).T).logsumexp(1).mean()})
    with pytest.raises(shardgraph.ShardGraphError, match="rows of a batch are not computed apart"):
        shardgraph.verify(model, (TOKENS, LABELS), "pp", mesh={"pp": 1}, pipeline=pipeline)


def test_verify_finds_a_batch_norm_by_the_microbatch():
    report = shardgraph.verify(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
        (torch.randn(8, 4),),
        "pp",
        mesh={"pp": 1},
        pipeline=Pipeline(schedule="looped-bfs", stages=("2",), microbatches=2),
    )
    assert report.ok, report
    assert "the original on its microbatches" in report.batch
