"""A CPU without a description is measured once, in processes of its own, and remembered."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.api.compile import _warn_of_memory
from shardgraph.calibration import MeasuredStep, learn, remembered
from shardgraph.calibration.correction import Correction, fitted
from shardgraph.calibration.remembered import measured_file, this_machine
from shardgraph.cost_models import detection
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Link
from shardgraph.search.machine import machine_for

MEASURED = replace(Cluster.detect(), name="measured", doubt=0.07, devices_per_node=3, sync=1e-3)


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """A cache without a file; the list of commands that are run to measure, each with its environment."""
    commands: list[tuple[list[str], dict[str, str]]] = []

    def run(command, env, **options):
        commands.append((command, env))
        MEASURED.save(command[-1])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    remembered._measured.cache_clear()
    yield commands
    remembered._measured.cache_clear()


def test_a_cpu_is_measured_the_first_time_and_never_again(unmeasured):
    assert this_machine().doubt == 0.07
    remembered._measured.cache_clear()  # as a new process
    assert this_machine().doubt == 0.07
    assert len(unmeasured) == 1
    assert measured_file().exists()


def test_what_is_measured_on_a_busy_machine_holds_while_it_is_busy(unmeasured, monkeypatch):
    for load, measured in ((9.0, 1), (1.6, 1), (0.5, 2), (9.0, 2)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setattr(detection, "cpu_cores", lambda: 2)
        remembered._measured.cache_clear()  # as a new process
        this_machine()
        assert len(unmeasured) == measured


def test_its_ranks_are_none_of_this_run(unmeasured, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    this_machine()
    command, environment = unmeasured[0]
    assert command[:4] == [sys.executable, "-m", "shardgraph", "calibrate"]
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & set(environment)


def test_a_core_has_its_share_of_all_memory_whatever_is_free(unmeasured, monkeypatch):
    monkeypatch.setattr(detection, "cpu_cores", lambda: 4)
    this_machine()
    monkeypatch.setattr(detection, "machine_memory", lambda: 2**32)
    monkeypatch.setattr(detection, "host_memory", lambda: 2**20)
    assert this_machine().devices_per_node == 4
    assert this_machine().device.memory == 2**30
    assert machine_for(None, 2).device.memory == 2**30
    assert machine_for(None, 16).device.memory == 2**28


def test_more_ranks_than_cores_take_turns(unmeasured, monkeypatch):
    monkeypatch.setattr(detection, "cpu_cores", lambda: 4)
    machine, shared = this_machine(), machine_for(None, 16)
    assert machine_for(None, 3) == machine
    for kind, rate in machine.device.rates.items():
        assert shared.device.rates[kind].per_second == rate.per_second / 4
        assert shared.device.rates[kind].overhead == rate.overhead * 4
    assert shared.intra.bandwidth == machine.intra.bandwidth / 4


def test_a_container_has_the_memory_that_it_may_use(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(detection, "_LIMITS", (str(limit),))
    whole = detection.machine_memory()
    for text, expected in {"max": whole, "1048576": 2**20, str(2**63): whole}.items():
        limit.write_text(f"{text}\n")
        assert detection.machine_memory() == expected


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


def test_a_plan_that_takes_more_than_is_free_is_warned_of_once_on_a_machine(monkeypatch):
    monkeypatch.setattr("shardgraph.api.compile.host_memory", lambda: 2**30)
    monkeypatch.setattr("shardgraph.api.compile.ranks_per_node", lambda: 4)
    for rank, nbytes, warned in (("0", 2**28 + 1, 1), ("1", 2**28 + 1, 0), ("0", 2**28, 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _warn_of_memory(nbytes)
        assert len(caught) == warned
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(UserWarning, match=r"4 ranks .* 256\.0 MiB each .* 1\.0 GiB are free now"):
        _warn_of_memory(2**28 + 1)


# -- measured steps ----------------------------------------------------------------------------------------------------


def steps(computation: float, communication: float, shares: tuple[float, ...] = (0.1, 0.4, 0.8)) -> list[MeasuredStep]:
    """Measured steps that took so many times their predictions, of 10 ms, of which these parts are communication."""
    parts = [(0.01 * (1 - share), 0.01 * share) for share in shares]
    return [MeasuredStep(one, other, computation * one + communication * other) for one, other in parts]


def test_the_factors_of_steps_that_differ_in_communication_are_found():
    assert vars(fitted(steps(1.5, 0.7))) == pytest.approx({"computation": 1.5, "communication": 0.7}, rel=0.05)


def test_a_corrected_link_keeps_its_own_efficiency_and_overlap():
    link = Link(1e9, 1e-4, {"all_reduce": 2e-4}, {"all_reduce": 0.5}, 0.75)
    corrected = Correction(communication=2.0).of(replace(MEASURED, inter=link)).inter
    assert corrected == replace(link, bandwidth=5e8, latency=2e-4, latencies={"all_reduce": 4e-4})


def test_steps_that_communicate_nothing_teach_nothing_of_it():
    found = fitted(steps(1.5, 9.0, (0.0, 0.0)))
    assert found.computation == pytest.approx(1.5, rel=0.02) and found.communication == pytest.approx(1.0)


def test_what_steps_teach_corrects_the_prices_of_this_machine_next_time(unmeasured):
    before = this_machine()
    learn(steps(2.0, 0.5))
    after = this_machine()
    first = after.device.rates["pointwise"].per_second / before.device.rates["pointwise"].per_second
    assert first == pytest.approx(0.5, rel=0.05)
    assert after.intra.bandwidth / before.intra.bandwidth == pytest.approx(2.0, rel=0.1)
    assert after.sync / before.sync == pytest.approx(0.5, rel=0.1)


def test_a_job_is_added_to_those_before_it_in_the_prices_as_measured(unmeasured):
    def computation() -> float:
        return this_machine().device.rates["pointwise"].per_second

    before = computation()
    learn(steps(2.0, 1.0))
    learn(steps(1.0, 1.0))  # right, of predictions with corrected prices: as 2.0 without
    assert before / computation() == pytest.approx(2.0, rel=0.05)


def test_the_last_job_does_not_outweigh_those_before_it(unmeasured):
    """Steps of a Llama and of a convolutional network on two ranks: (computation, communication, measured) in ms."""
    llama = [(318.2, 56.3, 241.4), (267.6, 156.0, 221.2), (268.2, 184.3, 259.4)]
    images = [(22.0, 7.5, 34.6), (21.5, 10.7, 32.0), (21.5, 16.1, 34.0)]
    found = []
    for jobs in ((llama, images), (images, llama)):
        for file in measured_file().parent.glob("correction-*"):
            file.unlink()
        machine = this_machine()
        for job in jobs:
            present = machine.device.rates["pointwise"].per_second / this_machine().device.rates["pointwise"].per_second
            link = machine.intra.bandwidth / this_machine().intra.bandwidth
            learn([MeasuredStep(present * one / 1e3, link * other / 1e3, step / 1e3) for one, other, step in job])
        found.append(this_machine().device.rates["pointwise"].per_second)
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_only_the_prices_that_were_measured_are_corrected(unmeasured):
    this_machine()
    learn(steps(2.0, 2.0))
    assert machine_for("H100", 8) == Cluster.of("H100")
    measured_file().unlink()  # measured again, with other rates
    other = replace(MEASURED, intra=replace(MEASURED.intra, latency=1e-3))
    other.save(measured_file())
    remembered._measured.cache_clear()
    assert this_machine().intra == other.intra


def test_a_correction_that_cannot_be_read_is_none(unmeasured):
    before = this_machine()
    learn(steps(2.0, 2.0))
    (file,) = measured_file().parent.glob("correction-*.yaml")
    jobs = "jobs: [[[0.1, 0.1, {}]]]"
    for content in ("- 1", "schema: 0\n" + jobs.format(2), "schema: 2\n" + jobs.format(-1), "schema: 2\njobs: 1", "{"):
        file.write_text(content)
        assert this_machine() == before


@pytest.mark.slow
def test_measuring_takes_seconds_and_gives_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered._measured.cache_clear()
    found = this_machine()
    remembered._measured.cache_clear()
    assert found.source.startswith("measured by")
    assert 1e8 < found.device.rates["matmul/float32"].per_second < 1e13
