"""The tutorial runs, messages that are quoted are those of the sources, and the site has every page and public name."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def text_of(node: ast.AST) -> str:
    """A string of the sources, with ``...`` for what is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "..."


def test_messages_that_are_quoted_are_in_the_sources():
    files = [path for folder in ("shardgraph", "passes", "cost_models") for path in (ROOT / folder).rglob("*.py")]
    strings = "\0".join(
        text_of(node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ).replace("%s", "...")
    quoted = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 40
    for message in quoted:
        parts = [re.escape(part) for part in message.split("...") if part]
        assert re.search("[^\0]*?".join(parts), strings), message


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_tutorial_runs(tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    work = "\n".join(block for block in blocks if block.startswith("# work.py"))
    (tmp_path / "work.py").write_text(work)
    steps = "\n".join(block for block in blocks if not block.startswith("# work.py"))
    indented = "".join(f"    {line}" for line in steps.splitlines(keepends=True))
    (tmp_path / "steps.py").write_text(f'if __name__ == "__main__":\n{indented}')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "steps.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=260)
    assert ran.returncode == 0, ran.stderr
    assert "equal: plan fsdp on 2 ranks" in ran.stdout and (tmp_path / "report.html").exists()
    losses = [float(found) for found in re.findall(r"loss (\S+) -> (\S+)", ran.stdout) for found in found]
    first, trained, resumed, last = losses
    assert trained < 0.5 * first and resumed < 0.5 * first and last < 0.5 * first


def test_the_reference_has_every_public_name():
    listed = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    stub = (ROOT / "shardgraph" / "__init__.pyi").read_text()
    public = set(re.findall(r"(\w+) as \w+", stub)) - {"nn"}
    assert len(listed) == len(set(listed))
    assert {name.rpartition(".")[2] for name in listed} - {"MoE"} == public


@pytest.mark.slow
def test_pictures_are_of_the_graphs_that_are_compiled_now():
    draw = loaded(DOCS / "pictures" / "draw.py")
    for name, of in draw.PICTURES.items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == draw.document(name, [*of(), draw.legend()]), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
def test_the_readme_shows_a_plan_as_it_is_drawn_now(tmp_path: Path):
    drawn = loaded(DOCS / "pictures" / "readme.py").plan(tmp_path / "plan.svg")
    shown, now = (sorted(ET.parse(path).getroot().itertext()) for path in (DOCS / "plan.svg", drawn))
    assert shown == now  # where Graphviz puts it depends on its version


def test_the_page_on_pipelines_shows_a_schedule_as_it_is_drawn_now(tmp_path: Path):
    drawn = loaded(DOCS / "pictures" / "readme.py").schedule(tmp_path / "schedule.svg")
    assert (DOCS / "schedule.svg").read_text() == drawn.read_text()


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {path.name for path in DOCS.glob("*.md")} <= set(navigation)
    assert {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")} <= set(navigation)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path):
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    # Not --quiet, which hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=270)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    broken = []
    for page in tmp_path.rglob("*.html"):
        if page.name == "404.html":  # of a server, with addresses from its root
            continue
        for target in re.findall(r'(?:href|src)="([^"#?:]+)(?:#[^"]*)?"', page.read_text()):
            if not (page.parent / unquote(target)).exists():
                broken.append((page.name, target))
    assert broken == []
    assert (
        yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("markdown_extensions")[0])["theme"]["font"] is False
    )
