"""What each rewrite leaves in the graph, and the contract between passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx, nn

from shardgraph import GraphInvariantError, ParameterPlan, PassOrderError, ir, torch_api
from shardgraph.capture.capture import capture
from shardgraph.checks.lockstep import run_lockstep
from shardgraph.ir.attributes import SUBJECT
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.lowering import build_program
from shardgraph.passes.parameters.reduce_gradients import ReduceGradients
from shardgraph.passes.parameters.shard_parameters import ShardParameters
from shardgraph.passes.schedule import lookahead
from shardgraph.passes.schedule.transfers import gathers_of, wait_of
from shardgraph.plans.presets import preset as with_buckets
from shardgraph.plans.shards import named_shapes
from shardgraph.report.step import program_memory
from shardgraph.runtime.bind import bind
from tests import ranks, zoo
from tests.standing import on_ranks


def preset(name, mesh):
    """A named plan with a collective for each parameter; tests/test_buckets.py merges them."""
    return replace(with_buckets(name, mesh), bucket=0)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))


def build(plan, module=None):
    return build_program(module or model(), plan, (torch.randn(4, 5),))


def operations(gm):
    return [node.target.__name__.split(".")[0] for node in ir.collectives(gm)]


def fresh(plan):
    module = model()
    joint = capture(module, (torch.randn(4, 5),), {}, device=torch.device("cpu"))
    shapes = named_shapes(module)
    return joint.module, Context.of(plan, shapes, joint.fake_mode)


def test_fsdp_gathers_each_parameter_in_forward_and_again_in_backward_only_if_used_there():
    program = build(preset("fsdp", {"dp": 2}))
    assert operations(program.forward) == ["all_gather_into_tensor"] * 3
    # Backward needs the second weight only: the input requires no gradient, and a bias is not multiplied.
    assert operations(program.backward) == ["all_gather_into_tensor"] + ["reduce_scatter_tensor"] * 3


def test_zero2_keeps_what_it_gathered():
    program = build(preset("zero2", {"dp": 2}))
    assert operations(program.forward) == ["all_gather_into_tensor"] * 3
    assert operations(program.backward) == ["reduce_scatter_tensor"] * 3


def test_zero1_reduces_whole_gradients_and_returns_this_ranks_rows():
    program = build(preset("zero1", {"dp": 2}))
    assert operations(program.backward) == ["all_reduce"] * 3
    gradient = dict(ir.outputs(program.backward))[ir.Gradient(ir.Parameter("0.weight"))]
    assert gradient.target is ir.local_chunk and gradient.meta["val"].shape == (4, 5)


def test_ddp_has_no_gathers():
    program = build(preset("ddp", {"dp": 2}))
    assert operations(program.forward) == []
    assert operations(program.backward) == ["all_reduce"] * 3


def test_hybrid_sharding_reduces_over_both_axes():
    program = build(preset("hsdp", {"dp_replicate": 2, "dp_shard": 2}))
    axes = [ir.group_of(node) for node in ir.collectives(program.backward) if node.target is not ir.ALL_GATHER]
    assert sorted(axes) == ["dp_replicate"] * 3 + ["dp_shard"] * 3


def test_reshard_after_forward_is_decided_per_parameter():
    keep = ParameterPlan(("shard(0)",), reshard_after_forward=False)
    plan = preset("fsdp", {"dp": 2})
    program = build(replace(plan, parameters=(*plan.parameters, ("2.weight", keep))))
    assert operations(program.backward) == ["reduce_scatter_tensor"] * 3


def test_one_rank_gets_no_collectives():
    program = build(preset("single", {}))
    assert operations(program.forward) == operations(program.backward) == []


def test_an_unused_parameter_is_not_gathered():
    module = model()
    module.register_parameter("unused", nn.Parameter(torch.ones(4)))
    program = build(preset("fsdp", {"dp": 2}), module)
    assert not any("unused" in str(SUBJECT.get(node)) for node in ir.collectives(program.forward))


def test_prefetch_starts_gathers_before_the_one_ahead_is_awaited(monkeypatch):
    monkeypatch.setattr(lookahead, "FURTHER", 1)

    def started_ahead(prefetch):
        deepest = under_way = 0
        for node in build(replace(preset("fsdp", {"dp": 2}), prefetch=prefetch)).forward.graph.nodes:
            under_way += (node.target is ir.ALL_GATHER) - (node.target is ir.WAIT)
            deepest = max(deepest, under_way)
        return deepest

    assert [started_ahead(0), started_ahead(1), started_ahead(2), started_ahead(9)] == [1, 2, 3, 3]


@pytest.mark.parametrize("bucket", [0, 64 * 1024])
def test_gathers_start_further_ahead_where_the_peak_has_room(monkeypatch, bucket):
    def built(further):
        monkeypatch.setattr(lookahead, "FURTHER", further)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)))
        plan = replace(preset("fsdp", {"dp": 2}), prefetch=2, bucket=bucket)
        return build_program(model, plan, (torch.zeros(64, 64),))

    def ahead(gm):
        """The nodes between the starts of gathers and their waits."""
        index = {node: i for i, node in enumerate(gm.graph.nodes)}
        return sum(index[wait_of(start)] - index[start] for start in gathers_of(gm))

    near, far = built(1), built(4)
    peaks = [program_memory(program, "sgd", gloo=False).peak_bytes for program in (far, near)]
    assert peaks[0] <= peaks[1]
    for mine, others in zip(far.graphs.values(), near.graphs.values(), strict=True):
        assert ahead(mine) > ahead(others)
        assert [str(SUBJECT.get(n)) for n in gathers_of(mine)] == [str(SUBJECT.get(n)) for n in gathers_of(others)]


def test_reductions_are_awaited_behind_later_ones():
    nodes = list(build(replace(preset("zero2", {"dp": 2}), prefetch=1)).backward.graph.nodes)
    kinds = [n.target for n in nodes if n.target in (ir.REDUCE_SCATTER, ir.WAIT)]
    assert kinds == [ir.REDUCE_SCATTER, ir.REDUCE_SCATTER, ir.WAIT, ir.REDUCE_SCATTER, ir.WAIT, ir.WAIT]


def test_each_reduction_of_a_gradient_over_two_axes_is_awaited_behind_later_ones():
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    nodes = list(build(replace(preset("hsdp", mesh), prefetch=1)).backward.graph.nodes)
    reductions = [node for node in nodes if node.target in (ir.REDUCE_SCATTER, ir.ALL_REDUCE)]
    assert len(reductions) == 6
    assert not any(next(iter(start.users)) is start.next for start in reductions)


def test_no_sync_has_no_reductions_and_returns_whole_gradients():
    local = build(preset("zero2", {"dp": 2})).graph("local")
    assert operations(local) == []
    assert dict(ir.outputs(local))[ir.Gradient(ir.Parameter("0.weight"))].meta["val"].shape == (7, 5)


def test_reductions_alone_are_those_of_parameters_that_have_a_gradient():
    module = model()
    module.register_parameter("unused", nn.Parameter(torch.ones(4)))
    reduced = build(preset("fsdp", {"dp": 2}), module).graph("reduce")
    assert ir.Gradient(ir.Parameter("0.weight")) in dict(ir.outputs(reduced))
    assert ir.Gradient(ir.Parameter("unused")) not in dict(ir.outputs(reduced))


def test_a_collective_names_its_parameter_and_the_users_line():
    text = [ir.describe_collective(node) for node in ir.collectives(build(preset("fsdp", {"dp": 2})).forward)]
    assert text[0].startswith("all_gather_into_tensor of 0.weight (4, 5) float32 over 'dp' (")
    assert "(module 0, Linear)" in text[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 4}), ("fsdp+tp+sp", {"dp": 2, "tp": 2})])
def test_the_text_of_a_program_does_not_depend_on_the_rank(plan, mesh):
    built = on_ranks(ranks.program_text, 4, args=("odd-mlp", plan, mesh))
    assert [rank for rank, _ in built] == [0, 1, 2, 3]
    assert len({text for _, text in built}) == 1


def test_a_pass_out_of_order_is_refused_by_name():
    gm, context = fresh(preset("fsdp", {"dp": 2}))
    with pytest.raises(PassOrderError, match="'reduce-gradients' requires sharded-parameters"):
        run_passes(gm, (ReduceGradients(),), context)


def test_a_pass_that_ran_already_is_refused():
    gm, context = fresh(preset("fsdp", {"dp": 2}))
    with pytest.raises(PassOrderError, match="'shard-parameters' must run before"):
        run_passes(gm, (ShardParameters(), ShardParameters()), context)


@dataclass(frozen=True)
class _ChangesAnOutput(Pass):
    name = "changes-an-output"

    def run(self, gm, context):
        results = ir.outputs(gm)
        wrong = next(node for node in gm.graph.nodes if node.op == "placeholder")
        ir.set_outputs(gm, [(role, wrong if isinstance(role, ir.Output) else value) for role, value in results])


def test_a_pass_that_changes_what_the_graph_returns_is_refused_by_name():
    gm, context = fresh(preset("fsdp", {"dp": 2}))
    with pytest.raises(GraphInvariantError, match="'changes-an-output' changed the result Output"):
        run_passes(gm, (_ChangesAnOutput(),), context)


def test_outputs_that_the_loss_ignores_cost_backward_no_zeros():
    llama, (args, kwargs) = zoo.make("llama", 4)
    program = build_program(llama, preset("fsdp", {"dp": 2}), args, kwargs)
    taken = ir.placeholders(program.backward)
    absent = {role: taken[role] for role in taken if isinstance(role, ir.Tangent) and role != ir.Tangent(0)}
    assert ir.Tangent(1) in absent  # the logits
    lean = program.graph("backward", frozenset(absent))
    assert not absent.keys() & ir.placeholders(lean).keys()
    assert not any(node.target is torch.ops.aten.full.default for node in lean.graph.nodes)
    assert operations(lean) == operations(program.backward)

    values = [{role: _random(node) for role, node in ir.placeholders(program.forward).items()}] * 2
    forward = [dict(result) for result in run_lockstep(program.forward, program.plan.mesh, values)]
    given = [
        {r: v for r, v in result.items() if isinstance(r, ir.Saved)} | {ir.Tangent(0): torch.ones(())}
        for result in forward
    ]
    zeros = {role: torch.zeros(node.meta["val"].shape) for role, node in absent.items()}
    expected = run_lockstep(program.backward, program.plan.mesh, [each | zeros for each in given])
    for mine, theirs in zip(run_lockstep(lean, program.plan.mesh, given), expected, strict=True):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True) if b is not None)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        x = self.trunk(x).tanh()
        return self.left(x), self.right(x)


def test_a_head_that_the_loss_ignores_gets_zero_gradients_and_its_collectives_stay():
    program = build(preset("fsdp", {"dp": 2}), TwoHeads())
    lean = program.graph("backward", frozenset({ir.Tangent(1)}))
    assert operations(lean) == operations(program.backward)
    values = [{role: _random(node) for role, node in ir.placeholders(lean).items()} for _ in range(2)]
    for result in run_lockstep(lean, program.plan.mesh, values):
        gradients = {role.of.fqn: value for role, value in result if value is not None}
        assert not gradients["right.weight"].any() and not gradients["right.bias"].any()
        assert gradients["left.weight"].any() and gradients["trunk.weight"].any()


class LayersAside(nn.Module):
    """Beside its loss it returns what a block of many kinds of layers makes of its trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.aside = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Softmax(-1))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution = nn.Sequential(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool1d(2))

    def forward(self, x):
        x = self.trunk(x)
        y = self.aside(x)
        return {"loss": x.square().mean(), "aside": self.convolution(self.attention(y, y, y)[0])}


def test_of_layers_whose_output_the_loss_ignores_nothing_is_computed_in_backward():
    program = build_program(LayersAside(), preset("single", {}), (torch.randn(2, 4, 8),), {})
    taken = ir.placeholders(program.backward)
    lean = program.graph("backward", frozenset(r for r in taken if isinstance(r, ir.Tangent) and r != ir.Tangent(0)))
    few, all_of_them = (
        [node for node in gm.graph.nodes if "_backward" in str(node.target)] for gm in (lean, program.backward)
    )
    assert not few and len(all_of_them) > 6


def _random(node):
    value = node.meta["val"]
    if value.is_floating_point():
        return torch.randn(value.shape)
    return torch.randint(0, 2, value.shape).to(value.dtype)


def test_graphs_are_data_until_they_are_bound(monkeypatch):
    program, written = build(preset("fsdp", {"dp": 2})), []
    write = fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda *args, **kwargs: written.append(args) or write(*args, **kwargs))
    for gm in (ir.copy_graph(program.joint.module), program.forward, program.graph("local", frozenset())):
        gm.recompile()
    assert not written
    readable = program.forward.print_readable(print_output=False)
    assert "all_gather" in program.forward.code and "all_gather" in readable and len(written) == 2


def test_rewriting_graphs_leaves_graph_modules_of_other_threads_as_they_are():
    recompile = fx.GraphModule.recompile
    build(preset("fsdp", {"dp": 2}))
    assert fx.GraphModule.recompile is recompile and not hasattr(torch_api, "without_code")


def test_a_graph_that_is_not_bound_is_interpreted():
    program = build(preset("single", {}))
    inputs = [torch.ones(node.meta["val"].shape) for node in ir.placeholders(program.forward).values()]
    bound = bind(program.forward, None)
    torch.testing.assert_close(program.forward(*inputs), bound(*inputs))


def misplaced(gm):
    gm.graph.find_nodes(op="placeholder")[0].prepend(
        next(node for node in gm.graph.nodes if node.op == "call_function")
    )


def of_another_graph(gm):
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.args = (fx.Graph().placeholder("x"), *node.args[1:])


def not_there(gm):
    next(iter(gm.graph.nodes)).prepend(gm.graph.create_node("get_attr", "missing"))


@pytest.mark.parametrize("fault", [misplaced, of_another_graph, not_there])
def test_a_graph_that_is_not_valid_is_not_taken_for_valid(fault):
    gm = capture(nn.Linear(4, 4), (torch.ones(2, 4),), {}, device=torch.device("cpu")).module
    assert torch_api.is_valid(gm)
    fault(gm)
    assert not torch_api.is_valid(gm)
    with pytest.raises(RuntimeError):
        gm.graph.lint()
