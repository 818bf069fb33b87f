"""What pictures of a program show: modules, placements, traffic, the flow of data, and memory over time."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import graphviz
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardgraph import ParameterPlan, Plan, preset
from shardgraph.api.analyze import analyze
from shardgraph.capture.stacks import Stack
from shardgraph.cost_models.schedules import SimulatedSchedule, StageCost, simulate_schedule
from shardgraph.passes.lowering import build_program
from shardgraph.pictures.boxes import draw_boxes
from shardgraph.pictures.flow import Edges, Site, trace_flow
from shardgraph.pictures.gantt import draw_gantt, draw_schedule
from shardgraph.pictures.graph import plan_graph, render_svg
from shardgraph.pictures.memory import draw_memory
from shardgraph.pictures.svg import Drawing, document
from shardgraph.pictures.tree import HeldParameter, Module, Tree, build_tree
from shardgraph.plans.orders import pipeline_order
from shardgraph.plans.parameter_plan import REPLICATE, SHARD
from tests.machines import toy_cluster
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")

MESH = (("replica", 2), ("shard", 4))
SHARDED = ParameterPlan((REPLICATE, SHARD))
WHOLE = ParameterPlan((REPLICATE, REPLICATE), "all_reduce", reshard_after_forward=False)


class Block(nn.Module):
    """A linear layer and a norm behind a residual."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, hidden, bias=False), nn.LayerNorm(hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.norm(self.up(x))))


class Net(nn.Module):
    """An embedding and blocks, the ``odd``-th of another size."""

    def __init__(self, layers: int = 4, odd: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, 8, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Block(32 if i == odd else 16) for i in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).float()
        for layer in self.layers:
            x = layer(x)
        return x


def outline(model: nn.Module, *inputs: torch.Tensor, plan: Plan | None = None) -> tuple[Tree, Edges]:
    program = build_program(model, plan or preset("fsdp", {"dp": 2}), inputs)
    tree = build_tree(program)
    return tree, trace_flow(program.forward, tree.root)


def in_buckets() -> Plan:
    return replace(preset("fsdp", {"dp": 2}), bucket=1 << 20)


def net(
    odd: int | None = None, rules: tuple[tuple[str, ParameterPlan], ...] = (), plan: Plan | None = None
) -> tuple[Tree, Edges]:
    plan = plan or Plan("mine", MESH, (("*", SHARDED), ("*norm*", WHOLE), *rules))
    return outline(Net(odd=odd), torch.zeros(2, 3, dtype=torch.long), plan=plan)


def texts(drawing: Drawing) -> list[str]:
    elements = ET.fromstring(document("test", [drawing])).iter("{http://www.w3.org/2000/svg}text")
    return [element.text or "" for element in elements]


def flows(model: nn.Module, *inputs: torch.Tensor, plan: Plan | None = None) -> set[tuple[str, str]]:
    def name(site: Site) -> str:
        return ".".join(filter(None, (site.module.path, site.text)))

    return {(name(source), name(target)) for source, target in outline(model, *inputs, plan=plan)[1]}


@pytest.fixture(scope="module")
def drawn() -> list[str]:
    return texts(draw_boxes(net()[0]))


# -- modules, placements, traffic ------------------------------------------------------------------


def test_alike_layers_are_drawn_once(drawn):
    assert drawn.count("layers.0 to layers.3") == 1
    assert drawn.count("norm") == 1


def test_a_layer_with_another_shape_is_drawn_apart():
    assert {"0", "1", "layers.2 to layers.3"} <= set(texts(draw_boxes(net(odd=1)[0])))


def test_a_layer_with_another_placement_is_drawn_apart():
    found = texts(draw_boxes(net(rules=(("layers.0.up.weight", WHOLE),))[0]))
    assert {"0", "layers.1 to layers.3"} <= set(found)


def test_every_placement_is_in_the_legend_with_its_bytes(drawn):
    sharded = 251 * 8 * 2 + 4 * (4 * 8 + 2 * 16 + 2) * 4
    assert f"replicate over replica, shard(0) over shard: 13 parameters, {sharded / 1024:.1f} KiB per rank" in drawn
    assert "replicate over replica, replicate over shard: 8 parameters, 512 B per rank" in drawn


def test_a_parameter_shows_its_whole_and_its_local_shape(drawn):
    assert "(1001, 8) -> (251, 8)" in drawn
    assert "(16)" in drawn


def test_a_module_lists_its_collectives_with_their_bytes(drawn):
    assert "forward: 1 x all_gather over shard" in drawn
    assert f"{3 * 251 * 8 * 2 / 1024:.1f} KiB sent" in drawn


def test_a_parameter_is_a_node_in_the_colour_of_its_placement():
    tree, flow = net()
    source = plan_graph(tree, flow).source
    for name, (colour, _) in zip(("layers.0.up.weight", "layers.0.norm.weight"), tree.legend, strict=True):
        (node,) = re.findall(rf'^\s*"{name}" \[(.*?)\]', source, re.DOTALL | re.MULTILINE)
        assert f'fillcolor="{colour}"' in node


AWKWARD = pytest.mark.parametrize("name", ["a<b", 'say "x"', "a:b", "a\\", "<b>", "&amp;"])


def awkward(name: str) -> tuple[Tree, Edges]:
    tree = Tree("fsdp", (), Module(""))
    module = tree.root.find(name)
    module.own.append(HeldParameter(f"w{name}", (2,), (2,), "whole", 4))
    module.sites.append(Site(module, "module", ""))
    return tree, {(Site(tree.root, "inputs", "inputs"), module.sites[0]): None}


@AWKWARD
def test_names_are_escaped_in_boxes(name):
    assert {name, f"w{name}"} <= set(texts(draw_boxes(awkward(name)[0])))


@needs_dot
@AWKWARD
def test_names_are_escaped_in_the_graph(name):
    assert {name, f"w{name}"} <= set(texts(render_svg(plan_graph(*awkward(name)))))


def crossed(dot: graphviz.Digraph) -> list[tuple[str, str]]:
    """The headings that an edge crosses where Graphviz draws them, each with the node that the edge comes from."""
    drawn = json.loads(dot.pipe("json"))
    headings = [node for node in drawn["objects"] if node["name"].startswith("label of")]
    assert headings
    found = []
    for edge in [each for each in drawn["edges"] if each.get("style") != "invis"]:
        points = [complex(*map(float, each.split(","))) for each in edge["pos"].removeprefix("e,").split()[1:]]
        for a, b, c, d in (points[at : at + 4] for at in range(0, len(points) - 1, 3)):  # Bezier curves
            for t in (step / 100 for step in range(101)):
                at = (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d
                for node in headings:
                    away = at - complex(*map(float, node["pos"].split(",")))
                    if abs(away.real) < 36 * float(node["width"]) and abs(away.imag) < 36 * float(node["height"]):
                        found.append((node["name"], drawn["objects"][edge["tail"]]["name"]))
    return found


@needs_dot
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Net(), torch.zeros(2, 3, dtype=torch.long)),
        (nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(8, 8))), torch.randn(2, 8)),
        (make("tied-transformer", 2)[0], torch.zeros(2, 6, dtype=torch.long)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 4, 8)),
    ],
)
def test_edges_go_around_the_headings_of_modules(model, x):
    assert crossed(plan_graph(*outline(model, x))) == []


def test_a_lengthened_stack_is_drawn_as_the_whole_one():
    ids = torch.zeros(2, 3, dtype=torch.long)
    alone = replace(preset("fsdp", {"dp": 2}), bucket=0)  # of a bucket all layers have parts
    (few, few_flow), (all_, all_flow) = outline(Net(5), ids, plan=alone), outline(Net(9), ids, plan=alone)
    few.lengthen(Stack("layers", 9), 5)
    assert plan_graph(few, few_flow).source == plan_graph(all_, all_flow).source
    assert few.summary == all_.summary


class Chain(nn.Module):
    """A product and a norm for each letter, as wide as its kind."""

    def __init__(self, kinds: str):
        super().__init__()
        widths = (ord(kind) for kind in kinds)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.LayerNorm(n), nn.Linear(n, 8)) for n in widths)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_stack_whose_first_layers_are_unlike_the_others_is_lengthened_by_these():
    x, alone = torch.zeros(2, 8), replace(preset("fsdp", {"dp": 2}), bucket=0)
    few, few_flow = outline(Chain("cb" + 5 * "a"), x, plan=alone)
    whole, whole_flow = outline(Chain("cb" + 9 * "a"), x, plan=alone)
    few.lengthen(Stack("layers", 11, head=2), 5)
    assert plan_graph(few, few_flow).source == plan_graph(whole, whole_flow).source
    assert few.summary == whole.summary


def test_layers_that_share_their_parameters_are_not_lengthened():
    tree = Tree("fsdp", (), Module(""))
    tree.root.find("layers.0").own.append(HeldParameter("weight", (2,), (2,), "whole", 4))
    tree.lengthen(Stack("layers", 9), 5)
    assert [module.path for module in tree.root.walk()] == ["", "layers", "layers.0"]


# -- the flow of data ------------------------------------------------------------------------------


def test_a_module_takes_what_the_one_before_gives_through_what_has_no_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4))
    assert flows(model, torch.randn(2, 4)) == {("inputs", "0"), ("0", "3"), ("3", "outputs")}


def test_a_residual_joins_two_flows():
    assert flows(Block(), torch.randn(2, 8)) == {
        ("inputs", "up"),
        ("up", "norm"),
        ("norm", "down"),
        ("inputs", "add"),
        ("down", "add"),
        ("add", "outputs"),
    }


def test_attention_is_one_join():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)

    assert flows(Attention(), torch.randn(2, 3, 4)) == {
        *(("inputs", name) for name in "qkv"),
        *((name, "bmm") for name in "qkv"),
        ("bmm", "out"),
        ("out", "outputs"),
    }


def test_a_parameter_that_its_parent_module_applies_is_not_called_tied():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 4, 8)
    tree, _ = outline(layer, x, plan=preset("tp", {"tp": 2}))
    (site,) = (site for module in tree.root.walk() for site in module.sites if site.kind == "borrowed")
    assert (site.text, site.use) == ("self_attn.out_proj.bias", "of a submodule")
    assert "self_attn.out_proj.bias (of a submodule)" in texts(draw_boxes(tree))


def test_a_tied_parameter_is_used_where_it_is_borrowed():
    found = flows(make("tied-transformer", 2)[0], torch.zeros(2, 6, dtype=torch.long))
    assert {("inputs", "embedding"), ("head.embedding.weight", "outputs")} <= found
    assert not any(target == "embedding" for source, target in found if source != "inputs")


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (make("tied-transformer", 2)[0], torch.zeros(2, 6, dtype=torch.long)),
        (Net(), torch.zeros(2, 3, dtype=torch.long)),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)), torch.randn(2, 4)),
    ],
)
def test_buckets_do_not_change_what_flows_where(model, x):
    assert flows(model, x, plan=in_buckets()) == flows(model, x)


def test_collectives_of_a_bucket_are_of_the_model_and_leave_layers_alike():
    tree = net(plan=in_buckets())[0]
    assert texts(draw_boxes(tree)).count("layers.0 to layers.3") == 1
    assert [traffic.count for traffic in tree.root.traffic.values()] == [1, 1, 1]
    assert not any(module.traffic for module in tree.root.find("layers").walk())


def test_collectives_between_operators_are_of_the_module_whose_values_they_move():
    layers = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)]
    tree, _ = outline(
        nn.Sequential(nn.Sequential(*layers), nn.Tanh()), torch.zeros(64, 8), plan=preset("tp", {"tp": 2})
    )
    moved = ("forward", "all_reduce", "tp")
    assert [module.path for module in tree.root.walk() if moved in module.traffic] == ["0.0.2", "0.1.2", "0.2.2"]


def test_a_parameter_beside_modules_is_a_site_of_its_own():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    found = flows(Scaled(), torch.randn(2, 4))
    assert found == {("inputs", "linear"), ("linear", "scale"), ("scale", "outputs")}


def test_positions_come_from_nowhere():
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(7, 4), nn.Embedding(7, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.token(ids) + self.position(torch.arange(ids.shape[1]))

    found = flows(Placed(), torch.zeros(2, 3, dtype=torch.long))
    assert [source for source, target in found if target == "position"] == []
    assert ("position", "add") in found


def test_modules_have_their_names_under_a_loss_too():
    model = nn.Sequential()
    model.add_module("model", nn.Linear(4, 4))
    call = {"target": torch.zeros(2, 4)}
    program = build_program(model, preset("fsdp", {"dp": 2}), (torch.zeros(2, 4),), call, loss_fn=F.mse_loss)
    tree = build_tree(program)
    ends = {(source.module.path, target.module.path) for source, target in trace_flow(program.forward, tree.root)}
    assert ("", "model") in ends and list(tree.root.children) == ["model"]


def test_modules_have_their_names_whatever_forward_calls_its_module():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(this, x: torch.Tensor) -> torch.Tensor:
            return this.linear(x)

    assert flows(Named(), torch.randn(2, 4)) == {("inputs", "linear"), ("linear", "outputs")}


def test_an_edge_of_the_graph_ends_at_the_cluster_of_a_module():
    tree, flow = outline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)), torch.randn(2, 4))
    assert '"0.weight" -> "label of 1" [lhead="cluster 1" ltail="cluster 0"]' in plan_graph(tree, flow).source


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def analysis():
    model, (args, kwargs) = make("conv-batch-norm", 2)
    return analyze(model, args, preset("fsdp", {"dp": 2}), example_kwargs=kwargs, cluster=toy_cluster())


def test_the_peak_is_marked_with_its_bytes_and_its_operation(analysis):
    found = texts(draw_memory(analysis))
    peak = f"{analysis.peak_memory / 1024:.1f} KiB"
    assert peak in found
    assert any(line.startswith(f"Peak {peak} at {analysis.peak.label} ({analysis.peak.half}") for line in found)


def test_every_kind_of_memory_is_stacked_and_named(analysis):
    kinds = {kind for row in analysis.rows for kind in row.memory}
    drawing = draw_memory(analysis)
    assert kinds <= set(texts(drawing))
    assert all(f"<title>{kind}</title>" in drawing.body for kind in kinds)


def test_the_halves_of_the_step_are_named(analysis):
    assert {"forward", "backward", "optimizer"} <= set(texts(draw_memory(analysis)))


@pytest.mark.parametrize("times, shown", [(0.7, True), (1.5, True), (3.0, False)])
def test_the_devices_memory_is_drawn_where_the_peak_is_near_it(analysis, times, shown):
    cluster = toy_cluster(memory=round(times * analysis.peak_memory))
    found = texts(draw_memory(replace(analysis, cluster=cluster)))
    assert any(line.startswith("toy has") for line in found) == shown


def test_a_step_of_many_operations_is_no_larger_a_picture(analysis):
    many = replace(analysis, rows=tuple(row for row in analysis.rows for _ in range(200)))
    assert len(draw_memory(many).body) < 220_000
    assert f"{analysis.peak_memory / 1024:.1f} KiB" in texts(draw_memory(many))


# -- pipeline schedules ----------------------------------------------------------------------------


def schedule(name: str, cost: StageCost, each: int = 1) -> SimulatedSchedule:
    return simulate_schedule(pipeline_order(name, 2, 2 * each, 4), [cost] * (2 * each))


def bars(drawing: Drawing) -> list[tuple[str, int, int]]:
    """Each action with the ends of its bar."""
    found = []
    for rect in ET.fromstring(document("test", [drawing])).iter("{http://www.w3.org/2000/svg}rect"):
        if len(rect):
            left, width = int(rect.attrib["x"]), int(rect.attrib["width"])
            found.append(((rect[0].text or "").partition(":")[0], left, left + width))
    return found


def test_every_action_of_a_schedule_is_a_bar_with_its_microbatch():
    drawing = draw_gantt(schedule("1f1b", StageCost(1.0, 2.0)))
    assert [name for name, _, _ in bars(drawing)][:8] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert texts(drawing).count("3") == 4


def test_bars_are_as_long_as_their_actions_and_never_overlap():
    drawn = bars(draw_gantt(schedule("1f1b", StageCost(1.0, 2.0))))
    forward, backward = (right - left for name, left, right in drawn if name in ("1F0", "1B0"))
    assert backward == pytest.approx(2 * forward, abs=4)  # whole pixels, and one between bars
    for rank in "01":
        ends = [(left, right) for name, left, right in drawn if name.startswith(rank)]
        assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_a_rank_of_a_schedule_shows_what_it_waits_and_holds():
    found = texts(draw_gantt(schedule("1f1b", StageCost(1.0, 2.0, saved=1024, fixed=512))))
    assert {"15 s a step; ranks wait 20.0% of it", "waits 20.0%", "at most 2.5 KiB", "at most 1.5 KiB"} <= set(found)


def test_a_schedule_without_bytes_shows_no_memory():
    assert not any("peak" in line or "memory" in line for line in texts(draw_gantt(schedule("gpipe", StageCost(1, 2)))))


def test_stages_of_a_rank_have_shades_of_their_own():
    def forwards(each: int, name: str) -> set[str]:
        drawing = draw_gantt(schedule(name, StageCost(1.0, 2.0), each))
        rects = ET.fromstring(document("test", [drawing])).iter("{http://www.w3.org/2000/svg}rect")
        return {rect.attrib["fill"] for rect in rects if len(rect) and "F" in (rect[0].text or "")}

    assert (len(forwards(1, "1f1b")), len(forwards(2, "zbv"))) == (1, 2)


def test_a_schedule_is_written_as_one_svg_file(tmp_path):
    path = draw_schedule(schedule("dualpipev", StageCost(1.0, 2.0), 2), tmp_path / "schedule.svg", "Mine & yours")
    assert "Mine & yours" in [element.text for element in ET.parse(path).getroot().iter()]
