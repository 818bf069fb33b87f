"""``shardgraph.visualize``: what it draws, in which form, with and without Graphviz's program."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Offload, PlanError, ShardGraphError
from shardgraph.plans.batch import Batch
from shardgraph.report.analysis import analyze_program
from tests.machines import toy_cluster

PLAN = shardgraph.preset("fsdp", {"dp": 2})
INPUTS = (torch.zeros(2, 4),)

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def visualize(path: Path, what: object = PLAN) -> str:
    """The text of a picture of the model under a plan."""
    return shardgraph.visualize(what, path, model=model(), example_inputs=INPUTS).read_text()


@pytest.fixture
def no_dot(monkeypatch):
    monkeypatch.setenv("PATH", "")


# -- forms -----------------------------------------------------------------------------------------


@needs_dot
def test_an_svg_has_the_graph_of_the_plan_and_the_memory(tmp_path):
    text = visualize(tmp_path / "plan.svg")
    assert {"Plan fsdp on dp=2", "inputs"} <= set(ET.fromstring(text).itertext())
    assert 'class="cluster"' in text and "Memory of a rank over a step" in text


@pytest.mark.parametrize(("reduce", "sent"), [("each", "call"), ("last", "last call")])
def test_a_picture_says_how_a_step_is_divided_and_what_a_call_sends(tmp_path, reduce, sent):
    plan = replace(PLAN, batch=Batch(16, 4, reduce))
    text = visualize(tmp_path / "plan.dot", plan)
    assert "16 samples a step: 2 data ranks x 4 calls" in text and f"Sent per rank and {sent}: " in text


@needs_dot
@pytest.mark.parametrize("form, magic", [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_png_and_a_pdf_are_the_plan(tmp_path, form, magic):
    path = shardgraph.visualize(PLAN, tmp_path / f"plan.{form}", model=model(), example_inputs=INPUTS)
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("ending", ["dot", "gv"])
def test_the_language_of_graphviz_needs_no_program(tmp_path, no_dot, ending):
    assert visualize(tmp_path / f"plan.{ending}").startswith("digraph")


def test_without_the_program_an_svg_has_boxes_and_a_warning_says_how_to_get_it(tmp_path, no_dot):
    with pytest.warns(UserWarning, match="apt-get install graphviz"):
        text = visualize(tmp_path / "plan.svg")
    assert "forward: 2 x all_gather over dp" in set(ET.fromstring(text).itertext())
    assert "Memory of a rank over a step" in text and 'class="cluster"' not in text


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_without_the_program_a_png_is_refused_and_the_error_says_what_works(tmp_path, no_dot, form):
    with pytest.raises(ShardGraphError, match=r"apt-get install graphviz.*\.svg, \.html, \.dot and \.gv"):
        visualize(tmp_path / f"plan.{form}")


def test_a_page_has_the_plan_as_text_and_both_pictures(tmp_path):
    page = visualize(tmp_path / "plan.html")
    assert page.count("<svg ") == 2 and "http" not in page.replace("http://www.w3.org/", "")
    assert "plan fsdp on dp=2, prefetch 4" in page and "&lt;- chosen" not in page


def test_a_page_says_what_the_plan_was_chosen_among(tmp_path):
    cluster = toy_cluster(devices_per_node=2)
    chosen = shardgraph.analyze(model(), INPUTS, "auto", cluster=cluster).plan
    assert "recomputed" in visualize(tmp_path / "plan.html", chosen)


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ShardGraphError, match=r"plan\.jpg.*\.svg, \.html"):
        visualize(tmp_path / "plan.jpg")


# -- what is drawn ---------------------------------------------------------------------------------


def test_a_compiled_module_is_drawn_from_its_latest_program(tmp_path):
    sharded = shardgraph.compile(model(), "single", example_inputs=INPUTS)
    assert "Plan single on one process" in shardgraph.visualize(sharded, tmp_path / "plan.svg").read_text()


def test_a_module_that_has_not_been_compiled_is_refused(tmp_path):
    with pytest.raises(ShardGraphError, match="call the module once"):
        shardgraph.visualize(shardgraph.compile(model(), "single"), tmp_path / "plan.svg")


def test_a_plan_without_its_model_is_refused(tmp_path):
    with pytest.raises(PlanError, match="model and example_inputs"):
        shardgraph.visualize(PLAN, tmp_path / "plan.svg")


def test_a_plans_name_is_refused_and_the_error_says_how_to_make_the_plan(tmp_path):
    with pytest.raises(ShardGraphError, match=r"shardgraph\.preset"):
        visualize(tmp_path / "plan.svg", "fsdp")


def analysis_of(plan: str = "fsdp") -> shardgraph.Analysis | shardgraph.PipelineAnalysis:
    call = {"example_kwargs": {"target": torch.zeros(8, 3)}, "loss_fn": nn.functional.mse_loss}
    mesh = {"pp" if plan == "pp" else "dp": 2}
    return shardgraph.analyze(model(), (torch.zeros(8, 4),), plan, mesh=mesh, cluster=toy_cluster(), **call)


@pytest.mark.parametrize("plan", ["fsdp", "pp"])
def test_an_analysis_alone_is_drawn_in_every_format(tmp_path, plan):
    analysis, over_time = analysis_of(plan), {"fsdp": "Memory of a rank", "pp": "Schedule"}[plan]
    for ending in ("svg", "html", "dot", "gv"):
        picture = shardgraph.visualize(analysis, tmp_path / f"plan.{ending}").read_text()
        assert f"Plan {plan} on {'pp' if plan == 'pp' else 'dp'}=2" in picture, ending
        assert ("over one rank of each stage" in picture) == ("B per rank" not in picture) == (plan == "pp")
        assert (over_time in picture) == (ending in ("svg", "html")), ending


@needs_dot
@pytest.mark.parametrize("form, magic", [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_an_analysis_alone_is_a_png_and_a_pdf_of_its_plan(tmp_path, form, magic):
    assert shardgraph.visualize(analysis_of(), tmp_path / f"plan.{form}").read_bytes().startswith(magic)


def test_the_analysis_of_a_compiled_program_is_refused_and_the_error_says_what_is_drawn(tmp_path):
    sharded = shardgraph.compile(model(), "single", example_inputs=INPUTS)
    analysis = analyze_program(sharded.program, toy_cluster())
    with pytest.raises(ShardGraphError, match="give visualize the compiled module"):
        shardgraph.visualize(analysis, tmp_path / "plan.svg")


def test_offloaded_parameters_are_drawn_as_such(tmp_path):
    plan = replace(PLAN, offload=Offload(parameters=True))
    assert "shard(0) over dp, on the host" in visualize(tmp_path / "plan.dot", plan)


def test_hundreds_of_layers_are_a_small_picture(tmp_path):
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(300))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    path = shardgraph.visualize(PLAN, tmp_path / "plan.dot", model=Deep(), example_inputs=INPUTS)
    text = path.read_text()
    assert len(text) < 5_000 and "299 equal layers" in text
