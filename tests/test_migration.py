"""What the tables of docs/migration.md call ours is ours: each function, option, value, plan, method and field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.module.sharded import ShardedModule
from shardgraph.plans.plan import Plan
from tests.machines import toy_cluster

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
THEIRS = ("torch.", "optimizer.", "loss.", "with torch", "DeviceMesh", "meta", "module.")  # torch's own, and prose
OPTIONS = set(inspect.signature(shardgraph.compile).parameters) | set(inspect.signature(shardgraph.plan).parameters)
FIELDS = {field.name for field in dataclasses.fields(Plan)} | OPTIONS


def rows() -> Iterator[tuple[str, list[str]]]:
    """What each row is of, and the pieces of code in its columns of ours."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) > 1 and (code := re.findall(r"`([^`]+)`", " ".join(cells[1:]))):
            yield cells[0], [each for each in code if not each.startswith(THEIRS)]


def ours(name: str) -> Any:
    """A public name, or what a compiled module or a plan has, by the name with or without its owner."""
    last = name.rpartition(".")[2]
    places = (shardgraph, shardgraph.nn, ShardedModule, Plan)
    return next((getattr(place, last) for place in places if hasattr(place, last)), None)


def check(code: str) -> None:
    """Assert that a piece of code names what there is."""
    if code in FIELDS or ours(code) is not None or re.fullmatch(r'"[\w.]+"', code):
        return
    if re.fullmatch(r"[a-z0-9+-]+", code):
        shardgraph.preset(code, MESHES[code])
        return
    if re.match(r"\w+=", code):
        code = f"compile(model, {code if not code.endswith('=') else code + '...'})"
    call = outer(code)
    function = ours(ast.unparse(call.func))
    assert function is not None, code
    names = set(inspect.signature(function).parameters)
    assert {each.arg for each in call.keywords} <= names, code


def outer(code: str) -> ast.Call:
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call), code
    return statement.value


MESHES: dict[str, dict[str, int]] = {
    **{name: {"dp": 2} for name in ("ddp", "zero1", "zero2", "fsdp")},
    **{
        name: dict.fromkeys(name.removesuffix("+sp").split("+"), 2)
        for name in ("tp", "tp+sp", "cp", "cp+tp+sp", "ep", "pp")
    },
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "local-sgd": {"dp": 2},
}


@pytest.mark.parametrize(("of", "code"), [pytest.param(*row, id=row[0][:40]) for row in rows()])
def test_what_a_row_calls_ours_is_there(of: str, code: list[str]) -> None:
    for each in code:
        check(each)


def values() -> Iterator[tuple[str, str]]:
    """The options with a value that rows have, such as ``recompute="full"`` and then ``"selective"``."""
    for _, code in rows():
        option = ""
        for each in code:
            if found := re.fullmatch(r'(\w+)="([\w.]+)"', each):
                option = found[1]
                yield option, found[2]
            elif option and (alone := re.fullmatch(r'"([\w.]+)"', each)):
                yield option, alone[1]


@pytest.mark.parametrize(("option", "value"), sorted(set(values())))
def test_an_option_takes_the_value_that_a_row_gives_it(option: str, value: str) -> None:
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.zeros(4, 8)
    if option == "loss_weight":
        shardgraph.compile(net, "single", loss_weight=value)
        return
    cluster = dataclasses.replace(toy_cluster(), device=shardgraph.Cluster.of("H100").device)
    found = shardgraph.analyze(net, (x,), "fsdp", mesh={"dp": 2}, cluster=cluster, **{option: value})
    assert found.peak_memory > 0
