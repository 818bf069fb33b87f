"""Costs as expressions: what they give at other sizes is what an analysis at those sizes gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import nn

import shardgraph
from shardgraph import CaptureError, ShardGraphError
from shardgraph.report.analysis import analyze_program
from shardgraph.search.symbolic import Symbolic
from tests.machines import GIB, toy_cluster
from tests.test_analysis import Towers, gpt2, llama, text
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")

Concrete = Callable[..., shardgraph.Analysis]


def of_llama(batch: int = 2, sequence: int = 16, dp: int = 4, layers: int = 1, **options) -> shardgraph.Analysis:
    call = text(batch, sequence)
    mesh = {"dp": dp}
    return shardgraph.analyze(
        llama(layers), plan="fsdp", example_kwargs=call, mesh=mesh, **{"cluster": toy_cluster()} | options
    )


def of_gpt2(batch: int = 2, sequence: int = 16, dp: int = 4) -> shardgraph.Analysis:
    call = text(batch, sequence)
    return shardgraph.analyze(gpt2(1), plan="zero2", example_kwargs=call, mesh={"dp": dp}, cluster=toy_cluster())


def of_odd_mlp(batch: int = 2, dp: int = 4) -> shardgraph.Analysis:
    model, (args, kwargs) = make("odd-mlp", batch)
    return shardgraph.analyze(
        model, args, plan="fsdp", example_kwargs=kwargs, mesh={"dp": dp}, cluster=toy_cluster(nodes=4)
    )


@pytest.fixture(scope="module")
def llama_costs() -> Symbolic:
    return of_llama().symbolic()


@pytest.fixture(scope="module")
def gpt2_costs() -> Symbolic:
    return of_gpt2().symbolic()


@pytest.fixture(scope="module")
def odd_mlp_costs() -> Symbolic:
    return of_odd_mlp().symbolic()


@pytest.mark.quick("odd_mlp-*")
@pytest.mark.parametrize(
    ("model", "analyse", "sizes"),
    [
        *[("llama", of_llama, {"batch": b, "sequence": s, "dp": d}) for b, s, d in [(5, 7, 2), (1, 31, 8)]],
        *[("gpt2", of_gpt2, {"batch": b, "sequence": s, "dp": d}) for b, s, d in [(2, 16, 4), (7, 3, 8)]],
        *[("odd_mlp", of_odd_mlp, {"batch": b, "dp": d}) for b in (1, 4) for d in (2, 3, 16)],
    ],
)
def test_the_expressions_give_the_concrete_analysis(request, model, analyse: Concrete, sizes):
    costs, concrete = request.getfixturevalue(f"{model}_costs").at(**sizes), analyse(**sizes)
    assert costs["peak_memory"] == concrete.peak_memory
    assert costs["flops"] == concrete.flops
    assert costs["sent"] == sum(row.sent for row in concrete.rows)
    assert costs["communication"] == pytest.approx(concrete.time.communication)
    assert costs["optimizer"] == pytest.approx(concrete.time.optimizer)


@pytest.mark.slow
def test_seconds_of_computation_are_exact_on_the_present_mesh(llama_costs):
    sizes = {"batch": 3, "sequence": 11}
    assert llama_costs.at(**sizes)["compute"] == pytest.approx(of_llama(**sizes).time.compute)


@pytest.mark.slow
def test_a_batch_of_one_may_be_asked_for_more():
    assert of_words(batch=1).max_batch("100KiB") == of_words(batch=3).max_batch("100KiB")


class Mixture(nn.Module):
    """Experts whose capacity, a rounded fraction of the sequence, is no multiple of it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = shardgraph.nn.MoE(d_model=8, d_hidden=16, num_experts=4, k=2, capacity_factor=1.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, lost = self.moe(x)
        return (x + output).square().mean() + lost


def test_the_largest_batch_needs_no_expression_in_the_sequence():
    def analyzed(rows: int) -> shardgraph.Analysis:
        return shardgraph.analyze(Mixture(), torch.ones(rows, 16, 8), "single", mesh={}, cluster=toy_cluster())

    largest = analyzed(2).max_batch("1MiB")
    assert analyzed(largest).peak_memory <= 2**20 < analyzed(largest + 1).peak_memory


@pytest.mark.slow
def test_the_step_takes_between_the_fastest_and_the_slowest(llama_costs):
    seconds = of_llama().time.total
    assert llama_costs.at()["fastest"] <= seconds <= llama_costs.at()["slowest"]


@pytest.mark.slow
def test_a_folded_stack_gives_what_all_its_layers_give():
    folded, whole = of_llama(layers=9).symbolic(), of_llama(layers=9, fold=False)
    assert folded.at()["peak_memory"] == whole.peak_memory and folded.at()["flops"] == whole.flops


@pytest.mark.slow
def test_so_do_two_folded_stacks():
    with torch.device("meta"):
        model, x = Towers(14), torch.zeros(4, 1024)
    folded, whole = (
        shardgraph.analyze(model, (x,), plan="single", mesh={"dp": 1}, cluster=toy_cluster(), fold=fold)
        for fold in (True, False)
    )
    assert folded.symbolic().at()["peak_memory"] == whole.peak_memory
    assert folded.symbolic().at()["flops"] == whole.flops


def test_flops_grow_with_the_square_of_the_sequence(llama_costs):
    assert sympy.degree(llama_costs.flops, llama_costs.sequence) == 2
    assert sympy.degree(llama_costs.flops, llama_costs.batch) == 1


def of_words(batch: int = 2, sequence: int = 8, memory: int = GIB) -> shardgraph.Analysis:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 11))
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return shardgraph.analyze(model, (ids,), plan="fsdp", mesh={"dp": 4}, cluster=toy_cluster(memory=memory))


@pytest.mark.parametrize("size", ["batch", "sequence"])
def test_the_largest_size_fits_and_the_next_does_not(size):
    memory = 100 * 2**10
    largest = of_words().max_batch(memory) if size == "batch" else of_words().max_sequence("100KiB")
    assert largest > 1
    assert of_words(**{size: largest}).peak_memory <= memory < of_words(**{size: largest + 1}).peak_memory


def test_the_largest_batch_is_by_default_for_the_memory_of_the_device():
    assert of_words(memory=2**20).max_batch() == of_words().max_batch("1MiB")


class Positions(nn.Module):
    """Has embeddings of 20 positions, and raises by itself beyond ``most``."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.words, self.positions, self.most = nn.Embedding(11, 8), nn.Embedding(20, 8), most

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > self.most:
            raise ValueError("too long")
        return (self.words(ids) + self.positions(torch.arange(ids.shape[1]))).sum()


@pytest.mark.slow
@pytest.mark.parametrize("model, limit", [(Positions(), 20), (Positions(most=13), 13)])
def test_the_longest_sequence_is_at_most_what_the_model_itself_takes(model, limit):
    ids = torch.zeros(2, 8, dtype=torch.long)
    analysis = shardgraph.analyze(model, (ids,), plan="fsdp", mesh={"dp": 4}, cluster=toy_cluster(memory=GIB))
    assert analysis.max_sequence() == limit


def test_a_lookup_beyond_the_rows_of_an_embedding_is_told_with_its_line():
    ids = torch.zeros(2, 21, dtype=torch.long)
    with pytest.raises(CaptureError, match=r"row 20 of an embedding that has 20 rows, at .*test_symbolic\.py:\d+"):
        shardgraph.analyze(Positions(), (ids,), plan="fsdp", mesh={"dp": 4}, cluster=toy_cluster())


def test_what_not_even_one_row_fits_is_told_with_what_it_takes():
    with pytest.raises(ShardGraphError, match=r"not even batch=1 fits 1.0 KiB: it takes \d+\.\d KiB"):
        of_words().max_batch(2**10)


def test_an_unknown_size_is_told_with_those_that_are_known(llama_costs):
    with pytest.raises(ShardGraphError, match="no size 'tp' here; there are batch, sequence, dp"):
        llama_costs.at(tp=2)


def test_a_size_is_a_positive_number(llama_costs):
    with pytest.raises(ShardGraphError, match="batch=0: a positive whole number"):
        llama_costs.at(batch=0)


class Splits(nn.Module):
    """Runs as many operations as it has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(row) for row in x]).sum()


def test_a_model_that_runs_other_operations_at_other_sizes_is_refused():
    analysis = shardgraph.analyze(Splits(), (torch.zeros(3, 4),), plan="ddp", mesh={"dp": 2}, cluster=toy_cluster())
    with pytest.raises(ShardGraphError, match="other operations at another batch size"):
        analysis.symbolic()


class Pairs(nn.Module):
    """Compares every row with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y @ y.t()).flatten().sum()


def test_a_size_that_is_no_polynomial_of_the_first_degree_is_refused():
    analysis = shardgraph.analyze(Pairs(), (torch.zeros(3, 4),), plan="ddp", mesh={"dp": 2}, cluster=toy_cluster())
    with pytest.raises(ShardGraphError, match="no sum of multiples of batch"):
        analysis.symbolic()


def test_the_analysis_of_a_compiled_program_has_no_other_sizes():
    sharded = shardgraph.compile(nn.Linear(4, 4), plan="single", example_inputs=(torch.zeros(2, 4),))
    analysis = analyze_program(sharded.program, toy_cluster())
    with pytest.raises(ShardGraphError, match="whose sizes are fixed"):
        analysis.symbolic()
