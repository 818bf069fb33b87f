"""Faults that other systems have trained with, made in programs that are right: each is found, and named.

All were silent: shapes fit, losses fell. Where several were published, the nearest is cited; "#7452" is
https://github.com/NVIDIA/Megatron-LM/issues/7452, a list of such faults in Megatron Core. What is outside of a step's
graphs (norms of gradients, the weight of a rank's loss) is outside of ``verify``: there the fault is made on processes,
and found by comparison with the model on one.

The symbolic proof must not prove them either. Those that are outside of the program's text it cannot see:
``in_text=False``.
"""

from __future__ import annotations

import copy
import importlib
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn

import shardgraph
from shardgraph import Pipeline, ir
from shardgraph.capture.capture import capture
from shardgraph.checks.bisect import Divergence
from shardgraph.ir.attributes import MADE_BY, PLACEMENTS, ROLE, SOURCE
from shardgraph.nn import MoE
from shardgraph.passes import lowering
from shardgraph.passes.analysis.loss_reduction import LossReduction
from shardgraph.passes.parameters.reduce_gradients import ReduceGradients
from shardgraph.passes.pipeline import extract
from shardgraph.passes.program import Program
from shardgraph.passes.sharding.lowerings import LOWERINGS
from shardgraph.passes.sharding.options import results
from shardgraph.passes.sharding.placements import REPLICATE
from shardgraph.passes.sharding.shard_operators import ShardOperators
from shardgraph.plans.presets import preset
from shardgraph.plans.shards import named_shapes
from shardgraph.proof.prove import prove
from shardgraph.runtime import loss_weight, rng
from tests.mutation import is_proved
from tests.ranks import whole
from tests.standing import on_ranks

pytestmark = pytest.mark.usefixtures("shared_captures")

aten = torch.ops.aten
TOKENS = torch.randint(0, 32, (4, 32), generator=torch.Generator().manual_seed(0))
PADDED = TOKENS.clone()
PADDED[0, 5:] = PADDED[1:, 20:] = -100  # more of the second half of every sequence, and most of the first one


class Language(nn.Module):
    """A feed-forward layer, and one of experts if there are any, between an embedding and the loss of its labels."""

    def __init__(self, dropout: float = 0.0, experts: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 32)
        self.inside, self.after = nn.Dropout(dropout), nn.Dropout(dropout)
        self.moe = MoE(16, 16, experts, k=2, capacity_factor=None) if experts else None
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.after(self.down(self.inside(F.gelu(self.up(self.norm(x))))))
        balance = 0.0
        if self.moe is not None:
            routed, balance = self.moe(x)
            x = x + routed
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance


def verified(plan: str, mesh: dict[str, int], labels: torch.Tensor = TOKENS, **options: Any) -> shardgraph.Report:
    """What verify says of the language model, made with ``options`` but for those that are verify's."""
    torch.manual_seed(0)
    pipeline = options.pop("pipeline", None)
    call = (TOKENS, labels)
    return shardgraph.verify(Language(**options), call, plan, mesh=mesh, pipeline=pipeline, fp64=True)


def caught(
    fault: Callable[[], Any], plan: str, mesh: dict[str, int], in_text: bool = True, **options: Any
) -> shardgraph.Report:
    """The report on the program with the ``fault``; the one without is equal, and the one with it is not proved."""
    right = verified(plan, mesh, **options)
    assert right.ok, right
    fault()
    with lowered() as programs:
        wrong = verified(plan, mesh, **options)
    assert not wrong.ok, "the fault is not found"
    assert not (in_text and is_proved(programs[-1])), "the fault is proved to be right"
    return wrong


@contextmanager
def lowered() -> Iterator[list[Program]]:
    """Within, the programs that ``verify`` lowers are put into the list."""
    programs: list[Program] = []
    module = importlib.import_module("shardgraph.api.verify")
    build = module.lower

    def kept(*args: Any, **kwargs: Any) -> Program:
        programs.append(build(*args, **kwargs))
        return programs[-1]

    with mock.patch.object(module, "lower", kept):
        yield programs


def blamed(report: shardgraph.Report) -> Divergence:
    """The first node that differs."""
    assert report.first_divergence is not None, report
    return report.first_divergence


@pytest.fixture
def after_pass(monkeypatch):
    """``after_pass(kind, change)``: every pass of that kind also does ``change(gm, context)``."""

    def install(kind: type, change: Callable[[fx.GraphModule, Any], None]) -> None:
        right = kind.run

        def run(self: Any, gm: fx.GraphModule, context: Any) -> None:
            right(self, gm, context)
            change(gm, context)

        monkeypatch.setattr(kind, "run", run)

    return install


# -- token counts ------------------------------------------------------------------------------------------


def test_tokens_counted_on_one_rank_of_a_divided_sequence(monkeypatch):
    """#7452, finding 3: the loss per token is divided by the rank's own count of tokens that are not ignored."""

    def by_own_count(write, *operation):
        with mock.patch.object(write, "reduce", lambda tensor, *_: tensor):
            return right(write, *operation)

    right = LOWERINGS["nll_loss_of_rows"]
    fault = partial(monkeypatch.setitem, LOWERINGS, "nll_loss_of_rows", by_own_count)
    report = caught(fault, "cp", {"cp": 2}, labels=PADDED)
    assert blamed(report).made_by == "shard-operators"


# -- auxiliary losses --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 0.5])
def test_an_auxiliary_loss_scaled_by_a_parallel_degree(after_pass, factor):
    """Megatron-LM pull requests 3769 (smaller by the data ranks), 5047 (dependent on the degree of tp), and 7452,
    finding 10: only the gradient of the router's balance is wrong, not its value."""

    def scale(gm: fx.GraphModule, _: Any) -> None:
        (mean,) = (n for n in gm.graph.nodes if n.target is aten.div.Scalar and n.args[1] == TOKENS.shape[1])
        assert "gating.py" in SOURCE.of(mean) and PLACEMENTS.of(mean), "the mean over the tokens of all ranks"
        mean.update_arg(1, mean.args[1] * factor)

    report = caught(partial(after_pass, ShardOperators, scale), "tp+sp", {"tp": 2}, experts=3)
    assert blamed(report).node.startswith("div") and "gating.py" in blamed(report).source
    assert not any(error > report.tolerance for name, error in report.errors.items() if name.startswith("loss"))


# -- vocabulary-parallel losses ----------------------------------------------------------------------------


def test_a_vocabulary_parallel_loss_of_gathered_logits(monkeypatch):
    """#7452, finding 2: every rank has all logits, which are summed over as if they were its part of the vocabulary.

    The loss is too large by the logarithm of the degree.
    """

    def of_gathered(write, node, option, tensors):
        gathered = write.place(tensors[0], option.results[0], REPLICATE, results(node)[0].shape)
        return [write.part(*right(write, node, option, [gathered]), option.results[0])]

    right = LOWERINGS["log_softmax"]

    fault = partial(monkeypatch.setitem, LOWERINGS, "log_softmax", of_gathered)
    report = caught(fault, "tp", {"tp": 2})
    assert blamed(report).made_by == "shard-operators"


def test_a_gradient_of_a_vocabulary_parallel_loss_scaled_by_the_degree(monkeypatch):
    """https://github.com/apple/ml-cross-entropy/pull/42: what ranks have of the gradient of the embeddings is summed,
    or is not, other than what takes it expects."""

    def scaled(write, *operation):
        return [write.call(aten.mul.Scalar, *right(write, *operation), write.parts)]

    right = LOWERINGS["log_softmax_backward"]

    fault = partial(monkeypatch.setitem, LOWERINGS, "log_softmax_backward", scaled)
    report = caught(fault, "tp", {"tp": 2})
    assert blamed(report).made_by == "shard-operators" or blamed(report).node.startswith("_log_softmax_backward")
    assert not any(error > report.tolerance for name, error in report.errors.items() if name.startswith("loss"))


# -- gradients of replicated parameters --------------------------------------------------------------------


def with_sums(change: Callable[[dict[str, tuple[str, ...]]], Any], monkeypatch: Any) -> None:
    """Reductions of gradients know another set of operator axes along which gradients are partial."""
    right = ReduceGradients.run

    def run(self: Any, gm: fx.GraphModule, context: Any) -> None:
        sums = dict(context.sums)
        change(sums)
        right(self, gm, replace(context, sums=sums))

    monkeypatch.setattr(ReduceGradients, "run", run)


@pytest.mark.quick("moe.gate.weight-cp-mesh3")
@pytest.mark.parametrize(
    ("parameter", "plan", "mesh"),
    [
        ("norm.weight", "tp+sp", {"tp": 2}),
        ("norm.bias", "tp+sp", {"tp": 2}),
        ("head.bias", "tp+sp", {"tp": 2}),
        ("moe.gate.weight", "cp", {"cp": 2}),
    ],
)
def test_a_gradient_that_is_not_summed_over_the_parts_of_a_sequence(parameter, plan, mesh, monkeypatch):
    """Of a norm (Megatron-LM issue 1446; #7452, finding 11), of biases (bigcode-project/Megatron-LM pull request 12),
    and of a router (Megatron-LM pull request 619, torchtitan issue 2387)."""
    fault = partial(with_sums, lambda sums: sums.pop(parameter), monkeypatch)
    report = caught(fault, plan, mesh, experts=3)
    assert [name for name, error in report.errors.items() if error > report.tolerance] == [
        f"gradient of {parameter} at step 0"
    ]
    assert blamed(report).error > report.tolerance


def test_a_gradient_that_is_summed_twice(monkeypatch):
    """The other side of the class above: every rank of tp has the whole gradient of a norm, and it is summed again."""
    fault = partial(with_sums, lambda sums: sums.update({"norm.weight": ("tp",)}), monkeypatch)
    report = caught(fault, "tp", {"tp": 2})
    assert report.worst[0] == "gradient of norm.weight at step 0"
    assert blamed(report).made_by == "reduce-gradients"


# -- tied embeddings ---------------------------------------------------------------------------------------

STAGES = Pipeline(2, stages=("head",))


def test_a_stage_that_gives_no_gradient_of_an_embedding_that_two_have(monkeypatch):
    """https://github.com/NVIDIA/Megatron-LM/issues/844 and https://github.com/uw-syfi/piper/issues/13."""

    def of_the_last_stage(gm, assignment, parts):
        right(gm, assignment, parts)
        role = ir.Gradient(ir.Parameter("embedding.weight"))
        parts[0].results = [(each, value) for each, value in parts[0].results if each != role]

    right = extract._assign_results
    fault = partial(monkeypatch.setattr, extract, "_assign_results", of_the_last_stage)
    report = caught(fault, "pp", {"pp": 2}, pipeline=STAGES, tied=True)
    assert report.worst[0] == "gradient of embedding.weight at step 0"


def test_stages_that_do_not_add_up_the_gradient_of_an_embedding_that_both_have(monkeypatch):
    """As above, where the stages have their gradients, and one is not known to share the parameter."""
    owners = Program.owners.func
    wrong = property(lambda program: {fqn: stages[-1:] for fqn, stages in owners(program).items()})
    fault = partial(monkeypatch.setattr, Program, "owners", wrong)
    report = caught(fault, "pp", {"pp": 2}, in_text=False, pipeline=STAGES, tied=True)
    assert report.worst[0] == "gradient of embedding.weight at step 0"


# -- stages ------------------------------------------------------------------------------------------------


def test_a_stage_that_takes_the_layers_of_another(monkeypatch):
    """Layers are numbered from the start of a stage: https://github.com/huggingface/transformers/pull/24381, and in
    checkpoints #7452, finding 12."""

    def by_number_in_stage(self, graphs, context):
        right(self, graphs, context)
        for role, node in ir.placeholders(graphs["stage1/joint"]).items():
            if isinstance(role, ir.Parameter) and role.fqn.startswith("2."):
                ROLE.set(node, ir.Parameter(role.fqn.replace("2.", "0.")))

    def report() -> shardgraph.Report:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        pipeline = Pipeline(2, stages=("2",))
        return shardgraph.verify(layers, (torch.randn(4, 8),), "pp", mesh={"pp": 2}, pipeline=pipeline, fp64=True)

    with lowered() as programs:
        assert report().ok
    assert is_proved(programs[-1])
    right = extract.DivideIntoStages.run_on
    monkeypatch.setattr(extract.DivideIntoStages, "run_on", by_number_in_stage)
    with lowered() as programs:
        assert not report().ok
    assert not is_proved(programs[-1])


# -- random numbers ----------------------------------------------------------------------------------------


def test_equal_random_numbers_on_data_ranks(monkeypatch):
    """Every rank drops the same elements, each of its own batch: transformers issue 31412, accelerate issue 114."""
    fault = partial(monkeypatch.setattr, rng, "rank_seed", lambda seed, rank: seed)
    report = caught(fault, "ddp", {"dp": 2}, in_text=False, dropout=0.2)
    assert report.worst[0] == "random numbers of data ranks 0 and 1 at step 0"


def own_mask(write, node, option, tensors):
    """Dropout of a rank's part, with the numbers that every rank draws for its own."""
    (tensor,), (_, probability, training) = tensors, node.args
    drawn = write.call(aten.native_dropout.default, tensor, probability, training)
    return [write.call(operator.getitem, drawn, i) for i in range(2)]


def test_equal_random_numbers_for_the_parts_of_an_activation(monkeypatch):
    """https://github.com/PaddlePaddle/PaddleFleetX/pull/1005: every part of a divided activation has the same mask."""

    fault = partial(monkeypatch.setitem, LOWERINGS, "dropout", own_mask)
    assert blamed(caught(fault, "tp", {"tp": 2}, dropout=0.2)).made_by == "shard-operators"


def masks_that_differ(program: Program) -> Program:
    """The program, in which ranks drop other elements where none has a part."""
    graph = program.forward.graph
    for node in [n for n in graph.nodes if n.target is aten.native_dropout.default and n not in MADE_BY]:
        for result in list(node.users):
            with graph.inserting_after(result):
                rank = graph.call_function(ir.first_row, (1, "tp"))
            with graph.inserting_after(rank):
                rolled = graph.call_function(torch.roll, (result, rank, 0))
            rolled.meta["val"] = result.meta["val"]
            result.replace_all_uses_with(rolled, delete_user_cb=lambda user, rolled=rolled: user is not rolled)
    return program


def test_different_random_numbers_for_a_replicated_activation(monkeypatch):
    """Ranks of tp drop other elements of what all have: bigscience-workshop/Megatron-DeepSpeed pull request 276."""

    build, verify = lowering.lower, importlib.import_module("shardgraph.api.verify")
    fault = partial(monkeypatch.setattr, verify, "lower", lambda *args, **kwargs: masks_that_differ(build(*args)))
    report = caught(fault, "tp", {"tp": 2}, dropout=0.2)
    assert any("rank 1" in name for name, error in report.errors.items() if error > report.tolerance)


# -- padding -----------------------------------------------------------------------------------------------


def test_padding_counted_as_tokens_of_microbatches(monkeypatch):
    """Microbatches count alike, whatever each ignores: https://github.com/huggingface/transformers/pull/34191."""
    fault = partial(monkeypatch.setattr, LossReduction, "counts", lambda self, value: [1.0] * len(self.terms))
    report = caught(fault, "pp", {"pp": 2}, in_text=False, pipeline=STAGES, labels=PADDED)
    assert report.errors["loss of rank 0 at step 0"] > report.tolerance


def test_padding_counted_as_tokens_of_a_divided_vocabulary(monkeypatch):
    """The mean of a vocabulary-parallel loss is over all labels, and its sum over those that are not ignored."""

    def of_all_labels(write, node, option, tensors):
        loss, count = right(write, node, option, tensors)
        every = write.call(aten.full_like.default, count, tensors[1].meta["val"].numel())
        return [write.call(aten.div.Tensor, write.call(aten.mul.Tensor, loss, count), every), every]

    right = LOWERINGS["nll_loss"]
    fault = partial(monkeypatch.setitem, LOWERINGS, "nll_loss", of_all_labels)
    assert blamed(caught(fault, "tp", {"tp": 2}, labels=PADDED)).made_by == "shard-operators"


# -- proofs --------------------------------------------------------------------------------------------------


@cache
def block() -> tuple[Any, Any]:
    """A norm and a feed-forward layer with dropout, captured, and the shapes of its parameters."""
    inside, outside = nn.Dropout(0.2), nn.Dropout(0.2)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), inside, nn.Linear(64, 16), outside)
    call = (torch.randn(4, 6, 16),)
    return capture(model, call, {}, device=torch.device("cpu")), named_shapes(model)


def block_under(plan: str) -> Program:
    """Its program on two ranks."""
    joint, shapes = block()
    return lowering.lower(replace(joint, placed={}), preset(plan, {"tp": 2}), shapes)


@pytest.mark.parametrize("plan", ["tp", "tp+sp"])
def test_a_block_without_a_fault_is_proved(plan):
    assert is_proved(block_under(plan))


@pytest.mark.parametrize("parameter", ["0.weight", "0.bias"])
def test_a_gradient_that_is_not_summed_over_the_parts_of_a_sequence_is_not_proved(parameter, monkeypatch):
    """The class above: what a rank has is a summand, and is taken for the sum."""
    with_sums(lambda sums: sums.pop(parameter), monkeypatch)
    assert [each.what for each in prove(block_under("tp+sp")).wrong] == [str(ir.Gradient(ir.Parameter(parameter)))]


def test_a_gradient_that_is_summed_twice_is_not_proved(monkeypatch):
    """The class above: what a rank has is the sum, and is taken for a summand."""
    with_sums(lambda sums: sums.update({"0.weight": ("tp",)}), monkeypatch)
    assert [each.what for each in prove(block_under("tp")).wrong] == [str(ir.Gradient(ir.Parameter("0.weight")))]


@pytest.mark.slow
def test_equal_random_numbers_for_the_parts_of_an_activation_are_not_proved(monkeypatch):
    """The class above: what a rank draws for its part is not its part of what the model draws."""
    monkeypatch.setitem(LOWERINGS, "dropout", own_mask)
    assert not is_proved(block_under("tp"))


def test_different_random_numbers_for_a_replicated_activation_are_not_proved():
    """The class above: ranks that have the same must drop the same."""
    assert not is_proved(masks_that_differ(block_under("tp")))


# -- outside of the graphs, on processes -------------------------------------------------------------------


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of the numbers that are kept."""
    return (output.squeeze(-1) * target).sum() / target.sum()


def gradient_of_tokens(right: bool) -> float:
    """The gradient of the mean of all ranks' numbers, one on the first and three on the second, by their factor."""
    numbers, kept = ([6.0, 0.0, 0.0], [True, False, False]) if dist.get_rank() == 0 else ([1.0, 2.0, 7.0], [True] * 3)
    sharded = shardgraph.compile(nn.Linear(1, 1, bias=False), "ddp", loss_fn=masked_mean, loss_weight="tokens")
    own_for_all = SimpleNamespace(all_reduce=lambda total, group: total.mul_(2))
    with nullcontext() if right else mock.patch.object(loss_weight, "dist", own_for_all):
        sharded.train_step(torch.tensor([numbers]).unsqueeze(-1), target=torch.tensor([kept]))
    return whole(sharded.weight.grad).item()


def test_tokens_counted_on_one_data_rank():
    """#7452, finding 3, with its numbers: each rank's count stands for all, and the gradient is 14/3 where 4 is right.

    A rank's loss is weighed by ``train_step``, which ``verify`` does not run.
    """
    assert on_ranks(gradient_of_tokens, args=(True,)) == [pytest.approx(4)] * 2
    assert on_ranks(gradient_of_tokens, args=(False,)) == [pytest.approx(14 / 3)] * 2


def norms_of_stages(right: bool) -> tuple[float, float, float]:
    """The norm of the gradients of stages that share an embedding, the model's on one process, and the embedding's."""
    torch.manual_seed(0)
    original, call = Language(tied=True), (TOKENS, TOKENS)
    sharded = shardgraph.compile(copy.deepcopy(original), "pp", pipeline=STAGES, example_inputs=call)
    sharded.train_step(*call)
    original(*call).backward()
    if not right:
        sharded._own(owners=dict.fromkeys(sharded.owners, sharded._running.numbers))  # each stage counts all it has
    expected = nn.utils.get_total_norm([parameter.grad for parameter in original.parameters()])
    embedding = original.embedding.weight.grad.norm()
    return sharded.clip_grad_norm_(1.0).item(), expected.item(), embedding.item()


def test_a_shared_embedding_counted_on_each_stage_in_the_norm_of_gradients():
    """Megatron-LM pull requests 7227 and 7228. ``verify`` compares gradients, not what a caller does with them."""
    for norm, expected, _ in on_ranks(norms_of_stages, args=(True,)):
        assert norm == pytest.approx(expected)
    for norm, expected, embedding in on_ranks(norms_of_stages, args=(False,)):
        assert norm == pytest.approx(math.hypot(expected, embedding)) and norm != pytest.approx(expected)
