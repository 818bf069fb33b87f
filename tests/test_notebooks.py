"""The notebooks run, and show what they were saved with; numbers may differ, which depend on machine and torch."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LARGEST = 400_000  # bytes of a file


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def printed_in(cell: dict[str, Any]) -> str:
    return "".join("".join(each["text"]) for each in cell["outputs"] if each["output_type"] == "stream")


def words(text: str) -> list[str]:
    """The text without numbers and what is measured in them, nor what of all was measured to round most."""
    text = re.sub(r"(?<=\): )[\w .]+(?= at step \d)", "#", text)
    return re.sub(r"\d[\d.,]*(e[+-]\d+)?( (GiB|MiB|KiB|B|s|ms|us|ns)\b)?", "#", text).split()


def run(source: str, space: dict[str, Any]) -> object:
    """Run a cell; returns the value of the expression that it ends with, or None."""
    *body, last = ast.parse(source).body
    ends = [last] if isinstance(last, ast.Expr) else []
    exec(compile(ast.Module(body if ends else [*body, last], []), "cell", "exec"), space)
    return eval(compile(ast.Expression(ends[0].value), "cell", "eval"), space) if ends else None


@pytest.mark.quick("own_pass", "quickstart")
@pytest.mark.parametrize(
    "path",
    # Searches for thousands of devices and for what fits take minutes.
    [pytest.param(path, marks=pytest.mark.slow if path.stem in ("cluster", "fitting") else ()) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_shows_what_it_was_saved_with(path: Path, capsys: pytest.CaptureFixture[str]):
    space: dict[str, Any] = {"__name__": "__main__"}
    capsys.readouterr()
    for cell in cells_of(path):
        value = run("".join(cell["source"]), space)
        assert words(capsys.readouterr().out) == words(printed_in(cell))
        shown = [each["data"] for each in cell["outputs"] if "data" in each]
        assert bool(shown) == (value is not None)
        assert all("text/html" not in each or hasattr(value, "_repr_html_") for each in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_saved_whole_and_small(path: Path):
    errors = [each for cell in cells_of(path) for each in cell["outputs"] if each["output_type"] == "error"]
    printed = "".join(map(printed_in, cells_of(path)))
    assert errors == [] and printed and path.stat().st_size < LARGEST
    assert path.name in (path.parent / "README.md").read_text()
