"""What the documents show runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import shardgraph
from shardgraph.plan import Plan
from shardgraph.progress import Progress

ROOT = Path(__file__).parent.parent


def fenced(document: str, start: str) -> str:
    text = (ROOT / document).read_text()
    return text[text.index(start) :].removeprefix(start).partition("```")[0]


def test_the_notebook_runs():
    cells = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    scope: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
    assert scope["report"].ok


def test_the_example_of_the_readme_trains(monkeypatch: pytest.MonkeyPatch):
    source = fenced("README.md", "```python\n")
    scope: dict = {"__name__": "readme"}
    exec(compile(ast.parse(source), "README.md", "exec"), scope)
    monkeypatch.setattr(shardgraph, "launch", lambda fn, nproc: fn())
    plans = []
    compile_model = shardgraph.compile
    monkeypatch.setattr(shardgraph, "compile", lambda model, plan: plans.append(plan) or compile_model(model, "single"))
    scope["main"]()
    assert plans == ["fsdp"]


def test_the_plan_in_the_documentation_is_a_plan():
    text = (ROOT / "docs" / "plans.md").read_text()
    block = text[text.index("    schema: 1") :].partition("\n\n")[0]
    plan = Plan.from_yaml("\n".join(line.removeprefix("    ") for line in block.splitlines()))
    assert plan.world_size == 2 and not dict(plan.parameters)["lm_head.weight"].reshard_after_forward


def test_a_long_compilation_says_what_it_does(capsys: pytest.CaptureFixture[str]):
    with Progress("fsdp", 2, enabled=True) as show:
        show("capture")
        show("rewrite")
    assert "shardgraph fsdp: rewrite" in capsys.readouterr().err


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    shardgraph.compile(torch.nn.Linear(2, 2), "single", example_inputs=(torch.ones(1, 2),))
    assert capsys.readouterr().err == ""
