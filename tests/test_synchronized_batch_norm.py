"""``torch.nn.SyncBatchNorm`` in a compiled model: a batch norm over the rows of all data-parallel ranks, on CPU too."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import CaptureError, PlanError
from shardgraph.ir import is_collective
from shardgraph.ir.attributes import SUBJECT
from shardgraph.passes.lowering import build_program
from shardgraph.plans.resolve import resolve_plan
from tests import synchronized
from tests.machines import toy_cluster
from tests.mutants import mutants
from tests.mutation import Case, Subject, lowered
from tests.standing import on_ranks

verifying = importlib.import_module("shardgraph.api.verify")
IMAGE, VECTOR = (3, 5, 5), (7,)


@pytest.mark.quick("fsdp-*", "zero2-*", "ddp-*-bare")
@pytest.mark.parametrize(
    ("plan", "mesh", "shape", "options", "kind"),
    [
        ("ddp", {"dp": 2}, IMAGE, {}, "affine"),
        ("fsdp", {"dp": 2}, VECTOR, {}, "affine"),
        ("zero2", {"dp": 2}, IMAGE, {"recompute": "full"}, "affine"),
        ("ddp", {"dp": 2}, VECTOR, {}, "bare"),
        pytest.param("hsdp", {"dp_replicate": 2, "dp_shard": 2}, VECTOR, {}, "affine", marks=pytest.mark.slow),
        ("fsdp+tp", {"dp": 2, "tp": 2}, IMAGE, {}, "affine"),
    ],
)
def test_training_is_that_of_all_rows_on_one_rank(plan, mesh, shape, options, kind):
    world = torch.Size(mesh.values()).numel()
    for found in on_ranks(synchronized.training, world, args=(plan, mesh, shape, options, kind)):
        assert max(found.values()) < 1e-12, found


def model_of(shape: tuple[int, ...]) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(synchronized.make_model(shape))


def test_each_sends_one_message_in_forward_and_one_in_backward_and_running_statistics_none():
    program = build_program(model_of(VECTOR), resolve_plan("ddp", (("dp", 2),)), (torch.randn(4, 7).double(),))
    sent = [
        Counter(node.target.__name__.partition(".")[0] for node in half.graph.nodes if is_collective(node))
        for half in (program.forward, program.backward)
    ]
    assert sent[0] == {"all_gather_into_tensor": 2}
    statistics = [n for n in program.backward.graph.nodes if is_collective(n) and "batch norm" in SUBJECT.get(n, "")]
    assert len(statistics) == 2


def test_a_batch_norm_stays_that_of_each_ranks_rows():
    model = synchronized.make_model(VECTOR)
    program = build_program(model, resolve_plan("ddp", (("dp", 2),)), (torch.randn(4, 7).double(),))
    assert not any("all_gather" in node.name for node in program.forward.graph.nodes)


def test_on_one_rank_and_in_evaluation_it_is_a_batch_norm():
    model, x = model_of(IMAGE), torch.randn(4, *IMAGE).double()
    plain = synchronized.make_model(IMAGE)
    sharded = shardgraph.compile(model, "single", progress=False)
    torch.testing.assert_close(sharded(x), plain(x))
    torch.testing.assert_close(sharded.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2}), ("fsdp+tp", {"dp": 2, "tp": 2})])
def test_it_is_verified_against_the_model_on_the_rows_of_all_ranks(plan, mesh):
    report = shardgraph.verify(model_of(IMAGE), (torch.randn(4, *IMAGE).double(),), plan, mesh=mesh, steps=2)
    assert report.ok, report
    assert "a batch of 4 cut among the ranks" in str(report)


def test_verify_finds_statistics_of_one_rank(monkeypatch):
    monkeypatch.setattr("shardgraph.capture.capture.mark_synchronized", lambda gm, model: None)
    report = shardgraph.verify(model_of(VECTOR), (torch.randn(4, 7).double(),), "ddp", mesh={"dp": 2})
    assert not report.ok


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of(VECTOR)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_a_model_that_returns_its_loss_is_verified_with_the_whole_batch_on_each_rank():
    report = shardgraph.verify(WithLoss(), (torch.randn(4, 7).double(),), "fsdp", mesh={"dp": 2}, steps=2)
    assert report.ok, report
    assert "every rank on the whole batch" in str(report)


def test_in_half_precision_statistics_are_in_single():
    x = torch.randn(8, *IMAGE) * 3 + 100  # whose variance half precision does not have
    model = nn.Sequential(nn.SyncBatchNorm(3))
    program = build_program(model.bfloat16(), resolve_plan("ddp", (("dp", 2),)), (x.bfloat16(),))
    dtypes = {n.args[0].meta["val"].dtype for n in program.forward.graph.nodes if "all_gather" in n.name}
    assert dtypes == {torch.float32}


class Own(nn.SyncBatchNorm):
    pass


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Own(7), "the module '0' is a Own: of a SyncBatchNorm only torch's own class is known"),
        (nn.SyncBatchNorm(7, process_group="ours"), "is a SyncBatchNorm of a process group of its own"),
    ],
    ids=["a subclass", "a group"],
)
def test_others_than_torchs_over_all_ranks_are_refused(layer, message):
    with pytest.raises(CaptureError, match=message):
        shardgraph.compile(nn.Sequential(layer), "single", progress=False)(torch.ones(2, 7))


@pytest.mark.parametrize(("plan", "mesh"), [("pp+ddp", {"pp": 2, "dp": 2}), ("pp", {"pp": 2})])
def test_in_a_pipeline_it_is_refused(plan, mesh):
    x, target = torch.randn(8, 7).double(), torch.zeros(8, 6).double()
    with pytest.raises(PlanError, match="a SyncBatchNorm has statistics of all rows of a batch"):
        shardgraph.analyze(
            model_of(VECTOR),
            (x,),
            plan,
            example_kwargs={"target": target},
            mesh=mesh,
            loss_fn=nn.functional.mse_loss,
            pipeline=shardgraph.Pipeline(2, stages=("3",)),
            cluster=toy_cluster(),
        )


@pytest.mark.slow
def test_verify_finds_every_mistake_of_the_pass():
    case = Case("synchronized", "ddp", (("dp", 2),))
    model = model_of(VECTOR)
    for buffer in (buffer for buffer in model.buffers() if buffer.is_floating_point()):
        buffer.uniform_(1, 2)  # a running mean of zero hides what is done to it
    made = Subject(case, model, (torch.randn(6, 7).double(),), {})
    build = verifying.lower

    def kept(*args, **kwargs):
        made.program = build(*args, **kwargs)
        return made.program

    with lowered(kept):
        assert made.verify().ok
    own = [mutant for mutant in mutants(made.program) if mutant.made_by == "synchronize-batch-norms"]
    # The order in which statistics of ranks are gathered is that of a mean and a variance over them: any is right. An
    # all-reduce of an all-reduce multiplies sums and the number of rows that they are divided by alike.
    equal = ("in another order", "all-reduce doubled")
    verdicts = {str(each): made.found(each) for each in own[::5] if not any(words in str(each) for words in equal)}
    assert len(verdicts) > 20 and set(verdicts.values()) <= {"refused", "synchronize-batch-norms"}
