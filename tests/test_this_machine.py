"""A CPU without a description is measured once, in processes of its own, and remembered."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.calibration import remembered
from shardgraph.calibration.remembered import measured_file, this_machine
from shardgraph.cost_models import detection
from shardgraph.cost_models.cluster import Cluster

MEASURED = replace(Cluster.detect(), name="measured", doubt=0.07, devices_per_node=3)


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """A cache without a file; the list of commands that are run to measure, each with its environment."""
    commands: list[tuple[list[str], dict[str, str]]] = []

    def run(command, env, **options):
        commands.append((command, env))
        MEASURED.save(command[-1])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    remembered._measured.cache_clear()
    yield commands
    remembered._measured.cache_clear()


def test_a_cpu_is_measured_the_first_time_and_never_again(unmeasured):
    assert this_machine().doubt == 0.07
    remembered._measured.cache_clear()  # as a new process
    assert this_machine().doubt == 0.07
    assert len(unmeasured) == 1
    assert measured_file().exists()


def test_its_ranks_are_none_of_this_run(unmeasured, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    this_machine()
    command, environment = unmeasured[0]
    assert command[:4] == [sys.executable, "-m", "shardgraph", "calibrate"]
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & set(environment)


def test_size_and_free_memory_are_those_of_now(unmeasured, monkeypatch):
    monkeypatch.setattr(detection, "cpu_cores", lambda: 4)
    this_machine()
    monkeypatch.setattr(detection, "host_memory", lambda: 2**32)
    assert this_machine().devices_per_node == 4
    assert this_machine().device.memory == 2**30


def test_plans_are_priced_with_what_was_measured(unmeasured):
    analysis = shardgraph.analyze(nn.Linear(4, 4), (torch.ones(2, 4),), "ddp", mesh={"dp": 2})
    assert analysis.cluster.doubt == 0.07


def test_a_named_cluster_measures_nothing(unmeasured):
    shardgraph.analyze(nn.Linear(4, 4), (torch.ones(2, 4),), "ddp", mesh={"dp": 2}, cluster="H100")
    assert shardgraph.verify(nn.Linear(4, 4), (torch.ones(2, 4),), "fsdp", mesh={"dp": 2}).ok
    assert not unmeasured


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (subprocess.CalledProcessError(1, "x", stderr=b"Traceback\nOSError: no room"), "no room"),
        (subprocess.TimeoutExpired("x", 120), "timed out"),
        (OSError("no processes"), "no processes"),
    ],
)
def test_a_cpu_that_cannot_be_measured_is_guessed_with_the_reason(unmeasured, monkeypatch, failure, words):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.warns(UserWarning, match=words):
        found = this_machine()
    assert found.device.rates == Cluster.detect().device.rates


def test_what_another_release_has_written_is_measured_again(unmeasured):
    measured_file().parent.mkdir()
    measured_file().write_text("schema: 0\n")
    assert this_machine().doubt == 0.07


def test_a_cache_that_cannot_be_written_is_told(unmeasured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert this_machine().doubt == 0.07


@pytest.mark.slow
def test_measuring_takes_seconds_and_gives_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered._measured.cache_clear()
    found = this_machine()
    remembered._measured.cache_clear()
    assert found.source.startswith("measured by")
    assert 1e8 < found.device.rates["matmul/float32"].per_second < 1e13
