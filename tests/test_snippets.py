"""Code and commands on the pages: what they call is there, with the arguments that they give it; whole programs run."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shardgraph.cli.main import app
from tests.emitted import under_torchrun

ROOT = Path(__file__).parent.parent
REGIONS = ("forward", "backward")  # of a profile, called `shardgraph forward`
PAGES = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md")), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*.md")]


def snippets(page: Path) -> Iterator[str]:
    """What a page has in fences, indented, or as code within a line."""
    text = page.read_text()
    yield from re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from indented(rest)
    yield from re.findall(r"`([^`\n]+)`", rest)


def indented(text: str) -> Iterator[str]:
    for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, re.MULTILINE):
        yield re.sub(r"^    ", "", block, flags=re.MULTILINE)


def calls(page: Path) -> Iterator[ast.Call]:
    """The calls of public functions in what is Python on a page."""
    for snippet in snippets(page):
        try:
            tree = ast.parse(snippet)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("shardgraph."):
                yield node


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of ``shardgraph`` on a page, as words."""
    for snippet in snippets(page):
        for line in re.findall(r"^(?:\$ )?shardgraph (.+)$", snippet, re.MULTILINE):
            yield shlex.split(line, comments=True)


def public(dotted: str) -> Any:
    """What a dotted name is of; rooms such as ``shardgraph.pictures`` are imported first."""
    return pkgutil.resolve_name(dotted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_functions_on_a_page_are_public_and_take_what_they_are_given(page: Path) -> None:
    for call in calls(page):
        written = ast.unparse(call)
        function = public(ast.unparse(call.func))
        if any(isinstance(each, ast.Constant) and each.value is ... for each in call.args):
            continue  # arguments that are left out
        given = {each.arg: None for each in call.keywords if each.arg is not None}
        signature = inspect.signature(function)
        try:
            signature.bind_partial(*call.args, **given)
        except TypeError as error:
            pytest.fail(f"{written}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_on_a_page_are_there_with_their_options(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    own = {name for each in group.params for name in each.opts} | {"--install-completion", "--show-completion"}
    for words in commands(page):
        while words and words[0].startswith("-"):
            assert words.pop(0) in own
        if not words or words[0] in ("COMMAND", *REGIONS):
            continue
        name, *rest = words
        assert name in group.commands, " ".join(words)
        known = {option for each in group.commands[name].params for option in (*each.opts, *each.secondary_opts)}
        known |= {"-h", "--help"}
        options = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert name == "run" or options <= known, " ".join(words)


def code_of(page: str) -> str:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return code


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_short_snippets_of_the_readme_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, text = (ROOT / "README.md").read_text().partition("```python\n")
    script, _, text = text.partition("```\n")
    space: dict[str, Any] = {}
    exec(script.partition("\n\n")[0], space)  # its imports
    pieces = [piece for piece in indented(text) if "shardgraph." in piece]
    for piece in pieces:
        exec(piece, space)
    shown = capsys.readouterr().out
    for line in ("equal: plan fsdp on 4 ranks", "proved: ", "plan fsdp on H100", "chosen by 'auto'", "best plan"):
        assert line in shown
    assert len(pieces) == 5 and (tmp_path / "plan.svg").exists()


@pytest.mark.slow
def test_the_program_of_the_page_on_emitting_trains_by_its_command_where_torch_alone_is(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(code_of("emit.md"))
    subprocess.run([sys.executable, "model.py"], cwd=tmp_path, check=True, capture_output=True, timeout=240)
    page = (ROOT / "docs" / "emit.md").read_text()
    (command,) = re.findall(r"```console\n\$ (torchrun .*)\n```", page)
    assert {line.strip() for line in (tmp_path / "program" / "program.py").read_text().splitlines()} >= {
        command.replace("program/", "")
    }
    first, second = under_torchrun(["--standalone", *shlex.split(command)[1:]], tmp_path)
    assert first == second and first[-1] < first[0]


def test_the_layer_of_the_page_on_experts_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "moe.md").read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(pieces[0], space)
    assert "equal: plan fsdp on 2 ranks" in capsys.readouterr().out
    for piece in pieces[1:]:
        assert eval(piece, space).ok
