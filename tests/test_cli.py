"""The command line: each command with what it does and what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardgraph
from shardgraph.__main__ import main as entry
from shardgraph.cli import doctor
from shardgraph.cli.main import app, main
from shardgraph.cli.model import job_of
from shardgraph.cli.planning import _text
from shardgraph.plans.plan import Plan

pytestmark = pytest.mark.timeout(120)

HERE = "tests.test_cli"
SMALL = [f"--set={each}" for each in ("n_layer=1", "n_embd=16", "n_head=2", "vocab_size=32", "bos_token_id=0")]
GPT2 = ["gpt2", *SMALL, "--set=eos_token_id=0", "--sequence", "8"]


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(4, 8),)


def bilinear() -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    return nn.Bilinear(4, 4, 2), (), {"input1": torch.randn(2, 4), "input2": torch.randn(2, 4)}


def module_alone() -> nn.Module:
    return nn.Linear(2, 2)


def needs_a_width(width: int) -> nn.Module:
    return nn.Linear(width, width)


def reads_a_value() -> tuple[nn.Module, tuple[torch.Tensor]]:
    width = int(torch.tensor(2.0).item())
    return nn.Linear(width, width), (torch.ones(2, width),)


def no_module() -> int:
    return 5


def talks() -> tuple[nn.Module, tuple[torch.Tensor]]:
    print("building")
    return mlp()


def ends() -> nn.Module:
    sys.exit(0)


made = nn.Linear(2, 2)


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def answer(*arguments: str | Path) -> Any:
    """What a command prints as JSON; it ends well."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refusal(*arguments: str | Path) -> str:
    """What a command says that cannot be: a few lines, and no traceback."""
    done = run(*arguments)
    assert done.exit_code == 2 and "Traceback" not in done.output and not done.stdout, done.output
    return done.stderr


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    shardgraph.preset("fsdp", {"dp": 2}).save(path)
    return path


def search_for(samples: int, path: Path) -> tuple[Path, str]:
    """A plan that was searched for, and what was shown of it."""
    done = run("plan", f"{HERE}:mlp", "--cluster", "H100", "--devices", "2", "--global-batch", samples, "-o", path)
    assert done.exit_code == 0, done.output
    return path, done.stdout


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return search_for(8, tmp_path_factory.mktemp("searched") / "plan.yaml")


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"shardgraph {shardgraph.__version__}\n"


def test_an_option_that_there_is_not_is_wrong_usage() -> None:
    assert run("analyze", "gpt2", "--lyers", "2").exit_code == 2


def test_a_traceback_is_shown_on_request() -> None:
    done = run("--traceback", "explain", "missing.yaml")
    assert done.exit_code == 2 and "Traceback" in done.stderr and "PlanError" in done.stderr


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardgraph.plans.plan.Plan.load", interrupted)
    done = run("explain", "plan.yaml")
    assert done.exit_code == 130 and done.output == ""
    assert main(["explain", "plan.yaml"]) == 130


def files_of(folder: Path) -> dict[str, bytes | None]:
    """What is in a folder, by its path: the bytes of files."""
    return {str(each): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


@pytest.mark.parametrize("moment", ["cli.model.job_of", "capture.export._trace", "passes.lowering.run_on_graphs"])
@pytest.mark.parametrize("command", ["compare", "emit"])
def test_an_interrupt_amid_any_work_ends_quietly_and_leaves_nothing(
    command: str, moment: str, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = [f"{HERE}:mlp", "--cluster", "H100"]
    words = {"compare": [plan_file, plan_file, "--model", *job], "emit": [*job, "-o", plan_file.parent / "program"]}
    before = files_of(plan_file.parent)
    monkeypatch.setattr(f"shardgraph.{moment}", interrupted)
    done = run(command, *words[command])
    assert (done.exit_code, done.output) == (130, "") and files_of(plan_file.parent) == before


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupt_while_a_program_is_written_leaves_the_folder_as_it_was(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "program"
    job = ["emit", f"{HERE}:mlp", "--mesh", "dp=2", "--cluster", "H100", "-o", folder]
    if there:
        assert run(*job).exit_code == 0
    before = files_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("torch.save", interrupted)
        done = run(*job)
    assert (done.exit_code, done.output) == (130, "") and files_of(tmp_path) == before
    assert run(*job).exit_code == 0
    assert {each.name for each in folder.iterdir()} == {"program.py", "batch.pt", "weights.pt"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["compare", "emit"])
def test_an_interrupt_at_any_moment_of_a_process_ends_it_quietly_and_leaves_nothing(
    command: str, plan_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    job = [f"{HERE}:mlp", "--cluster", "H100"]
    words = {"compare": [plan_file, plan_file, "--model", *job], "emit": [*job, "-o", plan_file.parent / "program"]}
    line = [sys.executable, "-m", "shardgraph", command, *words[command]]
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if the tests run in the background
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heeded}
    options["env"] = {**os.environ, "TMPDIR": str(temporary)}
    before, began = files_of(plan_file.parent), time.monotonic()
    subprocess.run(line, check=True, **options)
    whole = time.monotonic() - began
    shutil.rmtree(plan_file.parent / "program", ignore_errors=True)
    ended = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        with subprocess.Popen(line, start_new_session=True, **options) as running:
            time.sleep(share * whole)
            os.killpg(running.pid, signal.SIGINT)
            out, err = running.communicate(timeout=60)
        ended.append(running.returncode)
        if running.returncode:
            assert (running.returncode, out, err) == (130, "", ""), share
            assert files_of(plan_file.parent) == before
        shutil.rmtree(plan_file.parent / "program", ignore_errors=True)
    assert 130 in ended and files_of(temporary) == {}


def marked(value: str) -> set[int]:
    """The processes that have this in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if value.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("whole_group", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 3.0, 8.0])
def test_an_interrupt_while_this_machine_is_measured_leaves_no_process_and_no_file(
    seconds: float, whole_group: bool, plan_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")  # in which there are no prices yet
    line = [sys.executable, "-m", "shardgraph", "compare", plan_file, plan_file, "--model", f"{HERE}:mlp"]
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if the tests run in the background
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heeded}
    options["env"] = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache)}
    with subprocess.Popen(line, start_new_session=True, **options) as running:
        while not marked(str(cache)) - {running.pid}:  # the processes that measure
            assert running.poll() is None
            time.sleep(0.05)
        time.sleep(seconds)
        (os.killpg if whole_group else os.kill)(running.pid, signal.SIGINT)  # a terminal interrupts all of them
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "")
    deadline = time.monotonic() + 10
    while (left := marked(str(cache))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left and not [name for name, held in files_of(cache).items() if held is not None]


def test_an_interrupt_amid_a_trace_ends_without_the_traceback_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        warnings.warn("Error detected in AddmmBackward0. Traceback of forward call", UserWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("shardgraph.plans.plan.Plan.load", interrupted)
    done = run("explain", "plan.yaml")
    assert done.exit_code == 130 and done.output == ""


def test_an_interrupt_before_a_command_is_loaded_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "shardgraph.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "shardgraph.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handler
    assert entry() == 130


def test_a_warning_is_told_without_a_line_of_code(monkeypatch: pytest.MonkeyPatch, plan_file: Path) -> None:
    monkeypatch.setattr("shardgraph.plans.plan.Plan.explain", lambda _: warnings.warn("too small", stacklevel=1) or "")
    assert run("explain", plan_file).stderr == "shardgraph: too small\n"


@pytest.mark.slow
def test_shells_complete_commands_and_values() -> None:
    def completed(*words: str) -> list[str]:
        environment = os.environ | {
            "_SHARDGRAPH_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("shardgraph", *words)),
            "COMP_CWORD": str(len(words)),
        }
        command = [sys.executable, "-c", "from shardgraph.cli.main import main; main()"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.split()

    assert completed("ana") == ["analyze"]
    assert completed("plan", "gpt2", "--cluster", "H2") == ["H200"]


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from shardgraph.cli.main import main; main(['plan', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)


def test_a_function_gives_a_module_with_its_inputs_on_meta() -> None:
    job = job_of(f"{HERE}:mlp", None, None, None)
    assert job.module[0].weight.is_meta and job.args[0].is_meta and job.kwargs == {}
    job = job_of(f"{HERE}:bilinear", None, None, None, weights=True)
    assert not job.module.weight.is_meta and list(job.kwargs) == ["input1", "input2"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{HERE}:module_alone", "missing a required argument: 'input'"),
        (f"{HERE}:needs_a_width", "cannot be called without width"),
        (f"{HERE}:no_module", "returned int"),
        (f"{HERE}:reads_a_value", "test_cli.py:"),
        (f"{HERE}:reads_a_value", "device='cpu'"),
        (f"{HERE}:ends", "it ended itself as a script does"),
        (f"{HERE}:made", "is a Linear itself: name a function"),
        (f"{HERE}:mpl", "did you mean 'mlp'?"),
        (f"{HERE}:", "write it as package.module:function"),
        ("builtins:dict", "returned dict"),
        ("tests/test_cli.py:mlp", "as import does, tests.test_cli:mlp"),
        ("/somewhere/models.py:gpt", "models:gpt, and start the command in /somewhere"),
        ("nowhere.models:gpt", "no module 'nowhere'"),
        ("gtp2", "did you mean 'gpt2'"),
        ("missing.json", "cannot be read"),
        ("wav2vec2", "name a function"),
        (__file__, "name a function that returns the module and its inputs instead"),
    ],
)
def test_a_model_that_cannot_be_is_refused(name: str, said: str) -> None:
    assert said in refusal("analyze", name, "--cluster", "H100", "--mesh", "dp=2")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys\nsys.exit(0)\n", "SystemExit: 0 ({}:2), so it ended itself as a script does"),
        ("def f(:\n", "SyntaxError: invalid syntax ({}:1)"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n", "SystemExit: 2 ({}:2), so it ended"),
    ],
)
def test_a_file_that_is_no_module_is_told_with_its_line(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "a_script_of_mine", raising=False)
    (file := tmp_path / "a_script_of_mine.py").write_text(script)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said.format(file) in refusal("analyze", "a_script_of_mine:f", "--cluster", "H100", "--mesh", "dp=2")


def test_what_a_model_prints_does_not_mix_with_the_result() -> None:
    done = run("analyze", f"{HERE}:talks", "--cluster", "H100", "--mesh", "dp=2", "--json")
    assert json.loads(done.stdout)["plan"] == "fsdp" and done.stderr.strip() == "building"


def test_a_name_that_is_wrong_is_told_before_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardgraph.calibration.this_machine", lambda: pytest.fail("measured"))
    assert "has no function 'nope'" in refusal("analyze", f"{HERE}:nope", "--mesh", "dp=2")


def test_help_says_what_is_chosen_where_nothing_is_given() -> None:
    shown = re.sub(r"\x1b\[[\d;]*m", "", run("plan", "--help").stdout)  # which has colours where CI asks for them
    assert "[default: (this machine)]" in shown and "[default: (all of the cluster)]" in shown


def test_a_config_is_a_model_and_its_fields_can_be_changed(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 5, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 12}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    job = job_of(str(tmp_path / "config.json"), 3, None, ["num_hidden_layers=2"])
    assert len(job.module.transformer.h) == 2 and job.module.transformer.wte.weight.shape == (32, 16)
    assert job.kwargs["input_ids"].shape == job.kwargs["labels"].shape == (3, 12)
    assert len(job_of(str(tmp_path), 3, None, None).module.transformer.h) == 5  # its folder, as a checkpoint's


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "says no model_type"),
        ('{"model_type": ["gpt2"]}', "says no model_type"),
        ('{"model_type": "gtp2"}', "did you mean 'gpt2'"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "cannot be: "),
        ('{"model_type": "gpt2", "n_head": 0}', "is not a model that transformers can build: "),
        ('{"model_type": "gpt2", "activation_function": "no"}', "is not a model that transformers can build: "),
        ('{"model_type": "gpt2", "architectures": ["MyGPT"]}', "'MyGPT', which transformers"),
    ],
)
def test_a_config_file_that_is_broken_is_refused_with_the_reason(config: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert said in refusal("analyze", tmp_path / "config.json", "--cluster", "H100", "--mesh", "dp=2")


@pytest.mark.parametrize(
    ("kind", "class_name"),
    [("bert", "BertForMaskedLM"), ("t5", "T5ForConditionalGeneration"), ("vit", "ViTForImageClassification")],
)
def test_a_model_type_is_the_class_that_has_its_loss(kind: str, class_name: str) -> None:
    job = job_of(kind, 2, None, ["num_hidden_layers=1"])
    assert type(job.module).__name__ == class_name and "labels" in job.kwargs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "lyers=2"], "did you mean 'n_layer'"),
        (["--set", "n_layer"], "as num_hidden_layers=2"),
        (["--set", "n_head=7"], "divisible"),
        (["--sequence", "4096"], "--set max_position_embeddings=4096"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options: list[str], said: str) -> None:
    assert said in refusal("analyze", "gpt2", *options, "--cluster", "H100", "--mesh", "dp=2")


def test_sizes_are_not_for_a_function_with_inputs_of_its_own() -> None:
    assert "inputs of its own" in refusal("verify", f"{HERE}:mlp", "--batch", "4")


def test_plan_writes_what_explain_reads(searched: tuple[Path, str]) -> None:
    out, shown = searched
    assert "its step is" in shown and f"Wrote {out}" in shown
    explained = answer("explain", out)
    assert explained["plan"]["batch"] == {"samples": 8}
    assert set(explained["explanation"].splitlines()[1:]) <= set(shown.splitlines())


def test_plan_says_what_does_not_fit() -> None:
    said = refusal("plan", f"{HERE}:mlp", "--cluster", "H100", "--devices", "2", "--memory", "1KiB")
    assert "no plan fits 1.0 KiB" in said


def test_explain_refuses_what_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("layers: 3\n")
    assert "layers" in refusal("explain", tmp_path / "plan.yaml")


def test_analyze_predicts_memory_and_time() -> None:
    summary = answer("analyze", *GPT2, "--batch", "4", "--plan", "fsdp", "--mesh", "dp=8", "--cluster", "H100")
    assert (summary["mesh"], summary["samples"], summary["fits"]) == ({"dp": 8}, 32, True)


@pytest.mark.slow
def test_analyze_ends_with_1_if_it_does_not_fit() -> None:
    large = ["llama", "--set", "num_hidden_layers=2", "--set", "hidden_size=65536", "--set", "intermediate_size=400000"]
    done = run("analyze", *large, "--plan", "ddp", "--mesh", "dp=2", "--cluster", "H100", "--sequence", "8")
    assert done.exit_code == 1 and "MORE THAN THE DEVICE HAS" in done.stdout


@pytest.mark.parametrize("mesh", ["dp", "dp=0", "dp=2,dp=2", "=2", "dp=two"])
def test_a_mesh_without_sizes_is_refused(mesh: str) -> None:
    assert "--mesh dp=4,tp=2" in refusal("analyze", "gpt2", "--mesh", mesh)


def test_compare_shows_what_two_plans_cost(tmp_path: Path, plan_file: Path) -> None:
    shardgraph.preset("ddp", {"dp": 2}).save(tmp_path / "ddp.yaml")
    job = ["--model", f"{HERE}:mlp", "--cluster", "H100"]
    compared = answer("compare", plan_file, tmp_path / "ddp.yaml", *job)
    assert compared["ratio"] < 1 and any(each["part"].startswith("parameter") for each in compared["decisions"])
    assert "missing.yaml" in refusal("compare", plan_file, "missing.yaml", *job)


def test_compare_takes_a_plan_by_name_on_a_mesh(plan_file: Path) -> None:
    words = ["compare", plan_file, "ddp", "--model", f"{HERE}:mlp", "--cluster", "H100"]
    meshes = [each for each in answer(*words, "--mesh", "dp=4")["decisions"] if each["part"] == "mesh"]
    assert [each["second"] for each in meshes] == ["dp=4"]
    assert "did you mean 'ddp'" in refusal("compare", plan_file, "dpd", *words[3:], "--mesh", "dp=4")


def test_visualize_draws_a_plan(tmp_path: Path) -> None:
    job = ["visualize", f"{HERE}:mlp", "--mesh", "dp=2", "--cluster", "H100", "-o"]
    assert answer(*job, tmp_path / "plan.html") == {"wrote": str(tmp_path / "plan.html")}
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert ".svg" in refusal(*job, tmp_path / "plan.jpg")


def test_report_writes_a_page_of_modules_streams_and_the_plan(tmp_path: Path) -> None:
    job = ["report", f"{HERE}:mlp", "--mesh", "dp=2", "--cluster", "H100", "-o"]
    assert answer(*job, tmp_path / "report.html") == {"wrote": str(tmp_path / "report.html")}
    assert {"Modules", "Streams over one step", "The plan as YAML"} <= set(
        re.findall(r"<(?:h2|summary)>([^<]*)<", (tmp_path / "report.html").read_text())
    )
    assert "does not end in .html" in refusal(*job, tmp_path / "report.svg")


def test_lint_ends_with_1_at_a_warning() -> None:
    assert answer("lint", f"{HERE}:mlp", "--mesh", "dp=2") == {"findings": []}
    job = ["lint", *GPT2, "--mesh", "dp=2", "--cluster", "H100", "--json"]
    found = run(*job)
    assert found.exit_code == 1 and json.loads(found.stdout)["findings"][0]["rule"] == "unequal-counts"
    assert "lint looks at one plan" in refusal("lint", f"{HERE}:mlp", "--plan", "auto")


@pytest.mark.slow
def test_demo_verifies_trains_and_writes_a_page(tmp_path: Path) -> None:
    shown = answer("demo", "--out", tmp_path / "demo.html")
    assert shown["verified"] and shown["difference"] < 1e-5
    assert "Streams over one step" in (tmp_path / "demo.html").read_text()
    assert "--ranks" in refusal("demo", "--ranks", "0")


def test_front_compares_numbers_of_devices() -> None:
    points = answer("front", f"{HERE}:mlp", "--devices", "1,2", "--cluster", "H100")["points"]
    assert {each["devices"] for each in points} == {1, 2}
    done = run("front", f"{HERE}:mlp", "--devices", "many")
    assert done.exit_code == 2 and "8,16,32" in done.stderr


@pytest.mark.slow
def test_what_if_shows_other_conditions(plan_file: Path) -> None:
    job = ["what-if", plan_file, "--model", f"{HERE}:mlp", "--cluster", "H100"]
    changed = answer(*job, "--network", "0.5")
    assert changed["fits"] and changed["same"]["exposed"] > changed["now"]["exposed"]
    assert "needs a condition" in refusal(*job)


def test_verify_compares_a_program_with_its_model() -> None:
    report = answer("verify", *GPT2, "--plan", "fsdp", "--mesh", "dp=2")
    assert report["ok"] and report["batch"] == "a batch of 2 cut among the ranks"


def test_analyze_and_verify_search_for_a_global_batch() -> None:
    options = ["--plan", "auto", "--mesh", "dp=2", "--global-batch", "32"]
    assert answer("analyze", f"{HERE}:mlp", *options, "--cluster", "H100")["samples"] == 32
    report = answer("verify", f"{HERE}:mlp", *options)
    assert report["ok"] and report["plan"] != "auto"


def test_verify_ends_with_1_if_they_are_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    done = shardgraph.verify(*mlp(), "fsdp")
    monkeypatch.setattr("shardgraph.api.verify.Report.ok", property(lambda _: False))
    monkeypatch.setattr(shardgraph, "verify", lambda *_, **__: done)
    assert run("verify", f"{HERE}:mlp").exit_code == 1


def test_verify_refuses_ranks_that_are_not_those_of_the_mesh_or_the_plan(plan_file: Path) -> None:
    said = refusal("verify", f"{HERE}:mlp", "--ranks", "2", "--mesh", "dp=4")
    assert "the mesh {'dp': 4} is of 4 ranks, and world_size is 2" in said
    said = refusal("verify", f"{HERE}:mlp", "--ranks", "4", "--plan", plan_file)
    assert "the mesh {'dp': 2} of the plan is of 2 ranks, and world_size is 4" in said


def test_verify_refuses_a_plan_that_there_is_not() -> None:
    assert "'fsdq'" in refusal("verify", f"{HERE}:mlp", "--plan", "fsdq")


SCRIPT = """
import os, sys, time
print(os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(3)
if "--stay" in sys.argv:
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_run_starts_a_script_on_ranks_with_its_arguments(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("run", script, "--ranks", "2", "--lr", "0.1", "--", "--ranks=5").exit_code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 2 --lr 0.1 --ranks=5", "1 2 --lr 0.1 --ranks=5"]


def test_run_stops_all_ranks_when_one_fails(script: Path) -> None:
    began = time.monotonic()
    done = run("run", script, "--fail", "--stay")
    assert done.exit_code == 1 and "rank 1 of 2 ended with 3" in done.stderr and time.monotonic() - began < 55


def test_run_refuses_a_script_that_there_is_not() -> None:
    assert run("run", "missing.py").exit_code == 2


@pytest.mark.quick("9--9")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ranks_of_run_end_with_it_when_it_is_interrupted_or_killed(script: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "shardgraph", "run", script, "--stay"]
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if the tests run in the background
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeded)
    assert running.stdout is not None
    for _ in range(2):
        running.stdout.readline()  # the ranks have begun
    running.send_signal(number)
    out, err = running.communicate(timeout=100)  # ends when no rank holds the pipe any more
    assert (running.returncode, out, err) == (code, "", "")


MEETING = """
import atexit, sys
import torch, torch.distributed as dist
from shardgraph.runtime.launch import launch

def say(line):
    sys.stdout.write(line + chr(10))  # at once, since two ranks write to one stream
    sys.stdout.flush()

def main():
    dist.all_reduce(total := torch.ones(1))
    say(str(total.item()))

atexit.register(lambda: say("still in a group" if dist.is_initialized() else "left"))
launch(main)
"""


@pytest.mark.slow
def test_ranks_of_run_meet_in_launch_and_leave_at_their_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEETING)
    assert run("run", script).exit_code == 0
    assert sorted(capfd.readouterr().out.split()) == ["2.0", "2.0", "left", "left"]


ENDING = """
import sys, time
from datetime import timedelta
import shardgraph
from shardgraph.runtime.watch import watcher

class Late:
    def __del__(self):
        time.sleep(2.0)

class SlowStore:
    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def check(self, keys):
        self.store.wait(["never"], timedelta(seconds=1.0))

def main():
    if torch.distributed.get_rank() == 1:
        time.sleep(0.3)  # until its watch asks the store

import torch
sys.late = Late()  # the end of the interpreter takes longer than the answer
own = watcher.torch_api.own_connection
watcher.torch_api.own_connection = lambda: SlowStore(own())
shardgraph.launch(main)
"""


@pytest.mark.slow
def test_a_rank_ends_well_while_its_watch_asks_the_store(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDING)
    assert run("run", tmp_path / "train.py").exit_code == 0


def test_doctor_finds_that_this_machine_trains() -> None:
    found = {each["name"]: each for each in answer("doctor")["checks"]}
    assert list(found) == list(doctor.CHECKS) and found["two ranks"]["works"]


def test_doctor_says_what_mends_what_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {each: doctor.CHECKS[each] for each in ("torch", "C++ compiler", "graphviz")})
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    done = run("doctor")
    assert done.exit_code == 0 and "apt-get install g++" in done.stdout and "apt-get install graphviz" in done.stdout
    monkeypatch.setattr(doctor.importlib, "metadata", SimpleNamespace(version=lambda _: "2.8.0"))
    done = run("doctor")
    assert done.exit_code == 1 and "torch>=2.11,<2.14" in done.stdout


def test_doctor_cuts_no_path_and_wraps_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    path, command = "/a/long/path" * 20, "python -m pip install " + "x" * 200

    def found(name: str) -> doctor.Finding:
        return doctor.Finding(name, False, path, mend=command)

    monkeypatch.setattr(doctor, "CHECKS", {"python": found})
    lines = run("doctor").stdout.splitlines()
    assert path in "".join(line.strip() for line in lines).replace("no  python  ", "")
    assert f"  {command}" in lines


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> doctor.Finding:
        raise OSError("no loopback")

    monkeypatch.setattr(doctor, "CHECKS", {"two ranks": broken})
    done = run("doctor")
    assert done.exit_code == 1 and "no loopback" in done.stdout


@pytest.mark.parametrize(("load", "mend"), [(1.0, ""), (90.0, "again when less runs: 90 processes wait for 2 cores")])
def test_a_check_that_fails_on_a_busy_machine_says_that_it_is_busy(
    load: float, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(name: str) -> doctor.Finding:
        raise TimeoutError("two ranks did not meet")

    monkeypatch.setattr(doctor, "CHECKS", {"two ranks": late})
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    done = run("doctor", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["checks"][0]["mend"] == mend


def test_checkpoints_are_listed_and_verified(tmp_path: Path) -> None:
    for step in (1, 2):
        shardgraph.save_checkpoint(tmp_path, step, torch.nn.Linear(2, 2))
    assert [each["step"] for each in answer("checkpoint", tmp_path)["checkpoints"]] == [1, 2]
    assert run("checkpoint", tmp_path, "--verify").stdout.count("verified") == 2
    file = tmp_path / "step-00000001" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3] + b"bad")
    assert "all files are there" in run("checkpoint", tmp_path).stdout
    done = run("checkpoint", tmp_path, "--verify")
    assert done.exit_code == 1 and "step-00000001: damaged" in done.stdout and "step-00000002: of Linear" in done.stdout
    assert "there is no folder" in refusal("checkpoint", tmp_path / "missing")


@pytest.mark.parametrize("command", ["visualize", "report", "plan"])
def test_a_file_whose_folder_is_not_there_is_refused_before_the_work(command: str, tmp_path: Path) -> None:
    done = run(command, "no.such:model", "-o", tmp_path / "none" / "file.svg")
    assert done.exit_code == 2 and "there is no folder" in done.stderr


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said, words in (("folder", ["report", "-o", tmp_path]), ("file", ["emit", "-o", tmp_path / "file"])):
        assert f"is a {said}" in boxed(words[0], "no.such:model", *words[1:])
    assert "is a file: name a folder" in boxed("emit", "no.such:model", "-o", tmp_path / "file" / "in" / "it")


def boxed(*arguments: str | Path) -> str:
    """What a command says of an option that cannot be, without the box around it, which breaks its lines."""
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize("command", ["visualize", "front", "demo"])
def test_a_picture_of_no_format_is_refused_before_the_work(command: str, tmp_path: Path) -> None:
    model = {"visualize": ["no.such:model"], "front": ["no.such:model", "--devices", "2"], "demo": []}[command]
    assert "cannot draw 'plan.bmp'" in refusal(command, *model, "-o", tmp_path / "plan.bmp")


@pytest.mark.parametrize(("command", "out"), [("report", "page.html"), ("emit", "program"), ("plan", "plan.yaml")])
def test_what_may_not_be_written_is_refused_before_the_work(
    command: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert "may not be written to" in boxed(command, "no.such:model", "-o", tmp_path / out)


def test_a_plan_says_its_reason_once(plan_file: Path, searched: tuple[Path, str]) -> None:
    for file in (plan_file, searched[0]):
        lines = run("explain", file).stdout.splitlines()
        said = [line for line in lines if line.strip()]
        assert len(said) == len(set(said))


def test_two_candidates_alike_are_two_lines(searched: tuple[Path, str]) -> None:
    plan = Plan.load(searched[0])
    twice = replace(plan, considered=(plan.considered[0], plan.considered[1], plan.considered[1]))
    assert _text(twice).count(f"  {plan.considered[1].name} ") == 2


@pytest.mark.slow
def test_what_is_said_of_an_axis_is_said_of_the_layouts_that_have_it(tmp_path: Path) -> None:
    path, shown = search_for(1024, tmp_path / "plan.yaml")  # a batch for which it is better to divide that
    plan = Plan.load(path)
    assert "tp" not in plan.axes
    of_tp = [line for line in shown.splitlines() if "'tp'" in line]
    assert of_tp and all("where layouts are divided along 'tp', placements are the fastest" in line for line in of_tp)


def test_plans_that_are_called_alike_have_prices_that_are(searched: tuple[Path, str]) -> None:
    best, *others = Plan.load(searched[0]).considered
    alike = {each.name for each in (best, *others) if each.fits and each.per_sample < 1.01 * best.per_sample}
    told = re.findall("hardly matters which: (.*)", searched[1])
    assert [set(each.split(", ")) for each in told] == ([alike] if len(alike) > 1 else [])
