"""Cross-entropy over a large vocabulary in chunks of rows: found in the graph, equal, and smaller."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import shardgraph
from shardgraph import Pipeline, Plan, PlanError, Precision, preset
from shardgraph.capture.capture import capture
from shardgraph.ir import ALL_GATHER, Saved, collectives, outputs
from shardgraph.ir.attributes import SUBJECT
from shardgraph.passes.chunking.chunk_loss import chunks_of
from shardgraph.passes.lowering import build_program, lower
from shardgraph.passes.program import Program
from shardgraph.plans.shards import named_shapes
from shardgraph.report.step import program_memory
from shardgraph.runtime.measure import PeakMemory
from shardgraph.search.stages import place_stages
from tests.machines import toy_cluster
from tests.zoo import Loss, make

pytestmark = pytest.mark.usefixtures("shared_captures")

DP, TP, BOTH = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}
CHUNK = 61 * 8 * 5  # at most five rows of 61 scores in double precision


class Language(nn.Module):
    """An embedding, a head and a loss of the head's scores."""

    def __init__(self, vocabulary: int = 61, width: int = 16, bias: bool = True, **loss: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=bias)
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.embedding(ids))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **self.loss)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class Capped(Language):
    """Scores that are capped, in another order of their weight, with a loss of their size beside the cross-entropy."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.turned = nn.Parameter(self.head.weight.detach().t().clone())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = 5.0 * torch.tanh(self.embedding(ids) @ self.turned / 5.0)
        size = torch.logsumexp(scores, -1).square().mean()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()) + 0.01 * size


class Twice(Language):
    """Two losses of the same scores."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.embedding(ids)).flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten()) + 0.5 * F.cross_entropy(scores, ids.flatten())


class RowByRow(Language):
    """A loss of every row, each with a weight."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = F.cross_entropy(self.scores(self.embedding(ids)).flatten(0, 1), labels.flatten(), reduction="none")
        return (rows * torch.linspace(0, 1, rows.shape[0], dtype=rows.dtype)).sum()


class Shifted(Language):
    """Scores of all positions but the last, against labels of all but the first, as causal models shift them."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.embedding(ids)).float()[..., :-1, :].contiguous()
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), ids[..., 1:].reshape(-1), **self.loss)


def words(
    rows: int = 4, length: int = 9, vocabulary: int = 61, ignored: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and labels of which some are ignored."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[0, :4] = ignored
    return ids, labels


def in_chunks(model: nn.Module, *args: torch.Tensor, chunk: int = CHUNK, **kwargs: torch.Tensor) -> Program:
    return build_program(model, replace(preset("single", {}), loss_chunk=chunk), args, kwargs)


def scores_at_once(program: Program, vocabulary: int = 61, width: int = 16) -> int:
    """The most rows of a vocabulary that any value of a program has, but for a head of this width."""
    halves = [half for half in (program.forward, program.backward) if half is not None]
    values = [node.meta.get("val") for half in halves for node in half.graph.nodes if node.op == "call_function"]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor) and value.dim() > 1]
    rows = [shape.numel() // vocabulary for shape in shapes if shape[-1] == vocabulary and shape[0] != width]
    return max(rows, default=0)


# -- equal to the loss of all rows at once ---------------------------------------------------------------------


@pytest.mark.quick("ignore_index", "sum")
@pytest.mark.parametrize(
    "model",
    [
        Language(),
        Language(bias=False, reduction="sum"),
        RowByRow(),
        Language(ignore_index=3),
        Language(label_smoothing=0.1),
        Language(weight=torch.linspace(0.5, 1.5, 61, dtype=torch.float64)),
        Capped(),
        Twice(),
    ],
    ids=["mean", "sum", "none", "ignore_index", "label smoothing", "class weights", "capped", "twice"],
)
def test_the_loss_and_its_gradients_are_those_of_all_rows(model):
    model, call = model.double(), words(ignored=model.loss.get("ignore_index", -100))
    assert 0 < scores_at_once(in_chunks(model, *call)) <= 5
    report = shardgraph.verify(model, call, "single", world_size=1, loss_chunk=CHUNK, steps=3, fp64=True)
    assert report.ok and max(report.errors.values()) < 1e-12, str(report)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("plan", "mesh"), [("single", {}), ("fsdp+tp", BOTH), ("cp", {"cp": 3})])
def test_scores_that_a_shift_leaves_out_are_not_computed(bias, plan, mesh):
    model, call = Shifted(bias=bias), words(2 * mesh.get("dp", 1), 6)
    program = build_program(model, replace(preset(plan, mesh), loss_chunk=CHUNK // 4), words(2, 6))
    assert program.notes[-1].startswith("scores [10, ") and program.notes[-1].endswith("chunks")
    given = {"mesh": mesh} if mesh else {"world_size": 1}
    report = shardgraph.verify(model, call, plan, **given, loss_chunk=CHUNK // 4, steps=3)
    assert report.ok, str(report)


def test_the_last_chunk_may_be_smaller():
    program = in_chunks(Language(), *words(1, 17))
    assert program.notes[-1].endswith("are computed 9 rows at a time, in 2 chunks")
    report = shardgraph.verify(Language(), words(1, 17), "single", world_size=1, loss_chunk=CHUNK, fp64=True)
    assert report.ok, str(report)


def test_a_loss_of_ignored_labels_alone_is_nan_as_it_was():
    model, (ids, labels) = Language(), words()
    labels.fill_(-100)
    loss = model(ids, labels)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    sharded = shardgraph.compile(model, "single", example_inputs=(ids, labels), loss_chunk=CHUNK)
    ours = sharded(ids, labels)
    assert loss.isnan() and ours.isnan()
    for found, wanted in zip(torch.autograd.grad(ours, list(sharded.parameters())), expected, strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_loss_that_is_scaled_and_used_twice_has_the_right_gradients():
    model, call = Language().double(), words()
    loss = model(*call)
    expected = torch.autograd.grad(65536 * loss + loss.square(), list(model.parameters()))
    sharded = shardgraph.compile(model, "single", example_inputs=call, loss_chunk=CHUNK)
    loss = sharded(*call)
    for found, wanted in zip(
        torch.autograd.grad(65536 * loss + loss.square(), list(sharded.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_without_gradients_the_loss_is_in_chunks_too():
    model, call = Language(), words()
    with torch.no_grad():
        program, expected = in_chunks(model, *call), model(*call)
        sharded = shardgraph.compile(model, "single", example_inputs=call, loss_chunk=CHUNK)
        torch.testing.assert_close(sharded(*call), expected)
    assert program.backward is None and 0 < scores_at_once(program) <= 9


# -- under every plan ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        ("gpt2", "fsdp", DP),
        ("gpt2", "fsdp+tp+sp", BOTH),
        ("llama", "zero2", DP),
        ("llama", "tp+sp", {"tp": 3}),
        ("t5", "ddp", DP),
        ("t5", "tp", TP),
        ("llama", "cp", {"cp": 3}),
        ("mixture", "ep", {"ep": 2}),
    ],
)
def test_models_train_as_unsharded_in_chunks(name, plan, mesh):
    model, (args, kwargs) = make(name, 4)
    model = model if name == "mixture" else Loss(model)
    given = {"mesh": mesh, "example_kwargs": kwargs, "steps": 3, "fp64": True}
    assert any("in 2 chunks" in note or "in 4 chunks" in note for note in program_of(model, plan, mesh, kwargs).notes)
    shardgraph.verify(model, args, plan, loss_chunk=CHUNK, **given).raise_if_failed()


def program_of(model: nn.Module, plan: str, mesh: dict[str, int], kwargs: dict[str, torch.Tensor]) -> Program:
    return build_program(model, replace(preset(plan, mesh), loss_chunk=CHUNK), (), kwargs)


def test_shards_of_a_vocabulary_are_cut_in_chunks_of_rows():
    model, call = Language(vocabulary=64), words()
    program = build_program(model, replace(preset("tp", TP), loss_chunk=64 * 4 * 3), call)
    assert program.parameters["head.weight"].placements == ("split(0)",)
    assert scores_at_once(program, 32) == 6  # 64 * 4 * 3 bytes are three rows of 64 scores, or six of 32
    shardgraph.verify(model, call, "tp", mesh=TP, loss_chunk=64 * 4 * 3, steps=3, fp64=True).raise_if_failed()


def test_a_sharded_head_is_gathered_once_for_all_chunks_of_a_half():
    program = build_program(Language(), replace(preset("fsdp", DP), loss_chunk=CHUNK), words())
    for half in (program.forward, program.backward):
        gathers = [node for node in collectives(half) if node.target is ALL_GATHER]
        assert sum("head.weight" in str(SUBJECT.of(node)) for node in gathers) == 1


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_last_stage_of_a_pipeline_computes_its_loss_in_chunks(checkpoint):
    model, (args, kwargs) = make("gpt2", 8)
    plan = replace(preset("pp+tp", {"pp": 2, "tp": 2}, Pipeline(2, checkpoint=checkpoint)), loss_chunk=CHUNK)
    shardgraph.verify(Loss(model), args, plan, example_kwargs=kwargs, steps=3, fp64=True).raise_if_failed()


def test_backward_in_two_halves_hands_on_no_scores_from_one_to_the_other():
    model, (_, kwargs) = make("gpt2", 4)
    model = Loss(model)
    joint, shapes = capture(model, (), kwargs, device=torch.device("cpu")), named_shapes(model)
    plan = place_stages(joint, replace(preset("pp", {"pp": 2}, Pipeline(2)), loss_chunk=CHUNK), shapes)
    inputs, _ = lower(joint, plan, shapes).stages[-1].kept.parts
    handed = tree_leaves([node.meta["val"] for role, node in outputs(inputs) if isinstance(role, Saved)])
    gradient = shapes["model.transformer.wte.weight"]  # of the head, summed over chunks
    assert [value.shape for value in handed if isinstance(value, torch.Tensor) and 61 in value.shape] == [gradient]


# -- precision -------------------------------------------------------------------------------------------------


def test_in_bfloat16_chunks_are_no_less_precise_than_the_whole():
    model, (ids, labels) = Language(vocabulary=512, width=64), words(8, 64, 512)
    exact = copy.deepcopy(model).double()
    expected = torch.autograd.grad(exact(ids, labels), list(exact.parameters()))

    def error(chunk: int | None) -> float:
        plan = replace(preset("single", {}), loss_chunk=chunk, precision=Precision("bfloat16"))
        sharded = shardgraph.compile(copy.deepcopy(model), plan, example_inputs=(ids, labels))
        found = torch.autograd.grad(sharded(ids, labels), list(sharded.parameters()))
        pairs = zip(found, expected, strict=True)
        return sum(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)

    assert error(512 * 2 * 16) < 1.1 * error(None)


# -- where it does not apply -----------------------------------------------------------------------------------


def test_scores_that_the_model_returns_stay_and_a_note_says_how_they_need_not():
    model, (_, kwargs) = make("llama", 4)
    program = in_chunks(model, **kwargs)
    assert "the model returns them" in program.notes[-1] and "train_step" in program.notes[-1]
    assert program.text == build_program(model, preset("single", {}), (), kwargs).text


@pytest.mark.slow
def test_train_step_wants_the_loss_alone_so_that_a_model_which_returns_its_scores_is_chunked():
    model, (_, kwargs) = make("llama", 4)
    expected = copy.deepcopy(model)(**kwargs).loss
    sharded = shardgraph.compile(model, "single", loss_chunk=CHUNK)
    torch.testing.assert_close(sharded.train_step(**kwargs), expected.detach())
    assert sharded.program.notes[-1].endswith("chunks")


def test_what_mixes_rows_is_not_chunked_and_the_note_names_it():
    class Centred(Language):
        def scores(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().scores(hidden).cumsum(1)

    (note,) = in_chunks(Centred(), *words()).notes
    assert "cumsum" in note and "not computed in chunks" in note
    (note,) = in_chunks(nn.Linear(3, 3), torch.randn(2, 3)).notes
    assert "no cross-entropy" in note


def test_scores_that_fit_a_chunk_are_left_alone():
    program = in_chunks(Language(), *words(), chunk=2**20)
    assert program.notes[-1].endswith("are within a chunk of the loss") and scores_at_once(program) == 36


# -- memory ----------------------------------------------------------------------------------------------------


LARGE = {"vocabulary": 4096, "width": 32}


def test_the_peak_falls_by_the_scores_and_is_the_measured_one():
    model, call = Language(**LARGE), words(2, 256, 4096)
    scores = 512 * 4096 * 4
    whole = program_memory(build_program(model, preset("single", {}), call), "adamw").peak_bytes
    program = in_chunks(model, *call, chunk=scores // 4)
    predicted = program_memory(program, "adamw").peak_bytes
    assert whole - predicted > 1.5 * scores
    sharded = shardgraph.compile(model, program.plan, example_inputs=call)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    for _ in range(2):
        states = [value for state in optimizer.state.values() for value in state.values()]
        with PeakMemory().track([*sharded.parameters(), *states, *call]) as memory:
            sharded(*call).backward()
            optimizer.step()
        optimizer.zero_grad()
    assert memory.peak_bytes == pytest.approx(predicted, rel=0.02)


def test_a_budget_that_the_scores_do_not_fit_has_them_in_chunks():
    model, call = Language(vocabulary=40960, width=32), words(2, 256, 40960)
    given = {"mesh": DP, "cluster": toy_cluster()}
    whole = shardgraph.analyze(model, call, "fsdp", **given)
    found = shardgraph.analyze(model, call, "fsdp", **given, memory=0.7 * whole.peak_memory)
    assert found.plan.loss_chunk and found.peak_memory <= 0.7 * whole.peak_memory
    roomy = shardgraph.analyze(model, call, "fsdp", **given, memory=whole.peak_memory)
    assert roomy.plan.loss_chunk is None


# -- in the plan -----------------------------------------------------------------------------------------------


def test_a_plan_says_the_chunk_and_comes_back_from_its_file():
    plan = replace(preset("fsdp", DP), loss_chunk=2**20)
    assert Plan.from_yaml(plan.to_yaml()) == plan and "chunks of 1.0 MiB" in str(plan)
    with pytest.raises(PlanError, match="loss_chunk is -1"):
        replace(plan, loss_chunk=-1)


@pytest.mark.parametrize(
    ("scores", "chunks"),
    [(2**26, []), (2**27, [2**26]), (2**32, [2**29, 2**26]), (2**33, [2**29]), (2**36, [2**30])],
)
def test_chunks_are_large_ones_first_and_never_very_many(scores, chunks):
    assert chunks_of(scores) == chunks
