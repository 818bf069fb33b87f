"""The picture of a partition plan."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.picture import draw
from shardgraph.plan import REPLICATE, SHARD, ParameterPlan

MESH = (("replica", 2), ("shard", 4))
SHARDED = ParameterPlan((REPLICATE, SHARD))
WHOLE = ParameterPlan((REPLICATE, REPLICATE), "all_reduce", reshard_after_forward=False)


def plan(layers: int = 12) -> tuple[dict[str, ParameterPlan], dict[str, tuple[int, ...]]]:
    parameters, shapes = {"embed.weight": SHARDED}, {"embed.weight": (1001, 8)}
    for i in range(layers):
        parameters |= {f"layers.{i}.linear.weight": SHARDED, f"layers.{i}.norm.weight": WHOLE}
        shapes |= {f"layers.{i}.linear.weight": (16, 8), f"layers.{i}.norm.weight": (8,)}
    return parameters, shapes


def program(parameters: dict[str, ParameterPlan], shapes: dict[str, tuple[int, ...]]) -> fx.GraphModule:
    """A graph that gathers the embedding."""
    graph = fx.Graph()
    for fqn, shape in shapes.items():
        node = graph.placeholder(fqn.replace(".", "_"))
        node.meta.update(role=ir.Parameter(fqn), val=torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        if fqn == "embed.weight":
            node.meta["val"] = torch.empty(251, 8, device="meta", dtype=torch.bfloat16)
            start = graph.call_function(ir.ALL_GATHER, (node, 4, "shard"))
            start.meta.update(val=torch.empty(1004, 8, device="meta", dtype=torch.bfloat16), subject=fqn)
    graph.output(()).meta["roles"] = []
    return fx.GraphModule({}, graph)


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def drawn(tmp_path: Path) -> list[str]:
    parameters, shapes = plan()
    return texts(draw(program(parameters, shapes), None, MESH, parameters, shapes, tmp_path / "plan.svg"))


def test_alike_layers_are_drawn_once(drawn: list[str]) -> None:
    assert drawn.count("layers.0 .. layers.11 x12") == 1
    assert drawn.count("linear") == 1


def test_a_layer_with_another_shape_is_drawn_apart(tmp_path: Path) -> None:
    parameters, shapes = plan()
    shapes["layers.5.linear.weight"] = (32, 8)
    found = texts(draw(program(parameters, shapes), None, MESH, parameters, shapes, tmp_path / "plan.svg"))
    assert {"layers.0 .. layers.4 x5", "5", "layers.6 .. layers.11 x6"} <= set(found)


def test_a_layer_with_another_placement_is_drawn_apart(tmp_path: Path) -> None:
    parameters, shapes = plan()
    parameters["layers.0.linear.weight"] = WHOLE
    found = texts(draw(program(parameters, shapes), None, MESH, parameters, shapes, tmp_path / "plan.svg"))
    assert {"0", "layers.1 .. layers.11 x11"} <= set(found)


def test_every_placement_is_in_the_legend_with_its_bytes(drawn: list[str]) -> None:
    sharded = (251 * 8 + 12 * 4 * 8) * 2
    assert f"replicate over replica, shard(0) over shard: 13 parameters, {sharded / 1024:.1f} KiB per rank" in drawn
    assert "replicate over replica, replicate over shard: 12 parameters, 192 B per rank" in drawn


def test_a_parameter_shows_its_whole_and_its_local_shape(drawn: list[str]) -> None:
    assert "(1001, 8) -> (251, 8)" in drawn
    assert "(8)" in drawn


def test_a_module_lists_its_collectives_with_their_bytes(drawn: list[str]) -> None:
    assert "forward: 1 x all_gather_into_tensor over shard" in drawn
    assert f"{3 * 251 * 8 * 2 / 1024:.1f} KiB sent" in drawn


def test_names_are_escaped(tmp_path: Path) -> None:
    parameters, shapes = {"a<b.weight": WHOLE}, {"a<b.weight": (8,)}
    gm = fx.GraphModule({}, fx.Graph())
    gm.graph.output(()).meta["roles"] = []
    assert "a<b" in texts(draw(gm, None, MESH, parameters, shapes, tmp_path / "plan.svg"))
