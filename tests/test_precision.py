"""Mixed precision: what is stored, gathered, computed and reduced in which dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import CaptureError, Plan, PlanError, Precision, precision, preset
from shardgraph.ir import ALL_GATHER, REDUCE_SCATTER, Gradient, Mutation, Parameter, Saved, outputs, placeholders
from shardgraph.ir.attributes import MEMORY_KIND, ROLE, SUBJECT
from shardgraph.passes.analysis.rows import node_wire_bytes
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import resolve_plan
from tests import ranks
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.zoo import Loss, make, shorter

pytestmark = pytest.mark.usefixtures("shared_captures")

BF16, FP32 = torch.bfloat16, torch.float32
DP = {"dp": 2}
aten = torch.ops.aten


class Net(nn.Module):
    """Two products around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class Autocast(nn.Module):
    """A region in bfloat16 and, in it, one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y = self.inside(x)
            with torch.autocast("cpu", enabled=False):
                z = self.outside(x)
        return y.to(z.dtype) + z


class Scaled(nn.Module):
    """A product with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale)


def built(model: nn.Module, plan: str = "fsdp", given: str | Precision | None = "bf16", x=(4, 8)) -> Program:
    chosen = annotated(resolve_plan(plan, tuple(DP.items()), precision=given), model)
    return build_program(model, replace(chosen, bucket=0), (torch.zeros(x),))  # a collective for each parameter


def verified(model: nn.Module, plan: str = "fsdp", given: str | Precision | None = "bf16", **options):
    """Two steps equal the original's, computed in the same precision, but for the order of float32 sums."""
    return shardgraph.verify(model, (torch.randn(4, 8),), plan, precision=given, steps=2, tolerance=1e-6, **options)


def dtypes(gm: torch.fx.GraphModule, *targets) -> list[torch.dtype]:
    return [node.meta["val"].dtype for node in gm.graph.nodes if node.target in targets]


# -- what is in the graph --------------------------------------------------------------------------


def test_gathers_are_in_the_precision_of_the_computation_and_reductions_in_their_own():
    program = built(Net())
    for half in (program.forward, program.backward):
        assert set(dtypes(half, ALL_GATHER, aten.addmm.default, aten.mm.default)) == {BF16}
    assert set(dtypes(program.backward, REDUCE_SCATTER)) == {FP32}


def test_parameters_and_their_gradients_are_as_they_are_stored():
    program = built(Net(), given=Precision("bfloat16", reduce="bfloat16"))
    assert {n.meta["val"].dtype for r, n in placeholders(program.forward).items() if isinstance(r, Parameter)} == {FP32}
    assert set(dtypes(program.backward, REDUCE_SCATTER)) == {BF16}
    assert {n.meta["val"].dtype for r, n in outputs(program.backward) if isinstance(r, Gradient) and n} == {FP32}


@pytest.mark.parametrize("plan", ["fsdp", "zero2"])
def test_gathers_send_half_the_bytes(plan):
    def gathered(given: str | None) -> int:
        program = built(Net(), plan, given)
        nodes = [*program.forward.graph.nodes, *program.backward.graph.nodes]
        return sum(node_wire_bytes(node, program.plan.mesh) for node in nodes if node.target is ALL_GATHER)

    assert 2 * gathered("bf16") == gathered(None) > 0


def test_what_is_gathered_again_in_backward_is_cast_again_from_the_stored_shard():
    def casts(plan: str) -> list[torch.fx.Node]:
        nodes = built(Net(), plan).backward.graph.nodes
        return [node for node in nodes if node.target is aten._to_copy.default and MEMORY_KIND.get(node) == "gathered"]

    again = casts("fsdp")
    assert {SUBJECT.of(node) for node in again} == {"down.weight", "norm.weight", "norm.bias"}
    assert all(isinstance(ROLE.of(node.args[0]), Saved) for node in again)
    assert {node.args[0].meta["val"].dtype for node in again} == {FP32}
    assert casts("zero2") == casts("ddp") == []


def test_no_sync_adds_gradients_up_in_the_precision_of_the_reduction():
    local = built(Net()).graph("local")
    assert {n.meta["val"].dtype for r, n in outputs(local) if isinstance(r, Gradient) and n} == {FP32}


def test_inputs_and_outputs_are_cast():
    program = built(Net(), given=Precision("bfloat16", outputs="float32"))
    (result,) = [node for role, node in outputs(program.forward) if type(role).__name__ == "Output"]
    assert result.meta["val"].dtype == FP32
    assert set(dtypes(program.forward, aten.addmm.default)) == {BF16}


def test_inputs_that_are_not_cast_are_an_error_where_they_are_multiplied():
    with pytest.raises(
        CaptureError, match=r"bfloat16 and float32 are multiplied at .*test_precision\.py:\d+.*precision"
    ):
        built(Net(), given=Precision("bfloat16", inputs=False))


def test_statistics_that_run_stay_as_they_are_stored():
    model, (args, _) = make("conv-batch-norm", 4)
    program = build_program(model, resolve_plan("fsdp", tuple(DP.items()), precision="bf16"), args)
    norms = [n for n in program.forward.graph.nodes if "batch_norm" in str(n.target)]
    assert norms and all(each.meta["val"].dtype == FP32 for n in norms for each in n.all_input_nodes)
    assert {n.meta["val"].dtype for r, n in outputs(program.forward) if isinstance(r, Mutation)} == {FP32, torch.int64}
    assert set(dtypes(program.forward, aten.convolution.default)) == {BF16}


def test_buffers_are_kept_in_their_own_precision():
    with pytest.raises(CaptureError, match="are multiplied"):
        built(Scaled(), given="bf16")
    assert verified(Scaled(), given=Precision("bfloat16", reduce="float32", buffers="bfloat16")).ok
    model = Scaled()
    shardgraph.compile(model, "single", precision=Precision("bfloat16", buffers="bfloat16"))
    assert (model.scale.dtype, model.linear.weight.dtype) == (BF16, FP32)


# -- annotations -----------------------------------------------------------------------------------


def test_an_annotated_module_computes_in_its_own_precision():
    model = Net()
    shardgraph.annotate(model, {"norm": precision(torch.float32)})
    program = built(model)
    (norm,) = [n for n in program.forward.graph.nodes if n.target is aten.native_layer_norm.default]
    assert norm.meta["val"][0].dtype == FP32
    assert set(dtypes(program.forward, aten.addmm.default)) == {BF16}  # what it returns is cast back
    gathers = {SUBJECT.of(n): n.meta["val"].dtype for n in program.forward.graph.nodes if n.target is ALL_GATHER}
    assert (gathers["norm.weight"], gathers["up.weight"]) == (FP32, BF16)
    assert verified(model).ok


def test_an_annotated_module_may_say_what_it_returns():
    model = Net()
    shardgraph.annotate(model, {"down": precision("fp32", outputs="fp32")})
    program = built(model)
    assert dtypes(program.forward, aten.addmm.default) == [BF16, FP32]
    (result,) = [node for role, node in outputs(program.forward) if type(role).__name__ == "Output"]
    assert result.meta["val"].dtype == FP32


def test_one_module_may_compute_in_less_than_the_model():
    model = Net()
    shardgraph.annotate(model, {"up": precision("bf16")})
    program = built(model, given=None)
    assert dtypes(program.forward, aten.addmm.default) == [BF16, FP32]
    assert set(dtypes(program.backward, REDUCE_SCATTER)) == {BF16, FP32}  # each gradient in its own
    assert verified(model, given=Precision(reduce="float32")).ok


def test_an_annotated_parameter_is_computed_with_in_its_own_precision():
    model = Net()
    shardgraph.annotate(model, {"norm.*": precision("float32")})
    gathers = {SUBJECT.of(n): n.meta["val"].dtype for n in built(model).forward.graph.nodes if n.target is ALL_GATHER}
    assert (gathers["norm.bias"], gathers["up.bias"]) == (FP32, BF16)


def test_a_parameter_that_is_tied_has_one_precision():
    model, (args, _) = make("tied-transformer", 4)
    shardgraph.annotate(model, {"head": precision("float32")})
    with pytest.raises(PlanError, match=r"'embedding\.weight' is computed with in torch\.bfloat16, and head\.weight"):
        shardgraph.verify(model, args, precision="bf16")


def test_two_precisions_of_one_module_are_refused():
    with pytest.raises(PlanError, match=r"contradict each other, and both are of 'norm'"):
        shardgraph.annotate(Net(), {"norm": precision("float32"), "n*": precision("float16")})


def test_a_precision_of_nothing_is_refused():
    with pytest.raises(PlanError, match=r"matches none of the parameters or modules.*did you mean 'norm'"):
        shardgraph.annotate(Net(), {"nrom": precision("float32")})


# -- that it trains as the original does -----------------------------------------------------------


@pytest.mark.parametrize("given", ["bf16", "fp16", Precision("bfloat16", reduce="float32", outputs="float32")], ids=str)
def test_training_equals_the_original_in_the_same_precision(given):
    assert verified(Net(), given=given).ok


@pytest.mark.parametrize("plan", ["single", "ddp", "zero1", "zero2"])
def test_every_plan_of_data_trains_as_the_original(plan):
    assert verified(Net(), plan, world_size=1 if plan == "single" else 2).ok


def test_train_step_leaves_gradients_in_the_dtype_of_what_is_stored():
    sharded = shardgraph.compile(Net(), "single", precision="bf16", loss_fn=lambda out, to: (out - to).square().mean())
    assert sharded.train_step(torch.randn(4, 8), target=1).dtype == BF16
    assert {parameter.grad.dtype for parameter in sharded.parameters()} == {FP32}


def test_hybrid_sharding_trains_as_the_original():
    assert verified(Net(), "hsdp", world_size=4).ok


@pytest.mark.slow
def test_stages_of_a_pipeline_train_as_the_original():
    model = nn.Sequential(*(Net() for _ in range(4)))
    batch, mesh = (torch.randn(8, 8),), {"pp": 2, "dp": 2}
    assert shardgraph.verify(model, batch, "pp+fsdp", mesh=mesh, precision="bf16", steps=2).ok
    double = [tensor.double() for tensor in batch]
    assert shardgraph.verify(model.double(), tuple(double), "pp+fsdp", mesh=mesh, precision=TWICE, steps=2).ok


def test_regions_of_autocast_are_respected():
    program = built(Autocast(), given=None)
    assert dtypes(program.forward, aten.addmm.default) == [BF16, FP32]
    assert verified(Autocast(), given=None).ok
    assert verified(Autocast(), given="bf16").ok


def descent(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer that makes no large step of a small gradient's rounding."""
    return torch.optim.SGD(parameters, lr=0.1)


# Stored in double and computed in single precision: the same rewrites, and close enough to tell a bug from rounding.
TWICE = Precision("float32", reduce="float64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh", "name"),
    [
        ("fsdp+tp+sp", {"dp": 2, "tp": 2}, "llama"),
        ("cp", {"cp": 2}, "llama"),
        ("fsdp+ep", {"dp": 2, "ep": 2}, "mixture"),
    ],
)
def test_divided_operators_and_experts_train_as_the_original(plan, mesh, name):
    model, call = make(name, 4)
    if name == "llama":
        model, call = Loss(model), shorter(call, 8)
    report = shardgraph.verify(
        model.double(), call[0], plan, mesh=mesh, example_kwargs=call[1], precision=TWICE, steps=2, optimizer=descent
    )
    assert report.ok and report.tolerance == 1e-4, report


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_training_is_that_of_fsdp2_to_the_bit():
    policies = [(BF16, FP32), (torch.float16, BF16)]
    for differences in on_ranks(ranks.mixed_against_fsdp2, 2, args=(policies,)):
        assert differences == {str(policy): 0.0 for policy in policies}


@pytest.mark.timeout(120)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert on_ranks(ranks.overflow_on_one_rank, 2) == [([True, False, True], 4.0)] * 2


# -- what it costs ---------------------------------------------------------------------------------


def test_an_analysis_counts_stored_parameters_and_computes_in_the_lower_precision():
    def analysed(given: str | None):
        return shardgraph.analyze(
            Net(), (torch.zeros(4, 8),), "ddp", mesh={"dp": 2}, cluster=toy_cluster(), precision=given
        )

    full, mixed = analysed(None), analysed("bf16")
    assert {row.dtype for row in full.rows if row.flops} == {"float32"}
    assert {row.dtype for row in mixed.rows if row.flops} == {"bfloat16"}
    assert mixed.flops == full.flops
    parameters = 8 * 12 + 12 + 12 + 12 + 12 * 8 + 8
    assert mixed.rows[-1].memory["parameters"] == mixed.rows[-1].memory["gradients"] == 4 * parameters
    assert mixed.rows[-1].memory["optimizer state"] == full.rows[-1].memory["optimizer state"]
    # Most copies live at the last product: those of it, and of the norm, which backward needs.
    assert max(row.memory.get("gathered parameters", 0) for row in mixed.rows) == 2 * (12 + 12 + 12 * 8 + 8)


def test_a_symbolic_analysis_knows_the_lower_precision():
    analysis = shardgraph.analyze(
        Net(), (torch.zeros(4, 8),), "fsdp", mesh={"dp": 2}, cluster=toy_cluster(), precision="bf16"
    )
    assert analysis.symbolic().at(batch=4, dp=2)["peak_memory"] == analysis.peak_memory


# -- as data ---------------------------------------------------------------------------------------

WRITTEN = preset("fsdp", DP).to_yaml()


@pytest.mark.parametrize(
    "given",
    [Precision.of("bf16"), Precision.of("fp16"), Precision("float16", None, "bfloat16", False, "float32")],
    ids=str,
)
def test_a_plan_with_a_precision_round_trips_and_prints_it(given):
    plan = replace(
        preset("fsdp", DP), precision=given, annotations=(("norm", precision("float32", outputs="float32")),)
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert f"precision: {given}" in str(plan)
    assert "precision" not in WRITTEN


def test_the_precision_that_is_asked_for_takes_the_place_of_the_plan_s():
    plan = replace(preset("fsdp", DP), precision=Precision.of("fp16"))
    assert resolve_plan(plan, plan.mesh).precision.parameters == "float16"
    assert resolve_plan(plan, plan.mesh, precision="bf16").precision.parameters == "bfloat16"


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Precision("bfloat61"), r"precision\.parameters is 'bfloat61'.*did you mean 'bfloat16'"),
        (lambda: Precision(inputs="no"), r"precision\.inputs is 'no'"),
        (lambda: Precision.of("bf61"), r"no precision 'bf61'; there are .*; did you mean 'bf16'"),
        (lambda: precision("int8"), r"dtype of precision\(\) is 'int8'"),
        (
            lambda: Plan.from_yaml(WRITTEN + "precision: {redcue: float32}"),
            r"did you mean 'reduce'",
        ),
        (lambda: Plan.from_yaml(WRITTEN + "precision: {reduce: f}"), r"precision\.reduce is 'f'"),
    ],
)
def test_what_a_precision_cannot_be_is_told(make_it, message):
    with pytest.raises(PlanError, match=message):
        make_it()


def test_a_described_device_that_lacks_a_precision_is_told_with_what_it_has():
    with pytest.raises(PlanError, match=r"'V100'.* cannot: it can in float16.*'fp16'"):
        shardgraph.analyze(Net(), (torch.zeros(4, 8),), "fsdp", mesh=DP, cluster="V100", precision="bf16")


def test_a_present_device_that_lacks_a_precision_is_told_with_what_it_has(monkeypatch):
    def no_half(dtype: torch.dtype, device: torch.device) -> bool:
        return dtype != torch.float16

    monkeypatch.setattr("shardgraph.plans.dtype_support._multiplies", no_half)
    with pytest.raises(PlanError, match=r"computes in float16, which this cpu cannot: it can in bfloat16.*'bf16'"):
        shardgraph.compile(Net(), "single", precision="fp16")
