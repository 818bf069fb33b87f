"""What the documents show is there, and runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardgraph.cli.main import app, main
from tests import accelerated
from tests.standing import on_ranks

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *ROOT.glob("benchmarks/*.md"),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_files_and_folders_exist(document: Path) -> None:
    named = re.findall(r"`((?:shardgraph|passes|cost_models|tests|benchmarks)/[\w/.]*)`", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_is_at_most_100_characters_wide(document: Path) -> None:
    without_code = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    prose = [line for line in without_code.splitlines() if not line.startswith(("|", "![", "    "))]
    assert [line for line in prose if len(line) > 100] == []


def test_the_readme_has_the_packages_in_the_order_in_which_they_may_import_each_other() -> None:
    contract, *_ = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contract["layers"]]
    table = (ROOT / "README.md").read_text().partition("| package | |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")]
    number = {name: number for number, layer in enumerate(layers) for name in layer}
    assert sorted(named, key=number.__getitem__) == named
    assert set(named) == set(number)


@pytest.mark.parametrize("document", ["torch_tests.md", "fairscale.md", "trainers.md", "faults.md"])
def test_the_tests_that_a_table_names_exist(document: str) -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / document).read_text()))
    there = {file: (ROOT / "tests" / file).read_text() for file, _ in named}
    assert named and [name for name in sorted(named) if f"def {name[1]}(" not in there[name[0]]] == []


def test_the_counts_of_the_table_of_torchs_tests_are_those_of_its_rows() -> None:
    overview, *sections = (ROOT / "docs" / "torch_tests.md").read_text().split("\n## ")
    told = [[int(each) for each in line] for line in re.findall(r"\| (\d+) \| (\d+) \| (\d+) \|", overview)]
    counted = []
    for section in sections:
        rows = re.findall(r"^\| `test_\w+` \| .* \| (.*) \|$", section, re.MULTILINE)
        absent = sum(row.startswith("does not apply: ") for row in rows)
        counted.append([len(rows), len(rows) - absent, absent])
    assert told == [*counted, [sum(each) for each in zip(*counted, strict=True)]]


@pytest.mark.timeout(280)
@pytest.mark.quick("README.md")
@pytest.mark.parametrize("document", ["README.md", "docs/pipeline.md", "docs/checkpoints.md", "docs/faults.md"])
def test_the_examples_of_the_documents_run_on_two_ranks(document: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    script = tmp_path / "example.py"  # a file: ranks import the function that they run
    script.write_text(code.replace("/dev/shm/", f"{tmp_path}/memory/"))
    # The launched ranks end by themselves when this one is killed.
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert document != "README.md" or ran.stdout.count("loss") == 6  # whoever types it in sees that it trains


@pytest.mark.quick("Lightning Fabric")
@pytest.mark.parametrize(
    "section", ["Hugging Face Accelerate", "Hugging Face Trainer", "Lightning", "Lightning Fabric"]
)
def test_the_examples_of_trainers_run_on_two_ranks(section: str, tmp_path: Path) -> None:
    _, _, text = (ROOT / "docs" / "trainers.md").read_text().partition(f"## {section}\n")
    code, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    first, second = on_ranks(accelerated.runs, args=(code, str(tmp_path)))
    assert first == second


@pytest.mark.slow
def test_the_example_of_annotations_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "annotations.md").read_text(), re.DOTALL)
    exec(code, {})
    shown = capsys.readouterr().out
    assert "equal: plan fsdp+tp" in shown and shown.count("annotated") == 6


@pytest.mark.slow
def test_the_example_of_checks_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checks.md").read_text(), re.DOTALL)
    exec(code, {})
    shown = capsys.readouterr().out.partition(" of ")[0]  # of so many values, which rules may change
    assert shown.startswith("proved: ") and f"# {shown} of " in code


def test_the_example_of_mixed_precision_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "precision.md").read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.count("equal: plan fsdp on 2 ranks") == 2


@pytest.mark.slow
def test_the_examples_of_the_command_line_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for name, code in zip(("jobs.py", "train.py"), re.findall(r"```python\n(.*?)```", text, re.DOTALL), strict=True):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    (examples,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    for example in examples.splitlines():
        assert main(shlex.split(example.removeprefix("$ shardgraph "))) == 0, (example, capfd.readouterr())
    shown = capfd.readouterr().out
    assert "equal: plan fsdp on 2 ranks" in shown and "rank 1 of 2, lr=0.1" in shown
    assert (tmp_path / "plan.yaml").exists() and (tmp_path / "report.html").exists()


def test_every_command_is_in_its_document() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    table = (ROOT / "docs" / "cli.md").read_text().partition("shardgraph COMMAND")[0]
    assert {each.replace("_", "-") for each in commands} == set(re.findall(r"`([\w-]+)`", table)) - {"shardgraph"}
