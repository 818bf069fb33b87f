"""The scripts of examples/ train as they say: on two ranks that they start, under torchrun, and on several agents."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples import experts, generate, language_model, lora, pipeline, vision
from tests.standing import on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def losses_in(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\S+)", printed)]


def printed_by(command: list[str], folder: Path) -> str:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=270)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_pipeline_trains():
    losses, others = on_ranks(pipeline.train, args=(pipeline.options_of(["--steps", "8", "--layers", "2"]),))
    assert losses == others and losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_a_language_model_goes_on_from_its_checkpoint_on_one_rank(tmp_path: Path):
    first, all_of_it = (
        language_model.options_of(["--steps", steps, "--save", str(tmp_path / "run")]) for steps in ("10", "20")
    )
    losses, _ = on_ranks(language_model.train, args=(first,))
    assert losses[-1] < 0.8 * losses[0]
    (more,) = on_ranks(language_model.train, 1, args=(all_of_it,))
    assert on_ranks(language_model.train, 1, args=(all_of_it,)) == [[]]  # there is nothing left to do
    whole, _ = on_ranks(language_model.train, args=(language_model.options_of(["--steps", "20"]),))
    assert [*losses, *more] == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_batch_norms_over_ranks_learn_to_tell_stripes():
    *losses, accuracy = on_ranks(vision.train, args=(vision.options_of([]),))[0]
    assert losses[-1] < 0.5 * losses[0] and accuracy > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_a_model_that_learnt_to_count_writes_numbers_and_is_saved(plan: str, tmp_path: Path):
    *losses, right = on_ranks(generate.train, args=(generate.options_of(["--plan", plan]), str(tmp_path)))[0]
    assert losses[-1] < 0.1 * losses[0] and right == 1 and (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_experts_train():
    losses = on_ranks(experts.train, args=(experts.options_of(["--steps", "15"]),))[0]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_adapters_are_tuned_and_load_in_plain_peft(tmp_path: Path):
    *losses, apart = on_ranks(lora.train, args=(lora.options_of(["--steps", "15"]), str(tmp_path)))[0]
    assert losses[-1] < 0.9 * losses[0] and apart < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["language_model", "vision", "generate", "experts", "pipeline", "lora"])
def test_a_script_starts_its_own_ranks(name: str, tmp_path: Path):
    losses = losses_in(printed_by([sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "6"], tmp_path))
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_agents_of_torchrun_meet_and_train(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "job1", "--rdzv-endpoint", endpoint]
    script = [str(EXAMPLES / "pipeline.py"), "--steps", "6"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meeting, "--local-addr", "127.0.0.1", *script]
    other = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        printed = printed_by(command, tmp_path) + other.communicate(timeout=60)[0]
    finally:
        other.kill()
    losses = losses_in(printed)
    assert other.returncode == 0 and losses[-1] < losses[0]


def test_the_job_script_and_the_manifest_are_well_formed():
    script = EXAMPLES / "many_machines.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    text = (EXAMPLES / "many_machines.md").read_text()
    (manifest,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(manifest)["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 4
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(code, "many_machines.md", "exec")


@pytest.mark.parametrize("name", ["language_model", "vision", "generate", "experts", "pipeline", "lora"])
def test_a_script_is_short_and_says_how_it_is_run(name: str):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 120 and f"python examples/{name}.py" in text and "torchrun" in text
