"""The order of a program: what is hidden behind what, within which memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from shardgraph import Cluster, Precision, ir, preset
from shardgraph.ir.attributes import REDUCES
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.analysis.sized import Sizes, size_program
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.passes.schedule.transfers import Lane, reductions_of, wait_of
from shardgraph.passes.schedule.windows import await_late
from shardgraph.report.analysis import analyze_program
from shardgraph.report.bound import least_exposed
from shardgraph.report.step import program_memory

H100 = Cluster.of("H100")


class Blocks(nn.Module):
    """Residual blocks whose matrix products take long, each with a sum over tensor-parallel ranks."""

    def __init__(self, layers: int = 4, width: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def built(plan: str, mesh: dict[str, int], layers: int = 4, **fields: object) -> Program:
    with torch.device("meta"):
        model, x = Blocks(layers), torch.zeros(4096, 2048)
    return build_program(model, replace(preset(plan, mesh), **fields), (x,))


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def exposed(program: Program, half: str = "backward") -> float:
    return sum(each.exposed for each in analyze_program(program, H100).transfers if each.half == half)


def leave_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Leave out one of the scheduler's steps."""
    monkeypatch.setattr("shardgraph.passes.schedule.schedule." + name, lambda *arguments: None)


def test_a_lane_has_no_more_in_flight_than_its_limit() -> None:
    lane = Lane(starts=(), sizes=(4, 1, 2, 4, 3), limit=4, relayed=False)
    assert lane.first_beside() == [0, 1, 1, 3, 4]
    assert lane.first_beside(2) == [0, 0, 0, 1, 3]
    assert replace(lane, starts=tuple(range(5))).next_after() == [1, 3, 3, 4, 5]


def test_weight_gradients_are_computed_behind_sums_over_tensor_parallel_ranks(monkeypatch) -> None:
    moved = built("tp", {"tp": 4})
    leave_out(monkeypatch, "compute_behind")
    plain = built("tp", {"tp": 4})
    assert sorted(names(moved.backward)) == sorted(names(plain.backward))
    assert exposed(moved) < 0.5 * exposed(plain)


def test_the_next_weights_are_cast_behind_the_sums_of_forward(monkeypatch) -> None:
    moved = built("tp", {"tp": 4}, precision=Precision("bf16"))
    leave_out(monkeypatch, "compute_behind")
    plain = built("tp", {"tp": 4}, precision=Precision("bf16"))
    assert sorted(names(moved.forward)) == sorted(names(plain.forward))
    casts = [r for r in analyze_program(plain, H100).rows if r.half == "forward" and r.operation == "_to_copy.default"]
    behind_a_sum = sum(row.seconds for row in casts if row.module.startswith(("layers.1", "layers.2", "layers.3")))
    assert exposed(plain, "forward") - exposed(moved, "forward") > 0.9 * behind_a_sum > 0


@pytest.mark.parametrize("plan", ["tp", "tp+sp"])
def test_what_collectives_of_operators_expose_is_near_the_least_of_any_order(plan) -> None:
    program = built(plan, {"tp": 4}, layers=8, precision=Precision("bf16"))
    assert analyze_program(program, H100).time.exposed < 1.3 * least_exposed(program, H100)


@pytest.mark.quick("tp-")
@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.parametrize("plan", ["tp", "tp+sp"])
def test_what_is_computed_behind_collectives_takes_no_more_memory(monkeypatch, plan, precision) -> None:
    def peak() -> int:
        program = built(plan, {"tp": 4}, precision=Precision(precision or None))
        return program_memory(program, "sgd", gloo=False).peak_bytes

    moved = peak()
    leave_out(monkeypatch, "compute_behind")
    assert moved <= peak()


class Masked(nn.Module):
    """An embedding under a mask that needs no parameter, and is made after it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(4096, 2048), nn.Linear(2048, 2048)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = (places[:, None] >= places[None, :]).float().softmax(-1)
        return self.out(mask @ hidden).square().mean()


@pytest.mark.parametrize("plan", ["fsdp", "zero2"])
def test_what_needs_no_parameter_is_computed_behind_the_first_gather(monkeypatch, plan) -> None:
    def program() -> Program:
        with torch.device("meta"):
            return build_program(Masked(), preset(plan, {"dp": 8}), (torch.zeros(2, 2048, dtype=torch.int64),))

    found = program()
    order = names(found.forward)
    first = wait_of(next(ir.collectives(found.forward)))
    assert order.index("_softmax") < order.index(first.name) < order.index("embedding")
    leave_out(monkeypatch, "compute_before_first")
    apart = program()
    assert exposed(found, "forward") < exposed(apart, "forward")
    peak, without = (program_memory(each, "sgd", gloo=False).peak_bytes for each in (found, apart))
    assert peak <= 1.001 * without


def test_what_draws_random_numbers_stays_where_it_is() -> None:
    class Dropped(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.dropout(x, 0.5))

    program = build_program(Dropped(2, 64), preset("tp", {"tp": 4}), (torch.zeros(64, 64),))
    drawn = [node for node in program.forward.graph.nodes if draws(node)]
    assert drawn and drawn == sorted(drawn)


def test_the_sum_over_the_next_axis_starts_when_the_first_is_expected_to_be_done(monkeypatch) -> None:
    """A gradient is reduced over one axis, then over the other: the second link is not idle for four more gradients."""
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    moved = built("hsdp", mesh, bucket=0)
    leave_out(monkeypatch, "await_done")
    plain = built("hsdp", mesh, bucket=0)

    def later(program: Program) -> list[int]:
        """How many reductions start between the two of each gradient."""
        order = [node for node in program.backward.graph.nodes if ir.is_collective(node) and node in REDUCES]
        seconds = [
            next(n for n in tail if ir.is_collective(n))
            for chain in reductions_of(program.backward)
            for tail in chain.tails[:1]
        ]
        firsts = [chain.start for chain in reductions_of(program.backward)]
        return [order.index(second) - order.index(first) for first, second in zip(firsts, seconds, strict=True)]

    assert sum(later(moved)) < sum(later(plain))
    assert exposed(moved) <= exposed(plain)


@pytest.mark.parametrize("plan", ["fsdp", "zero2", "hsdp"])
def test_waits_that_are_put_off_take_no_more_memory(monkeypatch, plan) -> None:
    mesh = {"dp_replicate": 2, "dp_shard": 2} if plan == "hsdp" else {"dp": 4}
    moved = program_memory(built(plan, mesh), "sgd", gloo=False).peak_bytes
    leave_out(monkeypatch, "await_done")
    assert moved <= program_memory(built(plan, mesh), "sgd", gloo=False).peak_bytes


def test_each_wait_follows_its_start() -> None:
    for gm in built("hsdp", {"dp_replicate": 2, "dp_shard": 2}).graphs.values():
        assert all(start < wait_of(start) for start in ir.collectives(gm))


def test_nothing_is_awaited_before_it_starts_where_a_buffer_has_several_sums_over_the_next_axis() -> None:
    """Parts of a buffer of gradients are summed one after the other, and some of them are read late."""
    graph = fx.Graph()
    gradient, sums = graph.placeholder("gradient"), ("sum", "dp_replicate")

    def reduced(*operand: fx.Node) -> fx.Node:
        target = ir.ALL_REDUCE if operand else ir.REDUCE_SCATTER
        arguments = (*operand, *sums) if operand else (gradient, "sum", 2, "dp_shard")
        return graph.call_function(ir.WAIT, (graph.call_function(target, arguments),))

    buffer = reduced()
    first, second = (graph.call_function(torch.ops.aten.neg.default, (buffer,)) for _ in range(2))
    results = [reduced(first), reduced(second)]
    third, fourth = (graph.call_function(torch.ops.aten.neg.default, (buffer,)) for _ in range(2))
    results += [reduced(third), reduced(fourth)]
    others = [reduced() for _ in range(6)]
    graph.output((*results, *others))
    for node in graph.nodes:
        if node.op == "call_function":
            REDUCES.set(node, "weight")
    gm = fx.GraphModule(nn.Module(), graph)
    chains = reductions_of(gm)
    await_late(gm, chains, Lane.counted((chain.start for chain in chains), 1))
    graph.lint()  # which tells what is used before it is made


def test_expressions_hold_for_programs_that_other_sizes_order_otherwise() -> None:
    """They are those of the order at the present sizes."""

    def program(rows: int) -> Program:
        plan = replace(preset("fsdp", {"dp": 2}), bucket=0)
        return build_program(Blocks(4, 64), plan, (torch.zeros(rows, 64),))

    samples = [program(rows) for rows in (4, 5, 6)]
    first = next(start for start in ir.collectives(samples[1].backward) if start in REDUCES)
    first.append(wait_of(first))
    halves = [{"backward": each.backward} for each in samples]
    assert names(samples[1].backward) != names(samples[0].backward)
    points, context = [(4, 0), (5, 0), (6, 0)], replace(samples[0].context, parameters={})
    sized = size_program(halves, points, Sizes((("dp", 2),), []), context)
    assert names(sized["backward"]) == names(samples[0].backward)
