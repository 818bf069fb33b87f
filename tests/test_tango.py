"""AI2 Tango: configurations of its FairScale integration, against its own engine. It needs ``ai2-tango``, whose
requirements exclude those of Transformers 5: ``pip install shardgraph[tango]`` in an environment of its own."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tango.integrations.torch", reason="Tango is not installed, or not with what it requires")

from tango.common import Params
from tango.common.exceptions import ConfigurationError
from tango.common.logging import initialize_logging, teardown_logging
from tango.common.util import import_extra_module
from tango.integrations.torch import Model
from tango.step_graph import StepGraph
from tango.workspaces import LocalWorkspace

import shardgraph
from shardgraph import ShardGraphError
from shardgraph.trainers.tango import FSDPConfig, with_wrapped_modules
from tests import tangled

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

ROUNDED = 1e-6  # of single precision
PLAIN: dict[str, Any] = {"type": "regression"}
STEPS = 8


@pytest.fixture(autouse=True)
def as_tango_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where its workers can log, and in no repository, which it would ask for a remote called origin."""
    monkeypatch.chdir(tmp_path)
    initialize_logging()
    yield
    teardown_logging()


def wrapped(activation_checkpointing: bool = False, **config: Any) -> dict[str, Any]:
    return {
        "type": "fairscale::with_wrapped_modules",
        "model": PLAIN,
        "modules_to_wrap": [r"blocks\.[0-9]+", "head"],
        "fsdp_config": config,
        "activation_checkpointing": activation_checkpointing,
    }


def train(folder: Path, model: dict[str, Any], engine: dict[str, Any], devices: int = 2, **record: Any) -> Any:
    """The losses of the first worker by step, and the model that the run returns."""
    import_extra_module("tests.tangled")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    loader = {"batch_size": 8 // devices}
    if devices > 1:
        loader["sampler"] = {"type": "torch::DistributedSampler", "shuffle": True, "drop_last": True}
    train_step = {
        "type": "torch::train",
        "model": model,
        "training_engine": {"optimizer": {"type": "torch::Adam", "lr": 0.05}, **engine},
        "dataset_dict": {"type": "ref", "ref": "data"},
        "train_dataloader": loader,
        "validation_split": "validation",
        "train_steps": STEPS,
        "checkpoint_every": 2,
        "validate_every": 2,
        "device_count": devices,
        "distributed_port": port,
        "callbacks": [{"type": "record", "file": str(folder / "losses"), **record}],
    }
    workspace = LocalWorkspace(folder / "workspace")
    graph = StepGraph.from_params({"data": Params({"type": "points"}), "train": Params(train_step)})
    trained = graph["train"].result(workspace)
    return tangled.losses(folder / "losses", 0), trained


def compared(found: Any, expected: Any) -> None:
    (losses, model), (their_losses, their_model) = found, expected
    assert [step for step, _ in losses] == [*range(STEPS)]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in their_losses], abs=ROUNDED)
    assert losses[-1][1] != losses[0][1]
    torch.testing.assert_close(dict(model.state_dict()), dict(their_model.state_dict()), rtol=0, atol=1e-5)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("model", "config"),
    [
        (PLAIN, {}),
        (wrapped(), {"reshard_after_forward": False}),
        (wrapped(True, reshard_after_forward=False), {}),
        (wrapped(move_params_to_cpu=True), {"move_params_to_cpu": True, "move_grads_to_cpu": True}),
    ],
    ids=["plain", "wrapped", "checkpointed", "in host memory"],
)
def test_it_trains_like_tangos_own_engine(model: dict[str, Any], config: dict[str, Any], tmp_path: Path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    engine = {"type": "fairscale", "max_grad_norm": 1000.0, "fsdp_config": config}
    compared(train(ours, model, engine), train(theirs, PLAIN, {"type": "torch"}))


def test_one_device_is_refused_in_words(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="device_count of 2 or more, or the engine 'torch'"):
        train(tmp_path, PLAIN, {"type": "fairscale"}, devices=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("amp", [False, True])
def test_a_run_that_stops_resumes_from_its_checkpoint(amp: bool, tmp_path: Path):
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    unbroken.mkdir()
    stopped.mkdir()
    engine = {"type": "fairscale", "max_grad_norm": 0.1, "amp": amp}
    expected = train(unbroken, wrapped(), engine)
    with pytest.raises(Exception, match="stopped here"):
        train(stopped, wrapped(), engine, fail_at=5)
    before = tangled.losses(stopped / "losses", 0)
    losses, model = train(stopped, wrapped(), engine, fail_at=5)
    assert [step for step, _ in before] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in losses[6:]] == [4, 5, 6, 7]  # the last checkpoint was after step 3
    compared((losses[:4] + losses[6:], model), expected)


@pytest.mark.timeout(300)
def test_it_computes_in_half_precision(tmp_path: Path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    half = {"mixed_precision": True}
    found, _ = train(ours, wrapped(**half), {"type": "fairscale", "amp": True, "fsdp_config": half})
    expected, _ = train(theirs, PLAIN, {"type": "torch"})
    # Later ones differ: steps are skipped until the scale of the loss fits float16.
    first, theirs_first = found[0][1], expected[0][1]
    assert first == pytest.approx(theirs_first, rel=0.01) and first != pytest.approx(theirs_first, abs=ROUNDED)
    assert min(loss for _, loss in found) < first / 2


@pytest.mark.timeout(300)
def test_the_example_of_the_documents_trains(tmp_path: Path):
    _, _, section = (ROOT / "docs" / "trainers.md").read_text().partition("## AI2 Tango\n")
    (example,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    step = json.loads(example)
    losses, model = train(tmp_path, step["model"], step["training_engine"], step["device_count"])
    assert losses[-1][1] < losses[0][1] and type(model).__name__ == "Regression"


def test_modules_are_wrapped_by_names_that_match_whole():
    model = Model.from_params(Params(dict(PLAIN)))
    with pytest.raises(ShardGraphError, match="'block', 'heads', and no module of Regression has such a name"):
        with_wrapped_modules(model, {"block", "heads", "head"}, activation_checkpointing=True)
    with_wrapped_modules(model, {r"blocks\.[01]"}, activation_checkpointing=True)
    example = {"x": torch.ones(2, 4), "y": torch.ones(2, 1)}
    sharded = shardgraph.compile(model, "single", example_kwargs=example)
    assert sorted(map(str, sharded.plan.annotations)) == [f"('blocks.{i}', recompute())" for i in (0, 1)]


def test_options_are_those_of_fairscale():
    options = FSDPConfig.from_params(Params({"mixed_precision": True, "reshard_after_forward": False}))
    assert options.as_kwargs() == {
        "reshard_after_forward": False,
        "move_params_to_cpu": False,
        "move_grads_to_cpu": None,
        "mixed_precision": True,
    }
