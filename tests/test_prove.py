"""``shardgraph.prove``, and what ``compile`` and ``verify`` do with it."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import ir
from shardgraph.passes import lowering
from shardgraph.passes.program import Program
from shardgraph.proof.rules import RULES

aten = torch.ops.aten
INPUTS = (torch.randn(4, 6, 16),)


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def with_a_gradient_doubled(program: Program) -> Program:
    gm = program.graphs["backward"]
    gradient = next(value for role, value in ir.outputs(gm) if isinstance(role, ir.Gradient) and value is not None)
    with gm.graph.inserting_after(gradient):
        twice = gm.graph.call_function(aten.mul.Tensor, (gradient, 2))
    twice.meta["val"] = gradient.meta["val"]
    gradient.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    return program


@pytest.fixture
def faulty(monkeypatch):
    """Programs are lowered with a fault: one gradient is twice what it should be."""

    def lower(*args, **options):
        return with_a_gradient_doubled(lowering.lower(*args, **options))

    monkeypatch.setattr("shardgraph.module.remembered.lower", lower)
    monkeypatch.setattr(importlib.import_module("shardgraph.api.verify"), "lower", lower)


def test_a_model_without_memory_is_proved_for_a_thousand_devices():
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(4096, 32, 16384, dropout=0.0, batch_first=True)
    inputs = (torch.empty(1, 8192, 4096, device="meta"),)
    proof = shardgraph.prove(model, inputs, "hsdp+tp", mesh={"a": 16, "b": 8, "tp": 8}, cluster="H100")
    assert proof.ok and "proved: 61 results" in str(proof)


def test_a_compiled_module_and_its_program_are_proved():
    sharded = shardgraph.compile(block(), "single", example_inputs=INPUTS, progress=False)
    assert shardgraph.prove(sharded).ok and shardgraph.prove(sharded.program).ok


def test_a_pipeline_is_proved():
    model = nn.Sequential(block(), block())
    pipeline = shardgraph.Pipeline(stages=("1",), microbatches=2)
    loss = lambda output, target: (output - target).square().mean()  # noqa: E731
    kwargs = {"target": INPUTS[0]}
    mesh = {"pp": 2, "dp": 2}
    proof = shardgraph.prove(
        model, INPUTS, "pp+fsdp", mesh=mesh, pipeline=pipeline, loss_fn=loss, example_kwargs=kwargs, cluster="H100"
    )
    assert proof.ok, str(proof)


def test_a_pipeline_with_a_loss_of_its_output_alone_is_proved_with_it():
    """The loss of a call without a target had been left out, with the gradients of what it does not depend on."""
    model = nn.Sequential(block(), block())
    about = {"mesh": {"pp": 2}, "pipeline": shardgraph.Pipeline(stages=("1",), microbatches=2), "cluster": "H100"}
    assert shardgraph.prove(model, INPUTS, "pp", loss_fn=lambda output: output.square().mean(), **about).ok
    with pytest.raises(shardgraph.CaptureError, match="called with the model's output alone"):
        shardgraph.prove(model, INPUTS, "pp", loss_fn=lambda output, target: output.mean(), **about)


class LastToken(nn.Module):
    """A score of the last token that is not padding, as of ``GPT2ForSequenceClassification``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.scores = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        scores = self.scores(self.hidden(self.embedding(tokens)).relu())
        last = (torch.arange(tokens.shape[1]) * (tokens != 0).int()).argmax(-1)
        return scores[torch.arange(len(tokens)), last].square().mean()


class AlongRows(nn.Module):
    """Operations that need all elements of a row, and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.other(self.one(x).relu())
        rows = h.cumsum(-1) + h.sort(-1)[0] + h.flip(-1) + nn.functional.normalize(h, dim=-1)
        return (rows.std(-1) + h.topk(2, -1)[0].sum(-1) + h.median(-1)[0] + h.logsumexp(-1)).mean()


@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2}), ("tp", {"tp": 2}), ("fsdp+tp", {"dp": 2, "tp": 2})])
@pytest.mark.parametrize(
    ("made", "inputs"), [(LastToken, (torch.ones(4, 6, dtype=torch.long),)), (AlongRows, INPUTS)], ids=["last", "rows"]
)
def test_lookups_of_several_indices_and_operations_along_rows_are_proved(made, inputs, plan, mesh):
    proof = shardgraph.prove(made(), inputs, plan, mesh=mesh, cluster="H100")
    assert proof.ok, str(proof)


def test_an_operation_without_a_rule_is_named_by_its_line(monkeypatch):
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(super().forward(x).relu())

    monkeypatch.delitem(RULES, aten.mm.default)
    proof = shardgraph.prove(Twice(16, 16, bias=False), INPUTS, "tp", mesh={"tp": 2}, cluster="H100")
    assert not proof.ok and not proof.wrong
    assert "no rule for aten.mm.default" in str(proof) and "test_prove.py:" in str(proof)


def test_a_wrong_program_is_not_compiled_and_the_model_stays_as_it_was(faulty):
    model = block()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(shardgraph.ShardGraphError, match="WRONG: 1 of 13 results"):
        shardgraph.compile(model, "single", example_inputs=INPUTS, progress=False)
    torch.testing.assert_close(model.state_dict(), before)


def test_verify_reports_the_proof():
    report = shardgraph.verify(block(), INPUTS, "fsdp+tp", mesh={"dp": 2, "tp": 2})
    assert report.proof.ok and "by its text proved: 61 results" in str(report)


def test_verify_is_not_ok_where_the_text_is_wrong_whatever_the_tolerance(faulty):
    report = shardgraph.verify(block(), INPUTS, "fsdp", tolerance=10.0)
    assert report.worst[1] < 10.0 and report.proof.wrong and not report.ok


def test_tensors_without_elements_are_proved():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            return self.down(torch.cat([hidden[:0], hidden.relu()]))

    proof = shardgraph.prove(Model(), INPUTS, "tp", mesh={"tp": 2}, cluster="H100")
    assert proof.ok, str(proof)
